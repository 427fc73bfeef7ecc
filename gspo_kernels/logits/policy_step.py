"""One opaque operator from log-probs to loss, coefficients and metrics.

A clipped ratio per sequence or token, with or without a KL penalty, is one launch of the backend; other
objectives use ``evaluate``, a few hundred small operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import Terms, check_values
from gspo_kernels.arguments.values import all_valid
from gspo_kernels.backends.dispatch import ratio_backend
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.operators import must_check_values, operator
from gspo_kernels.core.torch_internals import is_last_backward
from gspo_kernels.core.types import (
    MASK_DTYPES,
    NO_RATIO,
    KLPenalty,
    LossOutput,
    RatioClip,
    Recheck,
    stats_dtype,
)
from gspo_kernels.logits.sequence_ratio import ratio_clip_of, ratio_operands, sum_over_prompts
from gspo_kernels.objectives.evaluate import PolicyStep, evaluate, metric_names, token_mean


def evaluate_objective(
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    backend: str,
    ratio_clip: RatioClip,
    want_metrics: bool = True,
    recheck: Recheck = None,
) -> PolicyStep:
    """Compute loss, coefficients and metrics of terms whose values have been checked.

    Args:
        logprobs: [B, T] or [1, N].
        entropy: the same shape, or None.
        terms: the validated terms.
        backend: the name of the backend that evaluates ``ratio_clip``.
        ratio_clip: see ``sequence_ratio.ratio_clip_of``; ``NO_RATIO`` for evaluation by PyTorch.
        want_metrics: False may skip the metrics.
        recheck: see ``RatioBackend.ratio_step``.
    """
    if ratio_clip == NO_RATIO:
        return evaluate(logprobs, entropy, terms, want_metrics)
    present = terms.counted(logprobs) if terms.loss_mask is None else terms.loss_mask
    if terms.skipped is not None:
        present = present & ~terms.layout(logprobs).expand(terms.skipped)
    logprobs = logprobs.to(stats_dtype(logprobs.dtype)).contiguous()
    if ratio_clip.divisor == "prompts":
        terms, ratio_clip = sum_over_prompts(logprobs, terms, ratio_clip)
    operands = ratio_operands(logprobs, terms, ratio_clip.level)
    kl = None
    if terms.ref_logprobs is not None:
        beta = None if terms.kl_beta is None else terms.kl_beta.to(logprobs.device)
        kl = KLPenalty(terms.ref_logprobs, beta, terms.kl_estimator)
    step = ratio_backend(backend).ratio_step(logprobs, present, operands, ratio_clip, kl, recheck)
    metrics = step.metrics
    if entropy is not None and want_metrics:
        metrics = torch.cat([metrics, token_mean(entropy, present).to(metrics.dtype).reshape(1)])
    no_entropy = torch.empty(0, dtype=logprobs.dtype, device=logprobs.device)
    return PolicyStep(step.loss, step.grad_logprobs, no_entropy, metrics)


def known_coefficients(
    tokens: Tensor, terms: Terms, backend: str, step: Callable[..., PolicyStep] = evaluate_objective
) -> Tensor:
    """Return dLoss/dlogprobs of an objective whose coefficients do not depend on log-probs.

    ``step`` is ``policy_step`` outside of operators.
    """
    zeros = torch.zeros_like(tokens, dtype=exact_dtype(tokens.device))
    terms = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return step(zeros, None, terms, backend, ratio_clip_of(terms, backend), False).grad_logprobs


@operator
def policy_step(
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    backend: str,
    ratio_clip: RatioClip,
    want_metrics: bool,
) -> PolicyStep:
    """Check values, then run ``evaluate_objective``."""
    launch, mask, recheck = ratio_clip != NO_RATIO, terms.loss_mask, None
    # if only the kernel reads the mask, it reads the caller's dtype
    mask_only = launch and entropy is None and terms.lengths is None and terms.skipped is None
    reads_mask = mask_only and mask is not None and mask.dtype in MASK_DTYPES
    # the kernel checks values while reading them, and calls ``recheck`` if some may be wrong
    terms = check_values(logprobs, terms, mask=not reads_mask, logprobs_too=not launch, logprobs=logprobs)
    if launch and must_check_values(logprobs.device):
        recheck = functools.partial(check_values, logprobs, terms, logprobs=logprobs)
        # the kernel doesn't read weights of sequences with a zero advantage
        if terms.rollout_weights is not None and not all_valid(terms.rollout_weights):
            recheck()
    step = evaluate_objective(logprobs, entropy, terms, backend, ratio_clip, want_metrics, recheck)
    return step if want_metrics else step._replace(metrics=step.loss.new_empty(0))


@policy_step.register_fake
def _(
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    backend: str,
    ratio_clip: RatioClip,
    want_metrics: bool,
) -> PolicyStep:
    dtype = stats_dtype(logprobs.dtype)
    with_entropy = entropy is not None and terms.entropy_coef is not None
    return PolicyStep(
        logprobs.new_empty((), dtype=dtype),
        torch.empty_like(logprobs, dtype=dtype, memory_format=torch.contiguous_format),
        logprobs.new_empty(logprobs.shape if with_entropy else (0,), dtype=dtype),
        logprobs.new_empty(len(metric_names(terms, entropy)) if want_metrics else 0, dtype=dtype),
    )


class PolicyLossFunction(torch.autograd.Function):
    """Loss of log-probs (and entropy). The backward scales the forward's gradients, in place if they are not
    needed afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, terms: Terms, backend: str, ratio_clip: RatioClip
    ) -> tuple[Tensor, Tensor]:
        step = policy_step(logprobs, entropy, terms, backend, ratio_clip, True)
        ctx.save_for_backward(step.grad_logprobs, step.grad_entropy)
        ctx.set_materialize_grads(False)
        ctx.dtypes = (logprobs.dtype, None if entropy is None else entropy.dtype)
        ctx.has_entropy_gradient = entropy is not None and terms.entropy_coef is not None
        ctx.mark_non_differentiable(step.metrics)
        return step.loss, step.metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        grad_logprobs, grad_entropy = ctx.saved_tensors
        dtype, entropy_dtype = ctx.dtypes
        if is_last_backward() and entropy_dtype is None:
            return grad_logprobs.mul_(grad).to(dtype), None, None, None, None
        to_entropy = (grad_entropy * grad).to(entropy_dtype) if ctx.has_entropy_gradient else None
        return (grad_logprobs * grad).to(dtype), to_entropy, None, None, None


def output_of(
    loss: Tensor, metrics: Tensor, logprobs: Tensor, entropy: Tensor | None, terms: Terms
) -> LossOutput:
    """Convert rows to the output of a public loss; values of skipped sequences are NaN."""
    names = metric_names(terms, entropy)
    packed = terms.cu_seqlens is not None
    per_token = []
    for rows in (logprobs, entropy):
        value = rows.detach() if rows is not None and rows.requires_grad else rows
        if value is not None and terms.skipped is not None:
            absent = terms.layout(value).expand(terms.skipped) & terms.counted(value)
            value = value.masked_fill(absent, float("nan"))
        per_token.append(value.squeeze(0) if packed and value is not None else value)
    shown, shown_entropy = per_token
    assert shown is not None
    return LossOutput(loss, shown, shown_entropy, dict(zip(names, metrics.unbind(), strict=True)))
