"""Operator: a distillation loss from two pairs of hidden states and weights, with the student's gradient.

What a token's divergence weighs is known beforehand from masks and lengths, so a chunk of rows is projected
once on either side, and its gradient follows while both sides' logits exist: 3 products of the student's size
and 1 of the teacher's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunking, LinearOperands
from gspo_kernels.linear.gradients import Gradients
from gspo_kernels.linear.held import Held, hold, released
from gspo_kernels.linear.sums import Needs, Rows, Weights
from gspo_kernels.linear.two_heads import LinearTeacher, TwoHeads, fitting
from gspo_kernels.ops.divergence import summed
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.pairs import DivergenceForm
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import PairGradients, RowOptions, stats_dtype


class LinearDistilled(NamedTuple):
    """Loss and divergences as in ``Distilled``, and the gradients."""

    loss: Tensor
    divergences: Tensor
    held: Held


@operator
def linear_distillation(
    operands: LinearOperands, teacher: LinearTeacher, form: DivergenceForm, shares: Tensor, needs: Needs
) -> LinearDistilled:
    """Loss, divergences and gradients; the labels of rows that are left out are negative.

    ``shares`` are [B, T], fp64.
    """
    call = Call.of(operands)
    check_temperature(teacher.rows.row_temperature)
    heads = TwoHeads(call.check(), teacher)
    call = heads.call
    found, gradients = call.new_rows(), Gradients(call, needs, normalised=True)
    for chunk in call.chunks(call.projected):
        pair = heads.pair(chunk, form)
        if not any(needs):
            stats = pair.evaluate(call.options, transform=chunk.transform)
            found.view(-1)[chunk.where] = stats.divergences
            del pair, stats
            continue
        share = shares.flatten()[chunk.where].unsqueeze(0)
        out, known = call.rows_memory(pair.logits.squeeze(0)), None
        units, scale = (share != 0).to(gradients.accumulate), share
        if out.dtype == torch.float16:
            known = pair.evaluate(call.options, transform=chunk.transform)
            scale = fitting(share, known.divergences)
            units = share / scale
        stats = pair.evaluate(
            call.options, known, PairGradients(units, None), out.unsqueeze(0), chunk.transform
        )
        found.view(-1)[chunk.where] = stats.divergences
        gradients.add_rows(Rows(out, None), chunk, Weights(scale.squeeze(0), share.squeeze(0) != 0))
        del pair, stats, known, out
    heads.close()
    return LinearDistilled(summed(found, shares), found, Held.of(gradients))


@linear_distillation.register_fake
def _(
    operands: LinearOperands, teacher: LinearTeacher, form: DivergenceForm, shares: Tensor, needs: Needs
) -> LinearDistilled:
    sums = stats_dtype(operands.hidden.dtype)
    return LinearDistilled(
        operands.hidden.new_empty((), dtype=sums),
        operands.labels.new_empty(operands.labels.shape, dtype=sums),
        Held.fake(operands, needs),
    )


class LinearDistillationFunction(torch.autograd.Function):
    """Loss and divergences; the forward already holds the loss's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: RowOptions,
        chunking: Chunking,
        teacher: LinearTeacher,
        form: DivergenceForm,
        shares: Tensor,
        kept: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = Needs.of(ctx, bias)
        operands = LinearOperands(hidden, weight, bias, labels, options, chunking)
        arguments = (operands, teacher, form, shares, needs)
        result = linear_distillation(*arguments)
        hold(ctx, result, linear_distillation, arguments, needs, options.backend, kept)
        ctx.mark_non_differentiable(result.divergences)
        return result.loss, result.divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        return (*released(ctx, grad), *(None,) * 7)
