"""How kernels read a row's columns: 16 bytes at a time if the row begins at a multiple of 16 bytes, otherwise
by as few loads as its address allows.

The log-sum-exp takes blocks [loads, threads, vector]: 16 bytes of columns for each thread and load, counted
from the row's first column. So neither the thread that adds a column nor the order depends on where the row
begins. Gradients read the 16-byte pieces of memory instead, see ``whole_vectors``.
"""

# ruff: noqa: SIM108, SIM300 - in Triton, branches choose code and constants are what a kernel is compiled for.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(number):
    """Decode an int32 from ``launch.encode``."""
    # The interpreter holds a number that fits 32 bits as int32; adding an int64 widens it.
    return ((number + tl.zeros([], tl.int64)) >> 32).to(tl.int32)


@triton.jit
def decode_wide(halves):
    """Decode an int64 from ``launch.encode_wide``."""
    low = decode(halves[0]).to(tl.uint32, bitcast=True).to(tl.int64)
    return (decode(halves[1]).to(tl.int64) << 32) | low


@triton.jit
def decode_float(halves):
    """Decode an fp64 number from ``launch.encode_float``."""
    return decode_wide(halves).to(tl.float64, bitcast=True)


@triton.jit
def element(pointer, b, t, strides):
    """Return the address of element or row (b, t) of a tensor with encoded strides, in 64-bit arithmetic."""
    return pointer + (b.to(tl.int64) * decode_wide(strides[0]) + t.to(tl.int64) * decode_wide(strides[1]))


