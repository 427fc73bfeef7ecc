"""What is done to rows of hidden states on either side of the gradient products, in one launch each.

Coefficients of any size neither overflow nor vanish on the way: they are taken apart into a power of two and
what is left of them, as ``linear.scaling`` does it where PyTorch's operations serve a call.
"""

# ruff: noqa: SIM300 - constants are what a kernel is compiled for.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import INTERPRETED, Tile, launch, platform, row_kernel, stats_type
from gspo_kernels.kernels.rows import narrowed

_TILE = Tile(1024, 4)
# The interpreter takes as long for one row as for many.
_ROWS, _COLUMNS = (64, 64) if INTERPRETED else (4, _TILE.block)
_SELECT = Tile(1024, 4)


@triton.jit
def power_of_two(value, STATS: tl.constexpr):
    """The power of two at or below a magnitude, and one over it, so that to multiply by the latter rounds
    nothing and leaves less than 2. What is 0, infinite or NaN gets some finite power, too.
    """
    if STATS == tl.float64:
        exponent = (value.to(tl.int64, bitcast=True) >> 52) & 0x7FF
        exponent = tl.minimum(tl.maximum(exponent, 1), 2043)
        power = (exponent << 52).to(tl.float64, bitcast=True)
        inverse = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.minimum(tl.maximum(exponent, 1), 251)
        power = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return power, inverse


@triton.jit
def times(value, factor):
    """The product, where an exact zero of either beats an overflow of the other."""
    return tl.where((value == 0) | (factor == 0), 0.0, value * factor)


@triton.jit
def _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS: tl.constexpr):
    """Of some rows the coefficient, and a factor beside it."""
    coefficient = tl.load(coefficients_ptr + rows.to(tl.int64) * stride, mask=inside, other=0.0).to(STATS)
    factor = tl.full(coefficient.shape, 1.0, STATS)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + rows, mask=inside, other=0.0).to(STATS)
    return coefficient, factor


@triton.jit
def _rows_here(rows_ptr, count, ROWS: tl.constexpr):
    """The rows of this program: where they come among those that are worked on, whether there are so many,
    and which of all rows they are.
    """
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = places < count
    rows = places
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + places, mask=inside, other=0)
    return places.to(tl.int64), inside, rows


