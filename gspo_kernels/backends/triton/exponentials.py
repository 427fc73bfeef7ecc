"""A product of hidden states and weight whose epilogue takes the exponentials: no pass over logits follows.

The label's own logit is a good offset for the softmax. With k near ``z_label log2(e)`` the epilogue computes
``e = 2^(z log2(e) - k)``, stores it in 16 bits and sums it in fp32, tile by tile. bf16 has the exponents of
fp32, so any offset within some 60 nats of the log-sum-exp keeps full relative precision, and no maximum has
to be known beforehand. With U, the sum of e over the columns other than the label's, and S = U + e_label,

    d logprob/dz = (1[label] - p)  =  (-1/S) * e,  if -U takes the place of e at the label:

stored exponentials are rows of the gradient products up to one factor per row. Labels stay out of the sums,
so that log-probs never exceed 0 and keep their relative accuracy near 0; see ``rows``.

Rows whose sums leave [2^-100, 2^90] (the label lies below some -68 nats, or is all but certain; NaN and
infinities) are flagged on the device. Three more launches, which end at once if nothing is flagged, find
their maxima and compute their tiles again with these as offsets, so that the host never looks.

Where the statistics are known, the log-sum-exp itself is the offset, no row can be flagged, and any columns
can be computed by themselves; see ``KnownRows``.

A row's bits depend on its hidden state, weight and label alone: tiles and orders of sums are fixed by V, and
variants of the kernel (with or without storing e, with or without the entropy) do the same arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels.backends.triton.launch import (
    RowConstants,
    Tile,
    launch,
    platform,
    slopes_of,
    triton_version,
    typed_kernel,
    without_spills,
)
from gspo_kernels.backends.triton.row_scaling import times
from gspo_kernels.backends.triton.rows import (
    HUGE,
    _multiply,
    _split_factor,
    log1p_unit,
    narrowed,
    one_minus_exp,
    row_label,
    row_slopes,
    tanh,
    transformed,
)
from gspo_kernels.backends.triton.tiles import GROUP, ProductTile, add_product, tile_at
from gspo_kernels.core.types import LogitTransform, RowStats

MARGIN: tl.constexpr = tl.constexpr(8)
"""How far the offset lies above the label, in powers of two. So factors of rows are at most 2^8.5, and
coefficients of any size multiply them without overflow."""
_SEARCH_LOG2: tl.constexpr = tl.constexpr(256)
"""Where the search for a flagged row's maximum begins, in powers of two below the label: what lies even lower
has a probability of 0."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LINE = Tile(1024, 4)
"""For the kernels before and after the product."""
_ROWS_PER_PROGRAM, _TILES_PER_STEP = 16, 32
"""Rows per program of the statistics, and how many tiles' sums they add at a time."""
ALIGNED = 8
"""Rows of 16-bit operands of the product lie a multiple of this many elements apart."""


_LARGE = ProductTile(128, 256, 64, 64, 8, 3)
# For softcaps, whose arithmetic takes more registers, and for Triton before 3.8 on Blackwell, which computes
# each exponential of the large tile twice, and spills.
_SMALL = ProductTile(128, 128, 64, 32, 8, 3)
_INTERPRETED = ProductTile(16, 64, 64, 32, 1, 1)


