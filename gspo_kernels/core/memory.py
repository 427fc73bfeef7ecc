"""Sizes of chunks of logits, and memory for them."""

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
"""Bytes that a default chunk may take regardless of its number of rows."""
CHUNK_BYTES = 256 * 2**20
"""Most bytes of a default chunk with more than the minimum of rows."""
CHUNK_ROWS = {"cpu": (1024, 2048), "cuda": (4096, 4096)}
"""Fewest and most rows of a default chunk. Accumulating dWeight is then cheap next to the matmuls."""
ALL_ROWS_BYTES = 2**30
"""On a GPU all rows of a call may share a chunk of up to this many bytes, or the bytes of a bf16 weight.
dWeight is then one matmul without an fp32 accumulator of twice the weight's bytes. On a CPU one chunk takes
as long as two (4,096 rows of 32,000 logits and 1,536 of 151,936: 1.00 and 0.98 times)."""
LEAST_BYTES = 256 * 2**20
"""Chunk size of ``two_pass`` and of ``memory="least"``: 441 rows of 151,936 logits, enough for matmuls at
full speed, or up to 16,384 rows of ``gradients.BLOCK_COLUMNS``."""
MIN_SYNC_WORK = 1.75e12
"""Minimum of rows * V * H for a host-device sync to save time. A sync costs about 1 ms of overlap. Skipping a
tenth of the rows saves 0.4 * rows * V * H operations in two matmuls, 1 ms at 700 TFLOP/s."""
MEMORY_SHARE = 16
"""A default chunk takes at most the device's memory divided by this."""


def default_chunk_bytes(
    row_bytes: int, total_memory: int, device: str, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return the default of ``max_chunk_bytes``.

    It is the size of the rows that fit ``CHUNK_BYTES``, clamped to ``CHUNK_ROWS``, at least
    ``MIN_CHUNK_BYTES`` and at most ``total_memory / MEMORY_SHARE``.

    Args:
        row_bytes: bytes of one row of logits.
        total_memory: the device's memory in bytes.
        device: the device's type; all but "cpu" are treated as GPUs.
        all_rows: rows of a call that may share a chunk, see ``ALL_ROWS_BYTES``, or 0.
        weight_bytes: bytes of the weight.
    """
    min_rows, max_rows = CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"])
    size = max(min_rows * row_bytes, min(max_rows * row_bytes, CHUNK_BYTES), MIN_CHUNK_BYTES)
    if device != "cpu" and all_rows * row_bytes <= max(weight_bytes, ALL_ROWS_BYTES):
        size = max(size, all_rows * row_bytes)
    return min(size, max(total_memory // MEMORY_SHARE, 1))


@functools.cache
def host_memory() -> int:
    """Return the bytes of memory available to this process: the machine's or its cgroup's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def chunk_rows(
    row_bytes: int, max_chunk_bytes: int, device: torch.device, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return the number of rows of logits that fit ``max_chunk_bytes`` (0: the default), at least 1."""
    if not max_chunk_bytes:
        on_gpu = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
        max_chunk_bytes = default_chunk_bytes(row_bytes, total, device.type, all_rows, weight_bytes)
    return max(1, max_chunk_bytes // row_bytes)


HUGE_PAGES_FROM = 16 * 2**20
"""Minimum of bytes to request huge pages on the CPU."""


def used_memory(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, *, larger: bool = True
) -> Tensor:
    """Return an uninitialized, contiguous tensor for short-lived data.

    Page faults take as long as the computation on new pages. On Linux a large tensor therefore reuses the
    pages of one of the last two freed tensors, if that had the same size or, if ``larger``, up to twice that.
    Meanwhile the system may reclaim those pages (``MADV_FREE``). New tensors use huge pages.
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
