"""Evaluation of an objective with its terms and aggregation, from log-probs to loss, coefficients and
metrics.

Tensors have one value per token or sequence and are in fp64. Coefficients are computed by autograd through
the objective, which is passed as a string, ``Objective.spec``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import SPECS, Terms, may_have_gradient
from gspo_kernels.core.exact import exact, exact_sum
from gspo_kernels.core.layout import Layout
from gspo_kernels.core.torch_internals import constant_of, inner_autograd
from gspo_kernels.core.types import METRICS, stats_dtype
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.aggregation import Aggregation, zero_uncounted
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, checked_evaluate, from_spec
from gspo_kernels.objectives.kl import kl_penalty


class PolicyStep(NamedTuple):
    """Loss, gradients and metrics in the statistics' dtype; outputs that are not needed are empty tensors."""

    loss: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    metrics: Tensor


def metric_names(terms: Terms, entropy: Tensor | None) -> tuple[str, ...]:
    """Return the names of ``PolicyStep.metrics``."""
    extra = (("kl/ref",) if terms.ref_logprobs is not None else ()) + (
        ("entropy",) if entropy is not None else ()
    )
    return METRICS + extra


def coefficients_depend_on(objective: Objective, terms: Terms) -> str:
    """Return the scope of a token's coefficient in a call; see ``hidden.call.Decisions``."""
    scope = objective.coefficient_scope
    if terms.kl_beta is not None and terms.kl_ratio_weighted and scope != "token":
        return scope
    on_policy = terms.old_logprobs is None and objective.ratio_only
    if on_policy or scope == "nothing":
        has_token_terms = terms.kl_beta is not None or terms.entropy_coef is not None
        return "token" if has_token_terms else "nothing"
    return scope


def _weighted_sum(values: Tensor, shares: Tensor) -> Tensor:
    # values with a share of 0 may be NaN
    return exact_sum(torch.where(shares != 0, values, 0.0).mul(shares).flatten())


def evaluate(logprobs: Tensor, entropy: Tensor | None, terms: Terms, want_metrics: bool = True) -> PolicyStep:
    """Compute a policy step: loss, its gradient with respect to log-probs and entropy, and metrics.

    Args:
        logprobs: tokens, float.
        entropy: tokens, float, or None.
        terms: the other terms of the loss.
        want_metrics: False returns empty metrics.
    """
    with inner_autograd():
        usable = terms.each(lambda _, tensor: constant_of(tensor))
        shown = None if entropy is None else constant_of(entropy)
        needs_tokens = from_spec(terms.objective).coefficient_scope in ("turn", "batch")
        run = _evaluate_gathered if terms.cp_group and needs_tokens else _evaluate
        return run(constant_of(logprobs), shown, usable, want_metrics)


def _evaluate_gathered(
    logprobs: Tensor, entropy: Tensor | None, terms: Terms, want_metrics: bool
) -> PolicyStep:
    """All-gather whole sequences and run ``_evaluate`` on them, for objectives that need more than sums over
    a sequence.
    """
    from gspo_kernels.distributed.sequences import GatheredTokens

    tokens = GatheredTokens(terms.layout(logprobs), logprobs, terms.cp_group)
    values = {"logprobs": logprobs, "loss_mask": terms.counted(logprobs)}
    if entropy is not None:
        values["entropy"] = entropy
    for name, spec in SPECS.items():
        value = getattr(terms, name)
        if spec.shape == "broadcast" and value is not None and value.numel() > 1:
            value = value.to(logprobs.device).expand(logprobs.shape)
        if value is not None and value.ndim == 2 and name != "loss_mask":
            values[name] = value
    gathered: dict[str, Any] = dict(zip(values, tokens.gather(list(values.values())), strict=True))
    logprobs, entropy = gathered.pop("logprobs"), gathered.pop("entropy", None)
    terms = terms._replace(**gathered, cu_seqlens=tokens.cu_seqlens, cp_group="")
    step = _evaluate(logprobs, entropy, terms, want_metrics)
    grad_entropy = step.grad_entropy
    return step._replace(
        grad_logprobs=tokens.local_part(step.grad_logprobs),
        grad_entropy=tokens.local_part(grad_entropy) if grad_entropy.numel() else grad_entropy,
    )