@triton.jit
def _key(number):
    """Return an integer that orders like an fp32 number; of such an integer return the number's bits."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _exponent(number):
    """Return the exponent of the power of two in an fp32 number, as fp32."""
    return (((number.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127).to(tl.float32)


@triton.jit
def _exp2(x, PLATFORM: tl.constexpr):
    """Return 2**x; on NVIDIA subnormal results become 0. Not called pure: the compiler for Blackwell would
    take a pure exponential twice, once for the sum and once for what is stored.
    """
    if PLATFORM == "cuda":
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _store_powers(powers_ptr, n, count, slopes, mask, ROW: tl.constexpr):
    """Store what multiplies the logits of rows in the exponent, as a sum of two numbers."""
    steepness = slopes[2] if ROW.SOFTCAP else slopes[0]
    exact = (steepness[0].to(tl.float64) + steepness[1].to(tl.float64)) * _LOG2_E
    power, lower = _split_factor(exact, tl.float32)
    tl.store(powers_ptr + n, power, mask=mask)
    tl.store(powers_ptr + count + n, lower, mask=mask)


@triton.jit
def _softcap_grad(z, slopes):
    """Return the slope of the softcap at logits z, in fp64."""
    outer = slopes[2][0].to(tl.float64) + slopes[2][1].to(tl.float64)
    tanh = z / outer
    return (1.0 - tanh) * (1.0 + tanh)


@typed_kernel
def label_offsets_kernel(
    hidden_ptr, weight_ptr, bias_ptr, labels_ptr, row_temperature_ptr,
    places_ptr, offsets_ptr, powers_ptr, count_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64,
    H: tl.int32, hidden_stride: tl.int64, weight_stride: tl.int64,
    BLOCK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Choose the offset of one row: its label's logit, from a dot product of its own. Write the label's place
    (-1: it is no column; -2: the row is ignored), the key of the offset, and what multiplies logits in the
    exponent. ROW is a ``RowConstants``.
    """
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, N, 0, labels_stride, ignore_index)
    labelled = counted & (label >= 0) & (label < V)
    place = tl.where(labelled, label, tl.where(counted, -1, -2))
    tl.store(places_ptr + n, place.to(tl.int32))
    hidden = hidden_ptr + n.to(tl.int64) * hidden_stride
    column = weight_ptr + tl.maximum(place, 0) * weight_stride
    dots = tl.zeros([BLOCK], tl.float32)
    width = tl.where(labelled, H, 0)
    for start in range(0, width, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + lanes, mask=lanes < width, other=0.0).to(tl.float32)
        dots += h * tl.load(column + lanes, mask=lanes < width, other=0.0).to(tl.float32)
    x = tl.sum(dots, axis=0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + tl.maximum(place, 0)).to(tl.float32)
    slopes = row_slopes(slope, inner, outer, row_temperature_ptr, b, t, 0, temperature_stride, tl.float32)
    z, _ = transformed(x, slopes, ROW)
    offset = tl.floor(z * _LOG2_E + 0.5) + MARGIN
    # Comparisons with NaN are false. Other rows and labels at infinity begin at 0.
    tl.store(offsets_ptr + n, _key(tl.where(tl.abs(offset) < HUGE, offset, 0.0)))
    if powers_ptr is not None:
        _store_powers(powers_ptr, n, N, slopes, None, ROW)
    if n == 0:
        tl.store(count_ptr, 0)


class HeadConstants(NamedTuple):
    """The constants for which the product is compiled.

    Attributes:
        PASS: "first"; "max": find the maxima of flagged rows; "recompute": compute flagged rows again.
        SCALED: 0 if logits are not multiplied, otherwise the sign of their factor.
        SOFTCAP: whether the logits have a softcap.
        SOFTCAP_GRAD: whether the slope of the softcap multiplies what is stored.
        ROWS, COLUMNS, DEPTH: rows and columns of a tile, and the depth of a step along H.
        PIECE: columns whose exponentials are taken and stored at a time.
        GROUP: tiles of rows that are computed side by side.
        PLATFORM: see ``launch.platform``.
    """

    PASS: str
    SCALED: int
    SOFTCAP: bool
    SOFTCAP_GRAD: bool
    ROWS: int
    COLUMNS: int
    DEPTH: int
    PIECE: int
    GROUP: int
    PLATFORM: str


@triton.jit
def _exponents(x, offset, power, inner, HEAD: tl.constexpr):
    """Return the exponents, to the base 2, of logits as the product gives them."""
    if HEAD.SOFTCAP:
        x = tanh(_multiply(x, inner), tl.float32, HEAD.PLATFORM)
    if HEAD.SOFTCAP or HEAD.SCALED != 0:
        d = tl.fma(x, power[0][:, None], -offset[:, None])
        d = tl.fma(x, power[1][:, None], d)
    else:
        d = tl.fma(x, _LOG2_E, -offset[:, None])
    return d


@triton.jit
def _store_labels(d, left, rows, inside, place, V, label_ptr):
    """Store the exponents at labels. Return exponents of -inf there, beyond the last column and in ignored
    rows, whose hidden states may be anything.
    """
    here = (place >= left) & (place < left + d.shape[1])
    columns = left + tl.arange(0, d.shape[1])
    is_label = columns[None, :] == place[:, None]
    tl.store(label_ptr + rows, tl.sum(tl.where(is_label, d, 0.0), axis=1), mask=here & inside)
    return tl.where(is_label | (columns[None, :] >= V) | (place == -2)[:, None], -float("inf"), d)


