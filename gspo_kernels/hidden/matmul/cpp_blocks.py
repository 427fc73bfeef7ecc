"""Matmuls of the C++ backend, and statistics on the CPU without writing logits.

Results of a row do not depend on the other rows (csrc/operators.h).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gspo_kernels.backends import cpp
from gspo_kernels.backends.cpp import operators, row_options
from gspo_kernels.backends.cpp.products import INSTRUCTIONS, multiply
from gspo_kernels.core.types import RowStats, stats_dtype
from gspo_kernels.hidden.chunk import Chunk
from gspo_kernels.hidden.matmul.pytorch import LOGITS_SLAB, SlabMatmul, in_parts, sum_of_parts

BLOCK = 2048
"""Columns per update of the running log-sum-exp."""
STATISTICS_ROWS = 4096
"""Rows per chunk if their logits are not written: enough for reading the weight to be cheap next to the
matmul, few enough to keep copies of hidden states small."""


class OnlineSoftmax:
    """Running statistics of rows over blocks of columns (csrc/operators.h).

    Args:
        chunk: the rows.
        vocabulary: V.
        dtype: of the logits.
        entropy: whether to compute the entropy.
    """

    def __init__(self, chunk: Chunk, vocabulary: int, dtype: torch.dtype, entropy: bool):
        self._dtype, self._vocabulary, self._entropy = stats_dtype(dtype), vocabulary, entropy
        options = chunk.options
        self._labels, self._ignore_index = chunk.labels.to(torch.int64).contiguous(), options.ignore_index
        self._options = row_options(options.transform, options.ignore_index, self._dtype)
        blocks = -(-vocabulary // BLOCK)
        self._sums = torch.zeros(chunk.size, 2 + 3 * blocks, dtype=torch.float64, device="cpu")

    def add(self, logits: Tensor, first: int) -> None:
        """Add logits [n, k] of the columns from ``first``: whole blocks, or all up to the last column."""
        operators().fold_columns(
            logits.unsqueeze(0),
            self._labels,
            *self._options,
            first,
            self._vocabulary,
            self._entropy,
            self._sums,
        )

    def add_product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Add all columns of hidden [n, H] @ weight [V, H].T + bias [V], computed as by
        ``cpp.products.multiply`` in blocks of at most a few hundred rows per thread.
        """
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        operators().fold_products(
            hidden.detach(), self._labels, *self._options, weight.detach(), bias, self._entropy,
            INSTRUCTIONS.index("best"), self._sums,
        )  # fmt: skip

    def statistics(self) -> RowStats:
        """Return the statistics [1, n] of the rows, bitwise identical to those of written logits."""
        like = self._labels
        stats = RowStats(
            torch.empty_like(like, dtype=self._dtype),
            torch.empty_like(like, dtype=torch.float64),
            torch.empty_like(like, dtype=self._dtype) if self._entropy else None,
        )
        operators().folded_statistics(self._sums, like, self._ignore_index, *stats)
        return stats


class StreamedMatmul(SlabMatmul):
    """PyTorch's matmuls on the CPU, with a running log-sum-exp over slabs of logits in cache.

    Attributes:
        fuses: whether the C++ backend multiplies and reduces in one operation.
    """

    fuses = False

    @property
    def streams(self) -> bool:
        """Whether statistics write no logits (C++ backend, fp32 or fp64 logits)."""
        return self.backend is cpp and self.dtype not in (torch.float16, torch.bfloat16)

    def statistics_bytes(self, row_count: int) -> int:
        """Return the bytes of a slab of logits, or 0 if blocks are reduced as they are computed."""
        if not self.streams:
            return super().statistics_bytes(row_count)
        return 0 if self.fuses else row_count * min(self.vocabulary, LOGITS_SLAB) * self.rows_dtype.itemsize

    def statistics(self, chunk: Chunk, entropy: bool, memory: Callable[[int], Tensor]) -> RowStats:
        """Return statistics without writing logits, bitwise identical to those of written logits."""
        if not self.streams:
            return super().statistics(chunk, entropy, memory)
        sums = OnlineSoftmax(chunk, self.vocabulary, self.dtype, entropy)
        if self.fuses:
            sums.add_product(chunk.hidden.to(self.weight.dtype), self.weight, self.bias)
        else:
            for first, columns in self.slabs(chunk.hidden, None):
                sums.add(columns, first)
        return sums.statistics()


class CppMatmul(StreamedMatmul):
    """The C++ backend's matmuls of fp32 or bf16, which reduce blocks of logits as they are computed."""

    name = "the C++ backend"
    fuses = True
    mm: Callable[..., Tensor] = staticmethod(multiply)

    @property
    def min_statistics_rows(self) -> int:  # type: ignore[override]
        """Rows per chunk for statistics without logits."""
        return STATISTICS_ROWS if self.streams else 1

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write fp32 logits, or rounded ones as PyTorch does."""
        if out.dtype != torch.float32:
            return super().logits(hidden, out)
        return multiply(hidden, self.weight.t(), out, bias=self.bias)

    def grad_hidden(self, grad_rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply rows by the weight in fp32."""
        out = total
        if out is None:
            size, device = (len(grad_rows), self.weight.shape[1]), grad_rows.device
            out = torch.empty(size, dtype=torch.float32, device=device)
        return self.mm(grad_rows, self.weight, out, accumulate=total is not None)

    def add_weight(
        self, total: Tensor, grad_rows: Tensor, operand: Tensor, accumulate: bool, ends: Tensor | None
    ) -> None:
        """Add in place."""
        self.mm(grad_rows.t(), operand, total, accumulate=accumulate, ends=ends)

    def transposed(self, grad_rows: Tensor, operand: Tensor) -> Tensor:
        """Multiply rows in bf16 and operands in fp32 to fp32."""
        if grad_rows.dtype == operand.dtype:
            return super().transposed(grad_rows, operand)
        parts = in_parts(operand, grad_rows.dtype)
        out = torch.empty(grad_rows.shape[1], parts.shape[1], dtype=torch.float32, device=grad_rows.device)
        return sum_of_parts(multiply(grad_rows.t(), parts, out), operand.shape[1])
