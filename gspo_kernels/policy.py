"""From per-token log-probs to loss, coefficients and metrics: the one place where terms meet aggregation.

Tensors here have one value per token or per sequence: a vocabulary's width smaller than the logits. So all of
it runs in fp64, and coefficients come from autograd through the objective itself instead of a second copy of
its formula. The objective travels as a string.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.autograd import inner_autograd
from gspo_kernels.layout import Layout, layout_of
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch, from_spec
from gspo_kernels.ops import values
from gspo_kernels.ops.library import checked_values
from gspo_kernels.types import METRICS, stats_dtype

KL_ESTIMATORS = ("k1", "k2", "k3")


class PolicyTerms(NamedTuple):
    """Everything that enters the loss besides log-probs and entropy.

    "Tokens" is [B, T] padded or [1, N] packed, so that the number of dimensions tells tokens from [B].
    Numbers have become 0-d fp64 tensors, or None where they change nothing.
    """

    old_logprobs: Tensor | None  # tokens; None: on-policy
    advantages: Tensor | None  # [B] or tokens
    loss_mask: Tensor | None  # tokens
    cu_seqlens: Tensor | None  # [B + 1]
    ref_logprobs: Tensor | None  # tokens
    kl_beta: Tensor | None  # broadcasts to tokens
    entropy_coef: Tensor | None  # broadcasts to tokens
    rollout_weights: Tensor | None  # [B] or tokens
    token_weights: Tensor | None  # tokens
    lengths: Tensor | None  # [B]
    group_ids: Tensor | None  # [B]
    turn_ids: Tensor | None  # tokens
    normalizer: Tensor | None  # 0-d
    skipped: Tensor | None  # [B] bool: sequences without log-probs; in every denominator, in no metric
    token_shares: Tensor | None  # tokens: loss = sum(share * value) instead of aggregating
    objective: str
    kl_estimator: str
    kl_ratio_weighted: bool


TERMS = (
    "Tensor? old_logprobs, Tensor? advantages, Tensor? loss_mask, Tensor? cu_seqlens, Tensor? ref_logprobs, "
    "Tensor? kl_beta, Tensor? entropy_coef, Tensor? rollout_weights, Tensor? token_weights, Tensor? lengths, "
    "Tensor? group_ids, Tensor? turn_ids, Tensor? normalizer, Tensor? skipped, Tensor? token_shares, "
    "str objective, str kl_estimator, bool kl_ratio_weighted"
)
"""``PolicyTerms`` as operands of an operator."""


class PolicyStep(NamedTuple):
    """The operator's outputs in the statistics' dtype; empty tensors stand for what was not asked for."""

    loss: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    metrics: Tensor


def metric_names(terms: PolicyTerms, entropy: Tensor | None) -> tuple[str, ...]:
    """The names of ``PolicyStep.metrics``."""
    extra = (("kl/ref",) if terms.ref_logprobs is not None else ()) + (
        ("entropy",) if entropy is not None else ()
    )
    return METRICS + extra


def kl_penalty(log_ratio: Tensor, estimator: str) -> Tensor:
    """Schulman's estimators of KL(pi, ref) from d = logp - ref: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return finite.mul(0.5 * log_ratio, log_ratio)
    return finite.k3(log_ratio)


class _Aggregation:
    """Counts and weights that turn per-token and per-sequence values into one loss."""

    def __init__(self, layout: Layout, mask: Tensor, terms: PolicyTerms):
        objective = from_spec(terms.objective)
        self.layout, self.mask = layout, mask
        self.counts = layout.sum(mask.to(torch.float64))
        self.nonempty = self.counts > 0
        lengths = self.counts if terms.lengths is None else terms.lengths.to(torch.float64)
        self.lengths = torch.where(self.nonempty, lengths, 1.0)
        self.per_sequence = objective.aggregation == "sequence_mean"
        counted, scale = objective.outer_divisor()
        if terms.normalizer is not None:
            divisor = terms.normalizer.to(mask.device, torch.float64)
        elif counted == "tokens":
            divisor = torch.where(self.nonempty, lengths, 0.0).sum()
        elif counted == "sequences":
            divisor = self.nonempty.sum().to(torch.float64)
        elif counted == "pairs":
            advantages = self.selected(terms.advantages)
            assert advantages is not None and terms.group_ids is not None
            divisor = objective.count_pairs(advantages, terms.group_ids, self.nonempty)
        else:
            divisor = torch.ones((), dtype=torch.float64, device=mask.device)
        self.total = torch.where(divisor == 0, 1.0, divisor)
        self.divisor = self.total * scale

    def selected(self, values: Tensor | None) -> Tensor | None:
        """[B] or tokens as fp64, zeros where nothing is counted."""
        if values is None:
            return None
        return _selected(values, self.mask if values.ndim == self.mask.ndim else self.nonempty)

    def token_shares(self) -> Tensor:
        """Tokens: d loss / d value of each counted token, 0 elsewhere."""
        share = torch.where(self.mask, 1.0 / self.divisor, 0.0)
        return share / self.layout.expand(self.lengths) if self.per_sequence else share

    def sequence_shares(self) -> Tensor:
        """[B]: d loss / d value of each sequence with a counted token, 0 elsewhere."""
        share = torch.where(self.nonempty, 1.0 / self.divisor, 0.0)
        return share if self.per_sequence else share * self.lengths