@triton.jit
def _take_exponentials(
    x, left, tile, out, PIECES_BEFORE: tl.constexpr, ENTROPY: tl.constexpr, HEAD: tl.constexpr
):
    """Turn a tile of logits into exponentials, a few columns at a time, and store them. Return each row's
    sum, or its maximum, and its sum of exponentials times exponents. ``exponentials_kernel`` has the tile.
    """
    COLUMNS: tl.constexpr = x.shape[1]
    PLATFORM: tl.constexpr = HEAD.PLATFORM
    top, rows, inside, place, offset, power, inner, label_ptr, first, V, marks = tile
    if COLUMNS > HEAD.PIECE:
        HALF: tl.constexpr = COLUMNS // 2
        BEFORE: tl.constexpr = PIECES_BEFORE + HALF // HEAD.PIECE
        x0, x1 = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))
        total0, spread = _take_exponentials(x0, left, tile, out, PIECES_BEFORE, ENTROPY, HEAD)
        total1, spread1 = _take_exponentials(x1, left + HALF, tile, out, BEFORE, ENTROPY, HEAD)
        if HEAD.PASS == "max":
            total = tl.maximum(total0, total1)
        else:
            total = total0 + total1
            if ENTROPY:
                base = _exponent(total)
                spread += (_exponent(total0) - base) * total0
                spread += spread1 + (_exponent(total1) - base) * total1
    else:
        d = _exponents(x, offset, power, inner, HEAD)
        if (((marks >> PIECES_BEFORE) & 1) != 0) | (left + COLUMNS > V):
            d = _store_labels(d, left, rows, inside, place, V, label_ptr)
        spread = offset
        if HEAD.PASS == "max":
            total = tl.max(d, axis=1)
        else:
            e = _exp2(d, PLATFORM)
            total = tl.sum(e, axis=1)
            if ENTROPY:
                # Counted from the power of two in the sum, as otherwise the mean exponent would cancel. Where
                # the exponent is infinite the exponential is 0.
                spread = tl.sum(e * tl.maximum(d - _exponent(total)[:, None], -HUGE), axis=1)
            if out is not None:
                if HEAD.SOFTCAP_GRAD:
                    # From the exponent: the compiler for Blackwell fails where more of ``x`` is needed here.
                    capped = tl.maximum((d + offset[:, None]) * (1.0 / power[0])[:, None], -1.0)
                    e *= (1.0 - capped) * (1.0 + capped)
                out.store([top, left - first], narrowed(e, out.dtype, PLATFORM))
    return total, spread


@triton.jit
def _multiplied(hidden, weight, bias_ptr, top, left, V, H, HEAD: tl.constexpr):
    """Return a tile of hidden @ weight.T + bias."""
    acc = tl.zeros([HEAD.ROWS, HEAD.COLUMNS], tl.float32)
    if bias_ptr is not None:
        columns = left + tl.arange(0, HEAD.COLUMNS)
        acc += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    for k in range(0, H, HEAD.DEPTH):
        acc = add_product(acc, hidden.load([top, k]), weight.load([left, k]).T, HEAD.PLATFORM)
    return acc


@triton.jit
def _any_flagged(flags_ptr, rows, N):
    return tl.max(tl.load(flags_ptr + rows, mask=rows < N, other=0), axis=0) != 0


