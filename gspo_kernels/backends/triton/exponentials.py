"""A matmul of hidden states and weight with exponentials in its epilogue, without a pass over logits.

The label's logit is a good offset for the softmax. With k near ``z_label log2(e)`` the epilogue computes
``e = 2^(z log2(e) - k)``, stores it in 16 bits and sums it in fp32, tile by tile. bf16 has the exponents of
fp32, so any offset within some 60 nats of the log-sum-exp keeps full relative precision. With U, the sum of e
over the columns other than the label's, and S = U + e_label,

    d logprob/dz = (1[label] - p)  =  (-1/S) * e,  if -U takes the place of e at the label:

stored exponentials are rows of the gradient matmuls up to one factor per row. The sums exclude labels, for
log-probs that are at most 0 and relatively accurate near 0; see ``rows``.

Rows whose sums are outside [2^-100, 2^90] (labels below some -68 nats or almost certain, NaN, infinities) are
flagged on the device. Three more launches, which return immediately if no row is flagged, find their maxima
and recompute their tiles with these as offsets, without a sync. With known statistics the log-sum-exp is the
offset, no row is flagged, and any range of columns can be computed; see ``KnownRows``.

Results of a row depend only on its hidden state, weight and label: tiles and the order of sums are fixed by
V, and all variants of the kernel (with or without stored e or entropy) have the same arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels.backends.triton.columns import program_rows
from gspo_kernels.backends.triton.launch import (
    RowConstants,
    Tile,
    empty_stats,
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
    LOG2_E,
    _multiply,
    _split_factor,
    add_hi_lo,
    logprob_of_excess,
    narrowed,
    one_minus_exp,
    row_label,
    row_slopes,
    tanh,
    transformed,
)
from gspo_kernels.backends.triton.tiles import ProductTile, add_product, halves, tile_at
from gspo_kernels.core.types import LogitTransform, RowStats

MARGIN: tl.constexpr = tl.constexpr(8)
"""How far the offset is above the label, in powers of two. Factors of rows are then at most 2^8.5, which
coefficients of any size multiply without overflow."""
_SEARCH_LOG2: tl.constexpr = tl.constexpr(256)
"""Where the search for a flagged row's maximum begins, in powers of two below the label: anything lower has a
probability of 0."""
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LINE = Tile(1024, 4)
"""For the kernels before and after the product."""
_ROWS_PER_PROGRAM, _TILES_PER_STEP = 16, 32
"""Rows per program of the statistics, and how many tiles' sums they add at a time."""
ALIGNED = 8
"""The distance of rows of the product's 16-bit operands is a multiple of this many elements."""

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
def _load_offsets(offsets_ptr, rows, inside):
    """Load the offsets of rows, which are stored as keys."""
    key = tl.load(offsets_ptr + rows, mask=inside, other=0)
    return _key(key).to(tl.float32, bitcast=True)


@triton.jit
def _store_powers(powers_ptr, n, count, slopes, mask, ROW: tl.constexpr):
    """Store what multiplies the logits of rows in the exponent, as a sum of two numbers."""
    steepness = slopes[2] if ROW.SOFTCAP else slopes[0]
    exact = add_hi_lo(steepness[0], steepness[1], tl.float64) * LOG2_E
    power, lower = _split_factor(exact, tl.float32)
    tl.store(powers_ptr + n, power, mask=mask)
    tl.store(powers_ptr + count + n, lower, mask=mask)


@triton.jit
def _softcap_grad(z, slopes):
    """Return the slope of the softcap at logits z, in fp64."""
    outer = add_hi_lo(slopes[2][0], slopes[2][1], tl.float64)
    tanh = z / outer
    return (1.0 - tanh) * (1.0 + tanh)


