"""A policy step by whatever does it soonest, as one opaque operator.

Steps that are a clipped sequence ratio and nothing else take one launch of the backend; ``policy.evaluate``
says the same of every objective, in a few hundred small operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import Objective, from_spec
from gspo_kernels.ops.backends import SequenceRatioBackend, load
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.sequence_ratio import has_single_launch
from gspo_kernels.policy import (
    TERMS,
    PolicyStep,
    PolicyTerms,
    check_term_values,
    evaluate,
    metric_names,
    outer_total,
    token_mean,
)
from gspo_kernels.types import ClippedSequenceRatio, stats_dtype


def sequence_form(objective: Objective, terms: PolicyTerms, backend: str) -> ClippedSequenceRatio | None:
    """The form in which ``backend`` can serve a step of the objective; None where a term goes beyond it."""
    beyond = (terms.ref_logprobs, terms.token_weights, terms.kl_beta, terms.entropy_coef, terms.token_shares)
    if any(term is not None for term in beyond) or not has_single_launch(backend):
        return None
    return objective.sequence_ratio_form()


class SequenceOperands(NamedTuple):
    """What the backend takes besides log-probs and mask, in its order."""

    old_logprobs: Tensor | None
    advantages: Tensor
    sequence_weights: Tensor | None
    lengths: Tensor | None
    normalizer: Tensor | None
    cu_seqlens: Tensor | None


def sequence_operands(tokens: Tensor, terms: PolicyTerms) -> SequenceOperands:
    """The terms as operands; ``tokens`` gives shape and device, ``terms.loss_mask`` what counts."""
    weights, normalizer = terms.rollout_weights, terms.normalizer
    assert terms.loss_mask is not None and terms.advantages is not None
    if weights is not None and weights.ndim == 2:
        layout, counted = layout_of(tokens, terms.cu_seqlens), terms.loss_mask != 0
        counts = layout.sum(counted.to(torch.float64)).clamp(min=1)
        weights = layout.sum(torch.where(counted, weights.double(), 0.0)) / counts
    if terms.skipped is not None:
        # they have no log-probs, but they are in the divisor
        normalizer = outer_total(tokens, terms.loss_mask != 0, terms)
    if normalizer is not None:
        normalizer = normalizer.to(tokens.device)
    return SequenceOperands(
        terms.old_logprobs, terms.advantages, weights, terms.lengths, normalizer, terms.cu_seqlens
    )


def policy_step(
    logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, backend: str, want_metrics: bool = True
) -> PolicyStep:
    """``policy.evaluate``, or one launch of the backend where it has one for the terms; only in operators."""
    form = sequence_form(from_spec(terms.objective), terms, backend)
    if form is None:
        return evaluate(logprobs, entropy, terms, want_metrics)
    layout = layout_of(logprobs, terms.cu_seqlens)
    counted = torch.ones_like(logprobs, dtype=torch.bool) if terms.loss_mask is None else terms.loss_mask != 0
    present = counted if terms.skipped is None else counted & ~layout.expand(terms.skipped)
    logprobs = logprobs.to(stats_dtype(logprobs.dtype)).contiguous()
    step = cast(SequenceRatioBackend, load(backend)).sequence_ratio_step(
        logprobs,
        present,
        form=form,
        **sequence_operands(logprobs, terms._replace(loss_mask=counted))._asdict(),
    )
    grad = torch.where(present, layout.expand(step.coefficients / step.divisor), 0.0)
    metrics = step.metrics
    if entropy is not None and want_metrics:
        metrics = torch.cat([metrics, token_mean(entropy, present).to(metrics.dtype).reshape(1)])
    return PolicyStep(step.loss, grad, logprobs.new_empty(0), metrics)


@operator(
    f"policy_step(Tensor logprobs, Tensor? entropy, str backend, {TERMS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def checked_policy_step(
    logprobs: Tensor, entropy: Tensor | None, backend: str, *terms: Any
) -> tuple[Tensor, ...]:
    """``policy_step`` as an operator, after checking values that only the device knows."""
    named = PolicyTerms(*terms)
    check_term_values(logprobs, named)
    return tuple(policy_step(logprobs, entropy, named, backend))


@checked_policy_step.register_fake
def _(logprobs: Tensor, entropy: Tensor | None, backend: str, *terms: Any) -> tuple[Tensor, ...]:
    named = PolicyTerms(*terms)
    dtype = stats_dtype(logprobs.dtype)
    with_entropy = entropy is not None and named.entropy_coef is not None
    return (
        logprobs.new_empty((), dtype=dtype),
        torch.empty_like(logprobs, dtype=dtype, memory_format=torch.contiguous_format),
        logprobs.new_empty(logprobs.shape if with_entropy else (0,), dtype=dtype),
        logprobs.new_empty(len(metric_names(named, entropy)), dtype=dtype),
    )


class PolicyLoss(torch.autograd.Function):
    """Loss of given log-probs (and entropy); the backward multiplies what the forward already knows."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, backend: str, *terms: Any
    ) -> tuple[Tensor, Tensor]:
        loss, grad_logprobs, grad_entropy, metrics = checked_policy_step(logprobs, entropy, backend, *terms)
        ctx.save_for_backward(grad_logprobs, grad_entropy)
        ctx.dtypes = (logprobs.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy = ctx.saved_tensors
        dtype, entropy_dtype = ctx.dtypes
        to_entropy = None
        if entropy_dtype is not None and grad_entropy.numel() == grad_logprobs.numel():
            to_entropy = (grad_entropy * grad).to(entropy_dtype)
        nothing = (None,) * (1 + len(PolicyTerms._fields))
        return (grad_logprobs * grad).to(dtype), to_entropy, *nothing
