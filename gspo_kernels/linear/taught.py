"""Operator: a hidden-state loss plus a divergence from a teacher, and the gradient of their sum.

Log-probs and divergences come from one projection on either side, and both gradients enter the products as
one row: together they take what a loss takes alone, and one product of the teacher's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.evaluate import metric_names
from gspo_kernels.linear.chunks import Call, Chunking, LinearOperands
from gspo_kernels.linear.held import Held, hold, released
from gspo_kernels.linear.run import Run
from gspo_kernels.linear.sums import Needs
from gspo_kernels.linear.two_heads import LinearTeacher, TaughtScores, TwoHeads
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.pairs import DivergenceForm
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.step import divergence_shares, take_divergence_step
from gspo_kernels.terms import Terms, check_values
from gspo_kernels.types import RowOptions, stats_dtype


class Lesson(NamedTuple):
    """Whom a student learns from, what is compared, and the schedule or "auto" of the objective beside it."""

    teacher: LinearTeacher
    form: DivergenceForm
    schedule: str


class LinearTaughtLoss(NamedTuple):
    """The sum and its two parts, the divergences' mean, the objective's metrics, log-probs, and the
    gradients.
    """

    loss: Tensor
    policy: Tensor
    divergence: Tensor
    mean: Tensor
    metrics: Tensor
    logprobs: Tensor
    held: Held


@operator
def linear_taught_policy(
    operands: LinearOperands, terms: Terms, lesson: Lesson, needs: Needs
) -> LinearTaughtLoss:
    """A hidden-state loss with a teacher, its log-probs and its gradients."""
    call = Call.of(operands)
    terms = check_values(operands.labels, terms)
    check_temperature(lesson.teacher.rows.row_temperature)
    heads = TwoHeads(call.check(), lesson.teacher)
    shares = divergence_shares(operands.labels, terms)
    scores = TaughtScores(heads, lesson.form, shares)
    # every row has a gradient
    run = Run(scores, terms, needs, skip=False)
    if not any(needs):
        run.forward()
    elif lesson.schedule == "known":
        run.known()
    elif lesson.schedule == "two_pass":
        run.two_pass()
    else:
        run.by_scopes(lesson.schedule, needs)
    scores.close()
    step = run.step()
    far = take_divergence_step(scores.divergences, shares, terms)
    return LinearTaughtLoss(
        step.loss + far.loss,
        step.loss,
        far.loss,
        far.mean,
        step.metrics,
        scores.stats.logprobs,
        Held.of(run.gradients),
    )


@linear_taught_policy.register_fake
def _(operands: LinearOperands, terms: Terms, lesson: Lesson, needs: Needs) -> LinearTaughtLoss:
    hidden, labels = operands.hidden, operands.labels
    sums = stats_dtype(hidden.dtype)
    loss, policy, divergence, mean = (hidden.new_empty((), dtype=sums) for _ in range(4))
    return LinearTaughtLoss(
        loss,
        policy,
        divergence,
        mean,
        hidden.new_empty(len(metric_names(terms, None)), dtype=sums),
        labels.new_empty(labels.shape, dtype=sums),
        Held.fake(operands, needs),
    )


class LinearTaughtFunction(torch.autograd.Function):
    """The first six of ``LinearTaughtLoss``; the forward already holds the loss's gradients."""

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
        lesson: Lesson,
        kept: bool,
    ) -> tuple[Tensor, ...]:
        needs = Needs.of(ctx, bias)
        arguments = (LinearOperands(hidden, weight, bias, labels, options, chunking), terms, lesson, needs)
        result = linear_taught_policy(*arguments)
        hold(ctx, result, linear_taught_policy, arguments, needs, options.backend, kept)
        ctx.mark_non_differentiable(*result[1:6])
        return tuple(result[:6])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        return (*released(ctx, grad), *(None,) * 6)