@typed_kernel
def label_offsets_kernel(
    hidden_ptr, weight_ptr, bias_ptr, labels_ptr, temperature_ptr,
    places_ptr, offsets_ptr, powers_ptr, count_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64,
    H: tl.int32, hidden_stride: tl.int64, weight_stride: tl.int64,
    BLOCK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Choose the offset of one row: its label's logit, from a separate dot product. Write the label's place
    (-1: not a column; -2: the row is ignored), the key of the offset, and what multiplies logits in the
    exponent. ROW is a ``RowConstants``.
    """
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, N, 0, labels_stride, ignore_index)
    labeled = counted & (label >= 0) & (label < V)
    place = tl.where(labeled, label, tl.where(counted, -1, -2))
    tl.store(places_ptr + n, place.to(tl.int32))
    hidden = hidden_ptr + n.to(tl.int64) * hidden_stride
    column = weight_ptr + tl.maximum(place, 0) * weight_stride
    dots = tl.zeros([BLOCK], tl.float32)
    width = tl.where(labeled, H, 0)
    for start in range(0, width, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + lanes, mask=lanes < width, other=0.0).to(tl.float32)
        dots += h * tl.load(column + lanes, mask=lanes < width, other=0.0).to(tl.float32)
    x = tl.sum(dots, axis=0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + tl.maximum(place, 0)).to(tl.float32)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, 0, temperature_stride, tl.float32)
    z, _ = transformed(x, slopes, ROW)
    offset = tl.floor(z * LOG2_E + 0.5) + MARGIN
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
        TILE: rows, columns and depth of a tile, and the columns whose exponentials are taken at a time.
        PLATFORM: see ``launch.platform``.
    """

    PASS: str
    SCALED: int
    SOFTCAP: bool
    SOFTCAP_GRAD: bool
    TILE: ProductTile
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
        d = tl.fma(x, LOG2_E, -offset[:, None])
    return d


@triton.jit
def _store_labels(d, left, tile, head):
    """Store the exponents at labels. Return exponents of -inf there, beyond the last column and in ignored
    rows, whose hidden states may be anything.
    """
    top, place, _offset, _power = tile
    N, V, _inner, label_ptr, _first = head
    rows = top + tl.arange(0, d.shape[0])
    columns = left + tl.arange(0, d.shape[1])
    here = (place >= left) & (place < left + d.shape[1])
    is_label = columns[None, :] == place[:, None]
    tl.store(label_ptr + rows, tl.sum(tl.where(is_label, d, 0.0), axis=1), mask=here & (rows < N))
    return tl.where(is_label | (columns[None, :] >= V) | (place == -2)[:, None], -float("inf"), d)


@triton.jit
def _add_exponentials(d, left, tile, head, out, ENTROPY: tl.constexpr, HEAD: tl.constexpr):
    """Store the exponentials of a piece of a tile. Return each row's sum of exponentials and, with ENTROPY,
    its sum of exponentials times exponents, counted from the power of two in the first sum: otherwise the
    mean exponent would cancel.
    """
    top, _place, offset, power = tile
    _N, _V, _inner, _label_ptr, first = head
    e = _exp2(d, HEAD.PLATFORM)
    total = tl.sum(e, axis=1)
    spread = total
    if ENTROPY:
        # Where the exponent is infinite the exponential is 0.
        spread = tl.sum(e * tl.maximum(d - _exponent(total)[:, None], -HUGE), axis=1)
    if out is not None:
        if HEAD.SOFTCAP_GRAD:
            # From the exponent: the compiler for Blackwell fails where more of the logits is needed here.
            capped = tl.maximum((d + offset[:, None]) * (1.0 / power[0])[:, None], -1.0)
            e *= (1.0 - capped) * (1.0 + capped)
        out.store([top, left - first], narrowed(e, out.dtype, HEAD.PLATFORM))
    return total, spread


@triton.jit
def _merge_parts(left_part, right_part, ENTROPY: tl.constexpr, HEAD: tl.constexpr):
    """Return what ``_reduce_tile`` does of two parts of a tile's columns."""
    total0, spread = left_part
    total1, spread1 = right_part
    total = tl.maximum(total0, total1) if HEAD.PASS == "max" else total0 + total1
    if ENTROPY:
        base = _exponent(total)
        spread += (_exponent(total0) - base) * total0
        spread += spread1 + (_exponent(total1) - base) * total1
    return total, spread


@triton.jit
def _reduce_tile(x, left, marks, tile, head, out, ENTROPY: tl.constexpr, HEAD: tl.constexpr):
    """Return what ``_add_exponentials`` does of a tile of logits or, in the pass "max", each row's maximum,
    twice. A piece at a time, so that few numbers are in registers besides the tile.
    """
    _top, _place, offset, power = tile
    _N, V, inner, _label_ptr, _first = head
    COLUMNS: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = COLUMNS // 2
    if HEAD.TILE.piece < COLUMNS:
        x0, x1 = halves(x)
        part0 = _reduce_tile(x0, left, marks, tile, head, out, ENTROPY, HEAD)
        marks = marks >> (HALF // HEAD.TILE.piece)
        part1 = _reduce_tile(x1, left + HALF, marks, tile, head, out, ENTROPY, HEAD)
        part = _merge_parts(part0, part1, ENTROPY, HEAD)
    else:
        d = _exponents(x, offset, power, inner, HEAD)
        if ((marks & 1) != 0) | (left + COLUMNS > V):
            d = _store_labels(d, left, tile, head)
        if HEAD.PASS == "max":
            peak = tl.max(d, axis=1)
            part = (peak, peak)
        else:
            part = _add_exponentials(d, left, tile, head, out, ENTROPY, HEAD)
    return part


@triton.jit
def _multiplied(hidden, weight, bias_ptr, top, left, V, H, HEAD: tl.constexpr):
    """Return a tile of hidden @ weight.T + bias."""
    acc = tl.zeros([HEAD.TILE.rows, HEAD.TILE.columns], tl.float32)
    if bias_ptr is not None:
        columns = left + tl.arange(0, HEAD.TILE.columns)
        acc += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    for k in range(0, H, HEAD.TILE.depth):
        acc = add_product(acc, hidden.load([top, k]), weight.load([left, k]).T, HEAD.PLATFORM)
    return acc


@triton.jit
def _marked_pieces(place, left, HEAD: tl.constexpr):
    """Return the pieces of a tile with a label, a bit each; all of them for an ignored row (-2)."""
    within = place - left
    mark = tl.where((within >= 0) & (within < HEAD.TILE.columns), 1 << (within // HEAD.TILE.piece & 31), 0)
    return tl.reduce(tl.where(place == -2, -1, mark), 0, _or)


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
    height = tl.cdiv(N, HEAD.TILE.rows)
    width = tl.cdiv(V - first, HEAD.TILE.columns)
    tiles = height * width
    if HEAD.PASS != "first":
        tiles = tl.where(tl.load(count_ptr) > 0, tiles, 0)
    inner = _split_factor(tl.full([], inner, tl.float64), tl.float32)
    head = (N, V, inner, label_ptr, first)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_at(number, height, width)
        top = row * HEAD.TILE.rows
        left = first + column * HEAD.TILE.columns
        rows = top + tl.arange(0, HEAD.TILE.rows)
        inside = rows < N
        if HEAD.PASS == "first" or tl.max(tl.load(flags_ptr + rows, mask=inside, other=0), axis=0) != 0:
            place = tl.load(places_ptr + rows, mask=inside, other=-1)
            offset = tl.zeros([HEAD.TILE.rows], tl.float32)
            if HEAD.PASS != "max":
                offset = _load_offsets(offsets_ptr, rows, inside)
            power = (offset, offset)
            if powers_ptr is not None:
                power = (
                    tl.load(powers_ptr + rows, mask=inside, other=0.0),
                    tl.load(powers_ptr + N + rows, mask=inside, other=0.0),
                )
            marks = _marked_pieces(place, left, HEAD)
            x = _multiplied(hidden, weight, bias_ptr, top, left, V, H, HEAD)
            tile = (top, place, offset, power)
            total, spread = _reduce_tile(x, left, marks, tile, head, out, ENTROPY, HEAD)
            if HEAD.PASS == "max":
                flagged = tl.load(flags_ptr + rows, mask=inside, other=0) != 0
                tl.atomic_max(offsets_ptr + rows, _key(tl.ceil(total)), mask=flagged, sem="relaxed")
            else:
                at = column.to(tl.int64) * N + rows
                tl.store(sums_ptr + at, total, mask=inside)
                if ENTROPY:
                    tl.store(spreads_ptr + at, spread, mask=inside)


@triton.jit
def _add_tiles(sums_ptr, spreads_ptr, row, inside, width, N, TILES: tl.constexpr):
    """Return each row's sums over its ``width`` tiles, in fp64; see ``_add_exponentials``."""
    total = tl.zeros(row.shape, tl.float64)
    spread = tl.zeros(row.shape, tl.float64)
    for start in range(0, width, TILES):
        tile = start + tl.arange(0, TILES)
        at = tile.to(tl.int64)[:, None] * N + row[None, :]
        mask = (tile < width)[:, None] & inside[None, :]
        part = tl.load(sums_ptr + at, mask=mask, other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
        if spreads_ptr is not None:
            of_part = tl.load(spreads_ptr + at, mask=mask, other=0.0).to(tl.float64)
            spread += tl.sum(of_part + _exponent(part).to(tl.float64) * part, axis=0)
    return total, spread


@triton.jit
def _flag_rows(flags_ptr, offsets_ptr, count_ptr, row, inside, counted, total, exponent, offset):
    """Flag and count the rows that must be computed again, and write where the search for their maxima
    begins. ``exponent`` is the label's.
    """
    # The label's exponential is next to 2^-MARGIN. Comparisons with NaN are false.
    good = (total >= 2.0**-100) & (total <= 2.0**90) & (tl.abs(exponent + MARGIN) < 64)
    flagged = counted & ~good
    tl.store(flags_ptr + row, flagged.to(tl.int32), mask=inside)
    start = tl.where(tl.abs(exponent) < HUGE, offset - _SEARCH_LOG2, -HUGE)
    # Several threads have the same row: all must have read its offset.
    tl.debug_barrier()
    tl.store(offsets_ptr + row, _key(start), mask=flagged)
    many = tl.sum(flagged.to(tl.int32), axis=0)
    if many > 0:
        tl.atomic_add(count_ptr, many, sem="relaxed")


@triton.jit
def _entropy(logp, labeled, total, spread, others, whole):
    """Return the entropy of rows from the label's p log p, and the others' from their mean exponent."""
    p = tl.where(labeled, tl.exp(logp), 0.0)
    rest = tl.exp(others - whole)
    entropy = -(tl.where(p == 0, 0.0, p * logp))
    mean = spread / total * _LN_2
    return entropy - tl.where(rest == 0, 0.0, rest * (mean - whole))


@triton.jit
def _store_rounded(value, pointers, mask, residual_ptrs, inside, PLATFORM: tl.constexpr):
    """Store fp32 values rounded to bf16, and what the rounding leaves of them."""
    rounded = narrowed(value, tl.bfloat16, PLATFORM)
    tl.store(pointers, rounded, mask=mask)
    tl.store(residual_ptrs, value - rounded.to(tl.float32), mask=inside)


@typed_kernel
def row_statistics_kernel(
    places_ptr, offsets_ptr, flags_ptr, count_ptr, sums_ptr, spreads_ptr, label_ptr, temperature_ptr,
    logprobs_ptr, lse_ptr, entropy_ptr, out_ptr, factors_ptr, label_residuals_ptr,
    N: tl.int32, V: tl.int32, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    temperature_stride: tl.int64, out_stride: tl.int64,
    COLUMNS: tl.constexpr, RECOMPUTED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of ROWS rows from sums of tiles, and finish their exponentials: write the factor
    of each row, the label's element, and what its rounding leaves. Flag rows that must be computed again.
    """
    stop = N
    if RECOMPUTED:
        stop = tl.where(tl.load(count_ptr) > 0, N, 0)
    row, inside = program_rows(stop, ROWS)
    width = tl.where(stop > 0, tl.cdiv(V, COLUMNS), 0)
    total, spread = _add_tiles(sums_ptr, spreads_ptr, row, inside, width, N, TILES)
    place = tl.load(places_ptr + row, mask=inside, other=-2)
    labeled = place >= 0
    counted = place != -2
    offset = _load_offsets(offsets_ptr, row, inside)
    exponent = tl.load(label_ptr + row, mask=labeled, other=-float("inf"))
    # In nats above the offset: the other columns, the label, and the whole row.
    others = tl.log(total)
    own = exponent.to(tl.float64) * _LN_2
    logp, softplus_down = logprob_of_excess(others - own)
    whole = tl.maximum(others, own) + softplus_down
    # As in PyTorch, the log-prob of a label at +inf is inf - inf, which is NaN.
    is_number = (own == own) & (own != float("inf"))
    logp = tl.where(labeled & is_number, logp, float("nan"))
    if not RECOMPUTED:
        _flag_rows(flags_ptr, offsets_ptr, count_ptr, row, inside, counted, total, exponent, offset)
    lse = tl.where(offset == float("inf"), float("inf"), offset.to(tl.float64) * _LN_2 + whole)
    tl.store(logprobs_ptr + row, tl.where(counted, logp, 0.0).to(tl.float32), mask=inside)
    tl.store(lse_ptr + row, tl.where(counted, lse, 0.0), mask=inside)
    if entropy_ptr is not None:
        entropy = _entropy(logp, labeled, total, spread, others, whole)
        tl.store(entropy_ptr + row, tl.where(counted, entropy, 0.0).to(tl.float32), mask=inside)
    if out_ptr is not None:
        t = tl.where(inside, row, 0)
        slopes = row_slopes(slope, inner, outer, temperature_ptr, t * 0, t, 0, temperature_stride, tl.float32)
        factor = tl.where(
            is_number, -add_hi_lo(slopes[0][0], slopes[0][1], tl.float64) * tl.exp(-whole), float("nan")
        )
        tl.store(factors_ptr + row, tl.where(labeled, factor, 0.0).to(tl.float32), mask=inside)
        # where all logits are -inf, the NaN of the factor would meet zeros alone
        value = tl.where(logp == logp, -total, float("nan"))
        if ROW.SOFTCAP:
            value *= _softcap_grad(own + offset.to(tl.float64) * _LN_2, slopes)
        value = tl.where(labeled, value.to(tl.float32), 0.0)
        elements = out_ptr + (row.to(tl.int64) * out_stride + place)
        _store_rounded(value, elements, labeled, label_residuals_ptr + row, inside, ROW.PLATFORM)


@typed_kernel
def known_rows_kernel(
    labels_ptr, temperature_ptr, active_ptr, coefficients_ptr, logprobs_ptr, lse_ptr,
    places_ptr, offsets_ptr, powers_ptr, factors_ptr, elements_ptr, label_residuals_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64,
    ROWS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write what the exponentials of ROWS rows with known statistics need. With coefficients these are in the
    offsets, and signs in the factors; without them the offset is a whole power of two. ROW is a
    ``RowConstants``.
    """
    row, inside = program_rows(N, ROWS)
    # beyond the last row the last one is read again
    b, t, label, counted = row_label(tl.minimum(row, N - 1), labels_ptr, N, 0, labels_stride, ignore_index)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, 0, temperature_stride, tl.float32)
    logp = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0).to(tl.float64)
    # Comparisons with NaN are false.
    finite = tl.abs(lse) < HUGE
    labeled = counted & (label >= 0) & (label < V)
    # NaN and infinities in a row without gradient must not meet the zeros of its other operand.
    inert = (tl.load(active_ptr + row, mask=inside, other=0) == 0) & (finite == 0)
    place = tl.where(labeled, label, -1)
    place = tl.where(counted & (inert == 0), place, -2)
    tl.store(places_ptr + row, place.to(tl.int32), mask=inside)
    if powers_ptr is not None:
        _store_powers(powers_ptr, row, N, slopes, inside, ROW)
    scale = add_hi_lo(slopes[0][0], slopes[0][1], tl.float64)
    if coefficients_ptr is not None:
        scale *= tl.load(coefficients_ptr + row, mask=inside, other=0.0)
        size = tl.abs(scale)
        # A coefficient of 0 gives an offset at infinity.
        offset = ((lse - tl.log(size)) * LOG2_E).to(tl.float32)
        factor = tl.where(scale > 0, -1.0, 1.0)
    else:
        offset = tl.floor(lse * LOG2_E + 0.5).to(tl.float32)
        whole = tl.where(finite, lse - offset.to(tl.float64) * _LN_2, 0.0)
        size = tl.exp(whole)
        factor = -scale / size
    tl.store(offsets_ptr + row, _key(offset), mask=inside)
    factor = tl.where(logp == logp, factor, float("nan"))
    tl.store(factors_ptr + row, tl.where(place >= 0, factor, 0.0).to(tl.float32), mask=inside)
    value = -one_minus_exp(logp, tl.float32, ROW.PLATFORM).to(tl.float64) * size
    if ROW.SOFTCAP:
        value *= _softcap_grad(lse + logp, slopes)
    value = tl.where(place >= 0, value, 0.0).to(tl.float32)
    _store_rounded(value, elements_ptr + row, inside, label_residuals_ptr + row, inside, ROW.PLATFORM)


@typed_kernel
def label_elements_kernel(
    places_ptr, elements_ptr, out_ptr, N: tl.int32, first: tl.int32, last: tl.int32, out_stride: tl.int64,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the elements of ROWS rows at their labels, where these are among the columns of ``out``."""
    row, inside = program_rows(N, ROWS)
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
    """The product of hidden states [n, H] with a weight [V, H], whose epilogue takes exponentials, and what
    the kernels know of each row.
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
            HEAD=HeadConstants(name, row.SCALED, row.SOFTCAP, softcap_grad, tile, platform()),
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
    stats = empty_stats(labels, torch.float32, entropy)
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

    The offset is the log-sum-exp, less the logarithm of the row's coefficient: what multiplies hidden states
    for dWeight is then a power of two, and is not rounded.

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
        self._product = product = _Product(hidden, weight, bias, labels, transform, ignore_index)
        self._with_softcap_grad = coefficients is not None
        known = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        factors, label_residuals, self._elements = known
        self.head = HeadRows(stats, factors, label_residuals)
        launch(
            known_rows_kernel, triton.cdiv(len(hidden), _ROWS_PER_PROGRAM), hidden.device, _LINE,
            labels, transform.row_temperature, active, coefficients, stats.logprobs, stats.lse,
            product.places, product.offsets, product.powers, factors, self._elements, label_residuals,
            *product.numbers, ROWS=_ROWS_PER_PROGRAM, ROW=product.row,
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
    values_ptr, labels_ptr, temperature_ptr, factors_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
    of_logprobs_ptr, of_entropy_ptr,
    N: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    labels_stride: tl.int64, temperature_stride: tl.int64, values_stride: tl.int64,
    BLOCK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Turn a block of a row's exponentials into the gradient of log-prob and entropy. ROW is a
    ``RowConstants``.
    """
    blocks = tl.cdiv(V, BLOCK)
    n = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - n * blocks) * BLOCK + tl.arange(0, BLOCK)
    b, t, label, counted = row_label(n, labels_ptr, N, 0, labels_stride, ignore_index)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, 0, temperature_stride, tl.float32)
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
    of_label = tl.where(is_label, one_minus_exp(logprob, tl.float32, ROW.PLATFORM), -p)
    value = of_logprobs * of_label - of_entropy * times(p, log_p + entropy)
    if ROW.SOFTCAP:
        z = log_p + tl.load(lse_ptr + n).to(tl.float32)
        capped = tl.maximum(z / (slopes[2][0] + slopes[2][1]), -1.0)
        value *= (1.0 - capped) * (1.0 + capped)
    needed = counted & ((of_logprobs != 0) | (of_entropy != 0))
    value = tl.where(needed, value * scale, 0.0)
    tl.store(line + columns, narrowed(value, values_ptr.dtype.element_ty, ROW.PLATFORM), mask=inside)


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
