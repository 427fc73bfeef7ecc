"""Operator: a distillation loss from two pairs of hidden states and weights, with the student's gradient.

What a token's divergence weighs is known beforehand from masks and lengths, so a chunk of rows is projected
once on either side, and its gradient follows while both sides' logits exist: 3 products of the student's size
and 1 of the teacher's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunk, Chunking, LinearOperands
from gspo_kernels.linear.gradients import Gradients
from gspo_kernels.linear.held import Held, hold, released
from gspo_kernels.linear.scaling import power_of_two
from gspo_kernels.linear.sums import Needs, Rows, Weights
from gspo_kernels.ops.divergence import summed
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.memory import CHUNK_ROWS, Workspace
from gspo_kernels.ops.pairs import DivergenceForm, Pair, TeacherRows
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import RowOptions, stats_dtype


class LinearTeacher(NamedTuple):
    """A teacher's head, or what it has said of some ids.

    Attributes:
        hidden: [B, T, H of the teacher], or None.
        weight: [V, H of the teacher], or None.
        bias: [V], or None.
        rows: ``TeacherRows`` without logits.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    rows: TeacherRows


class TwoHeads:
    """Student's and teacher's logits, a chunk of rows at a time and in one block of memory."""

    def __init__(self, call: Call, teacher: LinearTeacher):
        self._workspace, self._teacher, self.teacher = Workspace(), None, teacher
        if teacher.hidden is not None and teacher.weight is not None:
            operands = LinearOperands(
                teacher.hidden, teacher.weight, teacher.bias, call.labels, call.options, call.chunking
            )
            self._teacher = Call.of(operands)
            head = self._teacher.head
            own = call.head.row_bytes
            together = own + head.vocabulary * head.dtype.itemsize
            # both sides have the memory of the fewest rows that one would have by default
            fewest, _ = CHUNK_ROWS.get(call.hidden.device.type, CHUNK_ROWS["cuda"])
            rows = call.chunk_rows if call.chunking.max_chunk_bytes else min(call.chunk_rows, fewest)
            call = replace(call, chunk_rows=max(1, rows * own // together))
        self.call = call

    def pair(self, chunk: Chunk, form: DivergenceForm) -> Pair:
        """A chunk's rows of both sides, in memory that the next call writes over."""
        head, teacher, n = self.call.head, self._teacher, len(chunk)
        if teacher is None:
            own, theirs = self._memory(n, head.dtype), None
        elif teacher.head.dtype == head.dtype:
            own, theirs = self._memory(2 * n, head.dtype).split(n)
        else:
            own = self._memory(n, head.dtype)
            theirs = torch.empty(own.shape, dtype=teacher.head.dtype, device=own.device)
        logits = head.logits(chunk.hidden, own)
        if teacher is not None and theirs is not None:
            theirs = teacher.head.logits(teacher.chunk(chunk.where).hidden, theirs)
        rows = self.teacher.rows.at(chunk.where, theirs)
        return Pair(logits.unsqueeze(0), rows, chunk.labels, form)

    def _memory(self, rows: int, dtype: torch.dtype) -> Tensor:
        weight = self.call.head.weight
        if weight.is_cpu:
            return self._workspace.rows(rows, len(weight), dtype)
        return torch.empty(rows, len(weight), dtype=dtype, device=weight.device)

    def close(self) -> None:
        """The memory is no longer needed."""
        self._workspace.close()


def fitting(shares: Tensor, divergences: Tensor) -> Tensor:
    """Powers of two for rows of shares times divergences' gradients, so divided that fp16 can hold them.

    A student near its teacher has rows as small as the square root of what divides them.
    """
    size = divergences.sqrt().nan_to_num(1.0, 1.0).clamp(2.0**-12, 1.0)
    return power_of_two(shares.abs().to(size.dtype) * size)


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
        stats = pair.evaluate(call.options, known, units, out.unsqueeze(0), chunk.transform)
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
