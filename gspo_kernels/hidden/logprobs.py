"""Operators for log-probs of hidden states, of labels or of K ids per token, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.types import RowStats
from gspo_kernels.hidden.call import RequiresGrad, call_of
from gspo_kernels.hidden.chunk import indices, most_rows
from gspo_kernels.hidden.gradients import Accumulators, HeadGradients, block_width, is_active
from gspo_kernels.logits.logprobs import LogprobRows, save_rows, saved_rows
from gspo_kernels.logits.selected import SelectedGradients, SelectedRows, fake_rows, selected_rows


@matrix_operator
def linear_logprobs_forward(operands: LinearOperands, entropy: bool) -> LogprobRows:
    """Return log-probs of labels, log-sum-exp and entropy of hidden states."""
    call = call_of(operands)
    max_rows = most_rows(call.cut(call.row_count))
    out = Accumulators(call, RequiresGrad(), max_rows, normalized=False, entropy=entropy)
    out.forward(call.projected, call.cut(call.row_count, max(max_rows, call.matmul.min_statistics_rows)))
    return LogprobRows.of(out.stats)


@linear_logprobs_forward.register_fake
def _(operands: LinearOperands, entropy: bool) -> LogprobRows:
    return LogprobRows.fake(operands.labels, operands.hidden.dtype, entropy)


@matrix_operator
def linear_logprobs_backward(
    operands: LinearOperands,
    needs: RequiresGrad,
    stats: RowStats,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    skip: bool,
) -> HeadGradients:
    """Return the gradients of hidden, weight and bias from recomputed logits.

    With ``skip`` all matmuls skip rows without gradient.
    """
    call = call_of(operands)
    new_stats, where = False, call.projected
    if skip and call.matmul.min_rows_to_sync <= call.labels.numel():
        keep = is_active(grad_logprobs, grad_entropy) & call.counted
        new_stats = call.matmul.varies and not torch.equal(keep, call.counted)
        where = indices(keep)
    grad = grad_logprobs.flatten()[where]
    grad_entropy = None if grad_entropy is None else grad_entropy.flatten()[where]
    max_rows, one_product = most_rows(call.cut(len(grad))), call.matmul.by_columns
    out = Accumulators(call, needs, max_rows, normalized=False, stats=stats, one_product=one_product)
    width = block_width(call, len(grad), call.chunk_rows)
    out.recompute(where, grad, grad_entropy, width=width, new_stats=new_stats)
    return out.gradients()


@linear_logprobs_backward.register_fake
def _(operands: LinearOperands, needs: RequiresGrad, *_: Any) -> HeadGradients:
    return HeadGradients.fake(operands, needs, normalized=False)


class LinearTokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy; the backward recomputes the logits.

    The arguments are whether the entropy is computed, ``skip`` as in ``linear_logprobs_backward``, and the
    fields of the operands.
    """

    @staticmethod
    def forward(ctx: Any, entropy: bool, skip: bool, *fields: Any) -> tuple[Tensor, Tensor]:
        operands = LinearOperands(*fields).with_count()
        stats = linear_logprobs_forward(operands, entropy)
        save_rows(ctx, operands.options, *operands[:4], operands.base, *stats)
        ctx.entropy, ctx.skip, ctx.chunking = entropy, skip, operands.chunking
        if not entropy:
            ctx.mark_non_differentiable(stats.entropy)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        (hidden, weight, bias, labels, base, logprobs, lse, entropy), options = saved_rows(ctx)
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None,) * len(ctx.needs_input_grad)
            grad_logprobs = torch.zeros_like(grad_entropy)
        operands = LinearOperands(hidden, weight, bias, labels, options, ctx.chunking, base)
        stats = RowStats(logprobs, lse, entropy if ctx.entropy else None)
        needs = RequiresGrad(*ctx.needs_input_grad[2:5])
        gradients = linear_logprobs_backward(operands, needs, stats, grad_logprobs, grad_entropy, ctx.skip)
        of_inputs = needs.select(gradients.hidden, gradients.weight, gradients.bias)
        return None, None, *of_inputs, *(None,) * (len(ctx.needs_input_grad) - 5)


