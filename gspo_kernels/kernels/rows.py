"""Row mathematics that the kernels share: scalar functions, loading blocks, the logit transform, the online
fold.

A row is one token's logits. Its columns are walked block by block; lane ``i`` of a block keeps a running
maximum and a running sum of exponentials of the columns it has seen, and the lanes are combined once, when
the row ends. The label's column stays out of that fold: with U = log-sum-exp of the *other* columns,

    log p(label) = -log(1 + exp(U - z_label)),

which can't exceed 0 and keeps its relative accuracy where p(label) is close to 1.

The scalar functions are written out because libdevice isn't available to the interpreter, and because a plain
``exp(x) - 1`` or ``log(1 + x)`` leaves no accuracy near 0.
"""

# ruff: noqa: SIM108, SIM300 - in Triton, branches choose code and constants are what a kernel is compiled for.
from __future__ import annotations

import triton
import triton.language as tl

HUGE: tl.constexpr = tl.constexpr(1e30)
"""Stands in for infinity where a product with an exponential that is 0 must be 0; exp(-HUGE) is 0."""


@triton.jit
def lowest(STATS: tl.constexpr):
    """The lowest finite value: unlike -inf, subtracting it from -inf is no NaN."""
    if STATS == tl.float64:
        return tl.full([], -1.7976931348623157e308, STATS)
    return tl.full([], -3.4028234663852886e38, STATS)


@triton.jit
def exp_flushed(x, PLATFORM: tl.constexpr):
    """exp(x) for x <= 0 as one hardware exponential; on NVIDIA, results below the normal range become 0.

    Keeping them would cost three more instructions for each exponential, a third of the fold's time.
    """
    if PLATFORM == "cuda" and x.dtype == tl.float32:
        scaled = x * 1.4426950408889634
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp(x)


@triton.jit
def tanh(x, STATS: tl.constexpr, PLATFORM: tl.constexpr):
    """Hyperbolic tangent to a few units in the last place, near 0 too; one exponential and one division."""
    a = tl.abs(x)
    e = exp_flushed(-2.0 * a, PLATFORM)
    q = a * a
    # Below 1/2 a convergent of Lambert's continued fraction x/(1 + x^2/(3 + x^2/(5 + ...))), which doesn't
    # cancel: the one that ends in 9 or, for fp64, in 17.
    if STATS == tl.float64:
        top = (((q + 990.0) * q + 135135.0) * q + 4729725.0) * q + 34459425.0
        low = (((45.0 * q + 13860.0) * q + 945945.0) * q + 16216200.0) * q + 34459425.0
    else:
        top = (q + 105.0) * q + 945.0
        low = (15.0 * q + 420.0) * q + 945.0
    small = a < 0.5
    quotient = tl.where(small, a * top, 2.0 * e) / tl.where(small, low, 1.0 + e)
    magnitude = tl.where(small, quotient, 1.0 - quotient)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def log1p_unit(x):
    """log(1 + x) for x in [0, 1] with full relative accuracy, as 2 artanh(x / (2 + x))."""
    t = x / (2.0 + x)
    q = t * t
    # q <= 1/9: the first term left out is below 9**-17 / 35.
    tail = q * 0.0 + 1.0 / 33.0
    for k in tl.static_range(16):
        tail = tail * q + 1.0 / (31.0 - 2.0 * k)
    return 2.0 * t * tail


@triton.jit
def one_minus_exp(logp, STATS: tl.constexpr, PLATFORM: tl.constexpr):
    """1 - exp(logp) for logp <= 0 without cancellation, as 2t / (1 + t) with t = tanh(-logp / 2)."""
    t = tanh(-0.5 * logp, STATS, PLATFORM)
    return 2.0 * t / (1.0 + t)


@triton.jit
def narrowed(value, OUT: tl.constexpr, PLATFORM: tl.constexpr):
    """``value`` in the dtype OUT, rounded to the nearest even as hardware does."""
    if OUT == tl.float64:
        return value.to(tl.float64)
    value = value.to(tl.float32)
    if PLATFORM == "interpreter" and OUT == tl.bfloat16:
        # The interpreter truncates.
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(OUT)


@triton.jit
def joined(base, rest, LSE: tl.constexpr):
    """A log-sum-exp that is a sum of two as one number of dtype LSE."""
    return base.to(LSE) + rest.to(LSE)


@triton.jit
def parted(value, STATS: tl.constexpr):
    """A number of any dtype as a sum of two of dtype STATS."""
    base = value.to(STATS)
    rounded = base.to(value.dtype)
    rest = tl.where(value == rounded, 0.0, value - rounded).to(STATS)
    return base, rest


