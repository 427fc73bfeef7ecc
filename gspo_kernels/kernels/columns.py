"""How kernels read a row's columns: 16 bytes at a time where the row begins at a multiple of 16 bytes, and by
as few loads as its place in memory allows where it doesn't.

Folds take blocks as [loads, threads, vector]: 16 bytes of columns for each thread and load, counted from the
row's first column wherever that lies. Which thread folds a column, and in which order, leaves no trace of the
place. Gradients walk the 16-byte pieces of memory instead, see ``whole_vectors``.
"""

# ruff: noqa: SIM108, SIM300 - in Triton, branches choose code and constants are what a kernel is compiled for.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_pointer(pointer, b, t, stride_b, stride_t, ACCESS: tl.constexpr):
    """Address of row (b, t), in 64-bit arithmetic; "aligned" promises that it is a multiple of 16 bytes."""
    row = pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)
    if ACCESS == "aligned":
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def whole_vectors(row, width, VECTOR: tl.constexpr, ACCESS: tl.constexpr):
    """(pointer, first column, number of columns) of the part of a row to walk in blocks.

    "aligned" rows and those of "single" elements are walked as a whole. Of a "shifted" row it is what lies in
    whole vectors at multiples of 16 bytes; less than a vector is left at either end, see ``edge_columns``.
    """
    first = width * 0
    if ACCESS == "shifted":
        SIZE: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
        behind = (row.to(tl.int64) // SIZE) % VECTOR
        first = tl.minimum(((VECTOR - behind) % VECTOR).to(tl.int32), width)
        row = tl.multiple_of(row + first, 16)
    if ACCESS != "single":
        # For aligned rows the same number, by an operation that tells the compiler what divides it.
        width = (width - first) // VECTOR * VECTOR
    return row, first, width


@triton.jit
def edge_columns(lanes, first, whole, width, VECTOR: tl.constexpr):
    """The columns before and behind the whole vectors of a row, and which of the lanes have one."""
    columns = tl.where(lanes < VECTOR, lanes, first + whole + (lanes - VECTOR))
    return columns, (columns < first) | ((lanes >= VECTOR) & (columns < width))


@triton.jit
def load_columns(
    row,
    start,
    lanes,
    width,
    stride_v,
    ACCESS: tl.constexpr,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Raw logits of a block of columns; MASKED: -inf beyond the width."""
    if ACCESS == "single":
        pointers = row + (start + lanes).to(tl.int64) * stride_v
    else:
        pointers = (row + start) + lanes
    if MASKED:
        return tl.load(pointers, mask=start + lanes < width, other=-float("inf"), eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


# --- blocks of a fold


@triton.jit
def row_source(row, width, ACCESS: tl.constexpr):
    """What ``load_block`` reads a row from.

    For 16-bit logits of a "shifted" row: (the row, its pairs of columns that are 4-byte words, how many
    columns of the first pair lie before the row, its ends). The ends are the column of a pair that only
    begins within the row, and above it that of one that only ends there: nothing beside the row is read.
    """
    LOGIT: tl.constexpr = row.dtype.element_ty
    if ACCESS == "shifted" and LOGIT.primitive_bitwidth == 16:
        behind = ((row.to(tl.int64) // 2) % 2).to(tl.int32)
        pairs = (row - behind).to(tl.pointer_type(tl.uint32), bitcast=True)
        last = _single(row, width - 1, (width > 0) & ((width + behind) % 2 == 1))
        first = _single(row, 0, (width > 0) & (behind == 1))
        return row, pairs, behind, last | (first << 16)
    else:
        return (row,)


@triton.jit
def _single(row, column, is_there):
    """One 16-bit column as a number of 32 bits."""
    return tl.load(row + column, mask=is_there, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def load_block(
    source,
    start,
    lanes,
    width,
    stride_v,
    ACCESS: tl.constexpr,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Raw logits [loads, threads, vector] of a block; what MASKED gives beyond the width means nothing."""
    VECTOR: tl.constexpr = lanes.shape[2]
    THREADS: tl.constexpr = lanes.shape[1]
    pieces = tl.arange(0, lanes.shape[0])[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    first = pieces * VECTOR
    if ACCESS == "aligned":
        block = load_columns(source[0], start, lanes, width, stride_v, ACCESS, MASKED, EVICT)
    elif ACCESS == "shifted" and VECTOR == 8:
        block = _load_pairs(source, start, first, width, EVICT)
    else:
        # One by one, each thread its own, which share what the first of them has brought to the cache.
        row = source[0]
        a = load_columns(row, start, first, width, stride_v, ACCESS, MASKED, EVICT)
        b = load_columns(row, start, first + 1, width, stride_v, ACCESS, MASKED, EVICT)
        if VECTOR == 2:
            block = tl.join(a, b)
        else:
            c = load_columns(row, start, first + 2, width, stride_v, ACCESS, MASKED, EVICT)
            d = load_columns(row, start, first + 3, width, stride_v, ACCESS, MASKED, EVICT)
            block = _four(a, b, c, d)
            if VECTOR == 8:
                e = load_columns(row, start, first + 4, width, stride_v, ACCESS, MASKED, EVICT)
                f = load_columns(row, start, first + 5, width, stride_v, ACCESS, MASKED, EVICT)
                g = load_columns(row, start, first + 6, width, stride_v, ACCESS, MASKED, EVICT)
                h = load_columns(row, start, first + 7, width, stride_v, ACCESS, MASKED, EVICT)
                block = _alternating(_four(a, c, e, g), _four(b, d, f, h))
    return block


@triton.jit
def _load_pairs(source, start, first, width, EVICT: tl.constexpr):
    """Vectors of eight 16-bit columns, out of the five pairs that hold them."""
    row, pairs, behind, _ = source
    places = (pairs + start // 2) + first // 2
    LAST: tl.constexpr = first.shape[0] * first.shape[1] * 8 + 2
    column = start - behind
    if (column >= 0) & (column <= width - LAST):
        a = tl.load(places, eviction_policy=EVICT)
        b = tl.load(places + 1, eviction_policy=EVICT)
        c = tl.load(places + 2, eviction_policy=EVICT)
        d = tl.load(places + 3, eviction_policy=EVICT)
        e = tl.load(places + 4, mask=tl.where(behind == 1, first, -1) >= 0, eviction_policy=EVICT)
    else:
        a = _load_pair(source, places, column + first, width, EVICT)
        b = _load_pair(source, places + 1, column + first + 2, width, EVICT)
        c = _load_pair(source, places + 2, column + first + 4, width, EVICT)
        d = _load_pair(source, places + 3, column + first + 6, width, EVICT)
        # Where pairs begin with the vector, the fifth is the next one's alone.
        e = _load_pair(source, places + 4, column + first + 8, tl.where(behind == 1, width, 0), EVICT)
    by = (16 * behind).to(tl.uint64)
    found = _four(_from(a, b, by), _from(b, c, by), _from(c, d, by), _from(d, e, by))
    LOGIT: tl.constexpr = row.dtype.element_ty
    if LOGIT == tl.bfloat16:
        # As the fp32 numbers that they stand for, which is an operation for each.
        block = _alternating(found << 16, found & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        block = _alternating(found.to(tl.uint16), (found >> 16).to(tl.uint16)).to(LOGIT, bitcast=True)
    return block


@triton.jit
def _load_pair(source, place, column, width, EVICT: tl.constexpr):
    """A pair of columns where either may lie beside the row."""
    # Columns before the row are large numbers without a sign.
    inside = column.to(tl.uint32) < tl.maximum(width - 1, 0).to(tl.uint32)
    pair = tl.load(place, mask=inside, other=0, eviction_policy=EVICT)
    pair = tl.where(column == width - 1, source[3] & 0xFFFF, pair)
    return tl.where(column == -1, source[3] & 0xFFFF0000, pair)


@triton.jit
def _from(one, other, by):
    """32 bits of two words, from a bit of the first one on."""
    return ((one.to(tl.uint64) | (other.to(tl.uint64) << 32)) >> by).to(tl.uint32)


@triton.jit
def _four(a, b, c, d):
    """Four numbers for each thread and load, in this order."""
    return _alternating(tl.join(a, c), tl.join(b, d))


@triton.jit
def _alternating(even, odd):
    """Two blocks' numbers in turns."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 2 * even.shape[2]])
