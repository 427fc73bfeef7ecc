"""Row mathematics that the kernels share: loading blocks, the logit transform, the online fold, scalar functions.

A row is one token's logits. Its columns are walked block by block; lane ``i`` of a block keeps a running maximum and
a running sum of exponentials of the columns it has seen, and the lanes are combined once, when the row ends. The
label's column stays out of that fold: with U = log-sum-exp of the *other* columns,

    log p(label) = -log(1 + exp(U - z_label)),

which can't exceed 0 and keeps its relative accuracy where p(label) is close to 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HUGE: tl.constexpr = tl.constexpr(1e30)
"""Stands in for infinity where a product with an exponential that is 0 must be 0; exp(-_HUGE) is 0."""


@triton.jit
def _lowest(STATS: tl.constexpr):
    """The lowest finite value: unlike -inf, subtracting it from -inf is no NaN."""
    if STATS == tl.float64:
        value: tl.constexpr = -1.7976931348623157e308
    else:
        value: tl.constexpr = -3.4028234663852886e38
    return tl.full([], value, STATS)


# --- scalar and element-wise functions --------------------------------------------------------------------------------
# libdevice isn't available to the interpreter, and the fast exp and log leave no accuracy near 0.


@triton.jit
def tanh(x, STATS: tl.constexpr):
    """tanh to a few units in the last place, for small arguments too; one exponential and one division."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    q = a * a
    # Below 1/2 a convergent of Lambert's continued fraction x/(1 + x^2/(3 + x^2/(5 + ...))), which doesn't cancel:
    # the one that ends in 9 leaves 2e-10 of relative error at 1/2, the one that ends in 17 leaves 1e-20.
    if STATS == tl.float64:
        top = (((q + 990.0) * q + 135135.0) * q + 4729725.0) * q + 34459425.0
        low = (((45.0 * q + 13860.0) * q + 945945.0) * q + 16216200.0) * q + 34459425.0
    else:
        top = (q + 105.0) * q + 945.0
        low = (15.0 * q + 420.0) * q + 945.0
    small = a < 0.5
    magnitude = tl.where(small, a * top, 1.0 - e) / tl.where(small, low, 1.0 + e)
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
def one_minus_exp(logp, STATS: tl.constexpr):
    """1 - exp(logp) for logp <= 0 without cancellation, as 2t / (1 + t) with t = tanh(-logp / 2)."""
    t = tanh(-0.5 * logp, STATS)
    return 2.0 * t / (1.0 + t)


@triton.jit
def narrowed(value, OUT: tl.constexpr, INTERPRETED: tl.constexpr):
    """``value`` in the dtype OUT, rounded to the nearest even as hardware does."""
    if OUT == tl.float64:
        return value.to(tl.float64)
    value = value.to(tl.float32)
    if INTERPRETED and OUT == tl.bfloat16:
        # The interpreter truncates.
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(OUT)


# --- addresses --------------------------------------------------------------------------------------------------------


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


# --- the logit transform ----------------------------------------------------------------------------------------------


@triton.jit
def row_slopes(
    slope,
    inner,
    outer,
    row_temperature_ptr,
    b,
    t,
    stride_b,
    stride_t,
    STATS: tl.constexpr,
):
    """The transform's constants for one row: z = slope * x, or z = outer * tanh(inner * x) under a softcap."""
    slope = tl.full([], slope, STATS)
    inner = tl.full([], inner, STATS)
    outer = tl.full([], outer, STATS)
    if row_temperature_ptr is not None:
        temperature = tl.load(element(row_temperature_ptr, b, t, stride_b, stride_t)).to(STATS)
        slope = slope / temperature
        outer = outer / temperature
    return slope, inner, outer


