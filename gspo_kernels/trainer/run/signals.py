"""Ending a run from outside without losing its last step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NOTED = b"\nending after this step, with a checkpoint; Ctrl-C once more ends at once\n"


@contextmanager
def noted() -> Iterator[list[int]]:
    """Note SIGTERM and a first SIGINT inside instead of ending; in the main thread, where they arrive."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT:
            if caught:
                raise KeyboardInterrupt
            os.write(2, _NOTED)  # print might have been interrupted
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