@triton.jit(
    do_not_specialize=[
        *("coefficients_ptr", "factors_ptr", "active_ptr", "rows_ptr", "unit_ptr"),
        *("count", "stride", "most"),
    ]
)
def product_operand_kernel(
    hidden_ptr,
    coefficients_ptr,
    factors_ptr,
    active_ptr,
    rows_ptr,
    unit_ptr,
    out_ptr,
    count: tl.int32,
    stride: tl.int64,
    width,
    most: tl.float64,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Some rows of dWeight's operand."""
    places, inside, rows = _rows_here(rows_ptr, count, ROWS)
    share, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
    reads = inside & (share != 0)
    if active_ptr is not None:
        reads = reads & (tl.load(active_ptr + rows, mask=inside, other=0) != 0)
    bound = tl.full([], most, STATS)
    # Comparisons instead of a minimum, which would lose a NaN.
    share = tl.where(share > bound, bound, tl.where(share < -bound, -bound, share))
    if factors_ptr is not None:
        share = times(share, factor)
    if unit_ptr is not None:
        share = share * power_of_two(tl.load(unit_ptr).to(STATS), STATS)[1]
    sources = hidden_ptr + rows.to(tl.int64) * width
    targets = out_ptr + places * width
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        beyond = columns[None, :] < width
        values = tl.load(sources[:, None] + columns[None, :], mask=reads[:, None] & beyond, other=0.0)
        # Selected: the hidden state of a row without gradient may be anything, and is not read.
        values = tl.where(reads[:, None], values.to(STATS) * share[:, None], 0.0)
        values = narrowed(values, out_ptr.dtype.element_ty, PLATFORM)
        tl.store(targets[:, None] + columns[None, :], values, mask=inside[:, None] & beyond)


def product_operand(
    hidden: Tensor,
    coefficients: Tensor,
    factors: Tensor | None,
    active: Tensor | None,
    rows: Tensor | None,
    unit: Tensor | None,
    most: float,
    dtype: torch.dtype,
) -> Tensor:
    """See ``ops.backends.HiddenBackend.product_operand``."""
    count, width = len(hidden if rows is None else rows), hidden.shape[1]
    out = torch.empty(count, width, dtype=dtype, device=hidden.device)
    launch(
        product_operand_kernel,
        triton.cdiv(count, _ROWS),
        hidden.device,
        _TILE,
        hidden.contiguous(),
        coefficients,
        factors,
        None if active is None else active.contiguous().view(torch.int8),
        rows,
        unit,
        out,
        count,
        coefficients.stride(0),
        width,
        most,
        STATS=stats_type(hidden.dtype),
        ROWS=_ROWS,
        BLOCK=_COLUMNS,
        PLATFORM=platform(),
    )
    return out


@triton.jit(
    do_not_specialize=[
        *("coefficients_ptr", "factors_ptr", "rows_ptr", "before_ptr", "out_ptr"),
        *("count", "stride", "most"),
    ]
)
def sum_unit_kernel(
    coefficients_ptr,
    factors_ptr,
    rows_ptr,
    before_ptr,
    out_ptr,
    count: tl.int32,
    stride: tl.int64,
    most: tl.float64,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all rows, of which there are no more than a chunk has."""
    peaks = tl.zeros([BLOCK], STATS)
    for start in range(0, count, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < count
        if rows_ptr is not None:
            rows = tl.load(rows_ptr + rows, mask=inside, other=0)
        share, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
        share = times(tl.minimum(tl.abs(share), tl.full([], most, STATS)), factor)
        peaks = tl.maximum(peaks, tl.abs(share))
    power, inverse = power_of_two(tl.max(peaks, axis=0), STATS)
    if before_ptr is not None:
        before = tl.load(before_ptr)
        power, inverse = power_of_two(tl.maximum(before, power), STATS)
        tl.store(out_ptr + 1, before * inverse)
    tl.store(out_ptr, power)


def sum_unit(
    coefficients: Tensor,
    factors: Tensor | None,
    rows: Tensor | None,
    before: Tensor | None,
    most: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See ``ops.backends.HiddenBackend.sum_unit``."""
    out = torch.empty(2, dtype=dtype, device=coefficients.device)
    launch(
        sum_unit_kernel,
        1,
        out.device,
        _SELECT,
        coefficients,
        factors,
        rows,
        before,
        out,
        len(coefficients if rows is None else rows),
        coefficients.stride(0),
        most,
        STATS=stats_type(dtype),
        BLOCK=_SELECT.block,
    )
    return out[0], out[1]


@triton.jit
def _unit_rows(sources, columns, mask, unit):
    """Some columns of rows, times what their coefficients are beside a power of two."""
    values = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0.0)
    return times(values, unit[:, None])


@triton.jit(
    do_not_specialize=[
        *("coefficients_ptr", "factors_ptr", "rows_ptr", "where_ptr", "scales_ptr"),
        *("count", "stride", "first"),
    ]
)
def store_hidden_kernel(
    values_ptr,
    coefficients_ptr,
    factors_ptr,
    rows_ptr,
    where_ptr,
    hidden_ptr,
    scales_ptr,
    count: tl.int32,
    stride: tl.int64,
    first: tl.int64,
    width,
    STATS: tl.constexpr,
    WHOLE_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Some rows of dHidden."""
    places, inside, rows = _rows_here(rows_ptr, count, ROWS)
    coefficient, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
    if WHOLE_LAST:
        scale = times(coefficient, factor)
        unit = tl.full(scale.shape, 1.0, STATS)
    else:
        scale, inverse = power_of_two(coefficient, STATS)
        unit = coefficient * inverse
        if factors_ptr is not None:
            unit = times(unit, factor)
    targets = first + rows.to(tl.int64)
    if where_ptr is not None:
        targets = tl.load(where_ptr + rows, mask=inside, other=0).to(tl.int64)
    sources = values_ptr + places * width
    if scales_ptr is not None:
        peaks = tl.zeros([ROWS], STATS)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns[None, :] < width)
            peaks = tl.maximum(peaks, tl.max(tl.abs(_unit_rows(sources, columns, mask, unit)), axis=1))
        power, shrink = power_of_two(peaks, STATS)
        tl.store(scales_ptr + targets, power * scale, mask=inside)
    lines = hidden_ptr + targets * width
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns[None, :] < width)
        values = _unit_rows(sources, columns, mask, unit)
        if scales_ptr is not None:
            values = values * shrink[:, None]
        elif WHOLE_LAST:
            values = times(values, scale[:, None])
        else:
            values = values * scale[:, None]
        values = narrowed(values, hidden_ptr.dtype.element_ty, PLATFORM)
        tl.store(lines[:, None] + columns[None, :], values, mask=mask)


def store_hidden(
    values: Tensor,
    coefficients: Tensor,
    factors: Tensor | None,
    rows: Tensor | None,
    where: slice | Tensor,
    hidden: Tensor,
    scales: Tensor | None,
    whole_last: bool,
) -> None:
    """See ``ops.backends.HiddenBackend.store_hidden``."""
    count, width = values.shape
    launch(
        store_hidden_kernel,
        triton.cdiv(count, _ROWS),
        values.device,
        _TILE,
        values.contiguous(),
        coefficients,
        factors,
        rows,
        None if isinstance(where, slice) else where,
        hidden,
        scales,
        count,
        coefficients.stride(0),
        where.start if isinstance(where, slice) else 0,
        width,
        STATS=stats_type(values.dtype),
        WHOLE_LAST=whole_last,
        ROWS=_ROWS,
        BLOCK=_COLUMNS,
        PLATFORM=platform(),
    )


@triton.jit(do_not_specialize=["scales_ptr", "factor_ptr", "count"])
def scale_rows_kernel(
    values_ptr,
    scales_ptr,
    factor_ptr,
    count: tl.int32,
    width,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Some rows times what the row and all of them are to be multiplied by."""
    places, inside, _ = _rows_here(None, count, ROWS)
    scale = tl.load(scales_ptr + places, mask=inside, other=0.0).to(STATS) * tl.load(factor_ptr).to(STATS)
    lines = values_ptr + places * width
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns[None, :] < width)
        pointers = lines[:, None] + columns[None, :]
        values = times(tl.load(pointers, mask=mask, other=0.0).to(STATS), scale[:, None])
        tl.store(pointers, narrowed(values, values_ptr.dtype.element_ty, PLATFORM), mask=mask)


def scale_rows_(values: Tensor, scales: Tensor, factor: Tensor) -> None:
    """See ``ops.backends.HiddenBackend.scale_rows_``."""
    width = values.shape[-1]
    count = values.numel() // width
    launch(
        scale_rows_kernel,
        triton.cdiv(count, _ROWS),
        values.device,
        _TILE,
        values,
        scales,
        factor,
        count,
        width,
        STATS=stats_type(values.dtype),
        ROWS=_ROWS,
        BLOCK=_COLUMNS,
        PLATFORM=platform(),
    )


@triton.jit
def _is_active(grad_ptr, grad_entropy_ptr, rows, count, stride, stride_entropy):
    """Whether some rows have a gradient."""
    inside = rows < count
    active = tl.load(grad_ptr + rows.to(tl.int64) * stride, mask=inside, other=0.0) != 0
    if grad_entropy_ptr is not None:
        active |= tl.load(grad_entropy_ptr + rows.to(tl.int64) * stride_entropy, mask=inside, other=0.0) != 0
    return active


@row_kernel
def active_rows_kernel(
    grad_ptr,
    grad_entropy_ptr,
    rows_ptr,
    gaps_ptr,
    movers_ptr,
    total_ptr,
    count: tl.int32,
    stride: tl.int64,
    stride_entropy: tl.int64,
    BLOCK: tl.constexpr,
):
    """One program for all rows, of which there are no more than a chunk has."""
    lanes = tl.arange(0, BLOCK)
    total = count * 0
    for start in range(0, count, BLOCK):
        active = _is_active(grad_ptr, grad_entropy_ptr, start + lanes, count, stride, stride_entropy)
        total += tl.sum(active.to(tl.int32), axis=0)
    tl.store(total_ptr, total)
    gaps = count * 0
    movers = count * 0
    for start in range(0, count, BLOCK):
        rows = start + lanes
        active = _is_active(grad_ptr, grad_entropy_ptr, rows, count, stride, stride_entropy)
        front = rows < total
        tl.store(rows_ptr + rows, rows, mask=front & active)
        gap = (front & (active == 0)).to(tl.int32)
        mover = ((front == 0) & active).to(tl.int32)
        tl.store(gaps_ptr + gaps + tl.cumsum(gap, axis=0) - gap, rows, mask=gap != 0)
        tl.store(movers_ptr + movers + tl.cumsum(mover, axis=0) - mover, rows, mask=mover != 0)
        gaps += tl.sum(gap, axis=0)
        movers += tl.sum(mover, axis=0)
    # What threads have listed others read.
    tl.debug_barrier()
    for start in range(0, gaps, BLOCK):
        inside = start + lanes < gaps
        gap = tl.load(gaps_ptr + (start + lanes), mask=inside, other=0)
        tl.store(rows_ptr + gap, tl.load(movers_ptr + (start + lanes), mask=inside, other=0), mask=inside)


def active_rows(grad: Tensor, grad_entropy: Tensor | None) -> Tensor | None:
    """See ``ops.backends.HiddenBackend.active_rows``."""
    count = len(grad)
    lists = torch.empty(3 * count + 1, dtype=torch.int32, device=grad.device)
    *each, total = lists.split([count, count, count, 1])
    launch(
        active_rows_kernel,
        1,
        grad.device,
        _SELECT,
        grad,
        grad_entropy,
        *each,
        total,
        count,
        grad.stride(0),
        0 if grad_entropy is None else grad_entropy.stride(0),
        BLOCK=_SELECT.block,
    )
    found = int(total)
    return None if found == count else each[0][:found]
