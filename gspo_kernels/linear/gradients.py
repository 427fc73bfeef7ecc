"""Gradients of hidden states, weight and bias: summed over chunks, and kept until the backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.exact import power_of_two, times
from gspo_kernels.linear.call import Call, LinearOperands
from gspo_kernels.linear.chunk import Chunk, Projected, compacted
from gspo_kernels.linear.scores import Scores
from gspo_kernels.linear.sums import GradientRows, HeadSums
from gspo_kernels.ops.backends import hidden_kernels, load
from gspo_kernels.ops.library import Operator
from gspo_kernels.parallel.groups import begin_sum_
from gspo_kernels.plan import RequiresGrad
from gspo_kernels.torch_internals import refuse_second_derivatives
from gspo_kernels.types import RowGradients, stats_dtype

if TYPE_CHECKING:  # not every build of PyTorch has it
    from torch.distributed import Work


class HeadGradients(NamedTuple):
    """Gradients of hidden, weight and bias as an operator returns them; empty where not needed.

    A loss's forward computes these for an upstream gradient of 1, and not yet in the parameters' dtypes.

    Attributes:
        hidden: [B, T, H] in hidden's dtype.
        scales: [B, T], factors on ``hidden``, see ``Gradients``; empty where there are none.
        weight, bias: [V, H] and [V]; in the statistics' dtype where there are scales, otherwise in hidden's.
    """

    hidden: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def fake(cls, operands: LinearOperands, needs: RequiresGrad, normalised: bool) -> HeadGradients:
        """Return tensors of the right shapes and dtypes without values, for tracing."""
        hidden, weight = operands.hidden, operands.weight
        dtype = stats_dtype(hidden.dtype) if normalised else hidden.dtype
        return cls(
            hidden.new_empty(hidden.shape) if needs.hidden else hidden.new_empty(0, dtype=dtype),
            hidden.new_empty(hidden.shape[:-1] if normalised else 0, dtype=dtype),
            weight.new_empty(weight.shape if needs.weight else 0, dtype=dtype),
            weight.new_empty(weight.shape[0] if needs.bias else 0, dtype=dtype),
        )


class Gradients:
    """dHidden, dWeight and dBias of a chunked call.

    Attributes:
        hidden: [B, T, H] in hidden's dtype, or None.
        scales: None, or a factor per row in the statistics' dtype: dHidden is ``scales * hidden``. Rows of
            ``hidden`` are then normalised by powers of two, so that fp16 loses nothing whatever the
            coefficients.
        sums: the sums of dWeight and dBias.
        dtype: the dtype of sums and scales, which is the statistics'.
        one: 0-d, 1 in that dtype.
    """

    def __init__(self, call: Call, needs: RequiresGrad, normalised: bool, all_rows: bool = False):
        """``all_rows``: a gradient of every row will be stored."""
        self.call, self.needs, hidden = call, needs, call.hidden
        self.dtype, shape, device = stats_dtype(hidden.dtype), hidden.shape, hidden.device
        self.hidden = self.scales = None
        if needs.hidden:
            self.hidden = (torch.empty if all_rows else torch.zeros)(shape, dtype=hidden.dtype, device=device)
        if normalised:
            stored = all_rows and needs.hidden
            self.scales = (torch.empty if stored else torch.ones)(shape[:-1], dtype=self.dtype, device=device)
        self.sums = HeadSums(call.products, needs, call.options.backend)
        self.one = torch.ones((), dtype=self.dtype, device=device)

    def add(
        self, projected: Projected, chunk: Chunk, grad: Tensor, grad_entropy: Tensor | None, skip: bool
    ) -> None:
        """Add the gradients of a chunk, from its coefficients; overwrites its logits.

        Args:
            projected: the chunk's logits or rows, and its statistics.
            chunk: the rows.
            grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy, [n], or None.
            skip: leave rows without gradient out of the products.
        """
        active = is_active(grad, grad_entropy) if skip or grad_entropy is not None else None
        invariant = self.call.chunking.batch_invariant
        kept = compacted(active, invariant) if active is not None and skip else None
        if active is not None and kept is not None:
            rows, gaps = kept
            if not rows.numel():
                return
            projected, chunk = projected.select(rows, gaps), chunk.select(rows)
            active, grad = active[rows], grad[rows]
            grad_entropy = None if grad_entropy is None else grad_entropy[rows]
        self.add_rows(self.rows(projected, chunk, grad, grad_entropy, active), chunk)

    def rows(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        active: Tensor | None = None,
    ) -> GradientRows:
        """Return the rows of the gradient products for dLoss/dlogprobs (None: ones) and dLoss/dentropy, [n]
        each, in the memory of the logits if they fit there.
        """
        ones = self.one.expand(chunk.size)
        coefficients = ones if grad is None else grad
        if projected.written:
            assert grad_entropy is None
            return GradientRows(projected.values, coefficients, projected.factors, active)
        of_logprobs, of_entropy = ones, None
        if grad_entropy is not None:
            # a row then has two coefficients, so they go into the row itself
            both = torch.maximum(coefficients.abs(), grad_entropy.abs())
            scale = power_of_two(both.to(self.dtype))
            of_logprobs, of_entropy = coefficients / scale, (grad_entropy / scale).unsqueeze(0)
            coefficients = scale
        values = self.call.products.rows_memory(projected.values)
        grads, rows = RowGradients(of_logprobs.unsqueeze(0), of_entropy), chunk.rows(projected.values)
        self.call.products.backend.logprobs_backward(rows, projected.stats, grads, values.unsqueeze(0))
        return GradientRows(values, coefficients, None, active)

    def add_rows(self, rows: GradientRows, chunk: Chunk, sums: HeadSums | None = None) -> None:
        """Add the gradient products of rows. Those of weight and bias go to ``sums``; None: to ``self.sums``.

        Ranks sum dHidden while dWeight is multiplied. In batch-invariant calls the whole coefficient
        multiplies dHidden last, as in ``scale``.
        """
        call = self.call
        works: list[Work] = []
        if self.hidden is not None:
            values = call.products.grad_hidden(rows.values)
            group = call.options.shard.group if call.chunking.reduce_hidden_grad else ""
            if group and call.tokens is not None:
                values, works = call.tokens.reduce(values, chunk.where)
            elif group:
                works = [begin_sum_(group, values)]
        (self.sums if sums is None else sums).add(rows, chunk.hidden, chunk.where, call.labels)
        if self.hidden is None:
            return
        for work in works:
            work.wait()
        where, coefficients, factors = chunk.where, rows.coefficients, rows.factors
        if call.tokens is not None:
            # this rank has the hidden states of only some rows
            local, where = call.tokens.own_rows(where, call.labels.device)
            coefficients, factors = coefficients[local], None if factors is None else factors[local]
        hidden = self.hidden.view(-1, values.shape[1])
        scales = None if self.scales is None else self.scales.view(-1)
        call.hidden_kernels.store_hidden(
            values, coefficients, factors, where, hidden, scales, call.chunking.batch_invariant
        )

    def scale(self, where: slice | Tensor, coefficients: Tensor) -> None:
        """Multiply rows of dHidden, at some positions, by coefficients that were not known before."""
        assert self.scales is not None
        if self.call.tokens is not None:
            local, where = self.call.tokens.own_rows(where, self.call.labels.device)
            coefficients = coefficients[local]
        if isinstance(where, slice):
            self.scales.view(-1)[where].mul_(coefficients)
        else:
            self.scales.view(-1)[where] *= coefficients

    def result(self) -> HeadGradients:
        """Return the gradients as an operator returns them."""
        hidden, sums = self.call.hidden, self.sums.result()
        dtype = hidden.dtype if self.scales is None else self.dtype
        weight, bias = (None if total is None else total.to(dtype) for total in sums)
        # one empty tensor each: an operator's outputs may not be the same tensor
        computed = (self.hidden, self.scales, weight, bias)
        empty = functools.partial(torch.empty, 0, dtype=dtype, device=hidden.device)
        return HeadGradients(*(empty() if x is None else x for x in computed))


def is_active(grad: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Return which rows have a gradient, as bool."""
    return grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)


