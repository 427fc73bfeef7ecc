"""A clipped ratio in one launch of the backend: what it takes, and the loss of sequence ratios from logits.

Which losses are of this form the objective says; kernels never hear of its name.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.layout import layout_of
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import RatioBackend, load
from gspo_kernels.ops.library import checked_values, operator
from gspo_kernels.ops.logprobs import RowGradients, check_rows, gradient_of_logits, save_rows, saved_rows
from gspo_kernels.ops.values import check_cu_seqlens, check_lengths, check_normalizer, check_temperature
from gspo_kernels.terms import Terms, check_given
from gspo_kernels.torch_internals import constant_when_traced
from gspo_kernels.types import (
    METRICS,
    RatioClip,
    RowOptions,
    RowStats,
    SequenceRatioStats,
    stats_dtype,
)


@constant_when_traced
def has_single_launch(backend: str) -> bool:
    """Whether a backend offers ``sequence_ratio_forward``."""
    return hasattr(load(backend), "sequence_ratio_forward")


def ratio_form(objective: Objective, terms: Terms, backend: str) -> RatioClip | None:
    """The form in which ``backend`` can serve a step of the objective; None where a term goes beyond it."""
    beyond = (terms.token_weights, terms.entropy_coef, terms.token_shares)
    weighted_kl = terms.kl_beta is not None and terms.kl_ratio_weighted
    if weighted_kl or terms.cp_group or any(term is not None for term in beyond):
        return None
    if not has_single_launch(backend):
        return None
    return objective.ratio_form()


def sequence_form(objective: Objective, terms: Terms, backend: str) -> RatioClip | None:
    """The same for a whole loss from logits, whose ratios are per sequence and have no KL beside them."""
    form = ratio_form(objective, terms, backend)
    return form if form is not None and form.level == "sequence" and terms.ref_logprobs is None else None


class RatioOperands(NamedTuple):
    """What the backend takes besides log-probs and mask, in its order."""

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor | None
    lengths: Tensor | None
    normalizer: Tensor | None
    cu_seqlens: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor, terms: Terms, level: str = "sequence") -> RatioOperands:
        """From the terms of a call for ratios of a level; ``tokens`` gives shape and device."""
        weights, normalizer = terms.rollout_weights, terms.normalizer
        assert terms.advantages is not None
        if level == "sequence" and weights is not None and weights.ndim == 2:
            layout, counted = terms.layout(tokens), terms.counted(tokens)
            counts = layout.sum(counted.to(torch.float64)).clamp(min=1)
            weights = layout.sum(torch.where(counted, weights.double(), 0.0)) / counts
        if terms.skipped is not None:
            # they have no log-probs, but they are in the divisor
            normalizer = Aggregation.of(tokens, terms).total
        if normalizer is not None:
            normalizer = normalizer.to(tokens.device)
        return cls(terms.old_logprobs, terms.advantages, weights, terms.lengths, normalizer, terms.cu_seqlens)


_RATIO_MEAN = METRICS.index("ratio/mean")


@operator
def sequence_ratio(
    logits: Tensor,
    labels: Tensor,
    options: RowOptions,
    operands: RatioOperands,
    form: RatioClip,
) -> SequenceRatioStats:
    """From logits to loss; see ``ops.backends.RatioBackend``."""
    check_temperature(options.row_temperature)
    check_cu_seqlens(operands.cu_seqlens, labels)
    check_normalizer(operands.normalizer)
    if operands.lengths is not None:
        counted = (labels != options.ignore_index).to(torch.float64)
        check_lengths(operands.lengths, layout_of(labels, operands.cu_seqlens).sum(counted))
    doubt = (
        functools.partial(_check_given, labels, operands, options) if checked_values(labels.device) else None
    )
    stats = cast(RatioBackend, load(options.backend)).sequence_ratio_forward(
        logits,
        labels,
        form=form,
        transform=options.transform,
        ignore_index=options.ignore_index,
        **operands._asdict(),
        doubt=doubt,
    )
    # the log-prob of a label that is no column is NaN: where no ratio is, no label needs a look
    if checked_values(labels.device) and math.isnan(stats.metrics.tolist()[_RATIO_MEAN]):
        check_rows(labels, logits.shape[-1], options)
    return stats


def _check_given(labels: Tensor, operands: RatioOperands, options: RowOptions) -> None:
    """``terms.check_given``: what all losses of this form ask of values, GSPO asks."""
    terms = Terms(
        operands.old_logprobs,
        operands.advantages,
        labels != options.ignore_index,
        operands.cu_seqlens,
        rollout_weights=operands.weights,
        objective=GSPO().spec,
    )
    check_given(labels, terms)


@sequence_ratio.register_fake
def _(
    logits: Tensor,
    labels: Tensor,
    options: RowOptions,
    operands: RatioOperands,
    form: RatioClip,
) -> SequenceRatioStats:
    def new(*shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=stats_dtype(logits.dtype))

    lse = logits.new_empty(labels.shape, dtype=torch.float64)
    return SequenceRatioStats(
        new(), new(*labels.shape), lse, new(*operands.advantages.shape), new(), new(len(METRICS))
    )


class SequenceRatioFunction(torch.autograd.Function):
    """Loss of a clipped sequence ratio; the backward needs one scalar per sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        inplace: bool,
        options: RowOptions,
        operands: RatioOperands,
        form: RatioClip,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = sequence_ratio(logits, labels, options, operands, form)
        layout = layout_of(labels, operands.cu_seqlens)
        each = layout.expand(stats.coefficients / stats.divisor)
        save_rows(ctx, options, logits, labels, stats.logprobs, stats.lse, each)
        ctx.inplace = inplace
        ctx.mark_non_differentiable(stats.logprobs, stats.metrics)
        return stats.loss, stats.logprobs, stats.metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        (logits, labels, logprobs, lse, each), options = saved_rows(ctx)
        stats, grads = RowStats(logprobs, lse, None), RowGradients(each, None, grad)
        return (gradient_of_logits(logits, labels, stats, grads, options, ctx.inplace), *(None,) * 5)
