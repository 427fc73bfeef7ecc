"""A small call on the CPU: few logits stay until the backward, and plain products give the gradients.

Where the logits fit a cache, planning, chunks and normalised coefficients would take longer than the products
that they save or protect. What plain arithmetic could spoil is left to ``run``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import LinearOperands
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.products import transposed_product
from gspo_kernels.linear.scaling import times
from gspo_kernels.linear.sums import Needs
from gspo_kernels.ops.library import can_bypass_dispatcher
from gspo_kernels.ops.logprobs import RowGradients, logprobs_backward, save_rows, saved_rows
from gspo_kernels.plan import ratio_of
from gspo_kernels.sequence_ratio import RatioOperands, sequence_ratio
from gspo_kernels.terms import Terms
from gspo_kernels.types import RowOptions, RowStats, SequenceRatioStats

SMALL_BYTES = 2**20
"""Logits that take no more stay until the backward."""
_LEAST, _MOST = 2.0**-64, 2.0**64
"""Coefficients between these, or zero, lose nothing in a product and overflow none."""


class SmallLoss(NamedTuple):
    """A small call's head, its logits [B, T, V], and what follows from them."""

    head: Head
    logits: Tensor
    stats: SequenceRatioStats
    coefficients: Tensor  # [B], dLoss/dlogprobs of each counted token


def small_loss(operands: LinearOperands, terms: Terms, entropy: bool) -> SmallLoss | None:
    """The loss of a small call, without autograd; None where ``run`` is to serve it.

    Tokens that are left out need ``run``: what stands in their hidden states may be anything. So do
    coefficients of sizes that only normalised arithmetic bears, ranks that share a vocabulary, products in a
    fixed order, and whoever traces operators.
    """
    hidden, weight, bias, labels, options, chunking = operands
    if chunking.batch_invariant or options.shard.group or not can_bypass_dispatcher([hidden, weight, labels]):
        return None
    head = Head(weight.detach(), None if bias is None else bias.detach(), chunking.logits_dtype)
    budget = min(SMALL_BYTES, chunking.max_chunk_bytes or SMALL_BYTES)
    size = labels.numel() * weight.shape[0] * weight.element_size()
    small = hidden.is_cpu and head.exact and 0 < size <= budget
    if not small or entropy or terms.skipped is not None or terms.old_logprobs is None:
        return None
    form = ratio_of(terms, options.backend)
    if form.level != "sequence" or terms.ref_logprobs is not None or not bool(terms.counted(labels).all()):
        return None
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    logits = head.logits(rows, rows.new_empty(rows.shape[0], weight.shape[0]))
    logits = logits.view(*labels.shape, weight.shape[0])
    stats = sequence_ratio(logits, labels, options, RatioOperands.of(labels, terms), form)
    coefficients = stats.coefficients / stats.divisor
    # hidden states that aren't finite show here, also where a zero advantage hides them from the loss
    finite = math.isfinite(stats.lse.sum().item())
    if not finite or not all(c == 0 or _LEAST < abs(c) < _MOST for c in coefficients.tolist()):
        return None
    return SmallLoss(head, logits, stats, coefficients)


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
        small: SmallLoss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = small.stats
        each = terms.layout(labels).expand(small.coefficients)
        save_rows(ctx, options, hidden, labels, small.logits, stats.logprobs, stats.lse, each, weight, bias)
        ctx.needs, ctx.logits_dtype = Needs.of(ctx, bias), small.head.logits_dtype
        ctx.mark_non_differentiable(stats.metrics, stats.logprobs)
        return stats.loss, stats.metrics, stats.logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        (hidden, labels, logits, logprobs, lse, each, weight, bias), options = saved_rows(ctx)
        head, needs = Head(weight, bias, ctx.logits_dtype), ctx.needs
        grads = RowGradients(each, None, None)
        rows = logprobs_backward(logits, labels, RowStats(logprobs, lse, None), grads, options)
        rows = rows.view(-1, rows.shape[-1])
        found: tuple[Tensor | None, ...] = (
            head.grad_hidden(rows).view(hidden.shape) if needs.hidden else None,
            transposed_product(rows, hidden.reshape(-1, hidden.shape[-1])) if needs.weight else None,
            rows.sum(0) if needs.bias else None,
        )
        if grad.item() != 1.0:
            found = tuple(None if one is None else times(one, grad) for one in found)
        return (*found, *(None,) * 4)
