"""Operations on rows of hidden states before and after the gradient products, in one launch each.

Coefficients of any size neither overflow nor vanish on the way: each is split into a power of two and the
remaining factor. ``reference.row_scaling`` does it by PyTorch's operations for other backends.
"""

# ruff: noqa: SIM300 - constants are what a kernel is compiled for.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.launch import (
    INTERPRETED,
    Tile,
    is_aligned,
    launch,
    platform,
    stats_type,
    typed_kernel,
)
from gspo_kernels.backends.triton.rows import narrowed

_TILE = Tile(1024, 4)
# The interpreter takes as long for one row as for many.
_ROWS, _COLUMNS = (64, 64) if INTERPRETED else (4, _TILE.block)


@triton.jit
def power_of_two(value, STATS: tl.constexpr):
    """Return the power of two at or below the magnitude of ``value``, and its inverse: multiplication by the
    inverse rounds nothing and leaves less than 2. The power is held between the smallest normal number and
    2^124 (fp32) or 2^1020 (fp64), also for 0, subnormal numbers, infinity and NaN.
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
    """Return the product, where an exact zero of either factor beats an overflow of the other."""
    return tl.where((value == 0) | (factor == 0), 0.0, value * factor)


@triton.jit
def _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS: tl.constexpr):
    """Load the coefficients of some rows, and the factors that multiply along with them (default 1)."""
    coefficient = tl.load(coefficients_ptr + rows.to(tl.int64) * stride, mask=inside, other=0.0).to(STATS)
    factor = tl.full(coefficient.shape, 1.0, STATS)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + rows, mask=inside, other=0.0).to(STATS)
    return coefficient, factor


@triton.jit
def _program_rows(count, ROWS: tl.constexpr):
    """Return the rows of this program, int64, and which of them exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return rows.to(tl.int64), rows < count


