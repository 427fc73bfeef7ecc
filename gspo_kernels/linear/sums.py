"""Gradients of weight and bias, summed over chunks, and what goes into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.head import Head
from gspo_kernels.linear.products import fixed_product, multiply, transposed_product
from gspo_kernels.linear.scaling import bounded_for_sums, largest, most_in_sums, power_of_two, times
from gspo_kernels.linear.segments import Segmented, Segments
from gspo_kernels.ops.backends import launches_of, load
from gspo_kernels.ops.memory import used_memory
from gspo_kernels.types import stats_dtype


class Rows(NamedTuple):
    """What enters the gradient products: d logprob/dlogits is each row times its factor.

    Attributes:
        values: [n, V].
        factors: [n], or None for 1.
    """

    values: Tensor
    factors: Tensor | None

    def at(self, where: slice) -> Rows:
        """Some of the rows."""
        return Rows(self.values[where], None if self.factors is None else self.factors[where])

    def scaled(self, unit: Tensor) -> Tensor:
        """What is to multiply a product over ``values`` for coefficients ``unit`` [n]."""
        return unit if self.factors is None else times(self.factors, unit)


class Weights(NamedTuple):
    """What rows are multiplied by on their way into gradients.

    Attributes:
        coefficients: [n], any float dtype and stride.
        active: [n], bool: rows that have a gradient; None: those whose coefficient isn't 0.
    """

    coefficients: Tensor
    active: Tensor | None = None


class Needs(NamedTuple):
    """Which of a call's inputs want a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, ctx: Any, bias: Tensor | None) -> Needs:
        """In a function whose first inputs are the three."""
        hidden, weight, third, *_ = ctx.needs_input_grad
        return cls(hidden, weight, bias is not None and third)

    @property
    def head(self) -> bool:
        """Whether the head is trained."""
        return self.weight or self.bias


