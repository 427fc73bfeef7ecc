"""Row operations shared by kernels: scalar functions, the logit transform, the online log-sum-exp.

A row is one token's logits, read block by block. Each thread keeps a running maximum and sum of exponentials
of its columns, which are combined once at the end of the row. The sums exclude the label's column. With U =
log-sum-exp of the *other* columns,

    log p(label) = -log(1 + exp(U - z_label))

is at most 0 and relatively accurate where p(label) is close to 1.

Scalar functions are implemented here because the interpreter has no libdevice, and because ``exp(x) - 1`` and
``log(1 + x)`` are inaccurate near 0.
"""

# ruff: noqa: SIM300 - constants are what a kernel is compiled for.
from __future__ import annotations

import triton
import triton.language as tl

from gspo_kernels.backends.triton.columns import (
    aligned_width,
    element,
    load_block,
    mask_gradient,
    mask_logits,
)

HUGE: tl.constexpr = tl.constexpr(1e30)
"""Stands in for infinity where a product with an exponential that is 0 must be 0; exp(-HUGE) is 0."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def lowest(STATS: tl.constexpr):
    """Return the lowest finite value. Unlike -inf, it can be subtracted from -inf without giving NaN."""
    if STATS == tl.float64:
        return tl.full([], -1.7976931348623157e308, STATS)
    return tl.full([], -3.4028234663852886e38, STATS)


@triton.jit
def exp_flushed(x, PLATFORM: tl.constexpr):
    """Return exp(x) for x <= 0 by one hardware exponential; on NVIDIA, subnormal results become 0: they would
    cost three more instructions, out of eight per logit.
    """
    if PLATFORM == "cuda" and x.dtype == tl.float32:
        return _exp2_flushed(x * LOG2_E)
    return tl.exp(x)


@triton.jit
def _exp2_flushed(x):
    """Return 2**x by one NVIDIA instruction; subnormal results become 0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tanh(x, STATS: tl.constexpr, PLATFORM: tl.constexpr):
    """Return tanh to a few units in the last place, also near 0, by one exponential and one division."""
    a = tl.abs(x)
    e = exp_flushed(-2.0 * a, PLATFORM)
    q = a * a
    # Below 1/2, take a convergent of Lambert's continued fraction x/(1 + x^2/(3 + x^2/(5 + ...))), which
    # doesn't cancel. It ends with 9 or, for fp64, with 17.
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
    """Return log(1 + x) for x in [0, 1] with full relative accuracy, as 2 artanh(x / (2 + x))."""
    t = x / (2.0 + x)
    q = t * t
    # q <= 1/9: the first omitted term is below 9**-17 / 35.
    tail = q * 0.0 + 1.0 / 33.0
    for k in tl.static_range(16):
        tail = tail * q + 1.0 / (31.0 - 2.0 * k)
    return 2.0 * t * tail


@triton.jit
def logprob_of_excess(excess):
    """Return -log(1 + exp(excess)), the log-prob of a label below all other columns by ``excess``, and
    log(1 + exp(-|excess|)).
    """
    softplus_down = log1p_unit(tl.exp(-tl.abs(excess)))
    return 0.0 - (tl.maximum(excess, 0.0) + softplus_down), softplus_down


@triton.jit
def one_minus_exp(logp, STATS: tl.constexpr, PLATFORM: tl.constexpr):
    """Return 1 - exp(logp) for logp <= 0 without cancellation, as 2t / (1 + t) with t = tanh(-logp / 2)."""
    t = tanh(-0.5 * logp, STATS, PLATFORM)
    return 2.0 * t / (1.0 + t)


@triton.jit
def narrowed(value, OUT: tl.constexpr, PLATFORM: tl.constexpr):
    """Round ``value`` to the dtype OUT, to nearest even as hardware does."""
    if OUT == tl.float64:
        return value.to(tl.float64)
    value = value.to(tl.float32)
    if PLATFORM != "cuda" and OUT == tl.bfloat16:
        # The interpreter truncates, and Triton's own conversion takes more instructions on CDNA 3. Any NaN is
        # replaced by one that is still NaN after its bits are rounded.
        value = tl.where(value == value, value, float("nan"))
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(OUT, bitcast=True)
    return value.to(OUT)


