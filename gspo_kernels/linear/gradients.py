"""Gradients of hidden states, weight and bias, summed over chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunk
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.products import fixed_product, multiply, transposed_product
from gspo_kernels.linear.scaling import bounded_for_sums, largest, power_of_two, times, times_
from gspo_kernels.linear.scores import Kept, Projected, Scores
from gspo_kernels.linear.segments import Segmented, Segments
from gspo_kernels.ops.backends import RowBackend
from gspo_kernels.types import stats_dtype


class Rows(NamedTuple):
    """What enters the gradient products: d logprob/dlogits is each row times its factor.

    Attributes:
        values: [n, V].
        factors: [n], or None for 1.
    """

    values: Tensor
    factors: Tensor | None

    def scaled(self, unit: Tensor) -> Tensor:
        """What is to multiply a product over ``values`` for coefficients ``unit`` [n]."""
        return unit if self.factors is None else times(self.factors, unit)


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


class HeadGradients(NamedTuple):
    """Gradients of hidden, weight and bias in their dtypes; empty where not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    def wanted(self, needs: Needs) -> tuple[Tensor | None, ...]:
        """None instead of those that nobody wants."""
        return tuple(grad if need else None for grad, need in zip(self, needs, strict=True))


class HeadSums:
    """dWeight [V, H] and dBias [V] summed over chunks, where they are wanted; in the statistics' dtype.

    dWeight is summed inside of the products. Their 16-bit operands must hold the coefficients: bf16 does; for
    fp16 the sum counts in a power of two, which grows with the largest coefficient so far.

    Of a head whose products are fixed, both are sums over segments of rows, in their order.
    """

    def __init__(self, head: Head, needs: Needs, backend: RowBackend):
        dtype, device = stats_dtype(head.weight.dtype), head.weight.device
        self._head, self._backend = head, backend
        self._power: Tensor | None = None
        self._weight = torch.empty(head.weight.shape, dtype=dtype, device=device) if needs.weight else None
        self._bias = torch.zeros(head.vocabulary, dtype=dtype, device=device) if needs.bias else None
        self._empty = True
        self._segments = Segments(head.rows_in_step) if head.fixed else None

    def clear(self) -> None:
        """Begin anew."""
        assert self._segments is None
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def add(
        self, rows: Rows, hidden: Tensor, coefficients: Tensor, active: Tensor, ranks: Tensor | None = None
    ) -> None:
        """Add those of rows times ``coefficients`` [n], with hidden states [n, H]; ``ranks`` [n], ascending,
        are those of ``Call.ranks``, where products are fixed.
        """
        values, factors = rows.values, rows.scaled(bounded_for_sums(coefficients))
        if self._segments is not None:
            assert ranks is not None
            if self._weight is not None or self._bias is not None:
                operand = self._operand(hidden, factors, active, values.dtype)
                for segmented in self._segments.cut((values, operand, factors), ranks):
                    self._add_segments(segmented)
            return
        if self._weight is not None:
            shares = self._in_units(factors) if values.dtype == torch.float16 else factors
            self._multiply(values.t(), self._operand(hidden, shares, active, values.dtype))
        if self._bias is not None:
            self._add_bias(values, factors)
        self._empty = False

    def _operand(self, hidden: Tensor, factors: Tensor, active: Tensor, dtype: torch.dtype) -> Tensor:
        """Hidden states times factors, as the products take them."""
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

    def _in_units(self, factors: Tensor) -> Tensor:
        """Factors as multiples of what dWeight counts in, once that is as large as the largest of them."""
        scale = power_of_two(largest(factors))
        if not self._empty:
            before = torch.ones_like(scale) if self._power is None else self._power
            scale = torch.maximum(before, scale)
            assert self._weight is not None
            self._backend.scale_(self._weight, before / scale)  # costs nothing where it stays
        self._power = scale
        return factors / scale

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


def _nothing() -> None:
    """What is left to do where nothing was begun."""