@typed_kernel
def product_operand_kernel(
    hidden_ptr,
    coefficients_ptr,
    factors_ptr,
    active_ptr,
    unit_ptr,
    out_ptr,
    count: tl.int32,
    stride: tl.int64,
    width: tl.int32,
    bound: tl.float64,
    ALIGNED: tl.constexpr,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Compute some rows of the operand of dWeight's product: hidden states times coefficients."""
    rows, inside = _program_rows(count, ROWS)
    share, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
    reads = inside & (share != 0)
    if active_ptr is not None:
        reads = reads & (tl.load(active_ptr + rows, mask=inside, other=0) != 0)
    limit = tl.full([], bound, STATS)
    # Comparisons instead of a minimum, which would lose a NaN.
    share = tl.where(share > limit, limit, tl.where(share < -limit, -limit, share))
    if factors_ptr is not None:
        share = times(share, factor)
    if unit_ptr is not None:
        share = share * power_of_two(tl.load(unit_ptr).to(STATS), STATS)[1]
    sources = hidden_ptr + rows * width
    targets = out_ptr + rows * width
    if ALIGNED:
        # the same numbers, but now the compiler knows what divides them
        width = width // 16 * 16
        sources = tl.multiple_of(sources, 16)
        targets = tl.multiple_of(targets, 16)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        in_width = columns[None, :] < width
        values = tl.load(sources[:, None] + columns[None, :], mask=reads[:, None] & in_width, other=0.0)
        # Selected: a row without gradient is not read, and its hidden state may be anything.
        values = tl.where(reads[:, None], values.to(STATS) * share[:, None], 0.0)
        values = narrowed(values, out_ptr.dtype.element_ty, PLATFORM)
        tl.store(targets[:, None] + columns[None, :], values, mask=inside[:, None] & in_width)


def product_operand(
    hidden: Tensor,
    coefficients: Tensor,
    factors: Tensor | None,
    active: Tensor | None,
    unit: Tensor | None,
    bound: float,
    dtype: torch.dtype,
) -> Tensor:
    """See ``protocol.HiddenKernels.product_operand``."""
    count, width = hidden.shape
    hidden = hidden.contiguous()
    out = torch.empty(count, width, dtype=dtype, device=hidden.device)
    launch(
        product_operand_kernel, -(-count // _ROWS), hidden.device, _TILE,
        hidden, coefficients, factors,
        None if active is None else active.contiguous().view(torch.int8),
        unit, out, count, coefficients.stride(0), width, bound,
        ALIGNED=is_aligned(hidden, out), STATS=stats_type(hidden.dtype),
        ROWS=_ROWS, BLOCK=_COLUMNS, PLATFORM=platform(),
    )  # fmt: skip
    return out


@typed_kernel
def sum_unit_kernel(
    coefficients_ptr,
    factors_ptr,
    before_ptr,
    out_ptr,
    count: tl.int32,
    stride: tl.int64,
    bound: tl.float64,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the unit in one program for all rows, which are no more than a chunk has."""
    peaks = tl.zeros([BLOCK], STATS)
    for start in range(0, count, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < count
        share, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
        share = times(tl.minimum(tl.abs(share), tl.full([], bound, STATS)), factor)
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
    before: Tensor | None,
    bound: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See ``protocol.HiddenKernels.sum_unit``."""
    out = torch.empty(2, dtype=dtype, device=coefficients.device)
    launch(
        sum_unit_kernel, 1, out.device, _TILE,
        coefficients, factors, before, out, len(coefficients), coefficients.stride(0), bound,
        STATS=stats_type(dtype), BLOCK=_TILE.block,
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _unit_rows(sources, columns, mask, unit):
    """Load some columns of rows and multiply them by ``unit``: coefficients over a power of two, or 1."""
    values = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0.0)
    return times(values, unit[:, None])


@typed_kernel
def store_hidden_kernel(
    values_ptr,
    coefficients_ptr,
    factors_ptr,
    where_ptr,
    hidden_ptr,
    scales_ptr,
    count: tl.int32,
    stride: tl.int64,
    first: tl.int64,
    width: tl.int32,
    STATS: tl.constexpr,
    WHOLE_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Store some rows of dHidden."""
    rows, inside = _program_rows(count, ROWS)
    coefficient, factor = _coefficients(coefficients_ptr, factors_ptr, rows, inside, stride, STATS)
    if WHOLE_LAST:
        scale = times(coefficient, factor)
        unit = tl.full(scale.shape, 1.0, STATS)
    else:
        scale, inverse = power_of_two(coefficient, STATS)
        unit = coefficient * inverse
        if factors_ptr is not None:
            unit = times(unit, factor)
    targets = first + rows
    if where_ptr is not None:
        targets = tl.load(where_ptr + rows, mask=inside, other=0).to(tl.int64)
    sources = values_ptr + rows * width
    lines = hidden_ptr + targets * width
    if ALIGNED:
        width = width // 16 * 16
        sources = tl.multiple_of(sources, 16)
        lines = tl.multiple_of(lines, 16)
    if scales_ptr is not None:
        peaks = tl.zeros([ROWS], STATS)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns[None, :] < width)
            peaks = tl.maximum(peaks, tl.max(tl.abs(_unit_rows(sources, columns, mask, unit)), axis=1))
        power, shrink = power_of_two(peaks, STATS)
        tl.store(scales_ptr + targets, power * scale, mask=inside)
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
    where: slice | Tensor,
    hidden: Tensor,
    scales: Tensor | None,
    whole_last: bool,
) -> None:
    """See ``protocol.HiddenKernels.store_hidden``."""
    count, width = values.shape
    values = values.contiguous()
    launch(
        store_hidden_kernel, -(-count // _ROWS), values.device, _TILE,
        values, coefficients, factors,
        None if isinstance(where, slice) else where,
        hidden, scales, count, coefficients.stride(0),
        where.start if isinstance(where, slice) else 0,
        width,
        STATS=stats_type(values.dtype), WHOLE_LAST=whole_last, ALIGNED=is_aligned(values, hidden),
        ROWS=_ROWS, BLOCK=_COLUMNS, PLATFORM=platform(),
    )  # fmt: skip


@typed_kernel
def scale_rows_kernel(
    values_ptr,
    scales_ptr,
    factor_ptr,
    count: tl.int32,
    width: tl.int32,
    ALIGNED: tl.constexpr,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Multiply some rows by the scale of each row and by one factor for all."""
    rows, inside = _program_rows(count, ROWS)
    scale = tl.load(scales_ptr + rows, mask=inside, other=0.0).to(STATS) * tl.load(factor_ptr).to(STATS)
    lines = values_ptr + rows * width
    if ALIGNED:
        width = width // 16 * 16
        lines = tl.multiple_of(lines, 16)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns[None, :] < width)
        pointers = lines[:, None] + columns[None, :]
        values = times(tl.load(pointers, mask=mask, other=0.0).to(STATS), scale[:, None])
        tl.store(pointers, narrowed(values, values_ptr.dtype.element_ty, PLATFORM), mask=mask)


def scale_rows_(values: Tensor, scales: Tensor, factor: Tensor) -> None:
    """See ``protocol.HiddenKernels.scale_rows_``."""
    width = values.shape[-1]
    count = values.numel() // width
    launch(
        scale_rows_kernel, -(-count // _ROWS), values.device, _TILE,
        values, scales, factor, count, width,
        ALIGNED=is_aligned(values), STATS=stats_type(values.dtype),
        ROWS=_ROWS, BLOCK=_COLUMNS, PLATFORM=platform(),
    )  # fmt: skip
