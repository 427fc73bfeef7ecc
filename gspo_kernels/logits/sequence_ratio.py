"""Clipped ratios in one launch of the backend: operands, and the loss of sequence ratios from logits."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import Terms, check_token_values
from gspo_kernels.arguments.values import (
    all_valid,
    check_cu_seqlens,
    check_lengths,
    check_normalizer,
    check_temperature,
    mask_labels,
)
from gspo_kernels.backends.dispatch import load, ratio_backend
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.layout import layout_of, segment_ids
from gspo_kernels.core.operators import must_check_values, operator
from gspo_kernels.core.torch_internals import constant_when_traced
from gspo_kernels.core.types import (
    METRICS,
    NO_RATIO,
    LogitRows,
    RatioClip,
    RatioOperands,
    RowGradients,
    RowOptions,
    RowStats,
    SequenceRatioStats,
    stats_dtype,
)
from gspo_kernels.logits.logprobs import check_rows, gradient_of_logits, save_rows, saved_rows
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec


def ratio_clip_of(terms: Terms, backend: str) -> RatioClip:
    """Return the clipped ratio by which ``backend`` evaluates these terms in one launch, or ``NO_RATIO``.

    Schedules that evaluate different terms (for known coefficients, or of a chunk) call this for them.
    """
    plain = terms.token_weights is None and terms.entropy_coef is None and terms.token_shares is None
    weighted_kl = terms.kl_beta is not None and terms.kl_ratio_weighted
    if weighted_kl or terms.cp_group or not plain:
        return NO_RATIO
    # the compiler would ignore the cache and warn
    ratio_of = _ratio_of_objective if torch.compiler.is_compiling() else _cached_ratio
    return ratio_of(terms.objective, backend)


@constant_when_traced
def _ratio_of_objective(objective: str, backend: str) -> RatioClip:
    """Return the objective's clipped ratio if the backend is a ``RatioBackend``, otherwise ``NO_RATIO``."""
    supported = hasattr(load(backend), "sequence_ratio_forward")
    return (from_spec(objective).ratio_form() if supported else None) or NO_RATIO


_cached_ratio = functools.lru_cache(maxsize=1024)(_ratio_of_objective)


def is_sequence_ratio(terms: Terms, ratio_clip: RatioClip) -> bool:
    """Return whether ``sequence_ratio`` supports a loss."""
    of_sequences = ratio_clip.level == "sequence" and ratio_clip.divisor != "prompts"
    return of_sequences and terms.old_logprobs is not None and terms.ref_logprobs is None


def ratio_operands(tokens: Tensor, terms: Terms, level: str = "sequence") -> RatioOperands:
    """Return the operands of a clipped ratio from terms; ``tokens`` determines shape and device."""
    weights, normalizer = terms.rollout_weights, terms.normalizer
    assert terms.advantages is not None
    if level == "sequence" and weights is not None and weights.ndim == 2:
        layout, counted = terms.layout(tokens), terms.counted(tokens)
        counts = layout.sum(exact(counted)).clamp(min=1)
        weights = layout.sum(torch.where(counted, exact(weights), 0.0)) / counts
    if terms.skipped is not None:
        # the divisor includes skipped sequences
        normalizer = Aggregation(tokens, terms).total
    if normalizer is not None:
        normalizer = normalizer.to(tokens.device)
    return RatioOperands(
        terms.old_logprobs, terms.advantages, weights, terms.lengths, normalizer, terms.cu_seqlens
    )


def sum_over_tokens(per_token: Terms, ratio_clip: RatioClip) -> tuple[Terms, RatioClip]:
    """Return terms and ratio of loss = sum_t w_t f(r_t, A_t), where w_t is the token's share times its
    rollout weight.
    """
    shares, weights, beta = per_token.token_shares, per_token.rollout_weights, per_token.kl_beta
    assert shares is not None
    if per_token.token_weights is not None:
        # Linear, on-policy: coefficients c_t = share_t * token_weights_t equal dloss/dlogp = -w r A of r = 1,
        # w = c and A = -1.
        weights = per_token.token_weights
        per_token = per_token._replace(advantages=torch.full_like(shares, -1.0), token_weights=None)
    per_token = per_token._replace(
        token_shares=None,
        rollout_weights=shares if weights is None else shares * weights,
        kl_beta=None if beta is None else shares * beta,
    )
    return per_token, ratio_clip._replace(level="token", count_tokens=True, divisor="one", divisor_scale=1.0)


