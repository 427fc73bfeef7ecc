"""Gradients of weight and bias, summed over chunks, and the rows that enter these sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import launches_of, load
from gspo_kernels.ops.memory import used_memory
from gspo_kernels.ops.products import (
    SEGMENT,
    fixed_product,
    in_parts,
    multiply,
    sum_of_parts,
    transposed_product,
    values_in_step,
)
from gspo_kernels.plan import RequiresGrad
from gspo_kernels.types import stats_dtype


class GradientRows(NamedTuple):
    """The rows of the gradient products: d loss/d logits is each row times its factor and its coefficient.

    Attributes:
        values: [n, V].
        coefficients: [n], any float dtype and stride.
        factors: [n] in the statistics' dtype, or None for 1.
        active: [n], bool: rows that have a gradient; None: rows whose coefficient isn't 0.
    """

    values: Tensor
    coefficients: Tensor
    factors: Tensor | None = None
    active: Tensor | None = None


class HeadSums:
    """dWeight [V, H] and dBias [V] summed over chunks, where they are needed; in the statistics' dtype.

    The products themselves sum dWeight, so their 16-bit operands must hold the coefficients. bf16 does. For
    fp16 a power of two is the unit of the sum; it grows with the largest coefficient so far.

    If the head's products are fixed, both sums run over segments of rows, in order.
    """

    def __init__(self, head: Head, needs: RequiresGrad, backend: str):
        weight = head.trained
        dtype, device = stats_dtype(weight.dtype), weight.device
        self._head, self._backend, self._launches = head, load(backend), launches_of(backend)
        self._dtype = dtype
        self._power: Tensor | None = None
        # a sum that is rounded to the gradient's dtype is freed by the end of the backward
        memory = torch.empty if dtype == weight.dtype else used_memory
        self._weight = memory(weight.shape, dtype=dtype, device=device) if needs.weight else None
        self._bias = torch.zeros(head.vocabulary, dtype=dtype, device=device) if needs.bias else None
        self._empty = True
        self._segments: Segments | None = None
        if head.fixed:
            # how many rows a product may sum in one step, in whatever order
            self._segments = Segments(SEGMENT if weight.is_cuda else values_in_step(head.rows_dtype))

    def clear(self) -> None:
        """Start both sums anew."""
        assert self._segments is None
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def add(self, rows: GradientRows, hidden: Tensor, ranks: Tensor | None = None) -> None:
        """Add the gradients from rows with hidden states [n, H].

        Where products are fixed, ``ranks`` [n], ascending, are the rows' ``Call.ranks``.
        """
        values, total = rows.values, self._weight
        if total is None and self._bias is None:
            return
        if self._head.has_adapter:
            hidden = hidden[:, self._head.weight.shape[1] :]
        factors = None
        if self._launches is None or self._bias is not None or self._segments is not None:
            # what multiplies the rows, [n] in the sums' dtype
            most = MOST_IN_SUMS[self._dtype]
            factors = rows.coefficients.to(self._dtype).clamp(-most, most)
            factors = factors if rows.factors is None else times(rows.factors, factors)
        if self._segments is not None:
            assert ranks is not None and factors is not None
            parts = (values, self._operand(rows, factors, hidden, None), factors)
            for segmented in self._segments.cut(parts, ranks):
                self._add_segments(segmented)
            return
        if total is not None:
            unit = self._unit(rows, factors, total) if values.dtype == torch.float16 else None
            left, operand = values.t(), self._operand(rows, factors, hidden, unit)
            out, empty = total, self._empty
            if operand.dtype != left.dtype:
                # an adapter's columns, beside 16-bit rows
                operand, empty = in_parts(operand, left.dtype), True
                out = total.new_empty(left.shape[0], operand.shape[1])
            # the first product overwrites the memory: filling it with zeros would cost extra
            if self._head.in_blocks:
                multiply(left, operand, out, accumulate=not empty)
            elif left.dtype == out.dtype:
                torch.mm(left, operand, out=out) if empty else out.addmm_(left, operand)
            elif empty:
                torch.mm(left, operand, out_dtype=out.dtype, out=out)
            else:
                torch.addmm(out, left, operand, out_dtype=out.dtype, out=out)
            if out is not total:
                product = sum_of_parts(out, total.shape[1])
                total.copy_(product) if self._empty else total.add_(product)
        if self._bias is not None and factors is not None:
            if values.dtype == torch.float16:
                scale = power_of_two(largest(factors))
                column = transposed_product(values, (factors / scale).unsqueeze(1)).squeeze(1)
                self._bias.addcmul_(column, scale)
            else:
                self._bias += transposed_product(values, factors.unsqueeze(1)).squeeze(1)
        self._empty = False

    def _operand(
        self, rows: GradientRows, factors: Tensor | None, hidden: Tensor, unit: Tensor | None
    ) -> Tensor:
        """Return hidden states times factors, divided by ``unit``, in the dtype of the products; an adapter's
        columns stay in that of the sums.
        """
        dtype, active = self._dtype if self._head.has_adapter else rows.values.dtype, rows.active
        if self._launches is not None:
            most = MOST_IN_SUMS[self._dtype]
            return self._launches.product_operand(
                hidden, rows.coefficients, rows.factors, active, unit, most, dtype
            )
        assert factors is not None
        if unit is not None:
            factors = factors / unit
        if active is None:
            active = rows.coefficients != 0
        chosen = hidden.to(factors.dtype)
        if not (active.is_cpu and bool(active.all())):
            # selected, not multiplied: the hidden state of a row without gradient may be anything
            chosen = torch.where(active.unsqueeze(1), chosen, 0.0)
        return (chosen * factors.unsqueeze(1)).to(dtype)

    def _add_segments(self, segmented: SegmentedRows) -> None:
        (values, operand, factors), ends = segmented
        left, first = values.t(), self._empty
        if self._weight is not None:
            fixed_product(left, operand, self._weight, accumulate=not first, ends=ends)
        if self._bias is not None:
            column = factors.to(values.dtype).unsqueeze(1)
            fixed_product(left, column, self._bias.unsqueeze(1), accumulate=not first, ends=ends)
        self._empty = False

    def _unit(self, rows: GradientRows, factors: Tensor | None, total: Tensor) -> Tensor:
        """Raise the unit of dWeight's sum to at least the rows' largest factor, and return it."""
        before = self._power
        if before is None and not self._empty:
            before = torch.ones((), dtype=total.dtype, device=total.device)
        if self._launches is not None:
            most = MOST_IN_SUMS[total.dtype]
            unit, shrink = self._launches.sum_unit(rows.coefficients, rows.factors, before, most, total.dtype)
        else:
            assert factors is not None
            unit = power_of_two(largest(factors))
            unit = unit if before is None else torch.maximum(before, unit)
            shrink = unit if before is None else before / unit
        if before is not None:
            self._backend.scale_(total, shrink)  # costs nothing if the unit stays
        self._power = unit
        return unit

    def add_sums(self, sums: HeadSums, coefficient: Tensor) -> None:
        """Add other sums times a coefficient that was not known when they were summed."""
        if self._power is not None:
            self._count_in_ones()
        for total, other in zip((self._weight, self._bias), sums.result(), strict=True):
            if total is None or other is None:
                continue
            most = MOST_IN_SUMS[total.dtype]
            factor = coefficient.to(total.dtype).clamp(-most, most)
            if self._empty and total is self._weight:
                torch.mul(other, factor, out=total)
            else:
                total.addcmul_(other, factor)
        self._empty = False

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dWeight and dBias."""
        if self._segments is not None:
            for segmented in self._segments.rest():
                self._add_segments(segmented)
        if self._empty and self._weight is not None:
            self._weight.zero_()
            self._empty = False
        if self._power is not None:
            self._count_in_ones()
        return self._weight, self._bias

    def _count_in_ones(self) -> None:
        power, self._power = self._power, None
        if power is not None and self._weight is not None:
            self._backend.scale_(self._weight, power)