@triton.jit
def row_pointer(pointer, b, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Address of row (b, t), in 64-bit arithmetic; ALIGNED promises that it is a multiple of 16 bytes."""
    row = pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def element(pointer, b, t, stride_b, stride_t):
    """Address of element (b, t) of a [B, T] tensor, in 64-bit arithmetic."""
    return pointer + (b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t)


@triton.jit
def readable_width(wanted, vocabulary, ALIGNED: tl.constexpr):
    """Number of columns to walk: the vocabulary, or none for a row that must not be read."""
    width = tl.where(wanted, vocabulary, 0)
    if ALIGNED:
        width = tl.multiple_of(width, 16)
    return width


@triton.jit
def load_columns(
    row, start, width, stride_v, BLOCK: tl.constexpr, UNIT_STRIDE: tl.constexpr, EVICT: tl.constexpr
):
    """Raw logits of one block of columns, -inf beyond the width."""
    columns = start + tl.arange(0, BLOCK)
    if UNIT_STRIDE:
        pointers = row + columns
    else:
        pointers = row + columns.to(tl.int64) * stride_v
    return tl.load(pointers, mask=columns < width, other=-float("inf"), eviction_policy=EVICT)


@triton.jit
def row_slopes(
    constants,
    row_temperature_ptr,
    b,
    t,
    stride_b,
    stride_t,
    STATS: tl.constexpr,
):
    """The transform of one row: z = slope * x, or z = outer * tanh(inner * x) under a softcap.

    Each factor comes as a sum of two: rounding it would tilt all logits of the row the same way, and then the
    log-prob and the entropy by much more than rounding each product does.
    """
    slope = tl.full([], constants[0], tl.float64)
    inner = tl.full([], constants[1], tl.float64)
    outer = tl.full([], constants[2], tl.float64)
    if row_temperature_ptr is not None:
        temperature = tl.load(element(row_temperature_ptr, b, t, stride_b, stride_t)).to(tl.float64)
        slope = slope / temperature
        outer = outer / temperature
    return parted(slope, STATS), parted(inner, STATS), parted(outer, STATS)


@triton.jit
def _scaled(x, factor):
    """Multiply x by a factor in two parts. An infinite x meets only the first: the second may be 0."""
    finite = tl.minimum(tl.maximum(x, -HUGE), HUGE)
    return tl.fma(x, factor[0], finite * factor[1])


@triton.jit
def transformed(
    raw,
    columns,
    width,
    slopes,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Return z of one block, -inf beyond the width, and the factor of dz/dx that varies within the row."""
    x = raw.to(STATS)
    bend = 1.0
    if SOFTCAP:
        bent = tanh(_scaled(x, slopes[1]), STATS, PLATFORM)
        z = tl.where(columns < width, _scaled(bent, slopes[2]), -float("inf"))
        bend = (1.0 - bent) * (1.0 + bent)
    elif SCALED:
        z = tl.where(columns < width, _scaled(x, slopes[0]), -float("inf"))
    else:
        z = x
    return z, bend


@triton.jit
def _fold_block(peak, total, spread, z, ENTROPY: tl.constexpr, PLATFORM: tl.constexpr):
    """Fold one block into the lanes: total = sum exp(z - peak), spread = sum exp(z - peak) (z - peak).

    One exponential per element is enough: exp(-|z - peak|) is the new element's term where the peak stays,
    and the factor on the old sums where the peak moves.
    """
    distance = z - peak
    rises = distance > 0
    e = exp_flushed(-tl.abs(distance), PLATFORM)
    if ENTROPY:
        # Where the distance is infinite the exponential is 0. A NaN logit makes `total` NaN.
        a = tl.minimum(tl.abs(distance), HUGE)
        spread = tl.where(rises, e * (spread - a * total), spread - e * a)
    total = tl.where(rises, tl.fma(total, e, 1.0), total + e)
    peak = tl.maximum(peak, z)
    return peak, total, spread


@triton.jit
def joined_folds(one, other, ENTROPY: tl.constexpr, PLATFORM: tl.constexpr):
    """(peak, total, spread) of the columns of two folds together. The peak of ``one`` must be finite."""
    peak = tl.maximum(one[0], other[0])
    down = one[0] - peak
    other_down = other[0] - peak
    e = exp_flushed(down, PLATFORM)
    other_e = exp_flushed(other_down, PLATFORM)
    spread = one[2]
    if ENTROPY:
        spread = e * (one[2] + tl.maximum(down, -HUGE) * one[1])
        spread += other_e * (other[2] + tl.maximum(other_down, -HUGE) * other[1])
    return peak, e * one[1] + other_e * other[1], spread


@triton.jit
def _start_of(block, home, BLOCK: tl.constexpr):
    """The first column of the ``block``-th block that is folded: ``home``, then the others in order."""
    return tl.where(block > home, block, block - 1) * BLOCK


@triton.jit
def fold_row(
    row,
    label,
    labelled,
    width,
    stride_v,
    slopes,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Log-prob of the label, log-sum-exp (as a sum of two) and entropy of one row, each logit read once.

    The log-sum-exp is one of the logits plus a small rest, which together are more accurate than their
    rounded sum. ``labelled`` says that the label is a column of the row; where it isn't, the log-prob is NaN.
    """
    lanes = tl.arange(0, BLOCK)
    # The label's block comes first, so that no other block has to look for the label.
    label = tl.where(labelled, label, 0).to(tl.int32)
    home = label // BLOCK
    start = home * BLOCK
    raw = load_columns(row, start, width, stride_v, BLOCK, UNIT_STRIDE, EVICT)
    # Two blocks are always under way; loads beyond the last block lie beyond the width and read nothing.
    odd = load_columns(row, _start_of(1, home, BLOCK), width, stride_v, BLOCK, UNIT_STRIDE, EVICT)
    even = load_columns(row, _start_of(2, home, BLOCK), width, stride_v, BLOCK, UNIT_STRIDE, EVICT)

    z, _ = transformed(raw, start + lanes, width, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
    is_label = (start + lanes == label) & labelled
    z_label = tl.sum(tl.where(is_label, z, 0.0), axis=0)
    others = tl.where(is_label, -float("inf"), z)
    peak = tl.zeros([BLOCK], STATS) + lowest(STATS)
    total = tl.zeros([BLOCK], STATS)
    spread = tl.zeros([BLOCK], STATS)
    peak, total, spread = _fold_block(peak, total, spread, others, ENTROPY, PLATFORM)

    for block in range(1, tl.cdiv(width, BLOCK), 2):
        columns = _start_of(block, home, BLOCK) + lanes
        z, _ = transformed(odd, columns, width, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
        odd = load_columns(row, _start_of(block + 2, home, BLOCK), width, stride_v, BLOCK, UNIT_STRIDE, EVICT)
        peak, total, spread = _fold_block(peak, total, spread, z, ENTROPY, PLATFORM)

        columns = _start_of(block + 1, home, BLOCK) + lanes
        z, _ = transformed(even, columns, width, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
        even = load_columns(
            row, _start_of(block + 3, home, BLOCK), width, stride_v, BLOCK, UNIT_STRIDE, EVICT
        )
        peak, total, spread = _fold_block(peak, total, spread, z, ENTROPY, PLATFORM)

    return combine_lanes(peak, total, spread, z_label, labelled, STATS, ENTROPY)


@triton.jit
def combine_lanes(peak, total, spread, z_label, labelled, STATS: tl.constexpr, ENTROPY: tl.constexpr):
    """Combine the lanes of the other columns with the label's logit into the row's statistics."""
    top = tl.max(peak, axis=0)
    distance = peak - top
    e = tl.exp(distance)
    others = tl.sum(total * e, axis=0)
    log_others = tl.log(others)
    z_label = tl.where(labelled, z_label, -float("inf"))

    excess = (top - z_label) + log_others
    softplus_down = log1p_unit(tl.exp(-tl.abs(excess)))
    logp = 0.0 - (tl.maximum(excess, 0.0) + softplus_down)
    # As in PyTorch, a label at +inf is inf - inf.
    logp = tl.where(labelled & (z_label != float("inf")), logp, float("nan"))

    base = tl.where(excess >= 0, top, z_label)
    rest = tl.where(excess >= 0, log_others + softplus_down, softplus_down)
    rest = tl.where(others == 0, 0.0, rest)

    entropy = logp
    if ENTROPY:
        # Move all lanes to the common peak, then the label's column with them.
        down = tl.maximum(distance, -HUGE)
        others_spread = tl.sum(e * (spread + down * total), axis=0)
        height = tl.maximum(top, z_label)
        down_others = tl.maximum(top - height, -HUGE)
        down_label = tl.maximum(z_label - height, -HUGE)
        e_others = tl.exp(down_others)
        # A label at +inf or NaN makes the row NaN; the term of one at -inf is 0.
        e_label = tl.exp(z_label - height)
        whole = others * e_others + e_label
        whole_spread = e_others * (others_spread + down_others * others) + e_label * down_label
        entropy = tl.log(whole) - whole_spread / whole
    return logp, base, rest, entropy
