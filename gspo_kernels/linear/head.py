"""The projection from hidden states to logits and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gspo_kernels.linear.products import fixed_product, in_blocks, multiply, values_in_step
from gspo_kernels.linear.segments import SEGMENT
from gspo_kernels.ops.backends import OnlineSoftmax
from gspo_kernels.torch_internals import onednn_multiplies
from gspo_kernels.types import stats_dtype

LOGITS_SLAB, HIDDEN_SLAB = 2048, 8192
"""Rows of the weight that a product of torch's takes on the CPU at a time, for logits and, if it is 16-bit,
for dHidden. So logits are written in columns that stay in cache, with the same bits: with MKL on two AVX2
cores that is a twentieth faster, and a quarter where a product has only 16 rows."""


@dataclass(frozen=True)
class Head:
    """The projection from hidden states to logits, and how its products are computed.

    ``fixed``: in an order of their sums that depends on nothing but the weight.
    """

    weight: Tensor
    bias: Tensor | None
    logits_dtype: str
    fixed: bool = False

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def native(self) -> bool:
        """Products in the inputs' own dtype: fp32 and fp64 always, 16-bit where fp32 logits aren't wanted."""
        return self.weight.dtype in (torch.float32, torch.float64) or self.logits_dtype == "input"

    @property
    def exact(self) -> bool:
        """Whether gradients show the last bit of the logits: those of 16-bit weights don't."""
        return self.weight.dtype in (torch.float32, torch.float64)

    @property
    def shows_other_rows(self) -> bool:
        """Whether gradients show that logits were projected along with other rows than before."""
        return self.exact and not self.fixed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.weight.dtype if self.native else torch.float32

    @cached_property
    def in_blocks(self) -> bool:
        """Whether the C++ backend computes the products."""
        if self.fixed:
            return self.weight.is_cpu and self.weight.dtype in (torch.float32, torch.bfloat16)
        return in_blocks(self.weight)

    @property
    def rows_dtype(self) -> torch.dtype:
        """The dtype of the rows that enter the gradient products."""
        own = self.weight.is_cuda or self.weight.dtype == torch.float64 or self.in_blocks
        return self.weight.dtype if own else torch.float32

    @property
    def rows_in_step(self) -> int:
        """How many rows a fixed product for dWeight may sum up in one step of an order of its own."""
        if self.weight.is_cuda:
            return SEGMENT
        return values_in_step(self.rows_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of logits, and of the row that enters the gradient products unless it fits there."""
        rows = self.rows_dtype.itemsize
        return self.vocabulary * (self.dtype.itemsize + (rows if rows > self.dtype.itemsize else 0))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[n, H] -> [n, V], written into ``out``."""
        rounded = out.dtype in (torch.float16, torch.bfloat16)
        if self.fixed and (out.is_cuda or (self.in_blocks and not rounded)):
            return fixed_product(hidden, self.weight.t(), out, bias=self.bias)
        if self.weight.is_cuda and not self.native:
            torch.mm(hidden, self.weight.t(), out_dtype=out.dtype, out=out)
            return out if self.bias is None else out.add_(self.bias)
        if self.weight.is_cuda or (rounded and not self.fixed and onednn_multiplies(out.dtype)):
            if self.bias is None:
                return torch.mm(hidden, self.weight.t(), out=out)
            return torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        if rounded:
            for slab, columns in self._slabs_of_logits(hidden):
                out[:, slab] = columns
            return out
        if self.in_blocks:
            return multiply(hidden, self.weight.t(), out, bias=self.bias)
        hidden = self._operand(hidden)
        if self.vocabulary <= LOGITS_SLAB:
            return self._columns_of_logits(hidden, self.weight, self.bias, out)
        for slab in self._slabs(LOGITS_SLAB):
            self._slab_of_logits(hidden, slab, out[:, slab])
        return out

    def fold_logits(self, hidden: Tensor, folds: OnlineSoftmax) -> None:
        """Hand each logit of hidden states [n, H] on, with the bits that ``logits`` writes in fp32 or fp64;
        on the CPU.
        """
        if self.in_blocks:
            folds.add_product(hidden, self.weight, self.bias)
            return
        for slab, columns in self._slabs_of_logits(hidden):
            folds.add(columns, slab.start)

    def grad_hidden(self, rows: Tensor) -> Tensor:
        """[n, V] -> [n, H] in the statistics' dtype."""
        if self.fixed:
            return self._fixed_grad_hidden(rows)
        if self.in_blocks:
            return multiply(rows, self.weight, torch.empty(rows.shape[0], self.weight.shape[1]))
        if rows.dtype == self.weight.dtype:
            if rows.is_cuda and rows.dtype in (torch.float16, torch.bfloat16):
                return torch.mm(rows, self.weight, out_dtype=torch.float32)
            return torch.mm(rows, self.weight).to(stats_dtype(rows.dtype))
        out = torch.zeros(rows.shape[0], self.weight.shape[1], dtype=rows.dtype, device=rows.device)
        for slab in self._slabs(HIDDEN_SLAB):
            out.addmm_(rows[:, slab], self.weight[slab].to(rows.dtype))
        return out

    def _operand(self, values: Tensor) -> Tensor:
        """Hidden states or weights as products on the CPU take them that leave fp32 or fp64."""
        if self.exact or (self.fixed and self.in_blocks):
            return values
        return values.to(stats_dtype(values.dtype))

    def _slab_of_logits(self, operand: Tensor, slab: slice, out: Tensor) -> Tensor:
        """Some columns of logits, in fp32 or fp64."""
        bias = None if self.bias is None else self.bias[slab]
        return self._columns_of_logits(operand, self.weight[slab], bias, out)

    def _columns_of_logits(self, operand: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Columns of logits, given their rows of the weight."""
        weight = self._operand(weight)
        if self.fixed:
            return fixed_product(operand, weight.t(), out, bias=bias)
        torch.mm(operand, weight.t(), out=out)
        return out if bias is None else out.add_(bias)

    def _slabs_of_logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """All columns of logits, a slab at a time in the same memory."""
        # rows a power of two apart would share a few lines of a cache
        width = min(self.vocabulary, LOGITS_SLAB) + 16
        columns = torch.empty(hidden.shape[0], width, dtype=stats_dtype(hidden.dtype))
        hidden = self._operand(hidden)
        for slab in self._slabs(LOGITS_SLAB):
            yield slab, self._slab_of_logits(hidden, slab, columns[:, : slab.stop - slab.start])

    def _fixed_grad_hidden(self, rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape[0], self.weight.shape[1], dtype=torch.float32, device=rows.device)
        if rows.dtype == self.weight.dtype:
            return fixed_product(rows, self.weight, out)
        for slab in self._slabs(HIDDEN_SLAB):
            fixed_product(rows[:, slab], self.weight[slab].to(rows.dtype), out, accumulate=slab.start > 0)
        return out

    def _slabs(self, rows: int) -> Iterator[slice]:
        for start in range(0, self.vocabulary, rows):
            yield slice(start, min(start + rows, self.vocabulary))
