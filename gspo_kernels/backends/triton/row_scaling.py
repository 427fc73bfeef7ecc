"""Operations on rows of hidden states before and after the gradient matmuls, in one launch each.

Coefficients are split into a power of two and the remaining factor, against overflow and underflow.
"""

# ruff: noqa: SIM300 - constants are what a kernel is compiled for.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import aligned_width, program_rows
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
_SCALE_TILE = Tile(8192, 8)
_PROGRAMS = 2048
"""Maximum number of programs of ``scale_``, enough for any GPU and cheap if the factor is 1."""


class LineConstants(NamedTuple):
    """The constants for which a kernel over rows of hidden states is compiled.

    Attributes:
        STATS: the dtype of statistics.
        ALIGNED: see ``launch.is_aligned``.
        ROWS, BLOCK: rows of a program, and columns at a time.
        PLATFORM: see ``launch.platform``.
    """

    STATS: tl.dtype
    ALIGNED: bool
    ROWS: int
    BLOCK: int
    PLATFORM: str

    @staticmethod
    def of(dtype: torch.dtype, *lines: Tensor) -> LineConstants:
        """Return the constants for statistics of values of ``dtype``, and the lines that are accessed."""
        return LineConstants(stats_type(dtype), is_aligned(*lines), _ROWS, _COLUMNS, platform())


@triton.jit
def power_of_two(value, STATS: tl.constexpr):
    """Return the power of two at or below the magnitude of ``value``, and its inverse, which multiplies
    without rounding. The power is clamped to the smallest normal number and 2^124 (fp32) or 2^1020 (fp64).
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
def _addresses(values_ptr, rows, width, LINES: tl.constexpr):
    """Return the addresses of contiguous rows."""
    lines = values_ptr + rows.to(tl.int64) * width
    if LINES.ALIGNED:
        lines = tl.multiple_of(lines, 16)
    return lines


@triton.jit
def _block_of(start, width, inside, LINES: tl.constexpr):
    """Return some columns [1, columns] of a program's rows, and which elements exist."""
    columns = (start + tl.arange(0, LINES.BLOCK))[None, :]
    return columns, inside[:, None] & (columns < width)


@typed_kernel
def product_operand_kernel(
    hidden_ptr, coefficients_ptr, factors_ptr, active_ptr, unit_ptr, out_ptr,
    count: tl.int32, stride: tl.int64, width: tl.int32, bound: tl.float64,
    LINES: tl.constexpr,
):  # fmt: skip
    """Compute some rows of the operand of dWeight's product: hidden states times coefficients. LINES is a
    ``LineConstants``.
    """
    STATS: tl.constexpr = LINES.STATS
    rows, inside = program_rows(count, LINES.ROWS)
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
    sources = _addresses(hidden_ptr, rows, width, LINES)
    targets = _addresses(out_ptr, rows, width, LINES)
    width = aligned_width(width, LINES.ALIGNED)
    for start in range(0, width, LINES.BLOCK):
        columns, mask = _block_of(start, width, reads, LINES)
        values = tl.load(sources[:, None] + columns, mask=mask, other=0.0)
        # Selected: a row without gradient is not read, and its hidden state may be anything.
        values = tl.where(reads[:, None], values.to(STATS) * share[:, None], 0.0)
        values = narrowed(values, out_ptr.dtype.element_ty, LINES.PLATFORM)
        tl.store(targets[:, None] + columns, values, mask=inside[:, None] & (columns < width))


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
        LINES=LineConstants.of(hidden.dtype, hidden, out),
    )  # fmt: skip
    return out