class Gradients:
    """dHidden, dWeight and dBias of a chunked call.

    Attributes:
        hidden: [B, T, H] in hidden's dtype, or None.
        scales: None, or one for each row in the statistics' dtype: dHidden is ``scales * hidden``. Rows of
            ``hidden`` are then normalised by powers of two, so that fp16 loses nothing whatever the
            coefficients.
        sums: of dWeight and dBias.
    """

    def __init__(self, call: Call, needs: Needs, normalised: bool):
        hidden = call.hidden
        self.call, self.backend = call, call.backend
        self.hidden = (
            torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs.hidden else None
        )
        self.accumulate = stats_dtype(hidden.dtype)
        self.scales = hidden.new_ones(hidden.shape[:-1], dtype=self.accumulate) if normalised else None
        self.needs = needs
        self.sums = HeadSums(call.head, needs, self.backend)

    def add(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor,
        grad_entropy: Tensor | None,
        skip: bool,
    ) -> None:
        """Add one chunk, given its coefficients; overwrites its logits.

        Args:
            projected: of the chunk.
            chunk: the rows.
            grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy, [n], or None.
            skip: leave rows without gradient out of the products.
        """
        active = grad != 0
        if grad_entropy is not None:
            active = active | (grad_entropy != 0)
        keep = self.call.index(active) if skip else None
        if isinstance(keep, Tensor):
            if keep.numel() == 0:
                return
            kept = Kept.of(keep, len(chunk), self.call.head.fixed)
            keep = kept.rows
            projected, chunk, grad = projected.select(kept), chunk.select(keep), grad[keep]
            active = active[keep]
            grad_entropy = None if grad_entropy is None else grad_entropy[keep]
        if grad_entropy is None:
            self.add_rows(self.rows(projected, chunk), chunk, grad, active)
            return
        # a row then has two coefficients, so they go into the rows themselves
        scale = power_of_two(torch.maximum(grad.abs(), grad_entropy.abs()).to(self.accumulate))
        rows = self._write(projected, chunk, grad / scale, grad_entropy / scale, None)
        self.add_rows(Rows(rows, None), chunk, scale, active)

    def rows(self, projected: Projected, chunk: Chunk, out: Tensor | None = None) -> Rows:
        """What enters the gradient products, in ``out`` or, where it fits, in the memory of the logits."""
        if projected.factors is not None:
            return Rows(projected.values, projected.factors)
        ones = projected.stats.logprobs.new_ones(()).expand(len(chunk))
        return Rows(self._write(projected, chunk, ones, None, out), None)

    def _write(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor,
        grad_entropy: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """d(grad * logprob + grad_entropy * entropy)/dlogits."""
        assert projected.factors is None
        logits = projected.values
        rows = self.call.rows_memory(logits, out)
        self.backend.logprobs_backward(
            logits.unsqueeze(0),
            chunk.labels,
            projected.stats.each(lambda stat: stat.unsqueeze(0)),
            grad.unsqueeze(0),
            None if grad_entropy is None else grad_entropy.unsqueeze(0),
            None,
            chunk.transform,
            ignore_index=self.call.options.ignore_index,
            out=rows.unsqueeze(0),
        )
        return rows

    def add_rows(self, rows: Rows, chunk: Chunk, coefficients: Tensor, active: Tensor) -> None:
        """Add rows times coefficients [n], the inactive ones of which are zero."""
        coefficients = coefficients.to(self.accumulate)
        finish = self.begin_hidden(rows, chunk, coefficients)
        ranks = self.call.ranks[chunk.where] if self.call.head.fixed else None
        # between ranks dHidden is under way meanwhile
        self.sums.add(rows, chunk.hidden, coefficients, active, ranks)
        finish()

    def add_hidden(self, rows: Rows, chunk: Chunk, coefficients: Tensor) -> None:
        """Add the dHidden of rows times coefficients [n]; no row's depends on another's."""
        self.begin_hidden(rows, chunk, coefficients)()

    def begin_hidden(self, rows: Rows, chunk: Chunk, coefficients: Tensor) -> Callable[[], None]:
        """``add_hidden`` up to what ranks exchange; what is left to do."""
        if self.hidden is None:
            return _nothing
        values = self.call.head.grad_hidden(rows.values)
        if self.call.head.fixed:
            # as where a coefficient comes late: the whole of it multiplies last
            scale = rows.scaled(coefficients)
        else:
            scale = power_of_two(coefficients)
            values = times_(values, rows.scaled(coefficients / scale).unsqueeze(1))
        values, works = self.call.summed(values, chunk.where)

        def finish() -> None:
            for work in works:
                work.wait()
            self._store_hidden(values, scale, chunk.where)

        return finish

    def _store_hidden(self, values: Tensor, scale: Tensor, where: slice | Tensor) -> None:
        """Put values times ``scale`` [n] where they belong."""
        assert self.hidden is not None
        own, where = self.call.own_rows(where)
        scale = scale[own]
        if self.scales is None:
            scale = scale.unsqueeze(1)
            values = times_(values, scale) if self.call.head.fixed else values.mul_(scale)
        else:
            power = power_of_two(largest(values, 1))
            values.div_(power.unsqueeze(1))
            self.scales.view(-1)[where] = power * scale
        self.hidden.view(-1, values.shape[1])[where] = values.to(self.hidden.dtype)

    def result(self) -> HeadGradients:
        """The gradients in the parameters' dtypes."""
        head, hidden = self.call.head, self.call.hidden
        weight, bias = self.sums.result()
        # one empty tensor each: an operator's outputs may not be the same tensor
        return HeadGradients(
            hidden.new_empty(0) if self.hidden is None else self.hidden,
            hidden.new_empty(0) if weight is None else weight.to(head.weight.dtype),
            hidden.new_empty(0) if bias is None or head.bias is None else bias.to(head.bias.dtype),
        )


def recompute(
    scores: Scores,
    gradients: Gradients,
    index: slice | Tensor,
    anew: bool,
    grad: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Project the rows at ``index`` once more and add their gradient.

    Args:
        scores: with the statistics of the first pass.
        gradients: to add to.
        index: positions of the rows with a gradient.
        anew: take the statistics anew: a product over other rows may round otherwise, and exp(z - lse) of a
            peaked row shows the last bit of z.
        grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy of all rows, flat, or None.
    """
    for chunk in scores.call.chunks(index):
        if anew:
            projected = scores.score(chunk, grad_entropy is not None)
        else:
            projected = Projected(scores.logits(chunk), scores.at(chunk.where))
        entropy = None if grad_entropy is None else grad_entropy[chunk.where]
        gradients.add(projected, chunk, grad[chunk.where], entropy, skip=False)
        del projected
