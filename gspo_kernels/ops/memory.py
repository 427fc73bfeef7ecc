"""How much memory a chunk of logits may take, and memory of that size."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

MIN_CHUNK_BYTES = 64 * 2**20
"""A default chunk may take this much whatever its rows."""
CHUNK_BYTES = 256 * 2**20
"""Rows beyond the fewest may fill a default chunk up to this."""
CHUNK_ROWS = {"cpu": (1024, 2048), "cuda": (4096, 4096)}
"""Rows per chunk by default, fewest and most: enough that adding a chunk's dWeight costs little beside its
products."""
MEMORY_SHARE = 16
"""The default chunk is never more than this part of the device's memory."""


def default_chunk_bytes(row_bytes: int, total_memory: int, device: str) -> int:
    """The default of ``max_chunk_bytes``.

    As many rows of logits as fit ``CHUNK_BYTES``, but within ``CHUNK_ROWS``; at least ``MIN_CHUNK_BYTES``, at
    most ``total_memory / MEMORY_SHARE``.

    Args:
        row_bytes: of one row of logits.
        total_memory: of the device in bytes.
        device: its type; any that is not "cpu" counts as a GPU.
    """
    fewest, most = CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"])
    wanted = max(fewest * row_bytes, min(most * row_bytes, CHUNK_BYTES), MIN_CHUNK_BYTES)
    return min(wanted, max(total_memory // MEMORY_SHARE, 1))


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


def used_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised, contiguous tensor that is soon given up again.

    To fault in new pages takes as long as all that is computed on them. On Linux a large tensor is therefore
    made of the pages of the last one that nothing refers to any more, if it was up to twice as large; until
    then the system may take them whenever it needs memory (``MADV_FREE``). New ones ask for huge pages.
    """
    size = shape.numel() * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGES_FROM or not sys.platform.startswith("linux"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = _pages(size)
    # the tensor's storage is what holds this view, so its end is the view's
    view = memoryview(pages)
    weakref.finalize(view, _give_back, pages).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=shape.numel()).view(shape)


_given_back: list[mmap.mmap] = []


def _pages(size: int) -> mmap.mmap:
    with contextlib.suppress(IndexError):
        pages = _given_back.pop()
        if size <= len(pages) <= 2 * size:
            return pages
        del pages
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _give_back(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_FREE)
        _given_back[:] = [pages]


KEPT_FROM = 32 * 2**20
"""Bytes from which malloc gives memory back to the system at once instead of keeping it."""
_kept: list[Tensor] = []


class Workspace:
    """Memory for logits on the CPU, a chunk at a time, which the next call finds again.

    Fresh pages would cost a twentieth of the products that fill them, and huge ones have cost more than they
    saved where a virtual machine's host backs them late. One block at most is kept between calls. What it has
    beyond the most that a default chunk takes the system may take whenever it needs memory (``MADV_FREE``).
    For all of it that would cost a hundredth of the products: each page is marked, and marked again when it
    is next written to.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None

    def rows(self, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """[count, width], uninitialised, in the memory that any earlier ones of this workspace were in."""
        size = count * width * dtype.itemsize
        if self._block is None and size >= KEPT_FROM:
            with contextlib.suppress(IndexError):
                self._block = _kept.pop()
        if self._block is None or self._block.numel() < size:
            self._block = torch.empty(size, dtype=torch.uint8)
        return self._block[:size].view(dtype).view(count, width)

    def close(self) -> None:
        """Keep the block for the next call; nothing may use it any more."""
        block, self._block = self._block, None
        if block is None or block.numel() < KEPT_FROM:
            return
        resident = host_memory() // MEMORY_SHARE
        if block.numel() <= resident or _advise(block[resident:], "MADV_FREE"):
            _kept[:] = [block]


def release() -> None:
    """Give what is kept between calls back to the system now."""
    _kept.clear()
    _given_back.clear()


def _advise(memory: Tensor, advice: str) -> bool:
    """Tell the system about the pages that lie within a tensor; whether it listens."""
    kind, advise = getattr(mmap, advice, None), _madvise()
    if kind is None or advise is None:
        return False
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return advise(start, end - start, kind) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call
