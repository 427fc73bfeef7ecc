"""How much memory a chunk of logits may take, and memory of that size."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

MIN_CHUNK_BYTES = 64 * 2**20
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}
"""Rows per chunk by default: enough that adding a chunk's dWeight costs little beside its products."""
MEMORY_SHARE = 16
"""The default chunk is never more than this part of the device's memory."""


def default_chunk_bytes(row_bytes: int, total_memory: int, device: str) -> int:
    """The default of ``max_chunk_bytes``.

    ``CHUNK_ROWS`` rows of logits, at least ``MIN_CHUNK_BYTES``, at most ``total_memory / MEMORY_SHARE``.

    Args:
        row_bytes: of one row of logits.
        total_memory: of the device in bytes.
        device: its type; any that is not "cpu" counts as a GPU.
    """
    rows = CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"])
    return min(max(rows * row_bytes, MIN_CHUNK_BYTES), max(total_memory // MEMORY_SHARE, 1))


@functools.cache
def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def chunk_rows(row_bytes: int, max_chunk_bytes: int, device: torch.device) -> int:
    """How many rows of logits fit ``max_chunk_bytes`` (0: the default); at least one."""
    if not max_chunk_bytes:
        on_gpu = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
        max_chunk_bytes = default_chunk_bytes(row_bytes, total, device.type)
    return max(1, max_chunk_bytes // row_bytes)


HUGE_PAGES_FROM = 16 * 2**20
"""Bytes from which new memory on the CPU asks for huge pages."""


def new_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for the gradient of logits.

    Large blocks are new to the process at every call, so their first writes fault in page after page. On
    Linux they ask for huge pages, which takes a fraction of that time; where there are none nothing changes.
    Chunks of logits stay with ordinary pages: each is written many times, and on a virtual machine whose host
    backs huge pages late they cost more than they saved.
    """
    memory = torch.empty(shape, dtype=dtype, device=device)
    size = memory.numel() * memory.element_size()
    advise = _madvise()
    if device.type == "cpu" and size >= HUGE_PAGES_FROM and advise is not None:
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (memory.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, end - start, mmap.MADV_HUGEPAGE)
    return memory


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call
