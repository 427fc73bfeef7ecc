"""From chunks of hidden states to statistics, and to the rows that enter the gradient products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import Call, Chunk
from gspo_kernels.ops.backends import FoldingBackend, OnePassBackend
from gspo_kernels.ops.memory import Workspace
from gspo_kernels.ops.shards import ShardedRows
from gspo_kernels.types import RowStats


class Kept(NamedTuple):
    """The rows that are kept, in an order that moves few (those in front stay, those behind fill gaps), or in
    their own order.

    Either way a row that moves lies behind all places that are already filled, also where rows move a few at
    a time.

    Attributes:
        rows: [k], the index of each.
        gaps: positions among them to which another row moves.
    """

    rows: Tensor
    gaps: Tensor

    @classmethod
    def of(cls, keep: Tensor, count: int, in_order: bool = False) -> Kept:
        """Of ``count`` rows those at ``keep`` [k], ascending; looks once at the device."""
        if in_order:
            return cls(keep, (keep != torch.arange(keep.numel(), device=keep.device)).nonzero().squeeze(1))
        rows = torch.arange(keep.numel(), device=keep.device)
        left_out = torch.ones(count, dtype=torch.bool, device=keep.device).index_fill_(0, keep, False)
        gaps = left_out[: keep.numel()].nonzero().squeeze(1)
        rows[gaps] = keep[keep.numel() - gaps.numel() :]
        return cls(rows, gaps)

    def to_front(self, values: Tensor) -> Tensor:
        """The rows of [n, V], in the same memory, moved a few at a time."""
        step = max(1, values.shape[0] // 32, 2**20 // (values.shape[1] * values.element_size()))
        for start in range(0, self.gaps.numel(), step):
            gaps = self.gaps[start : start + step]
            values[gaps] = values[self.rows[gaps]]
        return values[: self.rows.numel()]


class Projected(NamedTuple):
    """A chunk on its way from logits to the gradient products.

    Attributes:
        values: [n, V], the logits, or what enters the gradient products in their stead.
        stats: [n] each.
        written: whether ``values`` are rows d logprob/dlogits already, but for a factor of each.
        factors: [n] in the statistics' dtype; None: 1.
    """

    values: Tensor
    stats: RowStats
    written: bool = False
    factors: Tensor | None = None

    def select(self, kept: Kept) -> Projected:
        """Some of the rows, in the same memory."""
        factors = None if self.factors is None else self.factors[kept.rows]
        stats = self.stats.each(lambda stat: stat[kept.rows])
        return Projected(kept.to_front(self.values), stats, self.written, factors)


class Scores:
    """Log-probs, log-sum-exp and entropy of a call, filled chunk by chunk; one chunk of logits at a time.

    ``known`` are those of an earlier pass, [B, T] each.
    """

    def __init__(self, call: Call, entropy: bool, known: RowStats | None = None):
        self.call, self.backend = call, call.backend
        if known is None:
            known = RowStats(
                call.new_rows(), call.new_rows(dtype=torch.float64), call.new_rows() if entropy else None
            )
        self._kept = known
        self._coming: list[tuple[slice | Tensor, RowStats]] = []
        self._begun: tuple[Callable[[], RowStats], Chunk] | None = None
        self._most = min(call.chunk_rows, call.labels.numel())
        self._logits: Tensor | None = None
        self._workspace = Workspace()

    def expect(self, rows: int) -> None:
        """Make room for chunks of so many rows instead of as many as the budget allows."""
        self._most = rows

    def close(self) -> None:
        """The chunk's memory is no longer needed."""
        self._logits = None
        self._workspace.close()

    def logits(self, chunk: Chunk) -> Tensor:
        """[n, V], in memory that the next call of this writes over."""
        head, rows = self.call.head, len(chunk)
        if self._logits is None:
            size = (max(rows, self._most), head.vocabulary)
            if head.weight.is_cpu:
                self._logits = self._workspace.rows(*size, head.dtype)
            else:
                self._logits = torch.empty(size, dtype=head.dtype, device=head.weight.device)
        return head.logits(chunk.hidden, self._logits[:rows])

    def statistics(self, logits: Tensor, chunk: Chunk, entropy: bool) -> RowStats:
        """Of a chunk's logits, [n] each."""
        stats = self.backend.logprobs_forward(
            logits.unsqueeze(0),
            chunk.labels,
            chunk.transform,
            ignore_index=self.call.options.ignore_index,
            entropy=entropy,
        )
        return RowStats(*stats).each(lambda stat: stat.squeeze(0))

    def score(self, chunk: Chunk, entropy: bool, settled: bool = False) -> Projected:
        """Project a chunk whose gradient is wanted, too: where one pass does both, its rows come with the
        statistics, where they fit in the memory of the logits.

        ``settled``: no row is left out by what is found, and log-probs are compared with no others.
        """
        logits = self.logits(chunk)
        if not self.call.one_pass(entropy, settled):
            return Projected(logits, self.statistics(logits, chunk, entropy))
        rows = self.call.rows_memory(logits)
        stats, factors = cast(OnePassBackend, self.backend).logprobs_and_rows(
            logits.unsqueeze(0),
            chunk.labels,
            chunk.transform,
            ignore_index=self.call.options.ignore_index,
            out=rows.unsqueeze(0),
        )
        factors = None if factors is None else factors.squeeze(0)
        return Projected(rows, stats.each(lambda stat: stat.squeeze(0)), True, factors)

    def add(self, chunk: Chunk, settled: bool = False) -> Projected:
        """``score`` a chunk and keep its statistics."""
        projected = self.score(chunk, self._kept.entropy is not None, settled)
        self.keep(projected.stats, chunk)
        return projected

    def add_forward(self, chunk: Chunk) -> None:
        """Project a chunk of ``Call.forward_chunks`` and keep its statistics; its logits are not needed.

        What ranks gather of the statistics is under way while the next chunk is multiplied.
        """
        entropy, ignored = self._kept.entropy is not None, self.call.options.ignore_index
        if self.call.folds:
            head = self.call.head
            folds = cast(FoldingBackend, self.backend).folds(
                chunk.labels,
                chunk.transform,
                head.vocabulary,
                head.dtype,
                ignore_index=ignored,
                entropy=entropy,
            )
            head.fold_logits(chunk.hidden, folds)
            self.keep(folds.statistics().each(lambda stat: stat.squeeze(0)), chunk)
            return
        logits = self.logits(chunk)
        if not isinstance(self.backend, ShardedRows):
            self.keep(self.statistics(logits, chunk, entropy), chunk)
            return
        self._finish()
        finish = self.backend.begin_forward(
            logits.unsqueeze(0), chunk.labels, chunk.transform, ignore_index=ignored, entropy=entropy
        )
        self._begun = finish, chunk

    def _finish(self) -> None:
        """Keep the statistics that ranks are gathering."""
        if self._begun is not None:
            (finish, chunk), self._begun = self._begun, None
            self.keep(finish().each(lambda stat: stat.squeeze(0)), chunk)

    def keep(self, stats: RowStats, chunk: Chunk) -> None:
        """Keep a chunk's statistics."""
        self._finish()
        if self._coming and not _follows(self._coming[-1][0], chunk.where):
            self._settle()
        self._coming.append((chunk.where, stats))

    @property
    def stats(self) -> RowStats:
        """The statistics of all rows, [B, T] each."""
        self._finish()
        self._settle()
        return self._kept

    def _settle(self) -> None:
        """Put what chunks have left where it belongs, all at once."""
        if not self._coming:
            return
        places, found = zip(*self._coming, strict=True)
        self._coming = []
        where = slice(places[0].start, places[-1].stop) if isinstance(places[0], slice) else _one(places)
        for all_rows, *parts in zip(self._kept, *found, strict=True):
            if all_rows is not None:
                all_rows.view(-1)[where] = _one(parts)

    def at(self, where: slice | Tensor) -> RowStats:
        """The statistics of some rows, [n] each."""
        return self.stats.each(lambda stat: stat.view(-1)[where])


def _follows(before: slice | Tensor, where: slice | Tensor) -> bool:
    """Whether two chunks' rows can be put in their places together."""
    if isinstance(before, slice) and isinstance(where, slice):
        return bool(before.stop == where.start)
    return isinstance(before, Tensor) and isinstance(where, Tensor)


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
