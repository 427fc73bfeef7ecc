"""Memory for large tensors that live shortly, such as chunks of logits."""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref

import torch
from torch import Tensor

HUGE_PAGES_FROM = 16 * 2**20
"""Minimum of bytes to request huge pages on the CPU."""


def reused_memory(
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