def recompute(
    scores: Scores,
    gradients: Gradients,
    where: slice | Tensor,
    new_stats: bool,
    grad: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Project rows once more and add their gradient.

    Args:
        scores: with the statistics of the first pass.
        gradients: where the gradient is added.
        where: positions of the rows with a gradient.
        new_stats: compute the statistics once more: a product over other rows may round differently, and
            exp(z - lse) of a peaked row shows the last bit of z.
        grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy of these rows, [n], or None.
    """
    products, done = scores.call.products, 0
    for chunk in scores.call.chunks(where):
        now = slice(done, done + chunk.size)
        entropy = None if grad_entropy is None else grad_entropy[now]
        if new_stats:
            projected = products.project(chunk, entropy is not None, all_rows_active=True, compared=False)
        else:
            projected = Projected(products.logits_of(chunk), scores.at(chunk.where))
        gradients.add(projected, chunk, grad[now], entropy, skip=False)
        done = now.stop
        del projected


def save_gradients(
    ctx: Any,
    gradients: HeadGradients,
    needs: RequiresGrad,
    operator: Operator,
    arguments: tuple[Any, ...],
    traced: bool,
) -> None:
    """Save gradients in an autograd context for ``take_gradients``, and, unless the call is traced, the
    operator and arguments that computed them. The first argument is ``LinearOperands``.
    """
    operands: LinearOperands = arguments[0]
    ctx.needs, ctx.dtype, ctx.backend = needs, operands.hidden.dtype, operands.options.backend
    ctx.traced, ctx.saved, ctx.operator = traced, None, None
    ctx.set_materialize_grads(False)
    if traced:
        ctx.save_for_backward(*gradients)
    else:
        ctx.saved, ctx.operator = gradients, operator
        operator.save(ctx, *arguments)


def take_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias for an upstream gradient, None where not needed.

    The first backward scales the forward's gradients in place and gives them away; later ones
    (``retain_graph``) compute them again. A traced call keeps them and scales out of place.
    """
    if torch.is_grad_enabled():
        refuse_second_derivatives()
    needs: RequiresGrad = ctx.needs
    dtype = ctx.dtype
    if ctx.traced:
        hidden, scales, *sums = ctx.saved_tensors
        if hidden.numel():
            hidden = times(hidden, (scales * upstream).unsqueeze(-1)).to(dtype)
        return needs.select(hidden, *((total * upstream).to(dtype) for total in sums))
    saved, ctx.saved = ctx.saved, None
    if saved is None:
        saved = ctx.operator.repeat(ctx).gradients
    hidden, scales, *sums = saved
    gradients = []
    for total in sums:
        if total.numel():
            load(ctx.backend).scale_(total, upstream)
        gradients.append(total.to(dtype))
    if hidden.numel():
        hidden_kernels(ctx.backend).scale_rows_(hidden, scales, upstream)
    return needs.select(hidden, *gradients)
