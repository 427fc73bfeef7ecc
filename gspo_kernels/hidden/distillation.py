"""Operator of a distillation loss from hidden states of student and teacher, with the student's gradient.

Each chunk of rows is projected once by student and teacher and its gradient is computed from these logits,
as the weights of tokens are known from masks and lengths: 3 matmuls of the student's size and 1 of the
teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.arguments.values import check_temperature
from gspo_kernels.core.exact import power_of_two
from gspo_kernels.core.memory import reused_memory
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.hidden.call import Call, RequiresGrad, call_of
from gspo_kernels.hidden.chunk import CHUNK_ROWS, most_rows
from gspo_kernels.hidden.gradients import (
    Accumulators,
    GradientRows,
    HeadGradients,
    save_gradients,
    take_gradients,
)
from gspo_kernels.logits.divergence import DivergenceSpec, Pair, TeacherRows, summed


class LinearDistilled(NamedTuple):
    """The loss, the divergence of each token, and the gradients."""

    loss: Tensor
    divergences: Tensor
    gradients: HeadGradients


@matrix_operator
def linear_distillation(
    operands: LinearOperands,
    needs: RequiresGrad,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    teacher: TeacherRows,
    spec: DivergenceSpec,
    shares: Tensor,
) -> LinearDistilled:
    """Return loss, divergences and gradients; rows with negative labels are skipped.

    The teacher is a head (hidden [B, T, H of the teacher], weight and bias), or log-probs of some ids in
    ``teacher``, whose logits are None. ``shares`` [B, T], fp64, are the weights of divergences in the loss.
    """
    call, of_teacher = call_of(operands, whole_logits=True), None
    temperature, ignore_index = teacher.transform.row_temperature, operands.options.ignore_index
    if temperature is not None:
        check_temperature(temperature, operands.labels, ignore_index, "teacher_temperature")
    matmul, device, chunk_rows = call.matmul, call.hidden.device, call.chunk_rows
    if teacher_hidden is not None and teacher_weight is not None:
        of_teacher = call_of(
            operands._replace(hidden=teacher_hidden, weight=teacher_weight, bias=teacher_bias, base=None),
            checked=False,
            whole_logits=True,
        )
        # both sides share the memory of one: by default the fewest rows of CHUNK_ROWS
        if not call.chunking.max_chunk_bytes:
            chunk_rows = min(chunk_rows, CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])[0])
        both = matmul.row_bytes + matmul.vocabulary * of_teacher.matmul.dtype.itemsize
        chunk_rows = max(1, chunk_rows * matmul.row_bytes // both)
    ends = call.cut(call.row_count, chunk_rows)
    out = Accumulators(
        call, needs, most_rows(ends), normalized=True, one_product=call.row_count <= chunk_rows
    )
    divergences = call.hidden.new_zeros(call.labels.shape, dtype=out.dtype)
    _add_chunks(call, of_teacher, teacher, spec, shares, ends, out, divergences)
    return LinearDistilled(summed(divergences, shares), divergences, out.gradients())


def _add_chunks(
    call: Call,
    of_teacher: Call | None,
    teacher: TeacherRows,
    spec: DivergenceSpec,
    shares: Tensor,
    ends: Sequence[int],
    out: Accumulators,
    divergences: Tensor,
) -> None:
    """Write the divergences of all rows and accumulate their gradients; free the logits on return."""
    matmul, device = call.matmul, call.hidden.device
    # one block of memory where both sides have the same dtype
    row_count = out.max_rows
    shared = of_teacher is not None and of_teacher.matmul.dtype == matmul.dtype
    block = reused_memory(torch.Size(((1 + shared) * row_count, matmul.vocabulary)), matmul.dtype, device)
    teacher_block = block[row_count:]
    if of_teacher is not None and not shared:
        teacher_block = torch.empty(
            row_count, matmul.vocabulary, dtype=of_teacher.matmul.dtype, device=device
        )
    for chunk in call.chunks(call.projected, ends):
        logits, teacher_logits = matmul.logits(chunk.hidden, block[: chunk.size]), None
        if of_teacher is not None:
            teacher_logits = teacher_block[: chunk.size]
            of_teacher.matmul.logits(of_teacher.chunk(chunk.where).hidden, teacher_logits)
        teacher_rows = teacher.at(chunk.where, teacher_logits)
        pair = Pair(logits.unsqueeze(0), teacher_rows, chunk.labels, spec)
        if not any(out.needs):
            stats = pair.evaluate(chunk.options)
            divergences.view(-1)[chunk.where] = stats.divergences
            continue
        share = shares.flatten()[chunk.where].unsqueeze(0)
        rows, known = matmul.rows_memory(logits), None
        units, scale = (share != 0).to(out.dtype), share
        if rows.dtype == torch.float16:
            known = pair.evaluate(chunk.options)
            # gradient rows scale with the square root of the divergence: divide by it, for fp16
            divided_by = known.divergences.sqrt().nan_to_num(1.0, 1.0).clamp(2.0**-12, 1.0)
            scale = power_of_two(share.abs().to(divided_by.dtype) * divided_by)
            units = share / scale
        stats = pair.evaluate(chunk.options, known, units, rows.unsqueeze(0))
        divergences.view(-1)[chunk.where] = stats.divergences
        active = share.squeeze(0) != 0
        out.add_rows(GradientRows(rows, scale.squeeze(0), None, active), chunk)


@linear_distillation.register_fake
def _(operands: LinearOperands, needs: RequiresGrad, *_: Any) -> LinearDistilled:
    sums = stats_dtype(operands.hidden.dtype)
    return LinearDistilled(
        operands.hidden.new_empty((), dtype=sums),
        operands.labels.new_empty(operands.labels.shape, dtype=sums),
        HeadGradients.fake(operands, needs, normalized=True),
    )


class LinearDistillationFunction(torch.autograd.Function):
    """Loss and divergences; the forward also computes the gradients.

    The arguments are whether the call is traced, those of ``linear_distillation`` after ``needs``, and the
    fields of the operands.
    """

    @staticmethod
    def forward(ctx: Any, traced: bool, rest: tuple[Any, ...], *fields: Any) -> tuple[Tensor, Tensor]:
        needs = RequiresGrad(*ctx.needs_input_grad[2:5])
        arguments = (LinearOperands(*fields), needs, *rest)
        result = linear_distillation(*arguments)
        save_gradients(ctx, result.gradients, needs, linear_distillation, arguments, traced)
        ctx.mark_non_differentiable(result.divergences)
        return result.loss, result.divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        gradients = (None,) * 3 if grad is None else take_gradients(ctx, grad)
        return None, None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 5)