SegmentedRows = tuple[tuple[Tensor, ...], Tensor]
"""Tensors over the rows of whole segments, [n, ...] each, and where each segment ends, int64
[segments] on the CPU."""


class Segments:
    """Cuts rows that come in ascending ranks into segments of ``SEGMENT`` counted tokens, and keeps the last
    segment back until it is whole.

    Rows without a gradient may be missing from a segment. Products that sum a few rows in one step get zeros
    in their place, so that the same rows always share a step.

    Args:
        step: how many rows a product sums in one step; a divisor of ``SEGMENT``.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._unfinished: tuple[Tensor, ...] | None = None

    def cut(self, parts: tuple[Tensor, ...], ranks: Tensor) -> Iterator[SegmentedRows]:
        """Yield the segments that become whole with ``parts``, [n, ...] over the rows of ``ranks`` [n]."""
        if not ranks.numel():
            return
        rows = (*parts, ranks.cpu())
        start, count = 0, ranks.numel()
        segments = rows[-1] // SEGMENT
        ends = _ends(segments)
        whole = bool(rows[-1][-1] % SEGMENT == SEGMENT - 1)
        before, self._unfinished = self._unfinished, None
        if before is not None:
            if bool(segments[0] == before[-1][0] // SEGMENT):
                start = int(ends[0])
                before = tuple(torch.cat([old, new[:start]]) for old, new in zip(before, rows, strict=True))
            if start == count and not whole:
                self._unfinished = before
                return
            yield self._padded(before)
        stop = count
        if not whole:
            stop = max(start, int(ends[-2]) if ends.numel() > 1 else 0)
            # copied, as the next chunk overwrites the rows' memory
            self._unfinished = tuple(row[stop:].clone() for row in rows)
        if stop > start:
            yield self._padded(tuple(row[start:stop] for row in rows))

    def rest(self) -> Iterator[SegmentedRows]:
        """Yield the rows that are kept back, if there are any."""
        rows, self._unfinished = self._unfinished, None
        if rows is not None:
            yield self._padded(rows)

    def _padded(self, rows: tuple[Tensor, ...]) -> SegmentedRows:
        """Return whole segments, with zeros in place of rows that are missing in a step of the products."""
        *parts, ranks = rows
        groups, place, sizes = torch.unique_consecutive(
            ranks // self._step, return_inverse=True, return_counts=True
        )
        if self._step < SEGMENT:
            # Products take rows that are missing behind the last one for zeros anyway. On a GPU, where a step
            # is a segment, zeros are written, so that products over any number of rows have the same tile.
            sizes[-1] += self._step - 1 - ranks[-1] % self._step
        if bool((sizes == self._step).all()):
            return tuple(parts), _ends(ranks // SEGMENT)
        place = (place * self._step + ranks % self._step).to(parts[0].device)
        count = groups.numel() * self._step
        filled = tuple(part.new_zeros(count, *part.shape[1:]).index_copy_(0, place, part) for part in parts)
        return filled, _ends(groups * self._step // SEGMENT) * self._step


def _ends(segments: Tensor) -> Tensor:
    """Return where each run of equal numbers ends."""
    inner = (segments[1:] != segments[:-1]).nonzero().squeeze(1) + 1
    return torch.cat([inner, inner.new_tensor([len(segments)])])


# Arithmetic in which coefficients of any size neither overflow nor vanish on their way into gradients

_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
"""By dtype: the integer type of the same width, and the bits of the exponent in it."""


def largest(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude, of all values or along a dimension."""
    if values.is_cpu:
        # on the CPU a norm takes a hundred times as long
        return values.abs().amax(() if dim is None else dim)
    return torch.linalg.vector_norm(values, float("inf"), dim)


