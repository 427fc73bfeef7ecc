"""A row's sampling mask: which of its columns are in the softmax (``types.LogitTransform.kept``).

Kernels take the pointer to the masks, or None: what follows from None is no code at all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept_row(kept_ptr, b, t, stride_b, stride_t):
    """The mask of row (b, t), in 64-bit arithmetic; None where there is none."""
    if kept_ptr is not None:
        kept_ptr += b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t
    return kept_ptr


@triton.jit
def in_row(label, width, kept):
    """Whether a label, int64, is a column of its row that isn't cut."""
    inside = (label >= 0) & (label < width)
    if kept is not None:
        inside = inside & _is_kept(kept, tl.where(inside, label, 0), width)
    return inside


@triton.jit
def cut_heights(heights, columns, width, kept):
    """Heights [loads, threads, vector] of columns, -inf for those that are cut."""
    if kept is not None:
        # A vector starts at a multiple of its length, which divides 32: one word has it.
        first = tl.min(columns, axis=2)
        word = tl.load(kept + (first >> 5), mask=first < width, other=0)
        heights = tl.where(((word[:, :, None] >> (columns & 31)) & 1) != 0, heights, -float("inf"))
    return heights


@triton.jit
def cut_gradient(gradient, columns, width, kept):
    """A gradient, 0 for columns that are cut, whatever their logits and the row's coefficients hold."""
    if kept is not None:
        gradient = tl.where(_is_kept(kept, columns, width), gradient, tl.zeros_like(gradient))
    return gradient


@triton.jit
def _is_kept(kept, columns, width):
    word = tl.load(kept + (columns >> 5), mask=columns < width, other=0)
    return ((word >> (columns & 31)) & 1) != 0
