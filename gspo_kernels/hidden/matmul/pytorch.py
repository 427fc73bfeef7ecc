"""PyTorch's matmuls, in the weight's dtype on a GPU and by slabs of the weight on other devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gspo_kernels.arguments.head import MIN_SYNC_WORK
from gspo_kernels.backends.dispatch import load
from gspo_kernels.backends.protocol import OnePassBackend
from gspo_kernels.core.exact import largest, power_of_two
from gspo_kernels.core.torch_internals import onednn_multiplies
from gspo_kernels.core.types import RowGradients, RowOptions, RowStats, stats_dtype
from gspo_kernels.distributed.shards import row_backend
from gspo_kernels.hidden.chunk import Chunk, Projected

if TYPE_CHECKING:  # circular import
    from gspo_kernels.hidden.matmul.batch_invariant import Segments

LOGITS_SLAB, HIDDEN_SLAB = 2048, 8192
"""Rows of the weight per torch.mm on the CPU, for logits and, if the weight is 16-bit, for dHidden. Logits
are then written while in cache, with bitwise identical results: with MKL on two AVX2 cores 5% faster, and 25%
for 16 rows."""


class HeadMatmul:
    """Immutable matmuls of a call with its head's weight, and the row operations between them.

    Subclasses may compute statistics without writing logits, or statistics along with gradient rows.

    Attributes:
        weight: [V, H].
        trained: the matrix whose gradient is dWeight: the weight, or a low-rank adapter's [V, r].
        bias: [V], or None.
        logits_dtype: "float32" or "input".
        backend: the row operations.
        options: the options of the call's rows.
        vocabulary: V.
        dtype: the dtype of the logits.
        rows_dtype: the dtype of the rows of the gradient matmuls.
        row_bytes: bytes of a row of logits, plus those of its gradient row if this has a wider dtype.
        varies: whether recomputing logits along with different rows, which may change their last bit, affects
            gradients (weights of more than 16 bits).
        by_columns: whether logits are recomputed by blocks of columns, see ``Accumulators.add_by_columns``.
        memory_dtype, stride: dtype and row stride of the memory for logits, of which they are the first
            ``vocabulary`` columns.
        rounds_early: whether dWeight can be rounded before it is multiplied by the upstream gradient, to
            avoid an fp32 accumulator. fp16 lacks the range.
        operand_dtype: the dtype of the hidden states in the dWeight matmul.
        first_column: the first column of hidden states that ``trained`` multiplies.
        min_statistics_rows: minimum of rows per chunk for statistics alone.
        min_rows_to_sync: minimum of rows for a host-device sync, to skip rows without gradient, to save time;
            see ``MIN_SYNC_WORK``.
    """

    name = "torch.mm"
    any_order = True
    """Whether the order of sums, and a row's last bits, may depend on the other rows."""
    multiple = 1
    """Chunk sizes are rounded down to a multiple of this."""
    min_statistics_rows = 1
    rows_from_project = False
    """Whether only ``project`` can compute gradient rows, not logits and earlier statistics."""
    writes_16_bits = True
    """Whether the matmul can round dWeight to the dtype of 16-bit rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, logits_dtype: str, converts: bool, options: RowOptions
    ):
        """Set dtypes and sizes; with ``converts`` 16-bit weights are multiplied in fp32."""
        self.weight = self.trained = weight
        self.bias, self.logits_dtype = bias, logits_dtype
        self.options, self.backend = options, row_backend(options)
        self.vocabulary = weight.shape[0]
        exact = weight.dtype in (torch.float32, torch.float64)
        self.varies = exact and self.any_order
        self.by_columns = not exact and self.any_order
        self.rounds_early = self.by_columns and weight.dtype == torch.bfloat16
        self.dtype = weight.dtype if exact or logits_dtype == "input" else torch.float32
        self.rows_dtype = stats_dtype(weight.dtype) if converts else weight.dtype
        extra = self.rows_dtype.itemsize if self.rows_dtype.itemsize > self.dtype.itemsize else 0
        self.row_bytes = self.vocabulary * (self.dtype.itemsize + extra)
        self.memory_dtype, self.stride = self.dtype, self.vocabulary
        self.operand_dtype, self.first_column = self.rows_dtype, 0
        self.min_rows_to_sync = MIN_SYNC_WORK / weight.numel() if weight.is_cuda else 0.0

    def columns(self, first: int, last: int) -> HeadMatmul:
        """Return the matmuls for a range of columns of the logits, rows of the weight."""
        block = copy.copy(self)
        block.weight, block.trained = self.weight[first:last], self.trained[first:last]
        block.bias = None if self.bias is None else self.bias[first:last]
        block.vocabulary = last - first
        return block

    def segments(self) -> Segments:
        """Return the segments of rows if sums over rows have a fixed order."""
        raise NotImplementedError

    # --- memory

    def statistics_bytes(self, row_count: int) -> int:
        """Return the bytes of logits that ``statistics`` of ``row_count`` rows writes at a time."""
        return row_count * self.row_bytes

    # --- logits, and what is computed along with them

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Project hidden states [n, H] to logits [n, V] in ``out``."""
        weight, bias = self.weight.t(), self.bias
        if out.dtype != weight.dtype:
            torch.mm(hidden, weight, out_dtype=out.dtype, out=out)
            return out if bias is None else out.add_(bias)
        return (
            torch.mm(hidden, weight, out=out) if bias is None else torch.addmm(bias, hidden, weight, out=out)
        )

    def statistics(self, chunk: Chunk, entropy: bool, memory: Callable[[int], Tensor]) -> RowStats:
        """Return the statistics of rows without a gradient; ``memory(n)`` returns [n, V] for logits."""
        logits = self.logits(chunk.hidden, memory(chunk.size))
        return self.backend.logprobs_forward(chunk.rows(logits), entropy)

    def project(
        self, chunk: Chunk, entropy: bool, out: Tensor, *, all_rows_active: bool, has_ratio: bool
    ) -> Projected:
        """Return the statistics of rows, and their logits or gradient rows.

        Args:
            chunk: the rows.
            entropy: whether to compute the entropy.
            out: memory for the logits, [n, V].
            all_rows_active: whether no row will be skipped.
            has_ratio: whether the loss has a ratio, which is sensitive to the last bits of log-probs.
        """
        logits = self.logits(chunk.hidden, out)
        rows = chunk.rows(logits)
        if (
            not self.any_order
            or entropy
            or not self.backend.one_pass_pays(rows, all_rows_active=all_rows_active, has_ratio=has_ratio)
        ):
            return Projected(logits, self.backend.logprobs_forward(rows, entropy))
        out = self.rows_memory(logits)
        stats, factors = cast(OnePassBackend, self.backend).logprobs_and_rows(rows, out.unsqueeze(0))
        return Projected(out, stats, True, None if factors is None else factors.squeeze(0))

    def add_entropy(self, projected: Projected, chunk: Chunk, grads: RowGradients) -> None:
        """Add the entropy's gradient to the rows of ``project``, if ``rows_from_project``."""
        raise NotImplementedError

    def rows_memory(self, logits: Tensor) -> Tensor:
        """Return memory for the gradient rows of logits [n, V]: the logits' own memory if the rows fit."""
        dtype = self.rows_dtype
        if logits.dtype == dtype:
            return logits
        if logits.element_size() > dtype.itemsize:
            return logits.view(dtype)[:, : logits.shape[1]]
        return torch.empty(logits.shape, dtype=dtype, device=logits.device)

    # --- some columns of rows with known statistics

    def known_rows(self, chunk: Chunk, stats: RowStats, grads: RowGradients, active: Tensor) -> Any:
        """Return the state that ``column_rows`` shares between blocks, with the rows' factors and label
        residuals in its ``head``, or None.

        Args:
            chunk: the rows.
            stats: their statistics, [1, n] each.
            grads: their coefficients, [1, n] each.
            active: rows with a gradient, bool [n].
        """
        return None

    def column_rows(
        self, memory: Tensor, chunk: Chunk, stats: RowStats, grads: RowGradients, known: Any
    ) -> Tensor:
        """Return the gradient rows of a block of columns, times their coefficients, in ``memory`` [n, k] of
        the ``memory_dtype``.
        """
        logits = self.logits(chunk.hidden, memory)
        values = self.rows_memory(logits)
        # not sharded rows, because the chunk's labels are relative to its first column
        backend = load(self.options.backend)
        backend.logprobs_backward(chunk.rows(logits), stats, grads, values.unsqueeze(0), sharded=True)
        return values

    # --- gradient products

    def grad_hidden(self, grad_rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply rows [n, V] by the weight: [n, H] in the statistics' dtype, or added to ``total``."""
        wide = stats_dtype(grad_rows.dtype)
        if grad_rows.dtype != wide:
            if total is None:
                return torch.mm(grad_rows, self.weight, out_dtype=wide)
            return torch.addmm(total, grad_rows, self.weight, out_dtype=wide, out=total)
        return torch.mm(grad_rows, self.weight) if total is None else total.addmm_(grad_rows, self.weight)

    def add_weight(
        self, total: Tensor, grad_rows: Tensor, operand: Tensor, accumulate: bool, ends: Tensor | None
    ) -> None:
        """Add rows [n, V].T times hidden states [n, H], multiplied by the coefficients, to dWeight.

        Args:
            total: the accumulator, [V, H].
            grad_rows, operand: the rows and the hidden states, of one dtype.
            accumulate: add to ``total`` instead of overwriting it.
            ends: see ``Segments``; None if sums may have any order.
        """
        left = grad_rows.t()
        if left.dtype == total.dtype:
            total.addmm_(left, operand) if accumulate else torch.mm(left, operand, out=total)
        elif accumulate:
            torch.addmm(total, left, operand, out_dtype=total.dtype, out=total)
        else:
            torch.mm(left, operand, out_dtype=total.dtype, out=total)

    def add_bias(
        self, total: Tensor, grad_rows: Tensor, factors: Tensor, accumulate: bool, ends: Tensor | None
    ) -> None:
        """Add rows [n, V] times their factors [n] to dBias [V]; see ``add_weight``."""
        if grad_rows.dtype != torch.float16:
            total += self.transposed(grad_rows, factors.unsqueeze(1)).squeeze(1)
            return
        scale = power_of_two(largest(factors))
        total.addcmul_(self.transposed(grad_rows, (factors / scale).unsqueeze(1)).squeeze(1), scale)

    def transposed(self, grad_rows: Tensor, operand: Tensor) -> Tensor:
        """Return [n, V].T @ [n, k] in the operand's dtype."""
        if grad_rows.dtype == operand.dtype:
            return torch.mm(grad_rows.t(), operand)
        product = torch.mm(grad_rows.t(), in_parts(operand, grad_rows.dtype), out_dtype=torch.float32)
        return sum_of_parts(product, operand.shape[1])


class SlabMatmul(HeadMatmul):
    """Matmuls for devices where PyTorch has none from 16 bits to fp32, by slabs of the converted weight."""

    name = "torch.mm in slabs of the weight"
    writes_16_bits = False

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write logits slab by slab, or rounded ones by oneDNN if supported."""
        rounds = out.dtype in (torch.float16, torch.bfloat16)
        if rounds and onednn_multiplies(out.dtype):
            return super().logits(hidden, out)
        for first, columns in self.slabs(hidden, None if rounds else out):
            if rounds:
                out[:, first : first + columns.shape[1]] = columns
        return out

    def slabs(self, hidden: Tensor, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yield the first column and the columns [n, k] of each slab of fp32 or fp64 logits.

        Slabs are views of ``out``; without it every slab overwrites the previous one.
        """
        dtype = self.rows_dtype
        hidden, memory = hidden.to(dtype), out
        if memory is None:
            # a power-of-two row stride causes cache conflicts
            width = min(self.vocabulary, LOGITS_SLAB) + 16
            memory = hidden.new_empty(hidden.shape[0], width, dtype=stats_dtype(dtype))
        for first in range(0, self.vocabulary, LOGITS_SLAB):
            slab = slice(first, min(first + LOGITS_SLAB, self.vocabulary))
            columns = memory[:, : slab.stop - first] if out is None else memory[:, slab]
            bias = None if self.bias is None else self.bias[slab]
            torch.mm(hidden, self.weight[slab].to(dtype).t(), out=columns)
            if bias is not None:
                columns.add_(bias)
            yield first, columns

    def grad_hidden(self, grad_rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply in the accumulator's dtype, slab by slab if the weight has a different one."""
        weight, out = self.weight, total
        if grad_rows.dtype == weight.dtype:
            return torch.mm(grad_rows, weight) if out is None else out.addmm_(grad_rows, weight)
        if out is None:
            size, device = (len(grad_rows), weight.shape[1]), grad_rows.device
            out = torch.zeros(size, dtype=grad_rows.dtype, device=device)
        for first in range(0, self.vocabulary, HIDDEN_SLAB):
            slab = slice(first, first + HIDDEN_SLAB)
            out.addmm_(grad_rows[:, slab], weight[slab].to(grad_rows.dtype))
        return out


def in_parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [n, k] in ``dtype``, fp32 values split into three 16-bit parts side by side, [n, 3 * k].

    The parts sum to the values; ``sum_of_parts`` returns the product with fp32 values.
    """
    if values.dtype == dtype:
        return values
    parts = []
    for _ in range(3):
        parts.append(values.to(dtype))
        values = values - parts[-1]
    return torch.cat(parts, 1)


def sum_of_parts(product: Tensor, width: int) -> Tensor:
    """Return a product [n, width] from that of ``in_parts``."""
    return product if product.shape[1] == width else product.unflatten(1, (-1, width)).sum(1)
