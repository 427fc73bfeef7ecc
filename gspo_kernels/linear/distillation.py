"""Operator: a distillation loss from two pairs of hidden states and weights, and the student's gradient,
together.

What a token's divergence weighs is known beforehand from masks and lengths, so a chunk of rows is projected
once on either side, and its gradient follows while both sides' logits exist: 3 products of the student's size
and 1 of the teacher's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunk, Chunking, LinearOperands
from gspo_kernels.linear.gradients import Gradients
from gspo_kernels.linear.held import hold, released
from gspo_kernels.linear.scaling import power_of_two
from gspo_kernels.linear.sums import Needs, Rows, Weights
from gspo_kernels.ops.divergence import DivergenceForm, TeacherRows, evaluate, summed
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.memory import CHUNK_ROWS, Workspace
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


class LinearDistilled(NamedTuple):
    """Loss and divergences as in ``Distilled``, and the gradients for upstream 1, see ``held.hold``."""

    loss: Tensor
    divergences: Tensor
    grad_hidden: Tensor
    scales: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


class _TwoHeads:
    """Student's and teacher's logits, a chunk of rows at a time and in one block of memory."""

    def __init__(self, call: Call, teacher: LinearTeacher):
        self._workspace, self._teacher = Workspace(), None
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

    def logits(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """[n, V] of either side, in memory that the next call of this writes over."""
        head, n = self.call.head, len(chunk)
        if self._teacher is None:
            return head.logits(chunk.hidden, self._memory(n, head.dtype)), None
        theirs = self._teacher.chunk(chunk.where)
        if self._teacher.head.dtype == head.dtype:
            own, other = self._memory(2 * n, head.dtype).split(n)
        else:
            own = self._memory(n, head.dtype)
            other = torch.empty(own.shape, dtype=self._teacher.head.dtype, device=own.device)
        return head.logits(chunk.hidden, own), self._teacher.head.logits(theirs.hidden, other)

    def _memory(self, rows: int, dtype: torch.dtype) -> Tensor:
        weight = self.call.head.weight
        if weight.is_cpu:
            return self._workspace.rows(rows, len(weight), dtype)
        return torch.empty(rows, len(weight), dtype=dtype, device=weight.device)

    def close(self) -> None:
        """The memory is no longer needed."""
        self._workspace.close()


@operator
def linear_distillation(
    operands: LinearOperands, teacher: LinearTeacher, form: DivergenceForm, shares: Tensor, needs: Needs
) -> LinearDistilled:
    """Loss, divergences and gradients; the labels of rows that are left out are negative.

    ``shares`` are [B, T], fp64.
    """
    call = Call.of(operands).check()
    check_temperature(teacher.rows.row_temperature)
    heads = _TwoHeads(call, teacher)
    call = heads.call
    found, gradients = call.new_rows(), Gradients(call, needs, normalised=True)
    for chunk in call.chunks(call.projected):
        logits, theirs = heads.logits(chunk)
        their_rows = teacher.rows.at(chunk.where, theirs)
        divergences = partial(
            evaluate,
            logits.unsqueeze(0),
            their_rows,
            chunk.labels,
            chunk.transform,
            call.options.backend,
            form,
        )
        if not any(needs):
            found.view(-1)[chunk.where] = divergences(None, None)
            continue
        share = shares.flatten()[chunk.where]
        units = (share != 0).to(gradients.accumulate).unsqueeze(0)
        out, factors = call.rows_memory(logits, None), None
        if out.dtype == torch.float16:
            # A student near its teacher has rows as small as the square root of what divides them.
            size = divergences(None, None).sqrt().nan_to_num(1.0, 1.0)
            factors = power_of_two(size.clamp(2.0**-12, 1.0))
            units = units / factors
        found.view(-1)[chunk.where] = divergences(units, out.unsqueeze(0))
        rows = Rows(out, None if factors is None else factors.squeeze(0))
        gradients.add_rows(rows, chunk, Weights(share))
        del logits, theirs, their_rows, divergences, out, rows
    heads.close()
    outputs = (gradients.hidden, gradients.scales, *gradients.sums.result())
    # one empty tensor each: an operator's outputs may not be the same tensor
    present = (found.new_empty(0) if x is None else x for x in outputs)
    return LinearDistilled(summed(found, shares), found, *present)


@linear_distillation.register_fake
def _(
    operands: LinearOperands, teacher: LinearTeacher, form: DivergenceForm, shares: Tensor, needs: Needs
) -> LinearDistilled:
    hidden, weight, labels = operands.hidden, operands.weight, operands.labels
    sums = stats_dtype(hidden.dtype)
    return LinearDistilled(
        hidden.new_empty((), dtype=sums),
        labels.new_empty(labels.shape, dtype=sums),
        hidden.new_empty(hidden.shape if needs.hidden else 0),
        hidden.new_empty(hidden.shape[:-1], dtype=sums),
        weight.new_empty(weight.shape if needs.weight else 0, dtype=sums),
        weight.new_empty(weight.shape[0] if needs.bias else 0, dtype=sums),
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
