"""Small calls on the CPU, which keep their logits for the backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.arguments.terms import Terms
from gspo_kernels.core.exact import times
from gspo_kernels.core.operators import can_bypass_dispatcher, isolated
from gspo_kernels.core.types import RowGradients, RowOptions, RowStats, SequenceRatioStats
from gspo_kernels.hidden.call import Decisions, RequiresGrad
from gspo_kernels.hidden.matmul import select_matmul
from gspo_kernels.logits.logprobs import logprobs_backward, save_rows, saved_rows
from gspo_kernels.logits.sequence_ratio import is_sequence_ratio, ratio_operands, sequence_ratio

SMALL_BYTES = 2**20
"""Most bytes of logits on the CPU to keep for the backward."""
_MIN, _MAX = 2.0**-64, 2.0**64
"""Range of magnitudes of nonzero coefficients that are safe from underflow and overflow in a matmul."""


def small_loss(
    operands: LinearOperands, terms: Terms, decisions: Decisions
) -> tuple[Tensor, SequenceRatioStats] | None:
    """Return logits [B, T, V] and statistics of a small call on the CPU, without autograd, or None if the
    call needs a schedule.

    If the logits fit in cache, planning, chunks and normalized coefficients cost more than they save. Calls
    with masked tokens (whose hidden states may be NaN), extreme coefficients, vocabulary shards,
    batch-invariant mode or an adapter need a schedule, and so do calls that must pass torch's dispatcher.
    """
    hidden, weight, bias, labels, options, chunking, base = operands
    if decisions.schedule != "auto" or decisions.entropy:
        return None
    if base is not None or chunking.batch_invariant or options.shard.group:
        return None
    if not can_bypass_dispatcher([hidden, weight, labels]):
        return None
    budget = min(SMALL_BYTES, chunking.max_chunk_bytes or SMALL_BYTES)
    size = labels.numel() * weight.shape[0] * weight.element_size()
    exact = weight.dtype in (torch.float32, torch.float64)
    if not (hidden.is_cpu and exact and 0 < size <= budget):
        return None
    if terms.skipped is not None or not is_sequence_ratio(terms, decisions.ratio_clip):
        return None
    if not bool(terms.counted(labels).all()):
        return None
    detached = None if bias is None else bias.detach()
    matmul = select_matmul(weight.detach(), detached, None, chunking.logits_dtype, False, options)
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    with isolated([rows]):
        logits = matmul.logits(rows, rows.new_empty(rows.shape[0], weight.shape[0]))
    logits = logits.view(*labels.shape, weight.shape[0])
    stats = sequence_ratio(logits, labels, None, options, ratio_operands(labels, terms), decisions.ratio_clip)
    coefficients = stats.coefficients / stats.divisor
    # detects non-finite hidden states even if a zero advantage hides them from the loss
    finite = math.isfinite(stats.lse.sum().item())
    if not finite or not all(c == 0 or _MIN < abs(c) < _MAX for c in coefficients.tolist()):
        return None
    return logits, stats


class SmallLossFunction(torch.autograd.Function):
    """Loss, metrics and log-probs of a small call; the backward computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: RowOptions,
        terms: Terms,
        logits: Tensor,
        stats: SequenceRatioStats,
    ) -> tuple[Tensor, Tensor, Tensor]:
        each = terms.layout(labels).expand(stats.coefficients / stats.divisor)
        save_rows(ctx, options, hidden, labels, logits, stats.logprobs, stats.lse, each, weight, bias)
        ctx.needs = RequiresGrad(*ctx.needs_input_grad[:3])
        ctx.mark_non_differentiable(stats.metrics, stats.logprobs)
        return stats.loss, stats.metrics, stats.logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        (hidden, labels, logits, logprobs, lse, each, weight, bias), options = saved_rows(ctx)
        needs = ctx.needs
        # small calls are fp32 or fp64, like their logits
        matmul = select_matmul(weight, bias, None, "float32", False, options)
        stats = RowStats(logprobs, lse, None)
        rows = logprobs_backward(logits, labels, stats, RowGradients(each), options)
        rows = rows.view(-1, rows.shape[-1])
        with isolated([rows]):
            gradients: tuple[Tensor | None, ...] = (
                matmul.grad_hidden(rows).view(hidden.shape) if needs.hidden else None,
                matmul.transposed(rows, hidden.reshape(-1, hidden.shape[-1])) if needs.weight else None,
                rows.sum(0) if needs.bias else None,
            )
        if grad.item() != 1.0:
            gradients = tuple(None if one is None else times(one, grad) for one in gradients)
        return (*gradients, *(None,) * 5)