@triton.jit
def add_hi_lo(high, low, OUT: tl.constexpr):
    """Return high + low as one number of dtype OUT."""
    return high.to(OUT) + low.to(OUT)


@triton.jit
def split_hi_lo(value, STATS: tl.constexpr):
    """Split a number of any dtype into a sum of two numbers of dtype STATS."""
    high = value.to(STATS)
    rounded = high.to(value.dtype)
    return high, tl.where(value == rounded, 0.0, value - rounded).to(STATS)


@triton.jit
def _split_factor(value, STATS: tl.constexpr):
    """Split a factor into a sum of two numbers of its sign, neither 0: infinity times them is not NaN."""
    high = value.to(STATS)
    if STATS == tl.float32:
        # Round towards 0: take off half a unit in the last place, then round to nearest.
        high = (value * (1.0 - 2.0**-24)).to(STATS)
    low = value - high.to(tl.float64)
    return high, tl.where(low == 0, value * 2.0**-60, low).to(STATS)


@triton.jit
def _multiply(x, factor):
    """Multiply ``x`` by a factor from ``_split_factor``."""
    return tl.fma(x, factor[0], x * factor[1])


@triton.jit
def row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index):
    """Return (b, t, label, counted) of row n: its indices, its int64 label, and whether it isn't ignored."""
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_b, labels_t)).to(tl.int64)
    return b, t, label, label != ignore_index


@triton.jit
def row_slopes(slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, STATS: tl.constexpr):
    """Return (slope, inner, outer) of ``launch.slopes_of`` for row (b, t), each a sum of two numbers: a
    rounded factor would scale all logits by the same error, which changes log-prob and entropy by much more
    than rounding each product does.
    """
    # the interpreter passes floats of Python
    slope = tl.full([], slope, tl.float64)
    inner = tl.full([], inner, tl.float64)
    outer = tl.full([], outer, tl.float64)
    if temperature_ptr is not None:
        place = element(temperature_ptr, b, t, temperature_b, temperature_t)
        temperature = tl.load(place).to(tl.float64)
        slope = slope / temperature
        outer = outer / temperature
    return _split_factor(slope, STATS), _split_factor(inner, STATS), _split_factor(outer, STATS)


@triton.jit
def _unscaled_logits(raw, slopes, ROW: tl.constexpr):
    """Return logits before the multiplication by ``_scale``: softcapped, or as they are."""
    x = raw.to(ROW.STATS)
    if ROW.SOFTCAP:
        x = tanh(_multiply(x, slopes[1]), ROW.STATS, ROW.PLATFORM)
    elif ROW.SCALED == -1:
        x = -x
    return x


@triton.jit
def _scale(slopes, ROW: tl.constexpr):
    """Return the positive factor that makes z of ``_unscaled_logits``."""
    scale = slopes[0]
    if ROW.SOFTCAP:
        scale = slopes[2]
    elif ROW.SCALED == -1:
        scale = (-scale[0], -scale[1])
    return scale


@triton.jit
def transformed(raw, slopes, ROW: tl.constexpr):
    """Return z of some logits, and the factor of dz/dx that varies within the row."""
    x = _unscaled_logits(raw, slopes, ROW)
    z = x
    if ROW.SOFTCAP or ROW.SCALED != 0:
        z = _multiply(x, _scale(slopes, ROW))
    tanh_slope = 1.0
    if ROW.SOFTCAP:
        tanh_slope = (1.0 - x) * (1.0 + x)
    return z, tanh_slope