def _evaluate(logprobs: Tensor, entropy: Tensor | None, terms: Terms, want_metrics: bool) -> PolicyStep:
    objective = from_spec(terms.objective)
    aggregation = Aggregation(logprobs, terms)
    layout, mask = aggregation.layout, aggregation.mask
    present = mask if terms.skipped is None else mask & ~layout.expand(terms.skipped)

    logp = torch.where(present, exact(logprobs), 0.0).requires_grad_()
    old = zero_uncounted(terms.old_logprobs, present)
    old = logp.detach() if old is None else old
    log_ratio = finite.difference(logp, old)
    token_weights = zero_uncounted(terms.token_weights, mask)
    reference = zero_uncounted(terms.ref_logprobs, present)
    entropy = zero_uncounted(entropy, present)
    batch = PolicyBatch(
        layout=layout,
        mask=mask,
        lengths=aggregation.lengths,
        logprobs=logp,
        old_logprobs=old,
        log_ratio=log_ratio if token_weights is None else finite.mul(token_weights, log_ratio),
        advantages=aggregation.zero_uncounted(terms.advantages),
        rollout_weights=aggregation.zero_uncounted(terms.rollout_weights),
        token_weights=token_weights,
        ref_logprobs=reference,
        entropy=entropy,
        group_ids=terms.group_ids,
        turn_ids=terms.turn_ids,
    )
    result = checked_evaluate(objective, batch)
    token_shares = aggregation.token_shares() if terms.token_shares is None else terms.token_shares
    sequence_level = objective.level == "sequence"
    sums = [_weighted_sum(result.loss, aggregation.sequence_shares() if sequence_level else token_shares)]

    kl = None if reference is None else kl_penalty(finite.difference(logp, reference), terms.kl_estimator)
    if kl is not None and terms.kl_beta is not None:
        penalty = kl
        if terms.kl_ratio_weighted:
            penalty = finite.mul(kl, batch.per_token(finite.exp(result.log_ratio)))
        sums.append(_weighted_sum(_times(penalty, terms.kl_beta), token_shares))
    leaves = [logp]
    if entropy is not None and terms.entropy_coef is not None:
        leaves.append(entropy.requires_grad_())
        sums.append(-_weighted_sum(_times(entropy, terms.entropy_coef), token_shares))
    token_sums = sums[1:] if sequence_level else sums
    if token_sums:
        sums[-len(token_sums) :] = layout.over_ranks(torch.stack(token_sums)).unbind()
    loss = sum(sums[1:], start=sums[0])

    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    with_gradient = present
    if terms.old_logprobs is not None and (not old.is_cpu or math.isnan(float(old.sum()))):
        # old log-probs may be NaN where the gradient is zero
        with_gradient = present & may_have_gradient(logprobs, terms)
    grads = [torch.where(with_gradient, grad, 0.0) for grad in gradients]
    metrics = logp.new_empty(0)
    if want_metrics:
        active = torch.stack([grad != 0 for grad in grads]).any(0)
        sequences = aggregation.nonempty if terms.skipped is None else aggregation.nonempty & ~terms.skipped
        metrics = _metrics(batch, (present, sequences), result, log_ratio, active, kl, entropy)
    grad_entropy = grads[1] if len(grads) > 1 else logp.new_empty(0)
    dtype = stats_dtype(logprobs.dtype)
    return PolicyStep(*(output.detach().to(dtype) for output in (loss, grads[0], grad_entropy, metrics)))


def _times(values: Tensor, factor: Tensor) -> Tensor:
    return finite.mul(values, factor.to(values.device, values.dtype).expand_as(values))


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens in the mask, 0-d fp64; 0 for an empty mask."""
    return exact_sum(torch.where(mask, exact(values.detach()), 0.0).flatten()) / mask.sum().clamp(min=1)


def _means(
    values: list[Tensor], present: tuple[Tensor, Tensor], layout: Layout
) -> tuple[list[Tensor], Tensor]:
    """Return the mean of each value over the present tokens or sequences, 0 if there are none, and the number
    of present tokens, with one all-reduce.
    """
    tokens, sequences = present

    def total(value: Tensor) -> Tensor:
        counted = tokens if value.ndim == tokens.ndim else sequences
        return exact_sum(torch.where(counted, exact(value), 0.0).flatten())

    token_totals = [total(value) for value in values if value.ndim == tokens.ndim]
    count = exact(tokens.sum())
    count, *totals = layout.over_ranks(torch.stack([count, *token_totals])).unbind()
    means, remaining = [], iter(totals)
    for value in values:
        if value.ndim == tokens.ndim:
            means.append(next(remaining) / count.clamp(min=1))
        else:
            means.append(total(value) / sequences.sum().clamp(min=1))
    return means, count


def _metrics(
    batch: PolicyBatch,
    present: tuple[Tensor, Tensor],
    result: ObjectiveLoss,
    log_ratio: Tensor,
    active: Tensor,
    kl: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """Return metrics in the order of ``metric_names``, over the tokens and sequences that have log-probs."""
    layout, (tokens, sequences) = batch.layout, present
    ratio = result.log_ratio.detach().exp()
    by_token = ratio.ndim == tokens.ndim
    items = tokens if by_token else sequences
    never = torch.zeros_like(items)
    low, high = (
        never if clipped is None else clipped for clipped in (result.clipped_low, result.clipped_high)
    )
    values = [
        ratio,
        low,
        high,
        batch.per_token(low) | batch.per_token(high),
        -log_ratio.detach(),
        layout.sum(exact(active)) > 0,
        *(value.detach() for value in (kl, entropy) if value is not None),
    ]
    (mean, *others), count = _means(values, present, layout)
    nothing = (count if by_token else sequences.sum()) == 0
    # one more value, as amax is undefined for empty tensors
    bottom = ratio.new_full((1,), float("-inf"))
    extremes = torch.stack(
        [
            torch.cat([torch.where(items, value, float("-inf")).flatten(), bottom]).amax()
            for value in (-ratio, ratio)
        ]
    )
    negated_min, maximum = (layout.largest(extremes) if by_token else extremes).unbind()
    ratios = [torch.where(nothing, 1.0, value) for value in (mean, -negated_min, maximum)]
    return torch.stack([*ratios, *others])
