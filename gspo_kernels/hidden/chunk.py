"""Chunks of rows that are projected together, with their hidden states, logits and gradient rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.core import bits
from gspo_kernels.core.types import LogitRows, RowOptions, RowStats


class Chunk(NamedTuple):
    """Rows that are projected together.

    Attributes:
        where: the rows' positions among the flattened rows of the call.
        hidden: [n, H].
        labels: [1, n].
        options: the call's options, with the transform of these rows, [1, n].
        size: n.
    """

    where: slice | Tensor
    hidden: Tensor
    labels: Tensor
    options: RowOptions
    size: int

    def rows(self, logits: Tensor) -> LogitRows:
        """Return logits [n, V] of the chunk in the form of backends."""
        options = self.options
        return LogitRows(logits.unsqueeze(0), self.labels, options.transform, options.ignore_index)

    def columns(self, first: int, last: int, label: int) -> Chunk:
        """Return the chunk for some columns of its logits, with labels relative to the token id ``label`` of
        the first column, out of range for other columns.
        """
        transform, ignore_index = self.options.transform, self.options.ignore_index - label
        if transform.kept is not None:
            transform = transform._replace(kept=bits.part(transform.kept, first, last - first))
        options = self.options._replace(transform=transform, ignore_index=ignore_index)
        return self._replace(labels=self.labels.to(torch.int64) - label, options=options)

    def select(self, keep: Tensor) -> Chunk:
        """Return a chunk of the rows with these indices."""
        transform = self.options.transform.rows(lambda rows: rows[:, keep])
        options = self.options._replace(transform=transform)
        where = as_index(self.where, keep.device)[keep]
        return Chunk(where, self.hidden[keep], self.labels[:, keep], options, keep.numel())


class Projected(NamedTuple):
    """A projected chunk.

    Attributes:
        values: [n, V], the logits, or the rows of the gradient matmuls in their memory.
        stats: [1, n] each.
        written: whether ``values`` are gradient rows d logprob/dlogits, up to a factor per row.
        factors: these factors, [n] in the statistics' dtype, or None for 1.
        label_residual: see ``gradients.GradientRows``.
    """

    values: Tensor
    stats: RowStats
    written: bool = False
    factors: Tensor | None = None
    label_residual: Tensor | None = None

    def select(self, sources: Tensor, gaps: Tensor) -> Projected:
        """Move some rows to the front in place, a few at a time; see ``compacted``."""
        values = self.values
        step = max(1, values.shape[0] // 32, 2**20 // (values.shape[1] * values.element_size()))
        for start in range(0, gaps.numel(), step):
            some = gaps[start : start + step]
            values[some] = values[sources[some]]
        factors, label_residual = (
            None if each is None else each[sources] for each in (self.factors, self.label_residual)
        )
        stats = self.stats.each(lambda stat: stat[:, sources])
        return Projected(values[: sources.numel()], stats, self.written, factors, label_residual)


def compacted(keep: Tensor, in_order: bool = False) -> tuple[Tensor, Tensor] | None:
    """Return the moves that bring the k rows with ``keep`` [n] to the front, or None if all are kept.

    By default as few rows as possible move, from the end into gaps. With ``in_order`` the rows keep their
    order. Both can move rows in place, because a source is always behind all earlier destinations. This is
    one host-device sync.

    Returns:
        The source index of each of the k rows, [k], and the destinations of the rows that move.
    """
    before = keep.cumsum(0)
    # the number of rows to keep, and of those that are among the first ``count``
    count, stay = torch.cat([before[-1:], before.take(before[-1:] - 1)]).tolist()
    if count == keep.numel():
        return None
    kept = keep.nonzero_static(size=count).squeeze(1)
    sources = torch.arange(count, device=keep.device)
    if in_order:
        return kept, (kept != sources).nonzero().squeeze(1)
    gaps = (~keep[:count]).nonzero_static(size=count - stay).squeeze(1)
    return sources.index_copy(0, gaps, kept[stay:]), gaps


def cut(row_count: int, max_rows: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the ends of chunks of similar size of at most ``max_rows`` rows, all but the last a multiple of
    ``multiple`` if ``max_rows`` is.
    """
    pieces = -(-row_count // max_rows)
    if multiple == 1 or max_rows % multiple or not row_count:
        return tuple(row_count * piece // pieces for piece in range(1, pieces + 1))
    size = -(-row_count // (pieces * multiple)) * multiple
    return tuple(min(row_count, end) for end in range(size, row_count + size, size))


def most_rows(ends: Sequence[int]) -> int:
    """Return the number of rows of the largest chunk, at least 1."""
    return max((end - start for start, end in itertools.pairwise((0, *ends))), default=1)


def rows_at(values: Tensor, where: slice | Tensor) -> Tensor:
    """Return the rows at some positions among all rows, [n] from [B, T]."""
    values = values.view(-1) if values.is_contiguous() else values.flatten()
    all_rows = isinstance(where, slice) and where.start == 0 and where.stop == values.numel()
    return values if all_rows else values[where]


def indices(keep: Tensor, count: int | None = None) -> slice | Tensor:
    """Return the indices where ``keep`` is True, a slice if all are; syncs unless ``count`` is passed."""
    count = int(keep.sum()) if count is None else count
    return slice(0, count) if count == keep.numel() else keep.flatten().nonzero_static(size=count).squeeze(1)


def as_index(where: slice | Tensor, device: torch.device) -> Tensor:
    """Return the positions as int64 [n]."""
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
