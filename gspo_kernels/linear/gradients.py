"""Gradients of hidden states, weight and bias, summed over chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunk
from gspo_kernels.linear.scaling import largest, power_of_two, times_
from gspo_kernels.linear.scores import Kept, Projected, Scores
from gspo_kernels.linear.sums import HeadSums, Needs, Rows, Weights
from gspo_kernels.types import stats_dtype


class HeadGradients(NamedTuple):
    """Gradients of hidden, weight and bias in their dtypes; empty where not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    def wanted(self, needs: Needs) -> tuple[Tensor | None, ...]:
        """None instead of those that nobody wants."""
        return tuple(grad if need else None for grad, need in zip(self, needs, strict=True))


def _nothing() -> None:
    """What is left to do where nothing was begun."""


def active(grad: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Bool: which rows have a gradient."""
    return grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)


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
        self.call, self.backend, self._launches = call, call.backend, call.launches
        self.hidden = (
            torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs.hidden else None
        )
        self.accumulate = stats_dtype(hidden.dtype)
        self.scales = hidden.new_ones(hidden.shape[:-1], dtype=self.accumulate) if normalised else None
        self.needs = needs
        self.sums = HeadSums(call.head, needs, call.options.backend)

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
        moving = None
        if skip or self._launches is None or grad_entropy is not None:
            moving = active(grad, grad_entropy)
            keep = self.call.index(moving) if skip else None
            if isinstance(keep, Tensor):
                if keep.numel() == 0:
                    return
                kept = Kept.of(keep, len(chunk), self.call.head.fixed)
                keep = kept.rows
                projected, chunk, grad = projected.select(kept), chunk.select(keep), grad[keep]
                moving = moving[keep]
                grad_entropy = None if grad_entropy is None else grad_entropy[keep]
        if grad_entropy is None:
            self.add_rows(self.rows(projected, chunk), chunk, Weights(grad, moving))
            return
        # a row then has two coefficients, so they go into the rows themselves
        scale = power_of_two(torch.maximum(grad.abs(), grad_entropy.abs()).to(self.accumulate))
        if moving is None:
            moving = active(grad, grad_entropy)
        values = self._write(projected, chunk, (grad / scale, grad_entropy / scale))
        self.add_rows(Rows(values, None), chunk, Weights(scale, moving))

    def rows(self, projected: Projected, chunk: Chunk) -> Rows:
        """What enters the gradient products, where it fits in the memory of the logits."""
        if projected.written:
            return Rows(projected.values, projected.factors)
        return Rows(self._write(projected, chunk, (self.ones(len(chunk)), None)), None)

    def ones(self, count: int) -> Tensor:
        """Ones [count], all in one place of memory."""
        return self._one.expand(count)

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones((), dtype=self.accumulate, device=self.call.hidden.device)

    def _write(
        self,
        projected: Projected,
        chunk: Chunk,
        grads: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """d(grad * logprob + grad_entropy * entropy)/dlogits."""
        assert not projected.written
        logits = projected.values
        values = self.call.rows_memory(logits)
        grad, grad_entropy = (None if each is None else each.unsqueeze(0) for each in grads)
        assert grad is not None
        stats = projected.stats.each(lambda stat: stat.unsqueeze(0))
        given = (logits.unsqueeze(0), chunk.labels, stats)
        ignore_index = self.call.options.ignore_index
        self.backend.logprobs_backward(
            *given,
            grad,
            grad_entropy,
            None,
            chunk.transform,
            ignore_index=ignore_index,
            out=values.unsqueeze(0),
        )
        return values

    def add_rows(self, rows: Rows, chunk: Chunk, weights: Weights) -> None:
        """Add rows times their weights."""
        finish = self.begin_hidden(rows, chunk, weights)
        ranks = self.call.ranks[chunk.where] if self.call.head.fixed else None
        # between ranks dHidden is under way meanwhile
        self.sums.add(rows, chunk.hidden, weights, ranks)
        finish()

    def add_hidden(self, rows: Rows, chunk: Chunk, weights: Weights) -> None:
        """Add the dHidden of rows times their weights; no row's depends on another's."""
        self.begin_hidden(rows, chunk, weights)()

    def begin_hidden(self, rows: Rows, chunk: Chunk, weights: Weights) -> Callable[[], None]:
        """``add_hidden`` up to what ranks exchange; what is left to do."""
        if self.hidden is None:
            return _nothing
        values, works = self.call.summed(self.call.head.grad_hidden(rows.values), chunk.where)

        def finish() -> None:
            for work in works:
                work.wait()
            own, where = self.call.own_rows(chunk.where)
            factors = None if rows.factors is None else rows.factors[own]
            self._store_hidden(Rows(values, factors), weights.coefficients[own], where)

        return finish

    def _store_hidden(self, rows: Rows, coefficients: Tensor, where: slice | Tensor) -> None:
        """Put rows of dHidden times their coefficients where they belong.

        Of batch-invariant products the whole coefficient multiplies last, as one that comes late does.
        """
        assert self.hidden is not None
        values, last = rows.values, self.call.head.fixed
        hidden, scales = self.hidden.view(-1, values.shape[1]), self.scales
        if self._launches is not None:
            flat = None if scales is None else scales.view(-1)
            self._launches.store_hidden(values, coefficients, rows.factors, where, hidden, flat, last)
            return
        coefficients = coefficients.to(self.accumulate)
        if last:
            scale = rows.scaled(coefficients)
        else:
            scale = power_of_two(coefficients)
            values = times_(values, rows.scaled(coefficients / scale).unsqueeze(1))
        if scales is None:
            scale = scale.unsqueeze(1)
            values = times_(values, scale) if last else values.mul_(scale)
        else:
            power = power_of_two(largest(values, 1))
            values.div_(power.unsqueeze(1))
            scales.view(-1)[where] = power * scale
        hidden[where] = values.to(hidden.dtype)

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
        grad, grad_entropy: their dLoss/dlogprobs and dLoss/dentropy, or None.
    """
    known, done = None if anew else scores.at(index), 0
    for chunk in scores.call.chunks(index):
        now = slice(done, done + len(chunk))
        if known is None:
            projected = scores.score(chunk, grad_entropy is not None, settled=True)
        else:
            projected = Projected(scores.logits(chunk), known.each(lambda stat: stat[now]))  # noqa: B023
        entropy = None if grad_entropy is None else grad_entropy[now]
        gradients.add(projected, chunk, grad[now], entropy, skip=False)
        done = now.stop
        del projected