class HeadSums:
    """dWeight [V, H] and dBias [V] summed over chunks, where they are wanted; in the statistics' dtype.

    dWeight is summed inside of the products. Their 16-bit operands must hold the coefficients: bf16 does; for
    fp16 the sum counts in a power of two, which grows with the largest coefficient so far.

    Of a head whose products are fixed, both are sums over segments of rows, in their order.
    """

    def __init__(self, head: Head, needs: Needs, backend: str):
        dtype, device = stats_dtype(head.weight.dtype), head.weight.device
        self._head, self._backend, self._launches = head, load(backend), launches_of(backend)
        self._power: Tensor | None = None
        # a sum that is rounded to be the gradient is given up by the end of the backward
        memory = torch.empty if dtype == head.weight.dtype else used_memory
        self._weight = memory(head.weight.shape, dtype=dtype, device=device) if needs.weight else None
        self._bias = torch.zeros(head.vocabulary, dtype=dtype, device=device) if needs.bias else None
        self._empty = True
        self._segments = Segments(head.rows_in_step) if head.fixed else None

    def clear(self) -> None:
        """Begin anew."""
        assert self._segments is None
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def add(self, rows: Rows, hidden: Tensor, weights: Weights, ranks: Tensor | None = None) -> None:
        """Add those of rows times their weights, with hidden states [n, H]; ``ranks`` [n], ascending, are
        those of ``Call.ranks``, where products are fixed.
        """
        values = rows.values
        if self._segments is not None:
            assert ranks is not None
            if self._weight is not None or self._bias is not None:
                parts = (values, self._operand(rows, hidden, weights), self._factors(rows, weights))
                for segmented in self._segments.cut(parts, ranks):
                    self._add_segments(segmented)
            return
        if self._weight is not None:
            unit = self._unit(rows, weights) if values.dtype == torch.float16 else None
            self._multiply(values.t(), self._operand(rows, hidden, weights, unit))
        if self._bias is not None:
            self._add_bias(values, self._factors(rows, weights))
        self._empty = False

    def _factors(self, rows: Rows, weights: Weights) -> Tensor:
        """What multiplies the rows, [k] in the sums' dtype."""
        coefficients = weights.coefficients.to(stats_dtype(self._head.weight.dtype))
        return rows.scaled(bounded_for_sums(coefficients))

    def _operand(self, rows: Rows, hidden: Tensor, weights: Weights, unit: Tensor | None = None) -> Tensor:
        """Hidden states times factors, over ``unit``, as the products take them."""
        dtype, coefficients, active = rows.values.dtype, weights.coefficients, weights.active
        if self._launches is not None:
            most = most_in_sums(stats_dtype(hidden.dtype))
            return self._launches.product_operand(
                hidden, coefficients, rows.factors, active, unit, most, dtype
            )
        factors = self._factors(rows, weights)
        if unit is not None:
            factors = factors / unit
        if active is None:
            active = coefficients != 0
        chosen = hidden.to(factors.dtype)
        if not (active.is_cpu and bool(active.all())):
            # selected: the hidden state of a row without gradient may be anything
            chosen = torch.where(active.unsqueeze(1), chosen, 0.0)
        return (chosen * factors.unsqueeze(1)).to(dtype)

    def _add_segments(self, segmented: Segmented) -> None:
        (values, operand, factors), ends = segmented
        left, first = values.t(), self._empty
        if self._weight is not None:
            fixed_product(left, operand, self._weight, accumulate=not first, ends=ends)
        if self._bias is not None:
            column = factors.to(values.dtype).unsqueeze(1)
            fixed_product(left, column, self._bias.unsqueeze(1), accumulate=not first, ends=ends)
        self._empty = False

    def _add_bias(self, values: Tensor, factors: Tensor) -> None:
        assert self._bias is not None
        if values.dtype != torch.float16:
            self._bias += transposed_product(values, factors.unsqueeze(1)).squeeze(1)
            return
        scale = power_of_two(largest(factors))
        self._bias.addcmul_(transposed_product(values, (factors / scale).unsqueeze(1)).squeeze(1), scale)

    def _multiply(self, left: Tensor, operand: Tensor) -> None:
        """Add [V, n] @ [n, H] to dWeight. The first is written: zeros would cost as much as to fill them."""
        total = self._weight
        assert total is not None
        if self._head.in_blocks:
            multiply(left, operand, total, accumulate=not self._empty)
        elif left.dtype == total.dtype:
            torch.mm(left, operand, out=total) if self._empty else total.addmm_(left, operand)
        elif self._empty:
            torch.mm(left, operand, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, operand, out_dtype=total.dtype, out=total)

    def _unit(self, rows: Rows, weights: Weights) -> Tensor:
        """What dWeight counts in, once that is as large as the largest of the rows' factors."""
        total, before = self._weight, self._power
        assert total is not None
        if before is None and not self._empty:
            before = torch.ones((), dtype=total.dtype, device=total.device)
        if self._launches is not None:
            most = most_in_sums(total.dtype)
            unit, shrink = self._launches.sum_unit(
                weights.coefficients, rows.factors, before, most, total.dtype
            )
        else:
            unit = power_of_two(largest(self._factors(rows, weights)))
            unit = unit if before is None else torch.maximum(before, unit)
            shrink = unit if before is None else before / unit
        if before is not None:
            self._backend.scale_(total, shrink)  # costs nothing where it stays
        self._power = unit
        return unit

    def _count_in_ones(self) -> None:
        power, self._power = self._power, None
        if power is not None and self._weight is not None:
            self._backend.scale_(self._weight, power)

    def add_sums(self, sums: HeadSums, coefficient: Tensor) -> None:
        """Add other sums times a coefficient that has come late."""
        weight, bias = sums.result()
        self._count_in_ones()
        for total, own in ((self._weight, weight), (self._bias, bias)):
            if total is None or own is None:
                continue
            factor = bounded_for_sums(coefficient.to(total.dtype))
            if self._empty and total is self._weight:
                torch.mul(own, factor, out=total)
            else:
                total.addcmul_(own, factor)
        self._empty = False

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The two sums."""
        if self._segments is not None:
            for segmented in self._segments.rest():
                self._add_segments(segmented)
        if self._empty and self._weight is not None:
            self._weight.zero_()
            self._empty = False
        self._count_in_ones()
        return self._weight, self._bias
