"""A student's and a teacher's projection of the same rows, a chunk at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.layout import as_rows
from gspo_kernels.linear.chunks import Call, Chunk, LinearOperands
from gspo_kernels.linear.scaling import power_of_two
from gspo_kernels.linear.schedule import TeacherShapes
from gspo_kernels.linear.scores import Projected, Scores, Taught
from gspo_kernels.ops.memory import CHUNK_ROWS, Workspace
from gspo_kernels.ops.pairs import DivergenceForm, Pair, TeacherRows
from gspo_kernels.types import RowStats


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

    @classmethod
    def of(
        cls,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: TeacherRows,
        packed: bool,
    ) -> LinearTeacher:
        """From tensors that have been checked."""
        return cls(None if hidden is None else as_rows(hidden, packed), weight, bias, rows)


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

    @property
    def teacher_shapes(self) -> TeacherShapes:
        """What the teacher's side costs depend on."""
        if self._teacher is None:
            return TeacherShapes()
        head = self._teacher.head
        return TeacherShapes(self._teacher.hidden.shape[-1], head.dtype.itemsize)

    def of_student(self, chunk: Chunk) -> Tensor:
        """Its logits alone, [n, V], in memory that the next call writes over."""
        head = self.call.head
        return head.logits(chunk.hidden, self._memory(len(chunk), head.dtype))

    def logits(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """[n, V] of either side, in memory that the next call writes over."""
        head, n = self.call.head, len(chunk)
        if self._teacher is None:
            return self.of_student(chunk), None
        theirs = self._teacher.chunk(chunk.where)
        if self._teacher.head.dtype == head.dtype:
            own, other = self._memory(2 * n, head.dtype).split(n)
        else:
            own = self._memory(n, head.dtype)
            other = torch.empty(own.shape, dtype=self._teacher.head.dtype, device=own.device)
        return head.logits(chunk.hidden, own), self._teacher.head.logits(theirs.hidden, other)

    def pair(self, chunk: Chunk, form: DivergenceForm) -> Pair:
        """A chunk's rows of both sides, in memory that the next call writes over."""
        logits, theirs = self.logits(chunk)
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


class TaughtScores(Scores):
    """``Scores`` of a student beside a teacher, and how far from the teacher each token is.

    Attributes:
        divergences: [B, T] in nats, 0.0 where no chunk has been compared.
    """

    def __init__(self, heads: TwoHeads, form: DivergenceForm, shares: Tensor):
        super().__init__(heads.call, False)
        self._heads, self._form, self._shares = heads, form, shares
        self.teacher = heads.teacher_shapes
        self.divergences = heads.call.new_rows()

    def logits(self, chunk: Chunk) -> Tensor:
        """See ``Scores.logits``: the student's alone."""
        return self._heads.of_student(chunk)

    def score(self, chunk: Chunk, entropy: bool, settled: bool = False) -> Projected:
        """See ``Scores.score``; both sides are projected, compared, and the divergences kept."""
        pair = self._heads.pair(chunk, self._form)
        stats = pair.evaluate(self.call.options, transform=chunk.transform)
        self.divergences.view(-1)[chunk.where] = stats.divergences.squeeze(0)
        of_rows = RowStats(stats.logprobs.squeeze(0), stats.lse.squeeze(0), None)
        shares = self._shares.flatten()[chunk.where].unsqueeze(0)
        return Projected(pair.logits.squeeze(0), of_rows, taught=Taught(pair, stats, shares))

    def close(self) -> None:
        """See ``Scores.close``."""
        super().close()
        self._heads.close()


def fitting(shares: Tensor, divergences: Tensor) -> Tensor:
    """Powers of two for rows of shares times divergences' gradients, so divided that fp16 can hold them.

    A student near its teacher has rows as small as the square root of what divides them.
    """
    size = divergences.sqrt().nan_to_num(1.0, 1.0).clamp(2.0**-12, 1.0)
    return power_of_two(shares.abs().to(size.dtype) * size)
