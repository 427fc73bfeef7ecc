"""The mutable state of a call: accumulators of statistics and of the gradients of hidden, weight and bias."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.backends.dispatch import hidden_kernels, load
from gspo_kernels.core.exact import MAX_IN_SUMS, exact_dtype, power_of_two, times
from gspo_kernels.core.memory import reused_memory
from gspo_kernels.core.operators import Operator
from gspo_kernels.core.torch_internals import refuse_second_derivatives
from gspo_kernels.core.types import RowGradients, RowStats, stats_dtype
from gspo_kernels.distributed.groups import begin_sum_
from gspo_kernels.distributed.shards import columns_of
from gspo_kernels.hidden.call import Call, RequiresGrad
from gspo_kernels.hidden.chunk import Chunk, Projected, compacted
from gspo_kernels.hidden.matmul import HeadMatmul
from gspo_kernels.logits.selected import SelectedGradients, SelectedRows, write_gradient

if TYPE_CHECKING:  # not in every build of PyTorch
    from torch.distributed import Work


BLOCK_COLUMNS = {"cpu": 16384, "cuda": 4096}
"""Columns of logits in a block of ``Accumulators.add_by_columns``. On a GPU each block accumulates dHidden,
8NH bytes in a matmul of 2N * 4096 * H operations: 1,024 operations per byte, where a GPU is compute-bound
from 160 to 240. On a CPU larger blocks avoid page faults."""


ROUNDED_COLUMNS = 16384
"""Columns of rows per matmul where a matmul for dWeight can't round to 16 bits."""


class HeadGradients(NamedTuple):
    """Gradients of hidden, weight and bias, the output of operators; empty if not needed.

    A loss's forward computes them for an upstream gradient of 1, with ``scales`` and wider dtypes, as fp16
    could overflow.

    Attributes:
        hidden: [B, T, H] in hidden's dtype.
        scales: [B, T], factors on ``hidden``, see ``Accumulators``, or empty.
        weight: [V, H] in the weight's dtype; with scales fp32 instead of fp16.
        bias: [V] in hidden's dtype; with scales in the statistics' dtype.
    """

    hidden: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def fake(cls, operands: LinearOperands, needs: RequiresGrad, normalized: bool) -> HeadGradients:
        """Return uninitialized tensors for tracing."""
        hidden, weight = operands.hidden, operands.weight
        dtype = stats_dtype(hidden.dtype) if normalized else hidden.dtype
        of_weight = dtype if weight.dtype == torch.float16 else weight.dtype
        return cls(
            hidden.new_empty(hidden.shape if needs.hidden else 0),
            hidden.new_empty(hidden.shape[:-1] if normalized else 0, dtype=dtype),
            weight.new_empty(weight.shape if needs.weight else 0, dtype=of_weight),
            weight.new_empty(weight.shape[0] if needs.bias else 0, dtype=dtype),
        )


class GradientRows(NamedTuple):
    """The rows of the gradient matmuls; d loss/d logits is each row times its factor and coefficient.

    Attributes:
        values: [n, V].
        coefficients: [n], any float dtype and stride.
        factors: [n] in the statistics' dtype, or None for 1.
        active: rows that have a gradient, bool [n], or None for rows with nonzero coefficients.
        label_residual: rounding error of each row's largest element, that of the label, [n], or None.
    """

    values: Tensor
    coefficients: Tensor
    factors: Tensor | None = None
    active: Tensor | None = None
    label_residual: Tensor | None = None