@triton.jit
def store_gradient(
    grad, out_row, start, lanes, end, mask, LOGITS: tl.constexpr, EVICT: tl.constexpr, ROW: tl.constexpr
):
    """Store a block of a gradient in the dtype of ``out_row``, 0 for columns that the mask excludes. LOGITS
    is the dtype of the logits.
    """
    OUT: tl.constexpr = out_row.dtype.element_ty
    NARROWER: tl.constexpr = OUT.primitive_bitwidth < LOGITS.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // (OUT.primitive_bitwidth if NARROWER else LOGITS.primitive_bitwidth)
    grad = mask_gradient(narrowed(grad, OUT, ROW.PLATFORM), start, end, mask, VECTOR, ROW.ALIGNED)
    if ROW.NARROWS_IN_PLACE:
        # Block k of the gradient overwrites logits of blocks up to k, which other threads may still read.
        tl.debug_barrier()
    tl.store(out_row + (start + lanes), grad, mask=start + lanes < end, eviction_policy=EVICT)


# --- the online log-sum-exp


@triton.jit
def _exp_scaled(x, power, ROW: tl.constexpr):
    """Return exp(x * scale) for x <= 0; ``power`` is the scale, times log2(e) where exp2 is used."""
    if ROW.SCALED == 0 and not ROW.SOFTCAP:
        return exp_flushed(x, ROW.PLATFORM)
    if ROW.PLATFORM == "cuda" and x.dtype == tl.float32:
        return _exp2_flushed(_multiply(x, power))
    return tl.exp(_multiply(x, power))


@triton.jit
def _add_block(state, x, power, ENTROPY: tl.constexpr, ROW: tl.constexpr):
    """Add unscaled logits [loads, threads, vector] to each thread's (peak, total, moment): the highest, the
    sum of exp(z - peak), and the sum of exp(z - peak) (z - peak) divided by the scale.
    """
    peak, total, moment = state
    top = tl.maximum(peak, tl.max(tl.max(x, axis=2), axis=0))
    shift = peak - top
    rescale = _exp_scaled(shift, power, ROW)
    distance = x - top[None, :, None]
    e = _exp_scaled(distance, power, ROW)
    if ENTROPY:
        # Where the distance is infinite the exponential is 0. A NaN logit makes `total` NaN.
        weighted = e * tl.maximum(distance, -HUGE)
        moment = rescale * (moment + tl.maximum(shift, -HUGE) * total)
        moment += tl.sum(tl.sum(weighted, axis=2), axis=0)
    total = tl.fma(total, rescale, tl.sum(tl.sum(e, axis=2), axis=0))
    return top, total, moment