@typed_kernel
def sum_unit_kernel(
    coefficients_ptr, factors_ptr, before_ptr, out_ptr, count: tl.int32, stride: tl.int64, bound: tl.float64,
    STATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the unit in one program for all rows, at most those of a chunk."""
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
    return times(tl.load(sources[:, None] + columns, mask=mask, other=0.0), unit[:, None])


@typed_kernel
def store_hidden_kernel(
    values_ptr, coefficients_ptr, factors_ptr, where_ptr, hidden_ptr, scales_ptr,
    count: tl.int32, stride: tl.int64, first: tl.int64, width: tl.int32,
    WHOLE_LAST: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Store some rows of dHidden. LINES is a ``LineConstants``."""
    STATS: tl.constexpr = LINES.STATS
    rows, inside = program_rows(count, LINES.ROWS)
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
    sources = _addresses(values_ptr, rows, width, LINES)
    lines = _addresses(hidden_ptr, targets, width, LINES)
    width = aligned_width(width, LINES.ALIGNED)
    if scales_ptr is not None:
        peaks = tl.zeros([LINES.ROWS], STATS)
        for start in range(0, width, LINES.BLOCK):
            columns, mask = _block_of(start, width, inside, LINES)
            peaks = tl.maximum(peaks, tl.max(tl.abs(_unit_rows(sources, columns, mask, unit)), axis=1))
        power, shrink = power_of_two(peaks, STATS)
        tl.store(scales_ptr + targets, power * scale, mask=inside)
    for start in range(0, width, LINES.BLOCK):
        columns, mask = _block_of(start, width, inside, LINES)
        values = _unit_rows(sources, columns, mask, unit)
        if scales_ptr is not None:
            values = values * shrink[:, None]
        elif WHOLE_LAST:
            values = times(values, scale[:, None])
        else:
            values = values * scale[:, None]
        values = narrowed(values, hidden_ptr.dtype.element_ty, LINES.PLATFORM)
        tl.store(lines[:, None] + columns, values, mask=mask)


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
        WHOLE_LAST=whole_last, LINES=LineConstants.of(values.dtype, values, hidden),
    )  # fmt: skip


@typed_kernel
def scale_rows_kernel(
    values_ptr, scales_ptr, factor_ptr, count: tl.int32, width: tl.int32, LINES: tl.constexpr
):
    """Multiply some rows by the scale of each row and by one factor for all. LINES is a ``LineConstants``."""
    rows, inside = program_rows(count, LINES.ROWS)
    scale = tl.load(scales_ptr + rows, mask=inside, other=0.0).to(LINES.STATS) * tl.load(factor_ptr).to(
        LINES.STATS
    )
    lines = _addresses(values_ptr, rows, width, LINES)
    width = aligned_width(width, LINES.ALIGNED)
    for start in range(0, width, LINES.BLOCK):
        columns, mask = _block_of(start, width, inside, LINES)
        pointers = lines[:, None] + columns
        values = times(tl.load(pointers, mask=mask, other=0.0).to(LINES.STATS), scale[:, None])
        tl.store(pointers, narrowed(values, values_ptr.dtype.element_ty, LINES.PLATFORM), mask=mask)


def scale_rows_(values: Tensor, scales: Tensor, factor: Tensor) -> None:
    """See ``protocol.HiddenKernels.scale_rows_``."""
    width = values.shape[-1]
    count = values.numel() // width
    launch(
        scale_rows_kernel, -(-count // _ROWS), values.device, _TILE,
        values, scales, factor, count, width, LINES=LineConstants.of(values.dtype, values),
    )  # fmt: skip


@typed_kernel
def scale_kernel(values_ptr, factor_ptr, count: tl.int64, LINES: tl.constexpr):
    """Multiply a program's share of the blocks; LINES.ALIGNED: values begin at a multiple of 16 bytes. A
    factor of 1, the usual upstream gradient, costs only the launch.
    """
    factor = tl.load(factor_ptr).to(LINES.STATS)
    OUT: tl.constexpr = values_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * LINES.BLOCK
    end = tl.where(factor == 1, 0, count)
    for start in range(first, end, tl.num_programs(0) * LINES.BLOCK):
        pointers = values_ptr + (start + tl.arange(0, LINES.BLOCK))
        if LINES.ALIGNED:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), LINES.BLOCK)
        # Whole blocks take no mask: a mask of unknown alignment would split 16-byte accesses.
        if start + LINES.BLOCK <= count:
            values = tl.load(pointers).to(LINES.STATS) * factor
            tl.store(pointers, narrowed(values, OUT, LINES.PLATFORM))
        else:
            inside = start + tl.arange(0, LINES.BLOCK) < count
            values = tl.load(pointers, mask=inside, other=0.0).to(LINES.STATS) * factor
            tl.store(pointers, narrowed(values, OUT, LINES.PLATFORM), mask=inside)


def scale_(values: Tensor, factor: Tensor) -> None:
    """See ``protocol.Backend.scale_``."""
    count = values.numel()
    launch(
        scale_kernel, min(-(-count // _SCALE_TILE.block), _PROGRAMS), values.device, _SCALE_TILE,
        values, factor, count, LINES=LineConstants(
            stats_type(values.dtype), values.data_ptr() % 16 == 0, 1, _SCALE_TILE.block, platform()
        ),
    )  # fmt: skip
