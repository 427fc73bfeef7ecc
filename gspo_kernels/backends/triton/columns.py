"""How kernels find and read a row's columns: 16 bytes at a time if all rows consist of 16-byte pieces,
otherwise one element at a time.

The log-sum-exp takes blocks [loads, threads, vector]: 16 bytes of columns for each thread and load, counted
from the row's first column. So neither the thread that adds a column nor the order depends on where the row
begins.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def element(pointer, b, t, stride_b, stride_t):
    """Return the address of element or row (b, t) of a tensor, in 64-bit arithmetic."""
    return pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)


@triton.jit
def row_pointer(pointer, b, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Return the address of row (b, t); ALIGNED promises the compiler a multiple of 16 bytes."""
    # Not by ``element``: Triton 3.6 forgets which number divides the result of a function.
    row = pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


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
    """Load every STEP-th of VECTOR columns one after the other, so that each thread has all of its own.

    Args:
        pointers, columns: [loads, threads, 1], the first of these columns.
        width: the number of columns of the row.
    """
    if STEP == VECTOR:
        block = _load(pointers, columns, width, MASKED, EVICT)
    else:
        even = _load_elements(pointers, columns, width, 2 * STEP, VECTOR, MASKED, EVICT)
        odd = _load_elements(pointers + STEP, columns + STEP, width, 2 * STEP, VECTOR, MASKED, EVICT)
        block = tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 2 * even.shape[2]])
    return block