def sum_over_prompts(tokens: Tensor, terms: Terms, ratio_clip: RatioClip) -> tuple[Terms, RatioClip]:
    """Return terms and ratio of "prompt_mean" as a sum over tokens, with the divisor of each sequence's
    prompt in its rollout weights and KL penalty.
    """
    shares, layout = 1.0 / Aggregation(tokens, terms).divisor, terms.layout(tokens)
    weights, beta = terms.rollout_weights, terms.kl_beta
    if weights is not None:
        shares_of = shares if weights.ndim == 1 else layout.expand(shares)
        weights = exact(weights) * shares_of
    if beta is not None:
        beta = beta.to(tokens.device) * layout.expand(shares)
    terms = terms._replace(
        rollout_weights=shares if weights is None else weights, kl_beta=beta, normalizer=None, group_ids=None
    )
    return terms, ratio_clip._replace(count_tokens=True, divisor="one", divisor_scale=1.0)


_RATIO_MEAN = METRICS.index("ratio/mean")


@operator
def sequence_ratio(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    options: RowOptions,
    operands: RatioOperands,
    ratio_clip: RatioClip,
) -> SequenceRatioStats:
    """Compute the loss of sequence ratios from logits; see ``protocol.RatioBackend``."""
    checks_values = must_check_values(labels.device)
    merged = None
    if mask is not None and checks_values:
        labels = merged = mask_labels(labels, mask, None, options.ignore_index).labels
        mask = None
    if options.transform.row_temperature is not None:
        check_temperature(options.transform.row_temperature, labels, options.ignore_index)
    if operands.cu_seqlens is not None:
        check_cu_seqlens(operands.cu_seqlens, labels)
    if operands.normalizer is not None:
        check_normalizer(operands.normalizer)
    if operands.lengths is not None and checks_values:
        counted = exact(labels != options.ignore_index)
        check_lengths(operands.lengths, layout_of(labels, operands.cu_seqlens).sum(counted))
    recheck = functools.partial(_check_token_values, labels, operands, options) if checks_values else None
    # the kernel doesn't read weights of sequences with a zero advantage
    if recheck is not None and operands.weights is not None and not all_valid(operands.weights):
        recheck()
    rows = LogitRows(logits, labels, options.transform, options.ignore_index)
    launch = ratio_backend(options.backend).sequence_ratio_forward
    stats = launch(rows, mask, operands, ratio_clip, recheck)
    # labels out of range have NaN log-probs: check labels only if the mean ratio is NaN
    if checks_values and math.isnan(stats.metrics.tolist()[_RATIO_MEAN]):
        check_rows(labels, logits.shape[-1], options)
    return stats if merged is None else stats._replace(labels=merged)


_GSPO = GSPO().spec


def _check_token_values(labels: Tensor, operands: RatioOperands, options: RowOptions) -> None:
    """Run ``terms.check_token_values`` for GSPO, which has the same requirements as the other losses here."""
    terms = Terms(
        operands.old_logprobs,
        operands.advantages,
        labels != options.ignore_index,
        operands.cu_seqlens,
        rollout_weights=operands.weights,
        objective=_GSPO,
    )
    check_token_values(labels, terms)


@sequence_ratio.register_fake
def _(
    logits: Tensor, labels: Tensor, mask: Tensor | None, _: RowOptions, operands: RatioOperands, *__: Any
) -> SequenceRatioStats:
    def new(*shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=stats_dtype(logits.dtype))

    lse = logits.new_empty(labels.shape, dtype=exact_dtype(logits.device))
    merged = labels.new_empty(0 if mask is None else labels.shape)
    coefficients, metrics = new(*operands.advantages.shape), new(len(METRICS))
    return SequenceRatioStats(new(), new(*labels.shape), lse, coefficients, new(), metrics, merged)


class SequenceRatioFunction(torch.autograd.Function):
    """Loss of a clipped sequence ratio from logits, whose backward needs one coefficient per sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        inplace: bool,
        options: RowOptions,
        operands: RatioOperands,
        ratio_clip: RatioClip,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = sequence_ratio(logits, labels, mask, options, operands, ratio_clip)
        labels = labels if mask is None else stats.labels
        saved = (stats.logprobs, stats.lse, stats.coefficients, stats.divisor, operands.cu_seqlens)
        save_rows(ctx, options, logits, labels, *saved, inplace=inplace)
        ctx.mark_non_differentiable(stats.logprobs, stats.metrics)
        return stats.loss, stats.logprobs, stats.metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 7
        (logits, labels, logprobs, lse, coefficients, divisor, cu_seqlens), options = saved_rows(ctx)
        if cu_seqlens is None:
            each = coefficients.unsqueeze(1).expand(labels.shape)
        else:
            each = coefficients[segment_ids(cu_seqlens, labels.numel())].unsqueeze(0)
        stats, grads = RowStats(logprobs, lse, None), RowGradients(each, None, grad / divisor)
        return (gradient_of_logits(ctx, logits, labels, stats, grads, options), *(None,) * 6)
