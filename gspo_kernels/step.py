"""A policy step by whatever does it soonest, as one opaque operator, and the loss that carries its gradient.

Steps that are a clipped ratio per sequence or per token, with a KL penalty or without, take one launch of the
backend; ``evaluate`` says the same of every objective, in a few hundred small operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gspo_kernels.evaluate import PolicyStep, evaluate, metric_names, token_mean
from gspo_kernels.layout import from_rows
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.ops.backends import RatioBackend, load
from gspo_kernels.ops.library import checked_values, operator
from gspo_kernels.sequence_ratio import RatioOperands, ratio_form
from gspo_kernels.terms import Terms, check_given, check_values
from gspo_kernels.torch_internals import is_last_backward
from gspo_kernels.types import KLPenalty, LossOutput, RatioClip, stats_dtype


def take_step(
    logprobs: Tensor, entropy: Tensor | None, terms: Terms, backend: str, want_metrics: bool = True
) -> PolicyStep:
    """``evaluate``, or one launch of the backend where it has one for the terms; only in operators."""
    form = ratio_form(from_spec(terms.objective), terms, backend)
    return _step_in_form(logprobs, entropy, terms, backend, want_metrics, form)


def _step_in_form(
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    backend: str,
    want_metrics: bool,
    form: RatioClip | None,
    doubt: Callable[[], None] | None = None,
) -> PolicyStep:
    if form is None:
        return evaluate(logprobs, entropy, terms, want_metrics)
    present = terms.counted(logprobs) if terms.loss_mask is None else terms.loss_mask
    if terms.skipped is not None:
        present = present & ~terms.layout(logprobs).expand(terms.skipped)
    logprobs = logprobs.to(stats_dtype(logprobs.dtype)).contiguous()
    operands = RatioOperands.of(logprobs, terms, form.level)
    kl = None
    if terms.ref_logprobs is not None:
        beta = None if terms.kl_beta is None else terms.kl_beta.to(logprobs.device)
        kl = KLPenalty(terms.ref_logprobs, beta, terms.kl_estimator)
    step = cast(RatioBackend, load(backend)).ratio_step(
        logprobs, present, form=form, **operands._asdict(), kl=kl, doubt=doubt
    )
    metrics = step.metrics
    if entropy is not None and want_metrics:
        metrics = torch.cat([metrics, token_mean(entropy, present).to(metrics.dtype).reshape(1)])
    return PolicyStep(step.loss, step.grad_logprobs, logprobs.new_empty(0), metrics)


@operator
def policy_step(
    logprobs: Tensor, entropy: Tensor | None, backend: str, terms: Terms, want_metrics: bool
) -> PolicyStep:
    """``take_step`` after checking values that only the device knows."""
    form = ratio_form(from_spec(terms.objective), terms, backend)
    reads_mask = form is not None and _backend_reads_mask(terms, entropy, backend)
    terms = check_values(
        logprobs,
        terms,
        mask=not reads_mask,
        given=form is None,  # otherwise the backend looks as it reads them
        logprobs=logprobs,
    )
    doubt = None
    if form is not None and checked_values(logprobs.device):
        doubt = functools.partial(check_given, logprobs, terms, logprobs)
    step = _step_in_form(logprobs, entropy, terms, backend, want_metrics, form, doubt)
    return step if want_metrics else step._replace(metrics=step.loss.new_empty(0))


def _backend_reads_mask(terms: Terms, entropy: Tensor | None, backend: str) -> bool:
    """Whether the launch checks the mask as it reads it, and nothing else looks at the mask."""
    if terms.loss_mask is None or any(x is not None for x in (entropy, terms.lengths, terms.skipped)):
        return False
    reads = getattr(load(backend), "reads_mask", None)
    return reads is not None and reads(terms.loss_mask)


@policy_step.register_fake
def _(logprobs: Tensor, entropy: Tensor | None, backend: str, terms: Terms, want_metrics: bool) -> PolicyStep:
    dtype = stats_dtype(logprobs.dtype)
    with_entropy = entropy is not None and terms.entropy_coef is not None
    return PolicyStep(
        logprobs.new_empty((), dtype=dtype),
        torch.empty_like(logprobs, dtype=dtype, memory_format=torch.contiguous_format),
        logprobs.new_empty(logprobs.shape if with_entropy else (0,), dtype=dtype),
        logprobs.new_empty(len(metric_names(terms, entropy)) if want_metrics else 0, dtype=dtype),
    )


class PolicyLoss(torch.autograd.Function):
    """Loss of given log-probs (and entropy); the backward multiplies what the forward already knows,
    in its memory where no other backward will ask for it.
    """

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, backend: str, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        step = policy_step(logprobs, entropy, backend, terms, True)
        ctx.save_for_backward(step.grad_logprobs, step.grad_entropy)
        ctx.dtypes = (logprobs.dtype, None if entropy is None else entropy.dtype)
        ctx.has_entropy_gradient = entropy is not None and terms.entropy_coef is not None
        ctx.mark_non_differentiable(step.metrics)
        return step.loss, step.metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy = ctx.saved_tensors
        dtype, entropy_dtype = ctx.dtypes
        if entropy_dtype is None and is_last_backward():
            return grad_logprobs.mul_(grad).to(dtype), None, None, None
        to_entropy = (grad_entropy * grad).to(entropy_dtype) if ctx.has_entropy_gradient else None
        return (grad_logprobs * grad).to(dtype), to_entropy, None, None


def loss_of(logprobs: Tensor, entropy: Tensor | None, backend: str, terms: Terms, packed: bool) -> LossOutput:
    """The loss of log-probs (and entropy) in rows, which receive its gradient."""
    loss, metrics = PolicyLoss.apply(logprobs, entropy, backend, terms)
    return output_of(loss, metrics, logprobs, entropy, terms, packed)


def carried_loss(
    carrier: Tensor, logprobs: Tensor, entropy: Tensor | None, backend: str, terms: Terms, packed: bool
) -> LossOutput:
    """The loss of a call whose forward computed the gradient: ``carrier`` is 0 and holds it."""
    step = policy_step(logprobs, entropy, backend, terms, True)
    return output_of(carrier + step.loss, step.metrics, logprobs, entropy, terms, packed)


def output_of(
    loss: Tensor, metrics: Tensor, logprobs: Tensor, entropy: Tensor | None, terms: Terms, packed: bool
) -> LossOutput:
    """What the public losses return, from rows; NaN where nothing was looked at."""
    names = metric_names(terms, entropy)
    named = dict(zip(names, metrics.unbind(), strict=True))
    shown = logprobs.detach()
    entropy = None if entropy is None else entropy.detach()
    if terms.skipped is not None:
        absent = terms.layout(shown).expand(terms.skipped) & terms.counted(shown)
        shown = shown.masked_fill(absent, float("nan"))
        entropy = None if entropy is None else entropy.masked_fill(absent, float("nan"))
    return LossOutput(
        loss, from_rows(shown, packed), None if entropy is None else from_rows(entropy, packed), named
    )
