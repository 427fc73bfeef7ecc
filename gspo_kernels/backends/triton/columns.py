"""Addresses, loads, stores and sampling masks of a row's columns.

Columns are accessed in 16-byte vectors if all rows are aligned, otherwise one by one. The log-sum-exp uses
blocks [loads, threads, vector] relative to the row's first column, to make the order of sums independent of
the row's address. Kernels take a pointer to sampling masks (``types.LogitTransform.kept``), or None.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_rows(count, ROWS: tl.constexpr):
    """Return the ROWS rows of this program, and a mask of those that exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return rows, rows < count


@triton.jit
def element(pointer, b, t, stride_b, stride_t):
    """Return the address of element or row (b, t) of a tensor, in 64-bit arithmetic."""
    return pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)


@triton.jit
def row_pointer(pointer, b, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Return the address of row (b, t); ALIGNED promises the compiler a multiple of 16 bytes."""
    # Not by ``element``: Triton 3.6 loses the divisibility of the result of a function.
    row = pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def aligned_width(width, ALIGNED: tl.constexpr):
    """Return ``width``; with ALIGNED in a form that the compiler can prove to be a multiple of 16."""
    if ALIGNED:
        width = width // 16 * 16
    return width


@triton.jit
def load_columns(row, start, lanes, width, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Load the raw logits of a block of columns; MASKED: -inf beyond the width."""
    return _load((row + start) + lanes, start + lanes, width, MASKED, EVICT)


@triton.jit
def load_block(row, start, lanes, width, MASKED: tl.constexpr, EVICT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a block's raw logits [loads, threads, vector]; MASKED: -inf beyond the width."""
    THREADS: tl.constexpr = lanes.shape[1]
    VECTOR: tl.constexpr = lanes.shape[2]
    if ALIGNED:
        block = load_columns(row, start, lanes, width, MASKED, EVICT)
    else:
        vectors = tl.arange(0, lanes.shape[0])[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
        first = (vectors * VECTOR)[:, :, None]
        block = _load_elements((row + start) + first, start + first, width, 1, VECTOR, MASKED, EVICT)
    return block


@triton.jit
def _load(pointers, columns, width, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Load columns; MASKED: -inf beyond the width."""
    if MASKED:
        return tl.load(pointers, mask=columns < width, other=-float("inf"), eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def _load_elements(
    pointers,
    columns,
    width,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load every STEP-th of VECTOR columns by separate loads, to keep each thread's columns together.
    ``pointers`` and ``columns`` [loads, threads, 1] are the first of these.
    """
    if STEP == VECTOR:
        block = _load(pointers, columns, width, MASKED, EVICT)
    else:
        even = _load_elements(pointers, columns, width, 2 * STEP, VECTOR, MASKED, EVICT)
        odd = _load_elements(pointers + STEP, columns + STEP, width, 2 * STEP, VECTOR, MASKED, EVICT)
        block = tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 2 * even.shape[2]])
    return block


@triton.jit
def is_kept(mask, columns, width):
    """Return for each of ``columns`` whether the mask keeps it; False beyond the width."""
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
def store_zeros(row, begin, lanes, end, EVICT: tl.constexpr):
    """Store zeros from column ``begin`` to ``end``, as many at a time as there are lanes."""
    zeros = tl.zeros(lanes.shape, row.dtype.element_ty)
    for start in range(begin, end, lanes.numel):
        tl.store(row + (start + lanes), zeros, mask=start + lanes < end, eviction_policy=EVICT)


@triton.jit
def mask_gradient(gradient, start, end, mask, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the gradient of a block with 0 for columns that the mask excludes, even if it is NaN. ALIGNED:
    the row is read in vectors.
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
    """Return a number for each vector of columns that begins at ``first``; its bit i is the i-th column's."""
    # A vector begins at a multiple of its length, which divides 32, so it is in one word of the mask.
    word = tl.load(mask + (first >> 5), mask=first < end, other=0).to(tl.uint32, bitcast=True)
    return word >> (first & 31).to(tl.uint32)