@triton.jit
def online_logsumexp(
    row, label, labeled, width, mask, slopes, ENTROPY: tl.constexpr, EVICT: tl.constexpr, ROW: tl.constexpr
):
    """Return a row's log-prob of the label, log-sum-exp and entropy; each logit is read once. The log-sum-exp
    is one of the logits plus a small rest: both together are more accurate than their rounded sum.

    Args:
        row: the address of the row's first logit.
        label, labeled: the label, and whether it is a column of the row; otherwise the log-prob is NaN.
        width: the number of columns.
        mask: the row's sampling mask or None. Columns that it excludes count like those beyond the width.
        slopes: from ``row_slopes``.
    """
    VECTOR: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    THREADS: tl.constexpr = ROW.WARPS * (64 if ROW.PLATFORM == "hip" else 32)
    LOADS: tl.constexpr = ROW.BLOCK // (THREADS * VECTOR)
    BLOCK: tl.constexpr = ROW.BLOCK
    vectors = tl.arange(0, LOADS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    lanes = vectors[:, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    width = aligned_width(width, ROW.ALIGNED)
    label = tl.where(labeled, label, -1).to(tl.int32)
    home = tl.maximum(label, 0) // BLOCK
    label_block = load_block(row, home * BLOCK, lanes, width, True, EVICT, ROW.ALIGNED)

    scale = _scale(slopes, ROW)
    scale_64 = scale[0].to(tl.float64) + scale[1].to(tl.float64)
    if ROW.PLATFORM == "cuda" and ROW.STATS == tl.float32:
        scale_64 *= LOG2_E  # for exp2
    power = _split_factor(scale_64, ROW.STATS)

    peak = tl.zeros([THREADS], ROW.STATS) + lowest(ROW.STATS)
    state = (peak, tl.zeros_like(peak), tl.zeros_like(peak))

    # The label's block comes first, so that no other block has to look for the label.
    columns = home * BLOCK + lanes
    x = mask_logits(_unscaled_logits(label_block, slopes, ROW), home * BLOCK, width, mask)
    is_label = columns == label
    x_label = tl.sum(tl.sum(tl.sum(tl.where(is_label, x, 0.0), axis=2), axis=0), axis=0)
    x = tl.where(is_label | (columns >= width), -float("inf"), x)
    state = _add_block(state, x, power, ENTROPY, ROW)

    full = width // BLOCK
    for other in range(tl.where(home < full, full - 1, full)):
        start = tl.where(other < home, other, other + 1) * BLOCK
        raw = load_block(row, start, lanes, width, False, EVICT, ROW.ALIGNED)
        x = mask_logits(_unscaled_logits(raw, slopes, ROW), start, width, mask)
        state = _add_block(state, x, power, ENTROPY, ROW)
    if (home < full) & (full * BLOCK < width):
        columns = full * BLOCK + lanes
        last_block = load_block(row, full * BLOCK, lanes, width, True, EVICT, ROW.ALIGNED)
        x = mask_logits(_unscaled_logits(last_block, slopes, ROW), full * BLOCK, width, mask)
        x = tl.where(columns < width, x, -float("inf"))
        state = _add_block(state, x, power, ENTROPY, ROW)

    peak, total, moment = state
    z_label = x_label
    if ROW.SOFTCAP or ROW.SCALED != 0:
        peak = tl.maximum(_multiply(peak, scale), lowest(ROW.STATS))
        moment = _multiply(moment, scale)
        z_label = _multiply(x_label, scale)
    return combine_threads(peak, total, moment, z_label, labeled, ENTROPY, ROW.STATS)


@triton.jit
def combine_threads(peak, total, moment, z_label, labeled, ENTROPY: tl.constexpr, STATS: tl.constexpr):
    """Combine the threads' sums over the other columns with the label's logit into the row's statistics."""
    top = tl.max(peak, axis=0)
    distance = peak - top
    e = tl.exp(distance)
    others = tl.sum(total * e, axis=0)
    log_others = tl.log(others)
    z_label = tl.where(labeled, z_label, -float("inf"))

    excess = (top - z_label) + log_others
    logp, softplus_down = logprob_of_excess(excess)
    # As in PyTorch, the log-prob of a label at +inf is inf - inf, which is NaN.
    logp = tl.where(labeled & (z_label != float("inf")), logp, float("nan"))

    lse_hi = tl.where(excess >= 0, top, z_label)
    lse_lo = tl.where(excess >= 0, log_others + softplus_down, softplus_down)
    # As in PyTorch, a row with +inf has NaN for log-probs and +inf for its log-sum-exp.
    infinite = tl.maximum(top, z_label) == float("inf")
    lse_hi = tl.where(infinite, float("inf"), lse_hi)
    lse_lo = tl.where((others == 0) | infinite, 0.0, lse_lo)

    entropy = logp
    if ENTROPY:
        # Relate all lanes to their common peak, then lanes and label to the higher of peak and label.
        down = tl.maximum(distance, -HUGE)
        others_moment = tl.sum(e * (moment + down * total), axis=0)
        highest = tl.maximum(top, z_label)
        down_others = tl.maximum(top - highest, -HUGE)
        down_label = tl.maximum(z_label - highest, -HUGE)
        e_others = tl.exp(down_others)
        # A label at +inf or NaN makes the entropy NaN; the term of a label at -inf is 0.
        e_label = tl.exp(z_label - highest)
        total_all = others * e_others + e_label
        moment_all = e_others * (others_moment + down_others * others) + e_label * down_label
        entropy = tl.log(total_all) - moment_all / total_all
    return logp, lse_hi, lse_lo, entropy
