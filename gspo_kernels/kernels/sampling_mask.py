"""A row's sampling mask: which of its columns are in the softmax (``types.LogitTransform.kept``).

Kernels take the pointer to the masks, or None, for which no code is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_kept(mask, columns, width):
    """Whether the mask has each of some columns."""
    word = tl.load(mask + (columns >> 5), mask=columns < width, other=0)
    return ((word >> (columns & 31)) & 1) != 0


@triton.jit
def in_row(label, width, mask):
    """Whether a label, int64, is a column of its row that the mask keeps."""
    inside = (label >= 0) & (label < width)
    if mask is not None:
        inside = inside & is_kept(mask, tl.where(inside, label, 0), width)
    return inside


@triton.jit
def mask_heights(heights, start, width, mask):
    """Heights [loads, threads, vector] of the columns of a block, -inf for those that the mask excludes."""
    if mask is not None:
        LOADS: tl.constexpr = heights.shape[0]
        THREADS: tl.constexpr = heights.shape[1]
        VECTOR: tl.constexpr = heights.shape[2]
        vectors = tl.arange(0, LOADS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
        bits = _bits_of_vectors(mask, start + vectors * VECTOR, width, VECTOR, False)
        lanes = tl.arange(0, VECTOR)[None, None, :]
        heights = tl.where(((bits[:, :, None] >> lanes) & 1) != 0, heights, -float("inf"))
    return heights


@triton.jit
def mask_gradient(gradient, start, end, mask, VECTOR: tl.constexpr, ACCESS: tl.constexpr):
    """The gradient of a block of columns, 0 for those that the mask excludes, whatever their logits and
    the row's coefficients hold. ACCESS says how the row is read: see ``launch.access``.
    """
    if mask is not None:
        if ACCESS == "single":
            # Threads have no vectors.
            are_kept = is_kept(mask, start + tl.arange(0, gradient.shape[0]), end)
        else:
            VECTORS: tl.constexpr = gradient.shape[0] // VECTOR
            first = start + tl.arange(0, VECTORS) * VECTOR
            # Of a shifted row a vector may end in another word than it begins in.
            bits = _bits_of_vectors(mask, first, end, VECTOR, ACCESS == "shifted")
            are_kept = ((bits[:, None] >> tl.arange(0, VECTOR)[None, :]) & 1) != 0
            are_kept = tl.reshape(are_kept, gradient.shape)
        gradient = tl.where(are_kept, gradient, tl.zeros_like(gradient))
    return gradient


@triton.jit
def _bits_of_vectors(mask, first, end, VECTOR: tl.constexpr, STRADDLES: tl.constexpr):
    """For vectors of columns that begin at ``first``: numbers whose bit i is that of the i-th column.

    A vector that begins at a multiple of its length, which divides 32, lies in one word.
    """
    word = tl.load(mask + (first >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
    shift = (first & 31).to(tl.uint32)
    if STRADDLES:
        last = first + (VECTOR - 1)
        # The same word again adds bits beyond the vector's.
        after = tl.load(mask + (last >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
        word = word.to(tl.uint64) | (after.to(tl.uint64) << 32)
    bits = (word >> shift).to(tl.uint32)
    return bits
