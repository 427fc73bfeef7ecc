"""From chunks of hidden states to statistics, and to the rows that enter the gradient products."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.exact import exact_dtype
from gspo_kernels.linear.call import Call, Chunk
from gspo_kernels.ops.backends import FoldingBackend, OnePassBackend
from gspo_kernels.ops.memory import used_memory
from gspo_kernels.types import RowStats, stats_dtype


def compacted(keep: Tensor, in_order: bool = False) -> tuple[Tensor, Tensor] | None:
    """Find how the k rows where ``keep`` [n] holds move to the front; None if it holds for all rows.

    By default few rows move: kept rows in front stay, those behind fill the gaps. With ``in_order`` the rows
    keep their order. Either way a row comes from behind all places that were filled before, so that rows can
    move within the same memory, a few at a time. This reads the device once.

    Returns:
        The index that each of the k rows comes from, [k], and the places into which another row moves.
    """
    before = keep.cumsum(0)
    # how many rows are kept, and how many of these are among the first ``count`` already
    count, stay = torch.cat([before[-1:], before.take(before[-1:] - 1)]).tolist()
    if count == keep.numel():
        return None
    kept = keep.nonzero_static(size=count).squeeze(1)
    rows = torch.arange(count, device=keep.device)
    if in_order:
        return kept, (kept != rows).nonzero().squeeze(1)
    gaps = (~keep[:count]).nonzero_static(size=count - stay).squeeze(1)
    return rows.index_copy(0, gaps, kept[stay:]), gaps


class Projected(NamedTuple):
    """A chunk on its way from logits to the gradient products.

    Attributes:
        values: [n, V], the logits, or the rows of the gradient products in their place.
        stats: [1, n] each.
        written: whether ``values`` are rows d logprob/dlogits already, up to a factor for each row.
        factors: these factors, [n] in the statistics' dtype; None: 1.
    """

    values: Tensor
    stats: RowStats
    written: bool = False
    factors: Tensor | None = None

    def select(self, rows: Tensor, gaps: Tensor) -> Projected:
        """Move some rows to the front of the same memory, a few at a time; see ``compacted``."""
        values = self.values
        step = max(1, values.shape[0] // 32, 2**20 // (values.shape[1] * values.element_size()))
        for start in range(0, gaps.numel(), step):
            some = gaps[start : start + step]
            values[some] = values[rows[some]]
        factors = None if self.factors is None else self.factors[rows]
        stats = self.stats.each(lambda stat: stat[:, rows])
        return Projected(values[: rows.numel()], stats, self.written, factors)


class Scores:
    """Log-probs, log-sum-exp and entropy of a call, filled chunk by chunk; one chunk of logits at a time.

    Attributes:
        call: the call.
        stats: the statistics of all rows, [B, T] each; zeros where nothing was projected.
        compared: whether a ratio compares the log-probs with others, which would show their last bits.
        most_rows: the number of rows of logits to make room for.
    """

    def __init__(
        self, call: Call, entropy: bool, known: RowStats | None = None, compared: bool = False
    ) -> None:
        """``known`` are the statistics of an earlier pass."""
        self.call, self.compared = call, compared
        if known is None:
            shape, dtype = call.labels.shape, stats_dtype(call.hidden.dtype)
            new = call.hidden.new_zeros
            known = RowStats(
                new(shape, dtype=dtype),
                new(shape, dtype=exact_dtype(call.labels.device)),
                new(shape, dtype=dtype) if entropy else None,
            )
        self.stats = known
        self.most_rows = min(call.chunk_rows, call.labels.numel())
        self._logits: Tensor | None = None

    def logits(self, chunk: Chunk) -> Tensor:
        """Return logits [n, V], in memory that the next call of this method overwrites."""
        head = self.call.head
        if self._logits is None:
            size = torch.Size((max(chunk.size, self.most_rows), head.vocabulary))
            self._logits = used_memory(size, head.dtype, head.weight.device)
        return head.logits(chunk.hidden, self._logits[: chunk.size])

    def forward(self, where: slice | Tensor) -> None:
        """Project rows that need only statistics."""
        call, head, entropy = self.call, self.call.head, self.stats.entropy is not None
        for chunk in call.chunks(where, forward_only=True):
            if not call.folds:
                self._keep(call.backend.logprobs_forward(chunk.rows(self.logits(chunk)), entropy), chunk)
                continue
            # the logits are never written, the bits are the same
            backend, transform = cast(FoldingBackend, call.backend), chunk.options.transform
            ignore_index = call.options.ignore_index
            sums = backend.folds(chunk.labels, transform, ignore_index, head.vocabulary, head.dtype, entropy)
            head.fold_logits(chunk.hidden, sums)
            self._keep(sums.statistics(), chunk)

    def project(self, chunk: Chunk, entropy: bool, all_rows_active: bool, keep: bool = True) -> Projected:
        """Project a chunk that needs a gradient, too.

        Where the backend has one pass for statistics and gradient rows, the rows go into the memory of the
        logits. Batch-invariant calls never use that pass: statistics that are computed alone, as in scoring,
        sum in another order.

        Args:
            chunk: the rows.
            entropy: whether to compute the entropy.
            all_rows_active: no row is left out because of its statistics.
            keep: whether ``stats`` get the chunk's statistics; False: those of an earlier pass stay.
        """
        call, logits = self.call, self.logits(chunk)
        backend, rows = cast(OnePassBackend, call.backend), chunk.rows(logits)
        one_pass = not entropy and not call.head.fixed and hasattr(backend, "logprobs_and_rows")
        compared = self.compared and keep
        if one_pass and backend.one_pass_pays(
            rows, all_rows_active=all_rows_active, logprobs_compared=compared
        ):
            out = call.rows_memory(logits)
            stats, factors = backend.logprobs_and_rows(rows, out.unsqueeze(0))
            projected = Projected(out, stats, True, None if factors is None else factors.squeeze(0))
        else:
            projected = Projected(logits, backend.logprobs_forward(rows, entropy))
        if keep:
            self._keep(projected.stats, chunk)
        return projected

    def _keep(self, stats: RowStats, chunk: Chunk) -> None:
        """Write a chunk's statistics into ``stats``."""
        for all_rows, part in zip(self.stats, stats, strict=True):
            if all_rows is not None and part is not None:
                all_rows.view(-1)[chunk.where] = part

    def at(self, where: slice | Tensor) -> RowStats:
        """Return the statistics of some rows, [1, n] each."""
        return self.stats.each(lambda stat: stat.view(1, -1)[:, where])