@matrix_operator
def linear_selected_forward(operands: LinearOperands, ids: Tensor, within: bool) -> SelectedRows:
    """Return log-probs of ids [B, T, K] and of the remaining mass, see ``SelectedRows``.

    Rows without ids have the label ``ignore_index``.
    """
    call = call_of(operands, whole_logits=True)
    ends = call.cut(call.row_count)
    out = Accumulators(call, RequiresGrad(), most_rows(ends), normalized=False)
    result = fake_rows(ids, operands.hidden.dtype)
    for values in result:
        values.zero_()
    for chunk in call.chunks(call.projected, ends):
        chunk_ids = ids.flatten(0, 1)[chunk.where].unsqueeze(0)
        logits = call.matmul.logits(chunk.hidden, out.logits_memory(chunk.size)).unsqueeze(0)
        rows = selected_rows(logits, chunk_ids, chunk.options, within)
        for all_rows, values in zip(result, rows, strict=True):
            all_rows.flatten(0, 1)[chunk.where] = values.squeeze(0)
    return result


@linear_selected_forward.register_fake
def _(operands: LinearOperands, ids: Tensor, within: bool) -> SelectedRows:
    return fake_rows(ids, operands.hidden.dtype)


@matrix_operator
def linear_selected_backward(
    operands: LinearOperands,
    needs: RequiresGrad,
    ids: Tensor,
    rows: SelectedRows,
    grads: SelectedGradients,
    within: bool,
) -> HeadGradients:
    """Return the gradients of hidden, weight and bias from logits that are recomputed chunk by chunk."""
    call = call_of(operands, whole_logits=True)
    ends = call.cut(call.row_count)
    out = Accumulators(call, needs, most_rows(ends), normalized=False)
    for chunk in call.chunks(call.projected, ends):

        def select(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[chunk.where].unsqueeze(0)  # noqa: B023

        of_tail = None if grads.tail is None else select(grads.tail)
        out.add_selected(
            call.matmul.logits(chunk.hidden, out.logits_memory(chunk.size)),
            select(ids),
            SelectedRows(*(select(values) for values in rows)),
            SelectedGradients(select(grads.logprobs), of_tail),
            chunk,
            within,
        )
    return out.gradients()


@linear_selected_backward.register_fake
def _(operands: LinearOperands, needs: RequiresGrad, *_: Any) -> HeadGradients:
    return HeadGradients.fake(operands, needs, normalized=False)


class LinearSelectedLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs of ids; the backward recomputes the logits.

    The arguments are ids, ``within``, and the fields of the operands.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, within: bool, *fields: Any) -> tuple[Tensor, Tensor]:
        operands = LinearOperands(*fields).with_count()
        rows = linear_selected_forward(operands, ids, within)
        save_rows(ctx, operands.options, *operands[:4], operands.base, ids, *rows)
        ctx.chunking, ctx.within = operands.chunking, within
        if within:
            ctx.mark_non_differentiable(rows.tail)
        return rows.logprobs, rows.tail

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_tail: Tensor | None) -> tuple[Any, ...]:
        (hidden, weight, bias, labels, base, ids, *rows), options = saved_rows(ctx)
        if grad_logprobs is None:
            if grad_tail is None:
                return (None,) * len(ctx.needs_input_grad)
            grad_logprobs = grad_tail.new_zeros(()).expand(ids.shape)
        operands = LinearOperands(hidden, weight, bias, labels, options, ctx.chunking, base)
        needs, grads = RequiresGrad(*ctx.needs_input_grad[2:5]), SelectedGradients(grad_logprobs, grad_tail)
        gradients = linear_selected_backward(operands, needs, ids, SelectedRows(*rows), grads, ctx.within)
        of_inputs = needs.select(gradients.hidden, gradients.weight, gradients.bias)
        return None, None, *of_inputs, *(None,) * (len(ctx.needs_input_grad) - 5)
