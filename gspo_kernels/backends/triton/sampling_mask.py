"""A row's sampling mask: which of its columns are in the softmax (``types.LogitTransform.kept``).

Kernels take the pointer to the masks, or None, for which no code is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_kept(mask, columns, width):
    """Return for each of ``columns`` whether the mask keeps it; False from ``width`` on."""
    word = tl.load(mask + (columns >> 5), mask=columns < width, other=0)
    return ((word >> (columns & 31)) & 1) != 0


@triton.jit
def in_row(label, width, mask):
    """Return whether a label, int64, is a column of its row that the mask keeps."""
    inside = (label >= 0) & (label < width)
    if mask is not None:
        inside = inside & is_kept(mask, tl.where(inside, label, 0), width)
    return inside


@triton.jit
def mask_logits(logits, start, width, mask):
    """Return logits [loads, threads, vector] of a block with -inf for columns that the mask excludes."""
    if mask is not None:
        LOADS: tl.constexpr = logits.shape[0]
        THREADS: tl.constexpr = logits.shape[1]
        VECTOR: tl.constexpr = logits.shape[2]
        vectors = tl.arange(0, LOADS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
        bits = _bits_of_vectors(mask, start + vectors * VECTOR, width)
        lanes = tl.arange(0, VECTOR)[None, None, :]
        logits = tl.where(((bits[:, :, None] >> lanes) & 1) != 0, logits, -float("inf"))
    return logits


@triton.jit
def mask_gradient(gradient, start, end, mask, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the gradient of a block with 0 for columns that the mask excludes, whatever their logits and
    the row's coefficients hold. ALIGNED: the row is read in vectors.
    """
    if mask is not None:
        if not ALIGNED:
            are_kept = is_kept(mask, start + tl.arange(0, gradient.shape[0]), end)
        else:
            VECTORS: tl.constexpr = gradient.shape[0] // VECTOR
            first = start + tl.arange(0, VECTORS) * VECTOR
            bits = _bits_of_vectors(mask, first, end)
            are_kept = ((bits[:, None] >> tl.arange(0, VECTOR)[None, :]) & 1) != 0
            are_kept = tl.reshape(are_kept, gradient.shape)
        gradient = tl.where(are_kept, gradient, tl.zeros_like(gradient))
    return gradient


@triton.jit
def _bits_of_vectors(mask, first, end):
    """Return a number for each vector of columns that begins at ``first``; its bit i is the i-th column's.

    A vector begins at a multiple of its length, which divides 32, so it is in one word of the mask.
    """
    word = tl.load(mask + (first >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
    return word >> (first & 31).to(tl.uint32)