class HeadSums:
    """Accumulators of dWeight [V, H] and dBias [V] over chunks, in the statistics' dtype.

    The 16-bit operands of the dWeight matmul contain the coefficients. For fp16 the accumulator has a power
    of two as unit, which grows with the largest coefficient so far.
    """

    def __init__(self, matmul: HeadMatmul, needs: RequiresGrad, backend: str, one_product: bool = False):
        """Allocate; with ``one_product`` dWeight is one matmul of all rows, in its final dtype."""
        weight = matmul.trained
        self.segments = None if matmul.any_order else matmul.segments()
        self._dtype, device = stats_dtype(weight.dtype), weight.device
        self._matmul, self._backend, self._kernels = matmul, load(backend), hidden_kernels(backend)
        self._power: Tensor | None = None
        self._wide: Tensor | None = None
        self._weight: Tensor | None = None
        dtype = weight.dtype if one_product else self._dtype
        if needs.weight and dtype == weight.dtype:
            self._weight = torch.empty(weight.shape, dtype=dtype, device=device)
        elif needs.weight:
            # freed by the end of the backward; it leaves the pages of logits to the next chunk
            self._weight = reused_memory(weight.shape, dtype, device, larger=False)
        self._bias = None
        if needs.bias:
            self._bias = torch.zeros(matmul.vocabulary, dtype=self._dtype, device=device)
        self._empty = True

    def clear(self) -> None:
        """Reset both sums."""
        self._empty, self._power = True, None
        if self._bias is not None:
            self._bias.zero_()

    def operands(
        self, hidden: Tensor, coefficients: Tensor, factors: Tensor | None, active: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the operands that multiply rows (see ``GradientRows``): hidden states times coefficients for
        dWeight, and coefficients for dBias.
        """
        matmul, bound = self._matmul, MAX_IN_SUMS[self._dtype]
        unit = None
        if self._weight is not None and matmul.rows_dtype == torch.float16:
            unit = self._unit(coefficients, factors)
        if matmul.first_column:
            hidden = hidden[:, matmul.first_column :]
        dtype = matmul.operand_dtype
        operand = self._kernels.product_operand(hidden, coefficients, factors, active, unit, bound, dtype)
        if self._bias is None:
            return (operand,)
        share = coefficients.to(self._dtype).clamp(-bound, bound)
        return operand, share if factors is None else times(factors, share)

    def add(
        self,
        parts: tuple[Tensor, ...],
        ends: Tensor | None = None,
        block: HeadMatmul | None = None,
        first: int = 0,
    ) -> None:
        """Add the gradients of rows, or of some of their columns.

        Args:
            parts: rows [n, V], and their ``operands``.
            ends: see ``HeadMatmul.add_weight``.
            block, first: the matmul of a block of columns and its first column; blocks are added in order.
        """
        matmul = self._matmul if block is None else block
        last = first + matmul.vocabulary
        values, operand, *factors = parts
        if self._weight is not None:
            total = self._weight[first:last]
            if total.dtype == self._dtype or (matmul.writes_16_bits and self._power is None):
                matmul.add_weight(total, values, operand, not self._empty, ends)
            else:
                self._add_rounded(matmul, total, values, operand)
        if self._bias is not None:
            matmul.add_bias(self._bias[first:last], values, factors[0], not self._empty, ends)
        if last == self._matmul.vocabulary:
            self._empty = False
            if self._wide is not None:
                self._power = self._wide = None  # dWeight is rounded, without a unit

    def _add_rounded(self, matmul: HeadMatmul, total: Tensor, values: Tensor, operand: Tensor) -> None:
        """Write the product of all rows to ``total``, rounded from fp32 by blocks of columns."""
        width = min(len(total), ROUNDED_COLUMNS)
        if self._wide is None:
            self._wide = reused_memory(torch.Size((width, total.shape[1])), self._dtype, total.device)
        for first in range(0, len(total), width):
            some = total[first : first + width]
            wide = self._wide[: len(some)]
            matmul.add_weight(wide, values[:, first : first + width], operand, False, None)
            some.copy_(wide if self._power is None else wide.mul_(self._power))

    def add_label_residual(
        self,
        label_residual: Tensor,
        labels: Tensor,
        operands: tuple[Tensor, ...],
        values: Tensor | None = None,
    ) -> None:
        """Add the rounding errors [n] of the rows of ``add`` at their labels [n], in order.

        ``operands`` are those of the rows. A 16-bit dWeight is corrected only if the rows are passed as
        ``values``.
        """
        at, weight = labels.clamp(0, self._matmul.vocabulary - 1), self._weight
        if weight is not None and weight.dtype == self._dtype:
            weight.index_put_((at,), operands[0] * label_residual.unsqueeze(1), accumulate=True)
        elif weight is not None and values is not None:
            # recompute these rows of dWeight, to round them once
            ordered, order = at.sort(stable=True)
            first = order[torch.searchsorted(ordered, at)]  # the first row with the same label
            exact = torch.empty_like(operands[0], dtype=self._dtype)
            self._matmul.add_weight(exact, values[:, at], operands[0], False, None)
            exact.index_put_((first,), operands[0] * label_residual.unsqueeze(1), accumulate=True)
            weight[at] = exact[first].to(weight.dtype)
        if self._bias is not None:
            self._bias.index_put_((at,), operands[1] * label_residual, accumulate=True)

    def _unit(self, coefficients: Tensor, factors: Tensor | None) -> Tensor:
        """Raise the unit of the dWeight accumulator to at least the largest factor of rows; return it."""
        total, before, bound = self._weight, self._power, MAX_IN_SUMS[self._dtype]
        assert total is not None
        if before is None and not self._empty:
            before = torch.ones((), dtype=total.dtype, device=total.device)
        unit, shrink = self._kernels.sum_unit(coefficients, factors, before, bound, self._dtype)
        if before is not None:
            self._backend.scale_(total, shrink)  # free if the unit is unchanged
        self._power = unit
        return unit

    def add_sums(self, sums: HeadSums, coefficient: Tensor) -> None:
        """Add other accumulators, times a coefficient that is known only now."""
        if self._power is not None:
            self._count_in_ones()
        for total, other in zip((self._weight, self._bias), sums.result(), strict=True):
            if total is None or other is None:
                continue
            bound = MAX_IN_SUMS[total.dtype]
            factor = coefficient.to(total.dtype).clamp(-bound, bound)
            if self._empty and total is self._weight:
                torch.mul(other, factor, out=total)
            else:
                total.addcmul_(other, factor)
        self._empty = False

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dWeight and dBias."""
        if self.segments is not None:
            for piece, ends in self.segments.rest():
                self.add(piece, ends)
        if self._empty and self._weight is not None:
            self._weight.zero_()
            self._empty = False
        if self._power is not None:
            self._count_in_ones()
        return self._weight, self._bias

    def _count_in_ones(self) -> None:
        power, self._power = self._power, None
        if power is not None and self._weight is not None:
            self._backend.scale_(self._weight, power)


class Accumulators:
    """Statistics of a call's rows, and dHidden, dWeight and dBias.

    Attributes:
        call, needs: the call, and which gradients it needs.
        stats: the statistics of all rows, [B, T] each; zeros for rows that were not projected.
        max_rows: the most rows of a chunk.
        hidden: [B, T, H] in hidden's dtype; None until the first rows are stored.
        scales: a factor per row in the statistics' dtype, or None: dHidden is ``scales * hidden``, with rows
            normalized by powers of two against underflow and overflow in fp16.
        sums: the accumulators of dWeight and dBias.
        dtype: the dtype of sums and scales, that of the statistics.
        one: 0-d, 1 in that dtype.
    """

    def __init__(
        self,
        call: Call,
        needs: RequiresGrad,
        max_rows: int,
        *,
        normalized: bool,
        stats: RowStats | None = None,
        entropy: bool | None = None,
        projects_all: bool = False,
        stores_all: bool = False,
        one_product: bool = False,
    ):
        """Allocate statistics and accumulators.

        Args:
            call: the call.
            needs: the inputs that require a gradient.
            max_rows: the most rows of a chunk.
            normalized: whether rows of dHidden have ``scales``.
            stats: the statistics of an earlier pass.
            entropy: whether the statistics include the entropy, or None to compute no statistics.
            projects_all: every row will be projected.
            stores_all: a gradient of every row will be stored.
            one_product: see ``HeadSums``; ignored if dWeight can't be rounded yet.
        """
        self.call, self.needs, self.max_rows, hidden = call, needs, max_rows, call.hidden
        self._logits: Tensor | None = None
        self.dtype, shape, device = stats_dtype(hidden.dtype), hidden.shape, hidden.device
        self._projects_all = projects_all
        if stats is None and entropy is not None:
            new = functools.partial(torch.empty if projects_all else torch.zeros, call.labels.shape)
            stats = RowStats(
                new(dtype=self.dtype, device=device),
                new(dtype=exact_dtype(device), device=device),
                new(dtype=self.dtype, device=device) if entropy else None,
            )
        if stats is not None:
            self.stats = stats
        if not (normalized or any(needs)):
            return
        self.hidden: Tensor | None = None
        self.scales: Tensor | None = None
        self._new_hidden = torch.empty if stores_all else torch.zeros
        if normalized:
            stored = stores_all and needs.hidden
            self.scales = (torch.empty if stored else torch.ones)(shape[:-1], dtype=self.dtype, device=device)
        one_product = one_product and (call.matmul.rounds_early or not normalized)
        self.sums = HeadSums(call.matmul, needs, call.options.backend, one_product)
        self.one = torch.full((), 1.0, dtype=self.dtype, device=device)

    def logits_memory(self, row_count: int) -> Tensor:
        """Return memory for logits, [row_count, V], which the next call reuses."""
        matmul, vocabulary = self.call.matmul, self.call.matmul.vocabulary
        if self._logits is None:
            shape = torch.Size((max(row_count, self.max_rows), matmul.stride))
            self._logits = reused_memory(shape, matmul.memory_dtype, matmul.weight.device)
        rows = self._logits[:row_count]
        return rows if rows.shape[1] == vocabulary else rows[:, :vocabulary]

    # --- statistics

    def forward(self, where: slice | Tensor, ends: Sequence[int]) -> None:
        """Compute statistics of rows, in chunks that end at ``ends``."""
        entropy = self.stats.entropy is not None
        for chunk in self.call.chunks(where, ends):
            self.keep(chunk, self.call.matmul.statistics(chunk, entropy, self.logits_memory))

    def keep(self, chunk: Chunk, stats: RowStats) -> None:
        """Write a chunk's statistics into ``stats``."""
        if self._projects_all and chunk.size == self.call.labels.numel():
            self.stats = stats.each(lambda stat: stat.view(self.call.labels.shape))
            return
        for all_rows, part in zip(self.stats, stats, strict=True):
            if all_rows is not None and part is not None:
                all_rows.view(-1)[chunk.where] = part

    def stats_at(self, where: slice | Tensor) -> RowStats:
        """Return the statistics of some rows, [1, n] each."""
        return self.stats.each(lambda stat: stat.view(1, -1)[:, where])

    # --- gradients

    def add(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor,
        grad_entropy: Tensor | None,
        skip: bool,
    ) -> None:
        """Add the gradients of a chunk; overwrites its logits.

        Args:
            projected: the chunk's logits or rows, and its statistics.
            chunk: the rows.
            grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy, [n], or None.
            skip: skip rows without gradient in the matmuls, which needs a host-device sync.
        """
        active = is_active(grad, grad_entropy) if skip or grad_entropy is not None else None
        invariant = self.call.chunking.batch_invariant
        kept = compacted(active, invariant) if active is not None and skip else None
        if active is not None and kept is not None:
            sources, gaps = kept
            if not sources.numel():
                return
            projected, chunk = projected.select(sources, gaps), chunk.select(sources)
            active, grad = active[sources], grad[sources]
            grad_entropy = None if grad_entropy is None else grad_entropy[sources]
        self.add_rows(self.rows(projected, chunk, grad, grad_entropy, active), chunk)

    def rows(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        active: Tensor | None = None,
    ) -> GradientRows:
        """Return the rows of the gradient matmuls for dLoss/dlogprobs (None: ones) and dLoss/dentropy, [n]
        each, in the memory of the logits if they fit.
        """
        ones = self.one.expand(chunk.size)
        coefficients = ones if grad is None else grad
        if projected.written and grad_entropy is None:
            return GradientRows(
                projected.values, coefficients, projected.factors, active, projected.label_residual
            )
        grads = RowGradients(ones.unsqueeze(0))
        if grad_entropy is not None:
            # apply both coefficients to the row
            grads, coefficients = self._normalized(coefficients, grad_entropy)
        matmul, values = self.call.matmul, self.call.matmul.rows_memory(projected.values)
        if matmul.rows_from_project:
            matmul.add_entropy(projected, chunk, grads)
        else:
            rows = chunk.rows(projected.values)
            matmul.backend.logprobs_backward(rows, projected.stats, grads, values.unsqueeze(0))
        return GradientRows(values, coefficients, None, active)

    def _normalized(self, grad: Tensor, grad_entropy: Tensor | None) -> tuple[RowGradients, Tensor]:
        """Divide each row's coefficients by a power of two, for 16-bit rows; return them and the powers."""
        size = grad.abs() if grad_entropy is None else torch.maximum(grad.abs(), grad_entropy.abs())
        powers = power_of_two(size.to(self.dtype))

        def normalized(values: Tensor) -> Tensor:
            # finite, because sums over rows would turn inf into NaN
            return (values / powers).clamp(-16.0, 16.0).unsqueeze(0)

        of_entropy = None if grad_entropy is None else normalized(grad_entropy)
        return RowGradients(normalized(grad), of_entropy), powers

    def add_rows(self, rows: GradientRows, chunk: Chunk, sums: HeadSums | None = None) -> None:
        """Add the gradients of rows, those of weight and bias to ``sums`` (default ``self.sums``).

        The all-reduce of dHidden overlaps with the dWeight matmul.
        """
        call, store = self.call, None
        if self.needs.hidden:
            values = call.matmul.grad_hidden(rows.values)
            store = self._begin_hidden(values, chunk, rows.coefficients, rows.factors, rows.label_residual)
        if self.needs.weight or self.needs.bias:
            sums = self.sums if sums is None else sums
            operands = sums.operands(chunk.hidden, rows.coefficients, rows.factors, rows.active)
            parts = (rows.values, *operands)
            segments = sums.segments
            pieces = [(parts, None)] if segments is None else segments.cut(parts, chunk.where, call.labels)
            for piece, ends in pieces:
                sums.add(piece, ends)
            if rows.label_residual is not None:
                sums.add_label_residual(rows.label_residual, chunk.labels.squeeze(0), parts[1:], rows.values)
        if store is not None:
            store()

    def _begin_hidden(
        self,
        values: Tensor,
        chunk: Chunk,
        coefficients: Tensor,
        factors: Tensor | None,
        label_residual: Tensor | None,
    ) -> Callable[[], None]:
        """Start the sum over ranks of a product of ``GradientRows`` and the weight, [n, H]; return a function
        that waits for it and stores these rows of dHidden.

        In batch-invariant calls the whole coefficient multiplies dHidden last, as in ``scale``.
        """
        call, where = self.call, chunk.where
        works: list[Work] = []
        if label_residual is not None:
            at = chunk.labels.squeeze(0).clamp(0, call.matmul.vocabulary - 1)
            values.addcmul_(call.matmul.weight[at], label_residual.unsqueeze(1))
        group = call.options.shard.group if call.chunking.reduce_hidden_grad else ""
        if group and call.tokens is not None:
            values, works = call.tokens.reduce(values, where)
        elif group:
            works = [begin_sum_(group, values)]
        if call.tokens is not None:
            # this rank has the hidden states of some rows only
            local, where = call.tokens.own_rows(where, call.labels.device)
            coefficients, factors = coefficients[local], None if factors is None else factors[local]

        def store() -> None:
            for work in works:
                work.wait()
            if self.hidden is None:
                shape, dtype = call.hidden.shape, call.hidden.dtype
                self.hidden = self._new_hidden(shape, dtype=dtype, device=values.device)
            hidden = self.hidden.view(-1, values.shape[1])
            scales = None if self.scales is None else self.scales.view(-1)
            invariant = call.chunking.batch_invariant
            call.hidden_kernels.store_hidden(values, coefficients, factors, where, hidden, scales, invariant)

        return store

    def add_selected(
        self,
        logits: Tensor,
        ids: Tensor,
        rows: SelectedRows,
        grads: SelectedGradients,
        chunk: Chunk,
        within: bool = False,
    ) -> None:
        """Add the gradients of a chunk's log-probs of ids; may overwrite its logits [n, V].

        ``ids``, ``rows`` and ``grads`` are [1, n, ...], see ``selected``.
        """
        of_ids, of_tail = grads
        largest = of_ids.abs().amax(-1)
        if of_tail is not None:
            largest = torch.maximum(largest, of_tail.abs())
        # apply the K coefficients to the row, normalized for 16 bits
        scale = power_of_two(largest.to(self.dtype))
        grads = SelectedGradients(of_ids / scale.unsqueeze(-1), None if of_tail is None else of_tail / scale)
        out = self.call.matmul.rows_memory(logits)
        write_gradient(out.unsqueeze(0), logits.unsqueeze(0), ids, rows, grads, chunk.options, within)
        self.add_rows(GradientRows(out, scale.squeeze(0), None, (largest != 0).squeeze(0)), chunk)

    def add_by_columns(
        self, chunk: Chunk, stats: RowStats, grad: Tensor, grad_entropy: Tensor | None, width: int
    ) -> None:
        """Add the gradients of all rows of a call by blocks of columns.

        With p = exp(z - lse) and a, b = dLoss/dlogprob, dLoss/dentropy, columns v are independent:

            row_v = a (onehot_v - p_v) - b p_v (log p_v + entropy)
            dWeight_v = sum over rows of row_v hidden,    dHidden = sum over columns of row_v weight_v

        A block of dWeight is one matmul, rounded once; dHidden is accumulated in [n, H].

        Args:
            chunk: the rows.
            stats: their statistics, [1, n] each.
            grad, grad_entropy: a and b, [n], or None.
            width: the columns of a block.
        """
        matmul, V = self.call.matmul, self.call.matmul.vocabulary
        self._logits = None  # blocks have separate memory
        start = columns_of(self.call.options.shard, V)[0]
        # labels out of range have NaN log-probs and no gradient
        grad = grad.masked_fill((stats.logprobs.isnan() & stats.lse.isfinite()).squeeze(0), 0.0)
        grads, powers = self._normalized(grad, grad_entropy)
        active = is_active(grad, grad_entropy)
        known, factors, label_residual = matmul.known_rows(chunk, stats, grads, active), None, None
        if known is not None and grad_entropy is None:
            factors, label_residual = known.head.factors, known.head.label_residual
        operands: tuple[Tensor, ...] = ()
        if self.needs.weight or self.needs.bias:
            operands = self.sums.operands(chunk.hidden, powers, factors, active)
        # a power-of-two row stride causes cache conflicts on the CPU
        stride = width + 16 if chunk.hidden.is_cpu else width
        shape = torch.Size((chunk.size, stride + -stride % 8))
        memory = reused_memory(shape, matmul.memory_dtype, chunk.hidden.device)
        total: Tensor | None = None
        for first in range(0, V, width):
            last = min(first + width, V)
            block = matmul.columns(first, last)
            part = chunk.columns(first, last, start + first)
            values = block.column_rows(memory[:, : last - first], part, stats, grads, known)
            if self.needs.hidden:
                total = block.grad_hidden(values, total)
            if operands:
                self.sums.add((values, *operands), None, block, first)
            del values
        if operands and label_residual is not None:
            self.sums.add_label_residual(label_residual, chunk.labels.squeeze(0), operands)
        del memory, operands, known
        if total is not None:
            self._begin_hidden(total, chunk, powers, factors, label_residual)()

    def recompute(
        self,
        where: slice | Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None,
        *,
        width: int,
        new_stats: bool,
    ) -> None:
        """Recompute the logits of rows and add their gradient.

        Args:
            where: positions of the rows with a gradient.
            grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy of these rows, [n], or None.
            width: see ``block_width``.
            new_stats: recompute the statistics, as a matmul over different rows may round differently and
                exp(z - lse) of peaked rows is sensitive to z's last bit.
        """
        call, matmul, done = self.call, self.call.matmul, 0
        if width:
            self.add_by_columns(call.chunk(where), self.stats_at(where), grad, grad_entropy, width)
            return
        for chunk in call.chunks(where, call.cut(len(grad), self.max_rows)):
            now = slice(done, done + chunk.size)
            entropy, out = None if grad_entropy is None else grad_entropy[now], self.logits_memory(chunk.size)
            if new_stats or matmul.rows_from_project:
                projected = matmul.project(
                    chunk, entropy is not None, out, all_rows_active=True, has_ratio=False
                )
            else:
                projected = Projected(matmul.logits(chunk.hidden, out), self.stats_at(chunk.where))
            self.add(projected, chunk, grad[now], entropy, skip=False)
            done = now.stop
            del projected, out

    def scale(self, where: slice | Tensor, coefficients: Tensor) -> None:
        """Multiply rows of dHidden, at some positions, by coefficients that are known only now."""
        assert self.scales is not None
        if self.call.tokens is not None:
            local, where = self.call.tokens.own_rows(where, self.call.labels.device)
            coefficients = coefficients[local]
        if isinstance(where, slice):
            self.scales.view(-1)[where].mul_(coefficients)
        else:
            self.scales.view(-1)[where] *= coefficients

    def gradients(self) -> HeadGradients:
        """Return the gradients in the form of an operator's output."""
        hidden, (weight, bias) = self.call.hidden, self.sums.result()
        if self.needs.hidden and self.hidden is None:
            self.hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._logits = None  # free the memory for the rounded dWeight
        dtype = hidden.dtype if self.scales is None else self.dtype
        own = self.call.matmul.trained.dtype
        dtypes = (hidden.dtype, dtype, dtype if own == torch.float16 else own, dtype)
        computed = (self.hidden, self.scales, weight, bias)
        # separate tensors, as outputs of an operator must not alias
        empty = functools.partial(torch.empty, 0, device=hidden.device)
        return HeadGradients(
            *(
                empty(dtype=dtype) if x is None else x if x.dtype == dtype else x.to(dtype)
                for x, dtype in zip(computed, dtypes, strict=True)
            )
        )


def is_active(grad: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Return which rows have a gradient, as bool."""
    return grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)


def block_width(call: Call, row_count: int, chunk_rows: int) -> int:
    """Return the number of columns per block when ``row_count`` rows are recomputed, with at most the logits
    of ``chunk_rows`` rows, or 0 to recompute whole rows in chunks (one chunk if ``matmul.by_columns``).

    Weights of more than 16 bits need chunks, because their gradients are sensitive to the last bit of logits,
    and batch-invariant calls need them for their fixed order of sums over rows. Ranks that share the
    vocabulary all-reduce dHidden once for all rows.
    """
    V = call.matmul.vocabulary
    if not row_count or not call.matmul.by_columns:
        return 0
    max_columns = BLOCK_COLUMNS["cpu" if call.hidden.is_cpu else "cuda"]
    columns = min(max_columns, max(1, chunk_rows * V // row_count))
    if columns > 64:
        columns -= columns % 64
    return min(columns, V) if columns < V or row_count > chunk_rows or call.options.shard.group else 0


def save_gradients(
    ctx: Any,
    gradients: HeadGradients,
    needs: RequiresGrad,
    operator: Operator,
    arguments: tuple[Any, ...],
    traced: bool,
) -> None:
    """Save gradients in an autograd context for ``take_gradients`` and, unless traced, the operator and its
    arguments, of which the first is ``LinearOperands``.
    """
    operands: LinearOperands = arguments[0]
    ctx.needs, ctx.dtype, ctx.backend = needs, operands.hidden.dtype, operands.options.backend
    ctx.traced, ctx.saved, ctx.operator = traced, None, None
    ctx.set_materialize_grads(False)
    if traced:
        ctx.save_for_backward(*gradients)
    else:
        ctx.saved, ctx.operator = gradients, operator
        operator.save(ctx, *arguments)


def take_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias for an upstream gradient, None where not needed.

    The first backward scales the forward's gradients in place and returns them; later ones (``retain_graph``)
    recompute them. A traced call keeps them and scales out of place.
    """
    if torch.is_grad_enabled():
        refuse_second_derivatives()
    needs: RequiresGrad = ctx.needs
    dtype = ctx.dtype
    if ctx.traced:
        hidden, scales, *sums = ctx.saved_tensors
        if hidden.numel():
            hidden = times(hidden, (scales * upstream).unsqueeze(-1)).to(dtype)
        return needs.select(hidden, *((total * upstream).to(dtype) for total in sums))
    saved, ctx.saved = ctx.saved, None
    if saved is None:
        saved = ctx.operator.repeat(ctx).gradients
    hidden, scales, *sums = saved
    gradients = []
    for total in sums:
        if total.numel():
            load(ctx.backend).scale_(total, upstream)
        gradients.append(total.to(dtype))
    if hidden.numel():
        hidden_kernels(ctx.backend).scale_rows_(hidden, scales, upstream)
    return needs.select(hidden, *gradients)