def token_shares(tokens: Tensor, mask: Tensor, terms: PolicyTerms) -> Tensor:
    """What one token's value weighs in the loss, fp64, ``tokens``' shape."""
    return _Aggregation(layout_of(tokens, terms.cu_seqlens), mask, terms).token_shares()


def outer_total(tokens: Tensor, mask: Tensor, terms: PolicyTerms) -> Tensor:
    """What the outer divisor counts over the whole call, 0-d fp64: the ``normalizer`` of any part of it."""
    return _Aggregation(layout_of(tokens, terms.cu_seqlens), mask, terms).total


def _weighted_sum(values: Tensor, shares: Tensor) -> Tensor:
    # selected, not multiplied: values without a share may be anything
    return torch.where(shares != 0, values, 0.0).mul(shares).sum()


def _selected(values: Tensor | None, mask: Tensor) -> Tensor | None:
    return None if values is None else torch.where(mask, values.to(torch.float64), 0.0)


def evaluate(
    logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, want_metrics: bool = True
) -> PolicyStep:
    """One policy step: loss, its gradient with respect to log-probs and entropy, and metrics.

    Args:
        logprobs: tokens, float.
        entropy: tokens, float, or None.
        terms: the rest.
        want_metrics: False leaves the metrics empty.
    """
    with inner_autograd():
        # tensors made under inference_mode can't take part in a graph, not even as constants
        usable: dict[str, Any] = {k: _usable(v) for k, v in terms._asdict().items() if isinstance(v, Tensor)}
        return _evaluate(
            _usable(logprobs),
            None if entropy is None else _usable(entropy),
            terms._replace(**usable),
            want_metrics,
        )


