"""PyTorch's products: in the weight's dtype on a GPU, and by slabs of the weight on other devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import load
from gspo_kernels.backends.protocol import OnePassBackend
from gspo_kernels.core.exact import largest, power_of_two
from gspo_kernels.core.memory import MIN_SYNC_WORK, used_memory
from gspo_kernels.core.torch_internals import onednn_multiplies
from gspo_kernels.core.types import RowGradients, RowOptions, RowStats, stats_dtype
from gspo_kernels.distributed.shards import rows_of
from gspo_kernels.hidden.chunk import Chunk, Projected

if TYPE_CHECKING:  # a subclass in another file
    from gspo_kernels.hidden.matmul.batch_invariant import Segments

LOGITS_SLAB, HIDDEN_SLAB = 2048, 8192
"""How many rows of the weight torch multiplies at a time on the CPU, for logits and, if the weight is 16-bit,
for dHidden. So logits are written in columns that stay in cache, with the same bits. With MKL on two AVX2
cores this is a twentieth faster, and a quarter where a product has only 16 rows."""


class HeadMatmul:
    """The products of a call with its head's weight, and the row operations between them.

    Another kind of product is a subclass in a separate file, which ``select_matmul`` selects. It computes
    what it can together: statistics without writing logits, or statistics along with gradient rows. Nothing
    changes after the construction.

    Attributes:
        weight: [V, H].
        trained: the matrix whose gradient is dWeight: the weight, or a low-rank adapter's [V, r].
        bias: [V], or None.
        logits_dtype: "float32" or "input".
        backend: the row operations.
        options: of the call's rows.
        vocabulary: V.
        dtype: the dtype of the logits.
        rows_dtype: the dtype of the rows that enter the gradient products.
        row_bytes: bytes of a row of logits, plus those of its gradient row where this has a wider dtype.
        varies: whether gradients show that logits were projected again along with other rows: their last bit
            may then differ, which shows with weights of more than 16 bits.
        by_columns: whether logits that are projected again come some columns at a time, see
            ``Gradients.add_by_columns``.
        block_dtype: the dtype of the memory of such columns.
        rounds_early: whether dWeight may have its own 16 bits before the upstream gradient multiplies it, so
            that one product of all rows needs no sum in fp32. fp16 lacks the range for that.
        operand_dtype: the dtype of the hidden states that are multiplied for dWeight.
        first_column: the first column of hidden states that ``trained`` multiplies.
        min_statistics_rows: rows that are projected at a time for statistics alone, where these are more than
            a chunk has.
        min_rows_to_sync: the least number of rows for which a host-device sync pays, so that gradient
            products can skip rows without gradient. See ``MIN_SYNC_WORK``.
    """

    name = "torch.mm"
    any_order = True
    """Whether sums may have any order, so that a row's last bits may depend on the other rows."""
    multiple = 1
    """Chunk sizes are rounded down to a multiple of this."""
    min_statistics_rows = 1
    rows_from_project = False
    """Whether gradient rows come from ``project`` alone, not from logits and earlier statistics."""
    writes_16_bits = True
    """Whether a sum for dWeight may have the dtype of 16-bit rows, so that the product rounds it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, logits_dtype: str, converts: bool, options: RowOptions
    ):
        """``converts``: 16-bit weights are multiplied in fp32."""
        self.weight = self.trained = weight
        self.bias, self.logits_dtype = bias, logits_dtype
        self.options, self.backend = options, rows_of(options)
        self.vocabulary = weight.shape[0]
        exact = weight.dtype in (torch.float32, torch.float64)
        self.varies = exact and self.any_order
        self.by_columns = not exact and self.any_order
        self.rounds_early = self.by_columns and weight.dtype == torch.bfloat16
        self.dtype = weight.dtype if exact or logits_dtype == "input" else torch.float32
        self.rows_dtype = stats_dtype(weight.dtype) if converts else weight.dtype
        extra = self.rows_dtype.itemsize if self.rows_dtype.itemsize > self.dtype.itemsize else 0
        self.row_bytes = self.vocabulary * (self.dtype.itemsize + extra)
        self.block_dtype = self.dtype
        self.operand_dtype, self.first_column = self.rows_dtype, 0
        self.min_rows_to_sync = MIN_SYNC_WORK / weight.numel() if weight.is_cuda else 0.0

    def columns(self, first: int, last: int) -> HeadMatmul:
        """Return the products of some columns of the logits: of a head with these rows of the weight."""
        block = copy.copy(self)
        block.weight, block.trained = self.weight[first:last], self.trained[first:last]
        block.bias = None if self.bias is None else self.bias[first:last]
        block.vocabulary = last - first
        return block

    def segments(self) -> Segments:
        """Return what cuts rows into segments, where sums over rows have a fixed order."""
        raise NotImplementedError

    # --- memory

    def allocate(self, row_count: int) -> Tensor:
        """Allocate memory for rows of logits; its first ``vocabulary`` columns are the logits."""
        return used_memory(torch.Size((row_count, self.vocabulary)), self.dtype, self.weight.device)

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
        """Return the statistics of rows without a gradient; ``memory(n)`` returns [n, V] for their logits.

        Another kind of product may write no logits.
        """
        logits = self.logits(chunk.hidden, memory(chunk.size))
        return self.backend.logprobs_forward(chunk.rows(logits), entropy)

    def project(
        self, chunk: Chunk, entropy: bool, out: Tensor, *, all_rows_active: bool, has_ratio: bool
    ) -> Projected:
        """Return the statistics of rows, and their logits or already their gradient rows.

        Args:
            chunk: the rows.
            entropy: whether to compute the entropy.
            out: memory for the logits, [n, V].
            all_rows_active: no row is skipped because of its statistics.
            has_ratio: a ratio compares the log-probs with others, and would show their last bits.
        """
        logits = self.logits(chunk.hidden, out)
        rows = chunk.rows(logits)
        if (
            not self.any_order
            or entropy
            or not self.backend.one_pass_pays(
                rows, all_rows_active=all_rows_active, logprobs_compared=has_ratio
            )
        ):
            return Projected(logits, self.backend.logprobs_forward(rows, entropy))
        out = self.rows_memory(logits)
        stats, factors = cast(OnePassBackend, self.backend).logprobs_and_rows(rows, out.unsqueeze(0))
        return Projected(out, stats, True, None if factors is None else factors.squeeze(0))

    def add_entropy(self, projected: Projected, chunk: Chunk, grads: RowGradients) -> None:
        """Turn what ``project`` gave into rows of log-probs and entropy, where ``rows_from_project``."""
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
        """Return what ``column_rows`` needs to know of all columns, or None. Its ``head`` has the rows'
        factors and residuals at their labels.

        Args:
            chunk: the rows.
            stats: their statistics, [1, n] each.
            grads: their coefficients, [1, n] each.
            active: [n], bool: rows with a gradient.
        """
        return None

    def column_rows(
        self, memory: Tensor, chunk: Chunk, stats: RowStats, grads: RowGradients, known: Any
    ) -> Tensor:
        """Return the gradient rows, with their coefficients, in ``memory`` [n, k] of the ``block_dtype``,
        where this product and the chunk have some columns only.
        """
        logits = self.logits(chunk.hidden, memory)
        values = self.rows_memory(logits)
        # not the rows of a whole shard: the chunk's labels count from its own first column
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
        self, total: Tensor, grad_rows: Tensor, operand: Tensor, first: bool, ends: Tensor | None
    ) -> None:
        """Add rows [n, V].T times hidden states [n, H], which contain the coefficients, to dWeight's sum.

        Args:
            total: [V, H], the sum.
            grad_rows, operand: the rows and the hidden states, of one dtype.
            first: overwrite ``total``.
            ends: see ``Segments``; None where sums may have any order.
        """
        left = grad_rows.t()
        # the first product overwrites the memory: filling it with zeros would cost extra
        if left.dtype == total.dtype:
            torch.mm(left, operand, out=total) if first else total.addmm_(left, operand)
        elif first:
            torch.mm(left, operand, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, operand, out_dtype=total.dtype, out=total)

    def add_bias(
        self, total: Tensor, grad_rows: Tensor, factors: Tensor, first: bool, ends: Tensor | None
    ) -> None:
        """Add rows [n, V] times their factors [n] to dBias's sum [V]; see ``add_weight``."""
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
    """Products on devices where PyTorch has none from 16 bits to fp32: slabs of the weight are converted."""

    name = "torch.mm in slabs of the weight"
    writes_16_bits = False

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write logits slab by slab, or rounded ones by oneDNN where it has such a product."""
        rounds = out.dtype in (torch.float16, torch.bfloat16)
        if rounds and onednn_multiplies(out.dtype):
            return super().logits(hidden, out)
        for first, columns in self.slabs(hidden, None if rounds else out):
            if rounds:
                out[:, first : first + columns.shape[1]] = columns
        return out

    def slabs(self, hidden: Tensor, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yield logits in fp32 or fp64, slab by slab: the first column, and the columns [n, k].

        Slabs are parts of ``out``; without it every slab overwrites the one before.
        """
        dtype = self.rows_dtype
        hidden, memory = hidden.to(dtype), out
        if memory is None:
            # rows whose distance is a power of two would share a few cache lines
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
        """Multiply in the dtype of sums, slab by slab where the weight has another."""
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
    """Return values [n, k] in ``dtype``; of fp32 values three 16-bit parts side by side, [n, 3 * k].

    The parts add up to the values, and ``sum_of_parts`` of a product to the product with fp32 values.
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
