"""Operators: log-probs of K ids per token from hidden states, and their gradient; see ``selected``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.hidden.call import Call, LinearOperands
from gspo_kernels.hidden.gradients import Gradients, HeadGradients
from gspo_kernels.logits.logprobs import save_rows, saved_rows
from gspo_kernels.logits.plan import RequiresGrad
from gspo_kernels.logits.selected import SelectedGradients, SelectedRows, fake_rows, score


@matrix_operator
def linear_selected_forward(operands: LinearOperands, ids: Tensor, within: bool) -> SelectedRows:
    """Return log-probs of ids [B, T, K] and the mass that they leave, as a log; see ``SelectedRows``.

    Rows without ids have the label ``ignore_index``.
    """
    call = Call(operands)
    call.make_room(call.row_count)
    result = fake_rows(ids, operands.hidden.dtype)
    for values in result:
        values.zero_()
    for chunk in call.chunks(call.projected):
        chunk_ids = ids.flatten(0, 1)[chunk.where].unsqueeze(0)
        logits = call.products.logits_of(chunk).unsqueeze(0)
        rows = score(logits, chunk_ids, chunk.options, within)
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
    """Return the gradients of hidden, weight and bias. The same products recompute logits chunk by chunk."""
    call = Call(operands)
    call.make_room(call.row_count)
    gradients = Gradients(call, needs, normalised=False)
    for chunk in call.chunks(call.projected):

        def select(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[chunk.where].unsqueeze(0)  # noqa: B023

        of_tail = None if grads.tail is None else select(grads.tail)
        gradients.add_selected(
            call.products.logits_of(chunk),
            select(ids),
            SelectedRows(*(select(values) for values in rows)),
            SelectedGradients(select(grads.logprobs), of_tail),
            chunk,
            within,
        )
    return gradients.result()


@linear_selected_backward.register_fake
def _(operands: LinearOperands, needs: RequiresGrad, *_: Any) -> HeadGradients:
    return HeadGradients.fake(operands, needs, normalised=False)


class LinearSelectedLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs of ids; the backward recomputes the logits.

    The arguments are the operands (field by field), ids and ``within``.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands, (ids, within) = LinearOperands(*arguments[:7]), arguments[7:]
        if operands.labels.is_cuda:
            operands = operands.with_count()
        rows = linear_selected_forward(operands, ids, within)
        save_rows(ctx, operands.options, *operands[:4], operands.base, ids, *rows)
        ctx.chunking, ctx.within = operands.chunking, within
        if within:
            ctx.mark_non_differentiable(rows.tail)
        return rows.logprobs, rows.tail

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_tail: Tensor | None) -> tuple[Any, ...]:
        (hidden, weight, bias, labels, base, ids, *rows), options = saved_rows(ctx)
        nothing = (None,) * 6
        if grad_logprobs is None:
            if grad_tail is None:
                return (None, None, None, *nothing)
            grad_logprobs = grad_tail.new_zeros(()).expand(ids.shape)
        needs = RequiresGrad(*ctx.needs_input_grad[:3])
        gradients = linear_selected_backward(
            LinearOperands(hidden, weight, bias, labels, options, ctx.chunking, base),
            needs,
            ids,
            SelectedRows(*rows),
            SelectedGradients(grad_logprobs, grad_tail),
            ctx.within,
        )
        return (*needs.select(gradients.hidden, gradients.weight, gradients.bias), *nothing)