@triton.jit
def row_pointer(pointer, b, t, strides, ACCESS: tl.constexpr):
    """Return the address of row (b, t); "aligned" promises the compiler a multiple of 16 bytes."""
    # Not by ``element``: Triton 3.6 forgets which number divides the result of a function.
    row = pointer + (b.to(tl.int64) * decode_wide(strides[0]) + t.to(tl.int64) * decode_wide(strides[1]))
    if ACCESS == "aligned":
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def whole_vectors(row, width, VECTOR: tl.constexpr, ACCESS: tl.constexpr):
    """Return (pointer, first column, number of columns) of the part of a row that is accessed in blocks.

    For "aligned" and "single" rows that is the whole row. For "shifted" rows it is the whole vectors at
    multiples of 16 bytes; less than a vector remains at either end, see ``edge_columns``.
    """
    first = width * 0
    if ACCESS == "shifted":
        SIZE: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
        behind = (row.to(tl.int64) // SIZE) % VECTOR
        first = tl.minimum(((VECTOR - behind) % VECTOR).to(tl.int32), width)
        row = tl.multiple_of(row + first, 16)
    if ACCESS != "single":
        # For aligned rows the same number, but now the compiler knows that VECTOR divides it.
        width = (width - first) // VECTOR * VECTOR
    return row, first, width


@triton.jit
def edge_columns(lanes, first, inner_width, width, VECTOR: tl.constexpr):
    """Return the columns before and behind a row's whole vectors, and which lanes have such a column."""
    columns = tl.where(lanes < VECTOR, lanes, first + inner_width + (lanes - VECTOR))
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
    """Load the raw logits of a block of columns; MASKED: -inf beyond the width."""
    if ACCESS == "single":
        pointers = row + (start + lanes).to(tl.int64) * stride_v
    else:
        pointers = (row + start) + lanes
    if MASKED:
        return tl.load(pointers, mask=start + lanes < width, other=-float("inf"), eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


# --- blocks of the log-sum-exp


@triton.jit
def load_block(
    row,
    start,
    lanes,
    width,
    stride_v,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
    ROW: tl.constexpr,
):
    """Load a block's raw logits [loads, threads, vector]; MASKED: values beyond the width mean nothing."""
    ACCESS: tl.constexpr = ROW.ACCESS
    PLATFORM: tl.constexpr = ROW.PLATFORM
    VECTOR: tl.constexpr = lanes.shape[2]
    THREADS: tl.constexpr = lanes.shape[1]
    pieces = tl.arange(0, lanes.shape[0])[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    if ACCESS == "aligned":
        block = load_columns(row, start, lanes, width, stride_v, ACCESS, MASKED, EVICT)
    elif ACCESS == "shifted" and VECTOR == 8 and not MASKED:
        block = _load_across_pieces(row, start, pieces, width, stride_v, EVICT, PLATFORM)
    else:
        block = _load_one_by_one(row, start, pieces, width, stride_v, VECTOR, ACCESS, MASKED, EVICT)
    return block


@triton.jit
def _load_one_by_one(
    row,
    start,
    pieces,
    width,
    stride_v,
    VECTOR: tl.constexpr,
    ACCESS: tl.constexpr,
    MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load each thread's columns one after the other; the first load brings the others to the cache."""
    column = start + pieces * VECTOR
    if ACCESS == "single":
        place = row + column.to(tl.int64) * stride_v
        step = stride_v
    else:
        place = (row + start) + pieces * VECTOR
        step = 1
    a = _load_column(place, column, width, MASKED, EVICT)
    b = _load_column(place + step, column + 1, width, MASKED, EVICT)
    if VECTOR == 2:
        block = tl.join(a, b)
    else:
        c = _load_column(place + 2 * step, column + 2, width, MASKED, EVICT)
        d = _load_column(place + 3 * step, column + 3, width, MASKED, EVICT)
        block = _four(a, b, c, d)
        if VECTOR == 8:
            e = _load_column(place + 4 * step, column + 4, width, MASKED, EVICT)
            f = _load_column(place + 5 * step, column + 5, width, MASKED, EVICT)
            g = _load_column(place + 6 * step, column + 6, width, MASKED, EVICT)
            h = _load_column(place + 7 * step, column + 7, width, MASKED, EVICT)
            block = _alternating(_four(a, c, e, g), _four(b, d, f, h))
    return block


@triton.jit
def _load_column(place, column, width, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Load one column for each thread and load."""
    if MASKED:
        return tl.load(place, mask=column < width, other=-float("inf"), eviction_policy=EVICT)
    return tl.load(place, eviction_policy=EVICT)


@triton.jit
def _load_across_pieces(row, start, pieces, width, stride_v, EVICT: tl.constexpr, PLATFORM: tl.constexpr):
    """Load vectors of eight 16-bit columns as fp32 numbers, each from the two 16-byte pieces that hold it.

    Where such a piece begins before the row or ends behind it, columns are read one by one, so that nothing
    outside of the row is read.
    """
    LOGIT: tl.constexpr = row.dtype.element_ty
    WIDE: tl.constexpr = (pieces.shape[0] * pieces.shape[1] + 1) * 8
    behind = ((row.to(tl.int64).to(tl.uint32) >> 1) & 7).to(tl.int32)
    if _lies_within(start - behind, width, WIDE):
        words = ((row - behind) + start).to(tl.pointer_type(tl.uint32), bitcast=True)
        places = tl.multiple_of(words, 16) + (pieces[:, :, None] * 4 + tl.arange(0, 4)[None, None, :])
        piece = _words(tl.load(places, eviction_policy=EVICT))
        piece += _words(tl.load(places + 4, eviction_policy=EVICT))
        block = _vectors(piece, behind, 0, 8, LOGIT, PLATFORM)
    else:
        block = _load_one_by_one(row, start, pieces, width, stride_v, 8, "shifted", False, EVICT)
        block = block.to(tl.float32)
    return block


@triton.jit
def _lies_within(column, width, WIDE: tl.constexpr):
    """Return whether WIDE columns from ``column`` on all lie in the row."""
    return (column >= 0) & (column <= width - WIDE)


@triton.jit
def _words(quads):
    """Split the last dimension: return the four words of each thread and load."""
    even, odd = tl.split(tl.reshape(quads, [quads.shape[0], quads.shape[1], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _vectors(
    words, behind, FIRST: tl.constexpr, CHOICES: tl.constexpr, LOGIT: tl.constexpr, PLATFORM: tl.constexpr
):
    """Return the eight columns from the one at ``behind`` on, which is in [FIRST, FIRST + CHOICES).

    Branches are cheaper than shifts: in each branch the conversion to fp32 takes a column from a fixed place.
    """
    HALF: tl.constexpr = CHOICES // 2
    if CHOICES == 1:
        even = _four(
            _column_of(words, FIRST, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 2, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 4, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 6, FIRST, LOGIT, PLATFORM),
        )
        odd = _four(
            _column_of(words, FIRST + 1, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 3, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 5, FIRST, LOGIT, PLATFORM),
            _column_of(words, FIRST + 7, FIRST, LOGIT, PLATFORM),
        )
        block = _alternating(even, odd)
    elif behind < FIRST + HALF:
        block = _vectors(words, behind, FIRST, HALF, LOGIT, PLATFORM)
    else:
        block = _vectors(words, behind, FIRST + HALF, HALF, LOGIT, PLATFORM)
    return block


@triton.jit
def _column_of(words, PLACE: tl.constexpr, BRANCH: tl.constexpr, LOGIT: tl.constexpr, PLATFORM: tl.constexpr):
    """Convert the 16-bit column at PLACE in the words to fp32.

    On NVIDIA this is assembly with a comment that names its branch. Without it the compiler would merge the
    branches, which do the same to different words, into one that selects each word first.
    """
    word = words[PLACE // 2]
    if PLATFORM == "cuda":
        part: tl.constexpr = "high" if PLACE % 2 else "low"
        bf16: tl.constexpr = "and.b32 $0, $1, 0xffff0000;" if PLACE % 2 else "shl.b32 $0, $1, 16;"
        fp16: tl.constexpr = f"{{.reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {part};}}"
        code: tl.constexpr = bf16 if LOGIT == tl.bfloat16 else fp16
        named: tl.constexpr = f"{code} // {BRANCH}"
        column = tl.inline_asm_elementwise(named, "=r,r", [word], tl.uint32, is_pure=True, pack=1)
        column = column.to(tl.float32, bitcast=True)
    else:
        bits = (word >> (16 * (PLACE % 2))).to(tl.uint16)
        column = bits.to(LOGIT, bitcast=True).to(tl.float32)
    return column


@triton.jit
def _four(a, b, c, d):
    """Join four numbers for each thread and load, in this order."""
    return _alternating(tl.join(a, c), tl.join(b, d))


@triton.jit
def _alternating(even, odd):
    """Interleave two blocks along the last dimension."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 2 * even.shape[2]])
