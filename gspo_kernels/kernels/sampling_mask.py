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
        bits = _bits_of_vectors(mask, start + vectors * VECTOR, width, VECTOR, False)
        lanes = tl.arange(0, VECTOR)[None, None, :]
        logits = tl.where(((bits[:, :, None] >> lanes) & 1) != 0, logits, -float("inf"))
    return logits


@triton.jit
def mask_gradient(gradient, start, end, mask, VECTOR: tl.constexpr, ACCESS: tl.constexpr):
    """Return the gradient of a block with 0 for columns that the mask excludes, whatever their logits and
    the row's coefficients hold. ACCESS says how the row is read: see ``launch.access``.
    """
    if mask is not None:
        if ACCESS == "single":
            # Single elements form no vectors.
            are_kept = is_kept(mask, start + tl.arange(0, gradient.shape[0]), end)
        else:
            VECTORS: tl.constexpr = gradient.shape[0] // VECTOR
            first = start + tl.arange(0, VECTORS) * VECTOR
            # In a shifted row a vector may end in another word of the mask than it begins in.
            bits = _bits_of_vectors(mask, first, end, VECTOR, ACCESS == "shifted")
            are_kept = ((bits[:, None] >> tl.arange(0, VECTOR)[None, :]) & 1) != 0
            are_kept = tl.reshape(are_kept, gradient.shape)
        gradient = tl.where(are_kept, gradient, tl.zeros_like(gradient))
    return gradient


@triton.jit
def _bits_of_vectors(mask, first, end, VECTOR: tl.constexpr, STRADDLES: tl.constexpr):
    """Return a number for each vector of columns that begins at ``first``; its bit i is the i-th column's.

    A vector that begins at a multiple of its length, which divides 32, lies in one word of the mask; with
    STRADDLES vectors may begin anywhere.
    """
    word = tl.load(mask + (first >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
    shift = (first & 31).to(tl.uint32)
    if STRADDLES:
        last = first + (VECTOR - 1)
        # If this is the same word again, its bits lie beyond the vector's.
        after = tl.load(mask + (last >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
        word = word.to(tl.uint64) | (after.to(tl.uint64) << 32)
    bits = (word >> shift).to(tl.uint32)
    return bits