@typed_kernel
def exponentials_kernel(
    hidden, weight, out, bias_ptr, places_ptr, offsets_ptr, powers_ptr, flags_ptr, count_ptr,
    sums_ptr, spreads_ptr, label_ptr,
    N: tl.int32, first: tl.int32, V: tl.int32, H: tl.int32, inner: tl.float64,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Compute a program's share of the tiles from the column ``first`` on. ``hidden``, ``weight`` and ``out``
    are tensor descriptors, HEAD is a ``HeadConstants``.
    """
    ENTROPY: tl.constexpr = spreads_ptr is not None
    height = tl.cdiv(N, HEAD.ROWS)
    width = tl.cdiv(V - first, HEAD.COLUMNS)
    tiles = height * width
    if HEAD.PASS != "first":
        tiles = tl.where(tl.load(count_ptr) > 0, tiles, 0)
    inner = _split_factor(tl.full([], inner, tl.float64), tl.float32)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_at(number, height, width, HEAD.GROUP)
        top = row * HEAD.ROWS
        left = first + column * HEAD.COLUMNS
        rows = top + tl.arange(0, HEAD.ROWS)
        inside = rows < N
        if HEAD.PASS == "first" or _any_flagged(flags_ptr, rows, N):
            place = tl.load(places_ptr + rows, mask=inside, other=-1)
            offset = tl.zeros([HEAD.ROWS], tl.float32)
            if HEAD.PASS != "max":
                key = tl.load(offsets_ptr + rows, mask=inside, other=0)
                offset = _key(key).to(tl.float32, bitcast=True)
            power = (offset, offset)
            if powers_ptr is not None:
                power = (
                    tl.load(powers_ptr + rows, mask=inside, other=0.0),
                    tl.load(powers_ptr + N + rows, mask=inside, other=0.0),
                )
            # The pieces with a label, or all for an ignored row (-2), whose hidden states may be anything.
            within = place - left
            mark = tl.where((within >= 0) & (within < HEAD.COLUMNS), 1 << (within // HEAD.PIECE & 31), 0)
            marks = tl.reduce(tl.where(place == -2, -1, mark), 0, _or)
            x = _multiplied(hidden, weight, bias_ptr, top, left, V, H, HEAD)
            tile = (top, rows, inside, place, offset, power, inner, label_ptr, first, V, marks)
            total, spread = _take_exponentials(x, left, tile, out, 0, ENTROPY, HEAD)
            if HEAD.PASS == "max":
                flagged = tl.load(flags_ptr + rows, mask=inside, other=0) != 0
                tl.atomic_max(offsets_ptr + rows, _key(tl.ceil(total)), mask=flagged, sem="relaxed")
            else:
                at = column.to(tl.int64) * N + rows
                tl.store(sums_ptr + at, total, mask=inside)
                if ENTROPY:
                    tl.store(spreads_ptr + at, spread, mask=inside)


@typed_kernel
def row_statistics_kernel(
    places_ptr, offsets_ptr, flags_ptr, count_ptr, sums_ptr, spreads_ptr, label_ptr, row_temperature_ptr,
    logprobs_ptr, lse_ptr, entropy_ptr, out_ptr, factors_ptr, label_residuals_ptr,
    N: tl.int32, V: tl.int32, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    temperature_stride: tl.int64, out_stride: tl.int64,
    COLUMNS: tl.constexpr, RECOMPUTED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of ROWS rows from sums of tiles, and finish their exponentials: write the factor
    of each row, the label's element, and what its rounding leaves. Flag rows that must be computed again.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    stop = N
    if RECOMPUTED:
        stop = tl.where(tl.load(count_ptr) > 0, N, 0)
    width = tl.where(stop > 0, tl.cdiv(V, COLUMNS), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < stop
    total = tl.zeros([ROWS], tl.float64)
    spread = tl.zeros([ROWS], tl.float64)
    for start in range(0, width, TILES):
        tile = start + tl.arange(0, TILES)
        at = tile.to(tl.int64)[:, None] * N + row[None, :]
        mask = (tile < width)[:, None] & inside[None, :]
        part = tl.load(sums_ptr + at, mask=mask, other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
        if entropy_ptr is not None:
            of_part = tl.load(spreads_ptr + at, mask=mask, other=0.0).to(tl.float64)
            spread += tl.sum(of_part + _exponent(part).to(tl.float64) * part, axis=0)
    place = tl.load(places_ptr + row, mask=inside, other=-2)
    labelled = place >= 0
    counted = place != -2
    offset = _key(tl.load(offsets_ptr + row, mask=inside, other=0)).to(tl.float32, bitcast=True)
    exponent = tl.load(label_ptr + row, mask=labelled, other=-float("inf"))
    # In nats above the offset: the other columns, the label, and the whole row.
    others = tl.log(total)
    own = exponent.to(tl.float64) * _LN_2
    excess = others - own
    softplus_down = log1p_unit(tl.exp(-tl.abs(excess)))
    whole = tl.maximum(others, own) + softplus_down
    logp = 0.0 - (tl.maximum(excess, 0.0) + softplus_down)
    # As in PyTorch, the log-prob of a label at +inf is inf - inf, which is NaN.
    is_number = (own == own) & (own != float("inf"))
    logp = tl.where(labelled & is_number, logp, float("nan"))
    if not RECOMPUTED:
        # The label's exponential is beside 2^-MARGIN. Comparisons with NaN are false.
        good = (total >= 2.0**-100) & (total <= 2.0**90) & (tl.abs(exponent + MARGIN) < 64)
        flagged = counted & ~good
        tl.store(flags_ptr + row, flagged.to(tl.int32), mask=inside)
        start_of_search = tl.where(tl.abs(exponent) < HUGE, offset - _SEARCH_LOG2, -HUGE)
        # Several threads have the same row: all must have read its offset.
        tl.debug_barrier()
        tl.store(offsets_ptr + row, _key(start_of_search), mask=flagged)
        many = tl.sum(flagged.to(tl.int32), axis=0)
        if many > 0:
            tl.atomic_add(count_ptr, many, sem="relaxed")
    lse = tl.where(offset == float("inf"), float("inf"), offset.to(tl.float64) * _LN_2 + whole)
    tl.store(logprobs_ptr + row, tl.where(counted, logp, 0.0).to(tl.float32), mask=inside)
    tl.store(lse_ptr + row, tl.where(counted, lse, 0.0), mask=inside)
    if entropy_ptr is not None:
        p = tl.where(labelled, tl.exp(logp), 0.0)
        rest = tl.exp(others - whole)
        # Sums of p log p: the label's, and the others' from their mean exponent.
        entropy = -(tl.where(p == 0, 0.0, p * logp))
        mean = spread / total * _LN_2
        entropy -= tl.where(rest == 0, 0.0, rest * (mean - whole))
        tl.store(entropy_ptr + row, tl.where(counted, entropy, 0.0).to(tl.float32), mask=inside)
    if out_ptr is not None:
        b = tl.zeros([ROWS], tl.int32)
        t = tl.where(inside, row, 0)
        slopes = row_slopes(slope, inner, outer, row_temperature_ptr, b, t, 0, temperature_stride, tl.float32)
        row_slope = slopes[0][0].to(tl.float64) + slopes[0][1].to(tl.float64)
        factor = tl.where(is_number, -row_slope * tl.exp(-whole), float("nan"))
        tl.store(factors_ptr + row, tl.where(labelled, factor, 0.0).to(tl.float32), mask=inside)
        # where all logits are -inf, the NaN of the factor would meet zeros alone
        value = tl.where(logp == logp, -total, float("nan"))
        if ROW.SOFTCAP:
            value *= _softcap_grad(own + offset.to(tl.float64) * _LN_2, slopes)
        value = value.to(tl.float32)
        rounded = narrowed(value, out_ptr.dtype.element_ty, PLATFORM)
        at = row.to(tl.int64) * out_stride + place
        tl.store(out_ptr + at, rounded, mask=labelled)
        residual = tl.where(labelled, value - rounded.to(tl.float32), 0.0)
        tl.store(label_residuals_ptr + row, residual, mask=inside)


@typed_kernel
def known_rows_kernel(
    labels_ptr, row_temperature_ptr, active_ptr, coefficients_ptr, logprobs_ptr, lse_ptr,
    places_ptr, offsets_ptr, powers_ptr, factors_ptr, elements_ptr, label_residuals_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64,
    ROWS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write what the exponentials of ROWS rows with known statistics need. With coefficients these are in the
    offsets, and signs in the factors; without them the offset is a whole power of two. ROW is a
    ``RowConstants``.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    # beyond the last row the last one is read again
    b, t, label, counted = row_label(tl.minimum(row, N - 1), labels_ptr, N, 0, labels_stride, ignore_index)
    slopes = row_slopes(slope, inner, outer, row_temperature_ptr, b, t, 0, temperature_stride, tl.float32)
    logp = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0).to(tl.float64)
    # Comparisons with NaN are false.
    finite = tl.abs(lse) < HUGE
    labelled = counted & (label >= 0) & (label < V)
    # NaN and infinities in a row without gradient must not meet the zeros of its other operand.
    inert = (tl.load(active_ptr + row, mask=inside, other=0) == 0) & (finite == 0)
    place = tl.where(labelled, label, -1)
    place = tl.where(counted & (inert == 0), place, -2)
    tl.store(places_ptr + row, place.to(tl.int32), mask=inside)
    if powers_ptr is not None:
        _store_powers(powers_ptr, row, N, slopes, inside, ROW)
    scale = slopes[0][0].to(tl.float64) + slopes[0][1].to(tl.float64)
    if coefficients_ptr is not None:
        scale *= tl.load(coefficients_ptr + row, mask=inside, other=0.0)
        size = tl.abs(scale)
        # A coefficient of 0 gives an offset at infinity.
        offset = ((lse - tl.log(size)) * _LOG2_E).to(tl.float32)
        factor = tl.where(scale > 0, -1.0, 1.0)
    else:
        offset = tl.floor(lse * _LOG2_E + 0.5).to(tl.float32)
        whole = tl.where(finite, lse - offset.to(tl.float64) * _LN_2, 0.0)
        size = tl.exp(whole)
        factor = -scale / size
    tl.store(offsets_ptr + row, _key(offset), mask=inside)
    factor = tl.where(logp == logp, factor, float("nan"))
    tl.store(factors_ptr + row, tl.where(place >= 0, factor, 0.0).to(tl.float32), mask=inside)
    value = -one_minus_exp(logp, tl.float32, PLATFORM).to(tl.float64) * size
    if ROW.SOFTCAP:
        value *= _softcap_grad(lse + logp, slopes)
    value = tl.where(place >= 0, value, 0.0).to(tl.float32)
    rounded = narrowed(value, tl.bfloat16, PLATFORM)
    tl.store(elements_ptr + row, rounded, mask=inside)
    tl.store(label_residuals_ptr + row, value - rounded.to(tl.float32), mask=inside)


@typed_kernel
def label_elements_kernel(
    places_ptr, elements_ptr, out_ptr, N: tl.int32, first: tl.int32, last: tl.int32, out_stride: tl.int64,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the elements of ROWS rows at their labels, where these are among the columns of ``out``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    place = tl.load(places_ptr + row, mask=inside, other=-1)
    here = (place >= 0) & (place >= first) & (place < last)
    element = tl.load(elements_ptr + row, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + (place - first), element, mask=here)


def capability(device: torch.device) -> int:
    """Return the major number of an NVIDIA GPU's compute capability: 9 for Hopper, 10 for B200."""
    return torch.cuda.get_device_capability(device)[0]


def _tile(transform: LogitTransform, device: torch.device) -> ProductTile:
    """Return the tile: it must not depend on what is stored or summed, so that bits don't, either."""
    if platform() == "interpreter":
        return _INTERPRETED
    twice = triton_version() < (3, 8) and capability(device) == 10
    return _SMALL if transform.softcap or twice else _LARGE


class HeadRows(NamedTuple):
    """What the product gives besides the exponentials e [n, V], of n rows.

    Attributes:
        stats: [1, n] each.
        factors: [n] fp32: d logprob/dlogits of row n is ``factors[n] * e[n]``; None where e is not stored.
        label_residual: [n] fp32, to be added to each row's element at the label, whose rounding weighs most.
    """

    stats: RowStats
    factors: Tensor | None
    label_residual: Tensor | None


def _numbers(n: int, V: int, labels: Tensor, transform: LogitTransform, ignore_index: int) -> list[Any]:
    """Return what kernels take of n rows: N, V, ignore_index, slopes, strides of labels and temperatures."""
    heat = transform.row_temperature
    strides = labels.stride(1), 0 if heat is None else heat.stride(1)
    return [n, V, ignore_index, *slopes_of(transform), *strides]


class _Product:
    """The product of hidden states [n, H] with a weight [V, H], whose epilogue takes exponentials.

    Attributes:
        row, numbers: constants of the rows for kernels, and what ``_numbers`` returns.
        places, offsets, flags, count, powers, label: what kernels know of each row.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        ignore_index: int,
    ):
        n, self.device = len(hidden), hidden.device
        self.hidden, self.weight, self.bias, self.tile = hidden, weight, bias, _tile(transform, self.device)
        self.row = RowConstants.of(hidden.unsqueeze(0), transform, _LINE)
        self.inner = slopes_of(transform)[1]
        self.numbers = _numbers(n, weight.shape[0], labels, transform, ignore_index)
        integers = torch.empty(3 * n + 1, dtype=torch.int32, device=self.device)
        self.places, self.offsets, self.flags, self.count = integers.split([n, n, n, 1])
        scaled = self.row.SCALED or self.row.SOFTCAP
        self.powers = torch.empty(2, n, dtype=torch.float32, device=self.device) if scaled else None
        self.label = torch.empty(n, dtype=torch.float32, device=self.device)

    def take(self, out: Tensor | None, first: int, last: int) -> None:
        """Choose the columns that are multiplied, and where their exponentials go."""
        hidden, weight, tile = self.hidden, self.weight, self.tile
        self.programs = tile.programs(len(hidden), last - first, self.device)
        self.first, self.last = first, last
        width = triton.cdiv(last - first, tile.columns)
        self.sums = torch.empty(width, len(hidden), dtype=torch.float32, device=self.device)
        self.operands = (
            TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
            None if out is None else TensorDescriptor.from_tensor(out, [tile.rows, tile.piece]),
        )

    def multiply(self, name: str, spreads: Tensor | None, with_softcap_grad: bool) -> None:
        """Launch a pass; see ``HeadConstants`` and ``exponentials``."""
        row, tile, out = self.row, self.tile, None if name == "max" else self.operands[2]
        softcap_grad = row.SOFTCAP and with_softcap_grad
        launch(
            exponentials_kernel, self.programs, self.device, tile.launched(),
            *self.operands[:2], out, self.bias, self.places, self.offsets, self.powers, self.flags,
            self.count, self.sums, None if name == "max" else spreads, self.label,
            len(self.hidden), self.first, self.last, self.hidden.shape[1], self.inner,
            HEAD=HeadConstants(
                name, row.SCALED, row.SOFTCAP, softcap_grad, *tile[:4], GROUP, platform()
            ),
        )  # fmt: skip


def exponentials(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    ignore_index: int,
    out: Tensor | None,
    *,
    entropy: bool = False,
    with_softcap_grad: bool = True,
) -> HeadRows:
    """Project hidden states [n, H] with a weight [V, H] in bf16, and return the statistics of their rows.

    Args:
        hidden, weight: contiguous along H, rows a multiple of 16 bytes apart.
        bias: [V] or None, contiguous.
        labels: [1, n].
        transform: without a sampling mask.
        ignore_index: the label of ignored rows, whose hidden states may be anything.
        out: [n, V] for the exponentials, rows a multiple of 16 bytes apart, or None: only statistics.
        entropy: whether to compute the entropy.
        with_softcap_grad: whether the slope of a softcap multiplies the exponentials.
    """
    n, device = len(hidden), hidden.device
    product = _Product(hidden, weight, bias, labels, transform, ignore_index)
    product.take(out, 0, weight.shape[0])
    spreads = torch.empty_like(product.sums) if entropy else None
    stats = RowStats(
        torch.empty(1, n, dtype=torch.float32, device=device),
        torch.empty(1, n, dtype=torch.float64, device=device),
        torch.empty(1, n, dtype=torch.float32, device=device) if entropy else None,
    )
    factors = label_residuals = None
    if out is not None:
        factors, label_residuals = torch.empty(2, n, dtype=torch.float32, device=device)
    launch(
        label_offsets_kernel, n, device, _LINE,
        hidden, weight, bias, labels, transform.row_temperature, product.places, product.offsets,
        product.powers, product.count, *product.numbers, hidden.shape[1], hidden.stride(0), weight.stride(0),
        BLOCK=_LINE.block, ROW=product.row,
    )  # fmt: skip
    for passes in (("first",), ("max", "recompute")):
        for name in passes:
            product.multiply(name, spreads, with_softcap_grad)
        launch(
            row_statistics_kernel, triton.cdiv(n, _ROWS_PER_PROGRAM), device,
            without_spills(_LINE, product.row.SOFTCAP),
            product.places, product.offsets, product.flags, product.count, product.sums, spreads,
            product.label, transform.row_temperature, *stats, out, factors, label_residuals,
            n, weight.shape[0], *slopes_of(transform), product.numbers[-1],
            0 if out is None else out.stride(0),
            COLUMNS=product.tile.columns, RECOMPUTED=name == "recompute",
            ROWS=_ROWS_PER_PROGRAM, TILES=_TILES_PER_STEP, ROW=product.row,
        )  # fmt: skip
    return HeadRows(stats, factors, label_residuals)


class KnownRows:
    """Rows whose statistics are known, from an earlier pass: some columns of their exponentials at a time.

    The kernel is that of ``exponentials``. Its offset is the log-sum-exp, less the logarithm of the row's
    coefficient: so what multiplies hidden states for dWeight is a power of two, and is not rounded.

    Attributes:
        head: statistics, factors and residuals of the rows.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        ignore_index: int,
        stats: RowStats,
        coefficients: Tensor | None,
        active: Tensor,
    ):
        """Find offsets and elements at the labels.

        Args:
            hidden, weight, bias, labels, transform, ignore_index: as in ``exponentials``.
            stats: [1, n] each, contiguous.
            coefficients: [n] fp32, what log-probs are multiplied by, between 2^-30 and 2^30 or 0; None: the
                rows are for ``entropy_rows_``.
            active: [n], bool: rows with a gradient.
        """
        self._product = _Product(hidden, weight, bias, labels, transform, ignore_index)
        self._with_softcap_grad = coefficients is not None
        known = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        factors, label_residuals, self._elements = known
        self.head = HeadRows(stats, factors, label_residuals)
        launch(
            known_rows_kernel, triton.cdiv(len(hidden), _ROWS_PER_PROGRAM), hidden.device, _LINE,
            labels, transform.row_temperature, active, coefficients, stats.logprobs, stats.lse,
            self._product.places, self._product.offsets, self._product.powers, factors, self._elements,
            label_residuals, *self._product.numbers, ROWS=_ROWS_PER_PROGRAM, ROW=self._product.row,
        )  # fmt: skip

    def exponentials(self, out: Tensor, first: int) -> None:
        """Write the columns from ``first`` on into ``out`` [n, k]."""
        product = self._product
        product.take(out, first, first + out.shape[1])
        product.multiply("first", None, self._with_softcap_grad)
        if self._with_softcap_grad:
            launch(
                label_elements_kernel, triton.cdiv(len(out), _ROWS_PER_PROGRAM), out.device, _LINE,
                product.places, self._elements, out, len(out), first, first + out.shape[1], out.stride(0),
                ROWS=_ROWS_PER_PROGRAM,
            )  # fmt: skip


