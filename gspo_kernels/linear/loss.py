"""Operator: a hidden-state loss and its gradient, computed together."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.evaluate import metric_names
from gspo_kernels.linear.chunks import Call, Chunking, LinearOperands
from gspo_kernels.linear.held import Held, hold, released
from gspo_kernels.linear.run import Run
from gspo_kernels.linear.scores import Scores
from gspo_kernels.linear.sums import Needs
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import ScoredRows
from gspo_kernels.terms import Terms, check_values
from gspo_kernels.types import RowOptions, stats_dtype


class Settings(NamedTuple):
    """How a call is worked through: a schedule or "auto", whether the entropy is kept, and whether rows
    without gradient are left out of products.
    """

    schedule: str
    entropy: bool
    skip: bool


class LinearLoss(NamedTuple):
    """Loss and metrics as in ``PolicyStep``, log-probs, the entropy or an empty tensor, and the gradients."""

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor
    held: Held


@operator
def linear_policy(operands: LinearOperands, terms: Terms, settings: Settings, needs: Needs) -> LinearLoss:
    """A hidden-state loss, its log-probs and its gradients."""
    terms = check_values(operands.labels, terms)
    call = Call.of(operands).check()
    run = Run(Scores(call, settings.entropy), terms, needs, settings.skip)
    if settings.schedule == "known":
        run.known()
    else:
        run.by_scopes(settings.schedule, needs)
    scored = ScoredRows.of(run.scores.stats)
    run.scores.close()
    step = run.step()
    return LinearLoss(step.loss, step.metrics, scored.logprobs, scored.entropy, Held.of(run.gradients))


@linear_policy.register_fake
def _(operands: LinearOperands, terms: Terms, settings: Settings, needs: Needs) -> LinearLoss:
    scored = ScoredRows.fake(operands.labels, operands.hidden.dtype, settings.entropy)
    sums, entropy = stats_dtype(operands.hidden.dtype), scored.entropy if settings.entropy else None
    return LinearLoss(
        scored.logprobs.new_empty((), dtype=sums),
        scored.logprobs.new_empty(len(metric_names(terms, entropy)), dtype=sums),
        scored.logprobs,
        scored.entropy,
        Held.fake(operands, needs),
    )


class LinearPolicyFunction(torch.autograd.Function):
    """Loss, metrics, log-probs and entropy; the forward already holds the loss's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: RowOptions,
        chunking: Chunking,
        terms: Terms,
        settings: Settings,
        kept: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs = Needs.of(ctx, bias)
        arguments = (LinearOperands(hidden, weight, bias, labels, options, chunking), terms, settings, needs)
        result = linear_policy(*arguments)
        hold(ctx, result, linear_policy, arguments, needs, options.backend, kept)
        ctx.mark_non_differentiable(result.metrics, result.logprobs, result.entropy)
        return result.loss, result.metrics, result.logprobs, result.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        return (*released(ctx, grad), *(None,) * 6)
