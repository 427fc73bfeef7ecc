"""The peak of this process's resident memory beyond what it had before (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from gspo_kernels.ops import memory


def _resident(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


def give_memory_back() -> None:
    """Return large blocks to the system when they are freed, so that resident memory is memory in use."""
    with contextlib.suppress(OSError, AttributeError):
        for threshold in (-3, -1):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc
            ctypes.CDLL(None).mallopt(threshold, 131072)


@contextlib.contextmanager
def peak_of_this_process() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how many bytes resident memory has risen at most in the block."""
    gc.collect()
    memory.release()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    yield lambda: _resident("VmHWM") - before
