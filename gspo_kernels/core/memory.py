"""How much memory a chunk of logits may take, and memory of that size."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor

MIN_CHUNK_BYTES = 64 * 2**20
"""A default chunk may take this many bytes, however many rows they are."""
CHUNK_BYTES = 256 * 2**20
"""A default chunk may have more than the fewest rows up to this many bytes."""
CHUNK_ROWS = {"cpu": (1024, 2048), "cuda": (4096, 4096)}
"""Rows per chunk by default, fewest and most: enough that adding a chunk's dWeight costs little compared with
its products."""
ALL_ROWS_BYTES = 2**30
"""On a GPU all rows of a call may share a chunk of up to this many bytes, or of as many as a bf16 weight has.
dWeight is one product then, without its sum in fp32, which has twice the weight's bytes. On a CPU one chunk
takes as long as two (measured, 4,096 rows of 32,000 logits and 1,536 of 151,936: 1.00 and 0.98 times)."""
LEAST_BYTES = 256 * 2**20
"""A chunk of a call whose rows are all projected twice, and of ``memory="least"``. Statistics then take 441
rows of 151,936 logits at a time, enough for products at full speed, and blocks of up to 16,384 rows have all
of ``gradients.BLOCK_COLUMNS``."""
MIN_SYNC_WORK = 1.75e12
"""The least rows * V * H for which a host-device sync may save time. A sync costs about a millisecond, by
which the host is otherwise ahead of the device. Skipping a tenth of the rows saves 0.4 * rows * V * H
operations in two products, which take as long at 700 TFLOP/s. On the CPU a sync costs nothing."""
MEMORY_SHARE = 16
"""The default chunk takes at most the device's memory divided by this."""


def default_chunk_bytes(
    row_bytes: int, total_memory: int, device: str, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return the default of ``max_chunk_bytes``.

    It holds as many rows of logits as fit ``CHUNK_BYTES``, but within ``CHUNK_ROWS``; it is at least
    ``MIN_CHUNK_BYTES`` and at most ``total_memory / MEMORY_SHARE``.

    Args:
        row_bytes: the bytes of one row of logits.
        total_memory: the device's memory in bytes.
        device: the device's type; any that is not "cpu" counts as a GPU.
        all_rows: the rows of a call that may share a chunk, see ``ALL_ROWS_BYTES``; 0: they may not.
        weight_bytes: the bytes of the weight.
    """
    min_rows, max_rows = CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"])
    size = max(min_rows * row_bytes, min(max_rows * row_bytes, CHUNK_BYTES), MIN_CHUNK_BYTES)
    if device != "cpu" and all_rows * row_bytes <= max(weight_bytes, ALL_ROWS_BYTES):
        size = max(size, all_rows * row_bytes)
    return min(size, max(total_memory // MEMORY_SHARE, 1))


@functools.cache
def host_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def chunk_rows(
    row_bytes: int, max_chunk_bytes: int, device: torch.device, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return how many rows of logits fit ``max_chunk_bytes`` (0: the default); at least one."""
    if not max_chunk_bytes:
        on_gpu = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
        max_chunk_bytes = default_chunk_bytes(row_bytes, total, device.type, all_rows, weight_bytes)
    return max(1, max_chunk_bytes // row_bytes)


HUGE_PAGES_FROM = 16 * 2**20
"""Bytes from which new memory on the CPU asks for huge pages."""


def used_memory(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, *, larger: bool = True
) -> Tensor:
    """Return an uninitialised, contiguous tensor, for data that is soon freed again.

    Faulting in new pages takes as long as all that is computed on them. On Linux a large tensor therefore
    reuses the pages of one of the last two freed tensors, if that had the same size or, if ``larger``, up to
    twice that. Until then the system may take those pages whenever it needs memory (``MADV_FREE``). New
    tensors ask for huge pages.
    """
    size = shape.numel() * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGES_FROM or not sys.platform.startswith("linux"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = _pages(size, 2 * size if larger else size)
    # the tensor's storage alone holds this view, so both end together
    view = memoryview(pages)
    weakref.finalize(view, _give_back, pages).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=shape.numel()).view(shape)


_given_back: list[mmap.mmap] = []


def _pages(size: int, largest: int) -> mmap.mmap:
    for pages in sorted(_given_back, key=len):
        if size <= len(pages) <= largest:
            with contextlib.suppress(ValueError):  # another thread took them
                _given_back.remove(pages)
                return pages
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _give_back(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_FREE)
        _given_back[:] = [pages, *_given_back[:1]]


def release() -> None:
    """Give memory that is kept between calls back to the system now."""
    _given_back.clear()
