"""Gradients of weight and bias, summed over chunks, and the rows that enter these sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import hidden_kernels, load
from gspo_kernels.core.exact import MAX_IN_SUMS, times
from gspo_kernels.core.memory import used_memory
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.hidden.matmul import Products
from gspo_kernels.logits.plan import RequiresGrad

ROUNDED_COLUMNS = 16384
"""How many columns of rows are multiplied at a time where a product for dWeight can't round to 16 bits."""


class GradientRows(NamedTuple):
    """The rows of the gradient products: d loss/d logits is each row times its factor and its coefficient.

    Attributes:
        values: [n, V].
        coefficients: [n], any float dtype and stride.
        factors: [n] in the statistics' dtype, or None for 1.
        active: [n], bool: rows that have a gradient; None: rows whose coefficient isn't 0.
        rests: [n] or None: what rounding took from the element at each row's label, which is the largest.
    """

    values: Tensor
    coefficients: Tensor
    factors: Tensor | None = None
    active: Tensor | None = None
    rests: Tensor | None = None


class HeadSums:
    """dWeight [V, H] and dBias [V] summed over chunks, where they are needed; in the statistics' dtype.

    The products themselves sum dWeight, so their 16-bit operands must hold the coefficients. bf16 does. For
    fp16 a power of two is the unit of the sum; it grows with the largest coefficient so far.
    """

    def __init__(self, products: Products, needs: RequiresGrad, backend: str, once: bool = False):
        """``once``: each column is added once, with all rows, so that dWeight has its own dtype at once."""
        weight = products.trained
        self._dtype, device = stats_dtype(weight.dtype), weight.device
        self._products, self._backend, self._kernels = products, load(backend), hidden_kernels(backend)
        self._power: Tensor | None = None
        self._wide: Tensor | None = None
        dtype = weight.dtype if once else self._dtype
        # a sum that is rounded to the gradient's dtype is freed by the end of the backward
        memory = torch.empty if dtype == weight.dtype else used_memory
        self._weight = memory(weight.shape, dtype=dtype, device=device) if needs.weight else None
        self._bias = None
        if needs.bias:
            self._bias = torch.zeros(products.vocabulary, dtype=self._dtype, device=device)
        self._empty = True

    def clear(self) -> None:
        """Start both sums anew."""
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def operands(
        self, hidden: Tensor, coefficients: Tensor, factors: Tensor | None, active: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what multiplies rows, see ``GradientRows``: for dWeight their hidden states times their
        coefficients, and for dBias, if it is needed, the coefficients.
        """
        products, bound = self._products, MAX_IN_SUMS[self._dtype]
        unit = None
        if self._weight is not None and products.rows_dtype == torch.float16:
            unit = self._unit(coefficients, factors)
        if products.first_column:
            hidden = hidden[:, products.first_column :]
        dtype = products.operand_dtype
        operand = self._kernels.product_operand(hidden, coefficients, factors, active, unit, bound, dtype)
        if self._bias is None:
            return (operand,)
        share = coefficients.to(self._dtype).clamp(-bound, bound)
        return operand, share if factors is None else times(factors, share)

    def add(
        self,
        parts: tuple[Tensor, ...],
        ends: Tensor | None = None,
        block: Products | None = None,
        first: int = 0,
    ) -> None:
        """Add the gradients of rows, or of some of their columns.

        Args:
            parts: rows [n, V], and their ``operands``.
            ends: see ``Products.add_weight``.
            block, first: the products of the columns from ``first`` on, where rows have only these; all
                columns come, in order.
        """
        products = self._products if block is None else block
        last = first + products.vocabulary
        values, operand, *factors = parts
        if self._weight is not None:
            total = self._weight[first:last]
            if total.dtype == self._dtype or (products.writes_16_bits and self._power is None):
                products.add_weight(total, values, operand, self._empty, ends)
            else:
                self._add_rounded(products, total, values, operand)
        if self._bias is not None:
            products.add_bias(self._bias[first:last], values, factors[0], self._empty, ends)
        if last == self._products.vocabulary:
            self._empty = False
            if self._wide is not None:
                self._power = self._wide = None  # dWeight is rounded, and not in units

    def _add_rounded(self, products: Products, total: Tensor, values: Tensor, operand: Tensor) -> None:
        """Write the product of all rows to ``total``, rounded from fp32 some columns at a time."""
        width = min(len(total), ROUNDED_COLUMNS)
        if self._wide is None:
            self._wide = used_memory(torch.Size((width, total.shape[1])), self._dtype, total.device)
        for first in range(0, len(total), width):
            some = total[first : first + width]
            wide = self._wide[: len(some)]
            products.add_weight(wide, values[:, first : first + width], operand, True, None)
            some.copy_(wide if self._power is None else wide.mul_(self._power))

    def add_rests(
        self, rests: Tensor, labels: Tensor, operands: tuple[Tensor, ...], values: Tensor | None = None
    ) -> None:
        """Add what is missing in the rows of ``add`` at their labels, [n] each; equal labels in order.

        ``operands`` are those of the rows. dWeight in 16 bits, which one product has rounded, needs the rows
        in ``values``; None: it is left as it is.
        """
        at, weight = labels.clamp(0, self._products.vocabulary - 1), self._weight
        if weight is not None and weight.dtype == self._dtype:
            weight.index_put_((at,), operands[0] * rests.unsqueeze(1), accumulate=True)
        elif weight is not None and values is not None:
            # these rows of dWeight are multiplied again, so that they, too, are rounded once
            ordered, order = at.sort(stable=True)
            first = order[torch.searchsorted(ordered, at)]  # the first row with the same label
            exact = torch.empty_like(operands[0], dtype=self._dtype)
            self._products.add_weight(exact, values[:, at], operands[0], True, None)
            exact.index_put_((first,), operands[0] * rests.unsqueeze(1), accumulate=True)
            weight[at] = exact[first].to(weight.dtype)
        if self._bias is not None:
            self._bias.index_put_((at,), operands[1] * rests, accumulate=True)

    def _unit(self, coefficients: Tensor, factors: Tensor | None) -> Tensor:
        """Raise the unit of dWeight's sum to at least the largest factor of rows, and return it."""
        total, before, bound = self._weight, self._power, MAX_IN_SUMS[self._dtype]
        assert total is not None
        if before is None and not self._empty:
            before = torch.ones((), dtype=total.dtype, device=total.device)
        unit, shrink = self._kernels.sum_unit(coefficients, factors, before, bound, self._dtype)
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
            bound = MAX_IN_SUMS[total.dtype]
            factor = coefficient.to(total.dtype).clamp(-bound, bound)
            if self._empty and total is self._weight:
                torch.mul(other, factor, out=total)
            else:
                total.addcmul_(other, factor)
        self._empty = False

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dWeight and dBias."""
        if self._products.segments is not None:
            for piece, ends in self._products.segments.rest():
                self.add(piece, ends)
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
