"""Ending a run from outside without losing its last step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(number: int = signal.SIGTERM) -> Iterator[threading.Event]:
    """Note a signal inside instead of dying of it; only where signals arrive, in the main thread."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.signal(number, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(number, previous)