@triton.jit
def transformed(
    raw,
    columns,
    width,
    slope,
    inner,
    outer,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """z for one block, -inf beyond the width, and dz/dx."""
    x = raw.to(STATS)
    if SOFTCAP:
        bent = tanh(inner * x, STATS)
        z = tl.where(columns < width, outer * bent, -float("inf"))
        chain = slope * ((1.0 - bent) * (1.0 + bent))
    elif SCALED:
        z = tl.where(columns < width, slope * x, -float("inf"))
        chain = slope
    else:
        z = x
        chain = slope
    return z, chain


# --- the online fold --------------------------------------------------------------------------------------------------


@triton.jit
def _fold_block(peak, total, spread, z, ENTROPY: tl.constexpr):
    """Take one block into the lanes: total = sum exp(z - peak), spread = sum exp(z - peak) (z - peak).

    One exponential per element: exp(-|z - peak|) is the new element's term where the peak stays, and the factor on
    the old sums where it moves.
    """
    distance = z - peak
    rises = distance > 0
    e = tl.exp(-tl.abs(distance))
    if ENTROPY:
        # A distance of infinity belongs to an exponential of 0; the NaN of a NaN logit lives on in `total`.
        a = tl.minimum(tl.abs(distance), _HUGE)
        spread = tl.where(rises, e * (spread - a * total), spread - e * a)
    total = tl.where(rises, tl.fma(total, e, 1.0), total + e)
    peak = tl.maximum(peak, z)
    return peak, total, spread


@triton.jit
def fold_row(
    row,
    label,
    labelled,
    width,
    stride_v,
    slope,
    inner,
    outer,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Log-prob of the label, log-sum-exp and entropy of one row, each logit read once.

    ``labelled`` says that the label is a column of the row; where it isn't, the log-prob is NaN.
    """
    lanes = tl.arange(0, BLOCK)
    # The label's block comes first, so that no other block has to look for the label.
    label = tl.where(labelled, label, 0).to(tl.int32)
    home = label // BLOCK
    start = home * BLOCK
    raw = load_columns(row, start, width, stride_v, BLOCK, UNIT_STRIDE, EVICT)
    # One block is always under way while the one before it is folded.
    start_ahead = tl.where(home == 0, 1, 0) * BLOCK
    ahead = load_columns(row, start_ahead, width, stride_v, BLOCK, UNIT_STRIDE, EVICT)

    z, _ = transformed(raw, start + lanes, width, slope, inner, outer, STATS, SCALED, SOFTCAP)
    is_label = (start + lanes == label) & labelled
    z_label = tl.sum(tl.where(is_label, z, 0.0), axis=0)
    peak = tl.zeros([BLOCK], STATS) + _lowest(STATS)
    total = tl.zeros([BLOCK], STATS)
    spread = tl.zeros([BLOCK], STATS)
    others = tl.where(is_label, -float("inf"), z)
    peak, total, spread = _fold_block(peak, total, spread, others, ENTROPY)

    for block in range(1, tl.cdiv(width, BLOCK)):
        start, raw = start_ahead, ahead
        # Blocks 0, 1, 2... without the label's; the last load lies beyond the width and reads nothing.
        start_ahead = tl.where(block >= home, block + 1, block) * BLOCK
        ahead = load_columns(row, start_ahead, width, stride_v, BLOCK, UNIT_STRIDE, EVICT)
        z, _ = transformed(raw, start + lanes, width, slope, inner, outer, STATS, SCALED, SOFTCAP)
        peak, total, spread = _fold_block(peak, total, spread, z, ENTROPY)

    return _combine_lanes(peak, total, spread, z_label, labelled, STATS, ENTROPY)


@triton.jit
def _combine_lanes(
    peak, total, spread, z_label, labelled, STATS: tl.constexpr, ENTROPY: tl.constexpr
):
    """From the lanes of the other columns and the label's logit to (log-prob, log-sum-exp, entropy)."""
    top = tl.max(peak, axis=0)
    distance = peak - top
    e = tl.exp(distance)
    others = tl.sum(total * e, axis=0)
    lse_others = top + tl.log(others)

    excess = (top - z_label) + tl.log(others)
    logp = 0.0 - (tl.maximum(excess, 0.0) + log1p_unit(tl.exp(-tl.abs(excess))))
    # As in PyTorch, a label at +inf is inf - inf.
    logp = tl.where(labelled & (z_label != float("inf")), logp, float("nan"))

    z_label = tl.where(labelled, z_label, -float("inf"))
    gap = tl.where(lse_others == z_label, 0.0, -tl.abs(lse_others - z_label))
    lse = tl.maximum(lse_others, z_label) + log1p_unit(tl.exp(gap))

    entropy = lse
    if ENTROPY:
        # Move all lanes to the common peak, then the label's column with them.
        down = tl.maximum(distance, -_HUGE)
        others_spread = tl.sum(e * (spread + down * total), axis=0)
        height = tl.maximum(top, z_label)
        down_others = tl.maximum(top - height, -_HUGE)
        down_label = tl.maximum(z_label - height, -_HUGE)
        e_others = tl.exp(down_others)
        # An infinite or NaN label is a NaN row, except -inf, whose term is 0.
        e_label = tl.exp(z_label - height)
        whole = others * e_others + e_label
        whole_spread = e_others * (others_spread + down_others * others) + e_label * down_label
        entropy = tl.log(whole) - whole_spread / whole
    return logp, lse, entropy
