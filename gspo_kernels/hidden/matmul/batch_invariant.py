"""Matmuls for batch-invariant calls.

Logits and dHidden are summed along H and V in a fixed order, dWeight and dBias over counted tokens in order,
``SEGMENT`` of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.backends.cpp.products import multiply, values_in_step
from gspo_kernels.hidden.matmul.cpp_blocks import CppMatmul

SEGMENT = 128
"""Counted tokens per segment: at most ``cpp.products.PIECE``, and a multiple of
``batch_invariant_matmul.STEP``."""


def batch_invariant_mm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """Multiply as ``cpp.products.multiply``, on CPU or GPU, with a fixed order of each element's sum."""
    if out.is_cpu:
        return multiply(a, b, out, bias=bias, accumulate=accumulate, ends=ends)
    from gspo_kernels.backends.triton import batch_invariant_mm as on_gpu

    return on_gpu(a, b, out, bias=bias, accumulate=accumulate, ends=ends)


class BatchInvariantMatmul(CppMatmul):
    """Matmuls by ``batch_invariant_mm``. On the CPU an fp16 weight is converted to fp32."""

    name = "products in a fixed order"
    mm = staticmethod(batch_invariant_mm)
    any_order = False
    multiple = SEGMENT

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.weight = self.weight.to(self.rows_dtype)

    def segments(self) -> Segments:
        """Return the segments for the step of this matmul."""
        step = SEGMENT if self.weight.is_cuda else values_in_step(self.rows_dtype)
        return Segments(step, self.options.ignore_index)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write logits, on the CPU 16-bit ones rounded from fp32."""
        rounds = out.is_cpu and out.dtype in (torch.float16, torch.bfloat16)
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device) if rounds else out
        batch_invariant_mm(hidden.to(self.weight.dtype), self.weight.t(), wide, bias=self.bias)
        return out.copy_(wide) if rounds else out

    def add_bias(
        self, total: Tensor, grad_rows: Tensor, factors: Tensor, accumulate: bool, ends: Tensor | None
    ) -> None:
        """Add whole segments."""
        column = factors.to(grad_rows.dtype).unsqueeze(1)
        batch_invariant_mm(grad_rows.t(), column, total.unsqueeze(1), accumulate=accumulate, ends=ends)


SegmentedRows = tuple[tuple[Tensor, ...], Tensor]
"""Tensors over the rows of whole segments, [n, ...] each, and the segments' ends, int64 [segments] on the
CPU."""


class Segments:
    """Splits rows, in order, into segments of ``SEGMENT`` counted tokens, and keeps an unfinished segment.

    Rows without a gradient may be missing. For matmuls that sum several rows in one step they are padded with
    zeros, to keep the assignment of rows to steps.

    Args:
        step: rows that a matmul sums in one step; a divisor of ``SEGMENT``.
        ignore_index: the label of rows that don't count.
    """

    def __init__(self, step: int, ignore_index: int) -> None:
        self._step, self._ignore_index = step, ignore_index
        self._unfinished: tuple[Tensor, ...] | None = None
        self._ordinals: Tensor | None = None

    def cut(
        self, parts: tuple[Tensor, ...], where: slice | Tensor, labels: Tensor
    ) -> Iterator[SegmentedRows]:
        """Yield the segments completed by ``parts``, [n, ...] over the rows at positions ``where`` of a call
        with ``labels`` [B, T].
        """
        if self._ordinals is None:
            # the number of counted rows before each row of the call
            counted = labels.flatten() != self._ignore_index
            self._ordinals = counted.cumsum(0) - counted.to(torch.int64)
        ordinals = self._ordinals[where]
        if not ordinals.numel():
            return
        rows = (*parts, ordinals.cpu())
        start, count = 0, ordinals.numel()
        segments = rows[-1] // SEGMENT
        ends = _ends(segments)
        complete = bool(rows[-1][-1] % SEGMENT == SEGMENT - 1)
        before, self._unfinished = self._unfinished, None
        if before is not None:
            if bool(segments[0] == before[-1][0] // SEGMENT):
                start = int(ends[0])
                before = tuple(torch.cat([old, new[:start]]) for old, new in zip(before, rows, strict=True))
            if start == count and not complete:
                self._unfinished = before
                return
            yield self._padded(before)
        stop = count
        if not complete:
            stop = max(start, int(ends[-2]) if ends.numel() > 1 else 0)
            # copy, because the next chunk overwrites the rows
            self._unfinished = tuple(row[stop:].clone() for row in rows)
        if stop > start:
            yield self._padded(tuple(row[start:stop] for row in rows))

    def rest(self) -> Iterator[SegmentedRows]:
        """Yield the unfinished segment, if any."""
        rows, self._unfinished = self._unfinished, None
        if rows is not None:
            yield self._padded(rows)

    def _padded(self, rows: tuple[Tensor, ...]) -> SegmentedRows:
        """Return segments with zeros for missing rows."""
        *parts, ordinals = rows
        groups, place, sizes = torch.unique_consecutive(
            ordinals // self._step, return_inverse=True, return_counts=True
        )
        if self._step < SEGMENT:
            # Missing rows at the end are implicit zeros. On a GPU, where a step is a segment, they are
            # written, to use the same tile for any number of rows.
            sizes[-1] += self._step - 1 - ordinals[-1] % self._step
        if bool((sizes == self._step).all()):
            return tuple(parts), _ends(ordinals // SEGMENT)
        place = (place * self._step + ordinals % self._step).to(parts[0].device)
        count = groups.numel() * self._step
        filled = tuple(part.new_zeros(count, *part.shape[1:]).index_copy_(0, place, part) for part in parts)
        return filled, _ends(groups * self._step // SEGMENT) * self._step


def _ends(segments: Tensor) -> Tensor:
    """Return the end of each run of equal numbers."""
    inner = (segments[1:] != segments[:-1]).nonzero().squeeze(1) + 1
    return torch.cat([inner, inner.new_tensor([len(segments)])])