def _usable(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _evaluate(logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, want_metrics: bool) -> PolicyStep:
    objective = from_spec(terms.objective)
    layout = layout_of(logprobs, terms.cu_seqlens)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if terms.loss_mask is None else terms.loss_mask != 0
    aggregation = _Aggregation(layout, mask, terms)
    present = mask if terms.skipped is None else mask & ~layout.expand(terms.skipped)

    logp = torch.where(present, logprobs.to(torch.float64), 0.0).requires_grad_()
    old = _selected(terms.old_logprobs, present)
    old = logp.detach() if old is None else old
    log_ratio = logp - old
    token_weights = _selected(terms.token_weights, mask)
    reference = _selected(terms.ref_logprobs, present)
    entropy = _selected(entropy, present)
    batch = PolicyBatch(
        layout=layout,
        mask=mask,
        lengths=aggregation.lengths,
        logprobs=logp,
        old_logprobs=old,
        log_ratio=log_ratio if token_weights is None else finite.mul(token_weights, log_ratio),
        advantages=aggregation.selected(terms.advantages),
        rollout_weights=aggregation.selected(terms.rollout_weights),
        token_weights=token_weights,
        ref_logprobs=reference,
        entropy=entropy,
        group_ids=terms.group_ids,
        turn_ids=terms.turn_ids,
    )
    result = objective.evaluate(batch)
    token_shares = aggregation.token_shares() if terms.token_shares is None else terms.token_shares
    sequence_level = objective.level == "sequence"
    loss = _weighted_sum(result.loss, aggregation.sequence_shares() if sequence_level else token_shares)

    kl = None if reference is None else kl_penalty(logp - reference, terms.kl_estimator)
    if kl is not None and terms.kl_beta is not None:
        penalty = kl
        if terms.kl_ratio_weighted:
            penalty = finite.mul(kl, batch.per_token(finite.exp(result.log_ratio)))
        loss = loss + _weighted_sum(_times(penalty, terms.kl_beta), token_shares)
    leaves = [logp]
    if entropy is not None and terms.entropy_coef is not None:
        leaves.append(entropy.requires_grad_())
        loss = loss - _weighted_sum(_times(entropy, terms.entropy_coef), token_shares)

    everywhere = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    grads = [torch.where(present, grad, 0.0) for grad in everywhere]
    metrics = logp.new_empty(0)
    if want_metrics:
        active = torch.stack([grad != 0 for grad in grads]).any(0)
        metrics = _metrics(batch, present, result, log_ratio, active, kl, entropy)
    grad_entropy = grads[1] if len(grads) > 1 else logp.new_empty(0)
    dtype = stats_dtype(logprobs.dtype)
    return PolicyStep(*(output.detach().to(dtype) for output in (loss, grads[0], grad_entropy, metrics)))


def _times(values: Tensor, factor: Tensor) -> Tensor:
    return finite.mul(values, factor.to(values.device, torch.float64).expand_as(values))


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the tokens in the mask, 0-d fp64; 0 where there is none."""
    return torch.where(mask, values.detach().double(), 0.0).sum() / mask.sum().clamp(min=1)


def _metrics(
    batch: PolicyBatch,
    present: Tensor,
    result: ObjectiveLoss,
    log_ratio: Tensor,
    active: Tensor,
    kl: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """Metrics in the order of ``metric_names``, over the sequences or tokens that have log-probs."""
    layout = batch.layout
    sequences_present = layout.sum(present.to(torch.float64)) > 0
    ratio = result.log_ratio.detach().exp()
    items = present if ratio.ndim == present.ndim else sequences_present
    count = items.sum().clamp(min=1)
    neutral = torch.where(items.any(), 0.0, 1.0)

    def share(chosen: Tensor) -> Tensor:
        among = present if chosen.ndim == present.ndim else sequences_present
        return (chosen & among).sum(dtype=torch.float64) / among.sum().clamp(min=1)

    never = torch.zeros_like(items)
    low, high = (
        never if clipped is None else clipped for clipped in (result.clipped_low, result.clipped_high)
    )
    sequence_active = layout.sum(active.to(torch.float64)) > 0
    padded = torch.cat([ratio.flatten(), ratio.new_ones(1)])
    inside = torch.cat([items.flatten(), ~items.any().reshape(1)])
    results = [
        torch.where(items, ratio, 0.0).sum() / count + neutral,
        torch.where(inside, padded, float("inf")).amin(),
        torch.where(inside, padded, float("-inf")).amax(),
        share(low),
        share(high),
        share(batch.per_token(low) | batch.per_token(high)),
        token_mean(-log_ratio, present),
        share(sequence_active),
    ]
    if kl is not None:
        results.append(token_mean(kl, present))
    if entropy is not None:
        results.append(token_mean(entropy, present))
    return torch.stack([result.to(torch.float64) for result in results])


def check_term_values(tokens: Tensor, terms: PolicyTerms) -> None:
    """Check what needs a look at the values; see ``ops.values``."""
    values.check_cu_seqlens(terms.cu_seqlens, tokens)
    values.check_mask(terms.loss_mask)
    values.check_normalizer(terms.normalizer)
    if terms.lengths is not None:
        mask = torch.ones_like(tokens, dtype=torch.bool) if terms.loss_mask is None else terms.loss_mask != 0
        values.check_lengths(terms.lengths, layout_of(tokens, terms.cu_seqlens).sum(mask.to(torch.float64)))
    if terms.group_ids is not None and checked_values(terms.group_ids.device):
        _check_groups(terms.group_ids)


def _check_groups(group_ids: Tensor) -> None:
    """Refuse a group of one sequence: where groups are cut into micro-batches, these are what shows."""
    ids, counts = torch.unique(group_ids, return_counts=True)
    alone = ids[counts == 1]
    if alone.numel():
        raise ValueError(
            f"group_ids: group {int(alone[0])} has a single sequence, expected whole groups of at least two; "
            "for parts of groups take policy_coefficients of the whole batch and give each part's to "
            "objective=Linear() as token_weights"
        )