def power_of_two(values: Tensor) -> Tensor:
    """Return the power of two at or below the magnitude of each value, fp32 or fp64. Dividing by it rounds
    nothing and leaves less than 2. Values that are 0, infinite or NaN get some finite power, too.
    """
    integers, exponent = _EXPONENT[values.dtype]
    limits = torch.finfo(values.dtype)
    power = values.view(integers).bitwise_and(exponent).view(values.dtype)
    return power.clamp(limits.tiny, 0.25 / limits.tiny)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """Return the product, where an exact zero of either operand beats an overflow of the other."""
    return torch.where((values == 0) | (factor == 0), 0.0, values * factor)


def times_(values: Tensor, factor: Tensor) -> Tensor:
    """Do what ``times`` does in place, for few factors and many values (checking each is slow on the CPU)."""
    zero = factor == 0
    if not (factor.is_cpu and bool(factor.isfinite().all())):
        zero = zero | (values == 0)
    values.mul_(factor)
    return values if factor.is_cpu and not bool(zero.any()) else values.masked_fill_(zero, 0.0)


MOST_IN_SUMS = {dtype: torch.finfo(dtype).max * 2.0**-24 for dtype in _EXPONENT}
"""The bound on coefficients by dtype. It keeps products finite: infinities of both signs would add to NaN."""
