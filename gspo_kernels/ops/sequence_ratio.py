"""Operator: a clipped sequence ratio from logits to loss in a single launch, where the backend has one."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gspo_kernels.layout import layout_of
from gspo_kernels.ops.backends import SequenceRatioBackend, load
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import (
    OPTIONS,
    check_labels,
    restore_options,
    save_options,
    token_logprobs_backward,
    token_logprobs_backward_,
)
from gspo_kernels.ops.values import check_cu_seqlens, check_lengths, check_normalizer, check_temperature
from gspo_kernels.tracing import constant_when_traced
from gspo_kernels.types import METRICS, ClippedSequenceRatio, LogitTransform, stats_dtype


@constant_when_traced
def has_single_launch(backend: str) -> bool:
    """Whether a backend offers ``sequence_ratio_forward``."""
    return hasattr(load(backend), "sequence_ratio_forward")


@operator(
    f"sequence_ratio(Tensor logits, Tensor labels, {OPTIONS}, Tensor old_logprobs, Tensor advantages, "
    "Tensor? sequence_weights, Tensor? lengths, Tensor? normalizer, Tensor? cu_seqlens, float log_low, "
    "float log_high, float log_dual, bool count_tokens, str divisor, float divisor_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def sequence_ratio(
    logits: Tensor,
    labels: Tensor,
    logit_scale: float,
    softcap: float,
    temperature: float,
    row_temperature: Tensor | None,
    ignore_index: int,
    backend: str,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    *form: Any,
) -> tuple[Tensor, ...]:
    """See ``ops.backends.SequenceRatioBackend``."""
    check_labels(labels, logits.shape[-1], ignore_index)
    check_temperature(row_temperature)
    check_cu_seqlens(cu_seqlens, labels)
    check_normalizer(normalizer)
    if lengths is not None:
        counted = (labels != ignore_index).to(torch.float64)
        check_lengths(lengths, layout_of(labels, cu_seqlens).sum(counted))
    stats = cast(SequenceRatioBackend, load(backend)).sequence_ratio_forward(
        logits,
        labels,
        old_logprobs,
        advantages,
        ClippedSequenceRatio(*form),
        LogitTransform(logit_scale, softcap, temperature, row_temperature),
        ignore_index=ignore_index,
        sequence_weights=sequence_weights,
        lengths=lengths,
        normalizer=normalizer,
        cu_seqlens=cu_seqlens,
    )
    return tuple(stats)


@sequence_ratio.register_fake
def _(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    advantages = args[7]

    def new(*shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=stats_dtype(logits.dtype))

    lse = logits.new_empty(labels.shape, dtype=torch.float64)
    return new(), new(*labels.shape), lse, new(*advantages.shape), new(), new(len(METRICS))


class SequenceRatioFunction(torch.autograd.Function):
    """Loss of a clipped sequence ratio; the backward needs one scalar per sequence."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, inplace: bool, options: tuple[Any, ...], *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, logprobs, lse, coefficients, divisor, metrics = sequence_ratio(logits, labels, *options, *rest)
        cu_seqlens = rest[5]
        extra = () if cu_seqlens is None else (cu_seqlens,)
        save_options(ctx, options, logits, labels, logprobs, lse, coefficients, divisor, *extra)
        ctx.inplace, ctx.rest = inplace, len(rest)
        ctx.mark_non_differentiable(logprobs, metrics)
        return loss, logprobs, metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        saved, options = restore_options(ctx)
        logits, labels, logprobs, lse, coefficients, divisor, *packed = saved
        layout = layout_of(labels, packed[0] if packed else None)
        rows = layout.expand(coefficients)
        args = (labels, logprobs, lse, logprobs.new_empty(0), rows, None, grad / divisor, *options)
        nothing = (None,) * (3 + ctx.rest)
        if ctx.inplace:
            token_logprobs_backward_(logits, *args)
            return (logits, *nothing)
        return (token_logprobs_backward(logits, *args), *nothing)
