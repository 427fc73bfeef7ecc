"""Operators: log-probs of hidden states and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.types import RowStats
from gspo_kernels.hidden.call import Call, LinearOperands
from gspo_kernels.hidden.gradients import Gradients, HeadGradients, is_active, recompute
from gspo_kernels.hidden.scores import Scores
from gspo_kernels.logits.logprobs import ScoredRows, save_rows, saved_rows
from gspo_kernels.logits.plan import RequiresGrad


@matrix_operator
def linear_logprobs_forward(operands: LinearOperands, entropy: bool) -> ScoredRows:
    """Return log-probs, log-sum-exp and entropy of hidden states at their labels."""
    call = Call(operands, whole_logits=False)
    call.make_room(call.row_count)
    scores = Scores(call, entropy)
    scores.forward(call.projected)
    return ScoredRows.of(scores.stats)


@linear_logprobs_forward.register_fake
def _(operands: LinearOperands, entropy: bool) -> ScoredRows:
    return ScoredRows.fake(operands.labels, operands.hidden.dtype, entropy)


@matrix_operator
def linear_logprobs_backward(
    operands: LinearOperands,
    needs: RequiresGrad,
    stats: RowStats,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    skip: bool,
) -> HeadGradients:
    """Return the gradients of hidden, weight and bias, from logits that are computed once more.

    ``skip`` leaves rows without gradient out of every product.
    """
    call = Call(operands, whole_logits=False)
    scores = Scores(call, False, stats)
    new_stats, where = False, call.projected
    if skip and call.products.min_rows_to_sync <= call.labels.numel():
        keep = is_active(grad_logprobs, grad_entropy) & call.counted
        new_stats = call.products.varies and not torch.equal(keep, call.counted)
        where = call.index(keep)
    grad = grad_logprobs.flatten()[where]
    call.make_room(len(grad))
    grad_entropy = None if grad_entropy is None else grad_entropy.flatten()[where]
    gradients = Gradients(call, needs, normalised=False, once=call.products.by_columns)
    recompute(scores, gradients, where, new_stats, grad, grad_entropy)
    return gradients.result()


@linear_logprobs_backward.register_fake
def _(operands: LinearOperands, needs: RequiresGrad, *_: Any) -> HeadGradients:
    return HeadGradients.fake(operands, needs, normalised=False)


class LinearTokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy; the backward recomputes the logits.

    The arguments are the operands (field by field), whether the entropy is computed, and ``skip`` as in
    ``linear_logprobs_backward``.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands, (entropy, skip) = LinearOperands(*arguments[:7]), arguments[7:]
        if operands.labels.is_cuda:
            operands = operands.with_count()
        scored = linear_logprobs_forward(operands, entropy)
        save_rows(ctx, operands.options, *operands[:4], operands.base, *scored)
        ctx.entropy, ctx.skip, ctx.chunking = entropy, skip, operands.chunking
        if not entropy:
            ctx.mark_non_differentiable(scored.entropy)
        return scored.logprobs, scored.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        (hidden, weight, bias, labels, base, logprobs, lse, entropy), options = saved_rows(ctx)
        nothing = (None,) * 6
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None, None, None, *nothing)
            grad_logprobs = torch.zeros_like(grad_entropy)
        needs = RequiresGrad(*ctx.needs_input_grad[:3])
        gradients = linear_logprobs_backward(
            LinearOperands(hidden, weight, bias, labels, options, ctx.chunking, base),
            needs,
            RowStats(logprobs, lse, entropy if ctx.entropy else None),
            grad_logprobs,
            grad_entropy,
            ctx.skip,
        )
        return (*needs.select(gradients.hidden, gradients.weight, gradients.bias), *nothing)
