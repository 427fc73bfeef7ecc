"""Gradients of weight and bias, summed over chunks, and the rows that enter these sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.exact import MAX_IN_SUMS, times
from gspo_kernels.linear.products import Products
from gspo_kernels.ops.backends import hidden_kernels, load
from gspo_kernels.ops.memory import used_memory
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
    """

    def __init__(self, products: Products, needs: RequiresGrad, backend: str):
        weight = products.trained
        self._dtype, device = stats_dtype(weight.dtype), weight.device
        self._products, self._backend, self._kernels = products, load(backend), hidden_kernels(backend)
        self._power: Tensor | None = None
        # a sum that is rounded to the gradient's dtype is freed by the end of the backward
        memory = torch.empty if self._dtype == weight.dtype else used_memory
        self._weight = memory(weight.shape, dtype=self._dtype, device=device) if needs.weight else None
        self._bias = None
        if needs.bias:
            self._bias = torch.zeros(products.vocabulary, dtype=self._dtype, device=device)
        self._empty = True

    def clear(self) -> None:
        """Start both sums anew."""
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def add(self, rows: GradientRows, hidden: Tensor, where: slice | Tensor, labels: Tensor) -> None:
        """Add the gradients from rows with hidden states [n, H], at the positions ``where`` in a call with
        ``labels`` [B, T].
        """
        if self._weight is None and self._bias is None:
            return
        products, kernels, bound = self._products, self._kernels, MAX_IN_SUMS[self._dtype]
        values, coefficients, factors, active = rows
        unit = None
        if self._weight is not None and values.dtype == torch.float16:
            unit = self._unit(rows)
        if products.first_column:
            hidden = hidden[:, products.first_column :]
        dtype = products.operand_dtype
        operand = kernels.product_operand(hidden, coefficients, factors, active, unit, bound, dtype)
        parts: tuple[Tensor, ...] = (values, operand)
        if self._bias is not None:
            # what multiplies the rows
            share = coefficients.to(self._dtype).clamp(-bound, bound)
            parts = (*parts, share if factors is None else times(factors, share))
        if products.segments is None:
            self._add(parts, None)
            return
        for piece, ends in products.segments.cut(parts, where, labels):
            self._add(piece, ends)

    def _add(self, parts: tuple[Tensor, ...], ends: Tensor | None) -> None:
        values, operand, *factors = parts
        if self._weight is not None:
            self._products.add_weight(self._weight, values, operand, self._empty, ends)
        if self._bias is not None:
            self._products.add_bias(self._bias, values, factors[0], self._empty, ends)
        self._empty = False

    def _unit(self, rows: GradientRows) -> Tensor:
        """Raise the unit of dWeight's sum to at least the rows' largest factor, and return it."""
        total, before, bound = self._weight, self._power, MAX_IN_SUMS[self._dtype]
        assert total is not None
        if before is None and not self._empty:
            before = torch.ones((), dtype=total.dtype, device=total.device)
        unit, shrink = self._kernels.sum_unit(rows.coefficients, rows.factors, before, bound, total.dtype)
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
                self._add(piece, ends)
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