@typed_kernel
def entropy_rows_kernel(
    values_ptr, labels_ptr, row_temperature_ptr, factors_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
    of_logprobs_ptr, of_entropy_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64,
    values_stride: tl.int64,
    BLOCK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Turn a block of a row's exponentials into the gradient of log-prob and entropy. ROW is a
    ``RowConstants``.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    blocks = tl.cdiv(V, BLOCK)
    n = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - n * blocks) * BLOCK + tl.arange(0, BLOCK)
    b, t, label, counted = row_label(n, labels_ptr, N, 0, labels_stride, ignore_index)
    slopes = row_slopes(slope, inner, outer, row_temperature_ptr, b, t, 0, temperature_stride, tl.float32)
    scale = slopes[0][0] + slopes[0][1]
    factor = -tl.load(factors_ptr + n) / scale
    logprob = tl.load(logprobs_ptr + n)
    entropy = tl.load(entropy_ptr + n)
    of_logprobs = tl.load(of_logprobs_ptr + n)
    of_entropy = tl.load(of_entropy_ptr + n)
    line = values_ptr + n.to(tl.int64) * values_stride
    inside = columns < V
    is_label = columns == label
    p = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32) * factor
    p = tl.where(is_label, tl.exp(logprob), p)
    # Where a probability is 0 its logarithm doesn't matter.
    log_p = tl.where(is_label, logprob, tl.where(p == 0, -HUGE, tl.log(p)))
    of_label = tl.where(is_label, one_minus_exp(logprob, tl.float32, PLATFORM), -p)
    value = of_logprobs * of_label - of_entropy * times(p, log_p + entropy)
    if ROW.SOFTCAP:
        z = log_p + tl.load(lse_ptr + n).to(tl.float32)
        capped = tl.maximum(z / (slopes[2][0] + slopes[2][1]), -1.0)
        value *= (1.0 - capped) * (1.0 + capped)
    needed = counted & ((of_logprobs != 0) | (of_entropy != 0))
    value = tl.where(needed, value * scale, 0.0)
    tl.store(line + columns, narrowed(value, values_ptr.dtype.element_ty, PLATFORM), mask=inside)


def entropy_rows_(
    values: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    ignore_index: int,
    head: HeadRows,
    of_logprobs: Tensor,
    of_entropy: Tensor,
) -> None:
    """Turn exponentials [n, V], stored without the softcap's slope, in place into rows d/dlogits of
    ``sum(of_logprobs * logprobs + of_entropy * entropy)``; both factors are contiguous fp32 [n].
    """
    n, V = values.shape
    launch(
        entropy_rows_kernel, n * triton.cdiv(V, _LINE.block), values.device, _LINE,
        values, labels, transform.row_temperature, head.factors, *head.stats, of_logprobs, of_entropy,
        *_numbers(n, V, labels, transform, ignore_index), values.stride(0),
        BLOCK=_LINE.block, ROW=RowConstants.of(values.unsqueeze(0), transform, _LINE),
    )  # fmt: skip
