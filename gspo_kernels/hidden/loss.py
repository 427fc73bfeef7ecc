"""The operator of a loss from hidden states: call, plan, one loop over the plan's steps.

The gradient is computed along with the loss. Coefficients follow from the log-probs of a whole group (one
sequence or several), so the gradient of a step can follow while its logits, or rows made of them, still
exist. The outer divisor is known beforehand from masks and lengths alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.arguments.terms import Terms, check_values
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.distributed.groups import sum_
from gspo_kernels.hidden.call import Decisions, call_of
from gspo_kernels.hidden.gradients import HeadGradients, save_gradients, take_gradients
from gspo_kernels.hidden.parts import parts_of, plan_of
from gspo_kernels.hidden.schedules import SCHEDULES, LossAccumulators, known_with_centering
from gspo_kernels.logits.centering import CenteringRows
from gspo_kernels.logits.logprobs import ScoredRows
from gspo_kernels.objectives.evaluate import metric_names


class LinearLoss(NamedTuple):
    """Loss and metrics as in ``PolicyStep``, log-probs, the entropy or an empty tensor, and the gradients."""

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradients: HeadGradients


@matrix_operator
def linear_policy(operands: LinearOperands, terms: Terms, decisions: Decisions) -> LinearLoss:
    """Return a hidden-state loss, its log-probs and its gradients."""
    return _run(operands, terms, decisions)


@matrix_operator
def linear_centered_policy(
    operands: LinearOperands, terms: Terms, decisions: Decisions, centering: CenteringRows
) -> LinearLoss:
    """Return the same for a loss with centering, with the schedule "known"."""
    return _run(operands, terms, decisions, centering)


def _run(
    operands: LinearOperands, terms: Terms, decisions: Decisions, centering: CenteringRows | None = None
) -> LinearLoss:
    call = call_of(operands, decisions if centering is None else None, whole_logits=centering is not None)
    terms = check_values(call.labels, terms)
    plan, terms = plan_of(call, terms, decisions)
    out = LossAccumulators(call, decisions, plan, terms, centering)
    for part in parts_of(call, terms, plan):
        schedule = SCHEDULES[part.step.schedule] if centering is None else known_with_centering
        schedule(call, part, out)
    out.sequence_sums = None  # whose memory the rounded dWeight may take
    step, (logprobs, _, entropy), loss = out.evaluation(), out.stats, None
    if centering is not None:
        centered = sum_(terms.cp_group, out.centered) if terms.cp_group else out.centered
        loss = (step.loss + centered).to(step.loss.dtype)
    if entropy is None:
        entropy = torch.empty(0, dtype=logprobs.dtype, device=logprobs.device)
    return LinearLoss(step.loss if loss is None else loss, step.metrics, logprobs, entropy, out.gradients())


@linear_policy.register_fake
@linear_centered_policy.register_fake
def _(operands: LinearOperands, terms: Terms, decisions: Decisions, *_: Any) -> LinearLoss:
    scored = ScoredRows.fake(operands.labels, operands.hidden.dtype, decisions.entropy)
    sums, entropy = stats_dtype(operands.hidden.dtype), scored.entropy if decisions.entropy else None
    return LinearLoss(
        scored.logprobs.new_empty((), dtype=sums),
        scored.logprobs.new_empty(len(metric_names(terms, entropy)), dtype=sums),
        scored.logprobs,
        scored.entropy,
        HeadGradients.fake(operands, decisions.requires_grad, normalised=True),
    )


class LinearPolicyFunction(torch.autograd.Function):
    """Loss, metrics, log-probs and entropy; the forward computes the gradients, too.

    The arguments are the operands (field by field), terms, decisions, whether the call is traced, and with
    centering its rows.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        operands, (terms, decisions, traced, *centering) = LinearOperands(*arguments[:7]), arguments[7:]
        call, operator = (operands, terms, decisions, *centering), linear_policy
        if centering:
            operator = linear_centered_policy
        result = operator(*call)
        ctx.others = 7 + len(centering)
        save_gradients(ctx, result.gradients, decisions.requires_grad, operator, call, traced)
        ctx.mark_non_differentiable(result.metrics, result.logprobs, result.entropy)
        return result.loss, result.metrics, result.logprobs, result.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        others = (None,) * ctx.others
        return (None, None, None, *others) if grad is None else (*take_gradients(ctx, grad), *others)
