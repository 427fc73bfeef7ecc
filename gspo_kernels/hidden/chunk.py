"""Rows that are projected together: their hidden states, then their logits, then rows of a gradient."""

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
        """Return logits [n, V] of the chunk as backends take them."""
        options = self.options
        return LogitRows(logits.unsqueeze(0), self.labels, options.transform, options.ignore_index)

    def columns(self, first: int, last: int, label: int) -> Chunk:
        """Return the chunk for some columns of its logits; ``label`` is the token id of the first. Labels
        count from there, and those of other columns are outside.
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
    """A chunk on its way from logits to the gradient products.

    Attributes:
        values: [n, V], the logits, or the rows of the gradient products in their place.
        stats: [1, n] each.
        written: whether ``values`` are rows d logprob/dlogits already, up to a factor for each row.
        factors: these factors, [n] in the statistics' dtype; None: 1.
        label_residual: see ``gradients.GradientRows``.
    """

    values: Tensor
    stats: RowStats
    written: bool = False
    factors: Tensor | None = None
    label_residual: Tensor | None = None

    def select(self, sources: Tensor, gaps: Tensor) -> Projected:
        """Move some rows to the front of the same memory, a few at a time; see ``compacted``."""
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
    """Find how the k rows where ``keep`` [n] holds move to the front; None if it holds for all rows.

    By default few rows move: kept rows in front stay, those behind fill the gaps. With ``in_order`` the rows
    keep their order. Either way a row comes from behind all places that were filled before, so that rows can
    move within the same memory, a few at a time. This is one host-device sync.

    Returns:
        The index that each of the k rows comes from, [k], and the places into which another row moves.
    """
    before = keep.cumsum(0)
    # how many rows are kept, and how many of these are among the first ``count`` already
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
    """Return where chunks of at most ``max_rows`` rows end. Chunks have about the same size, which is a
    multiple of ``multiple``, except for the last one, if ``max_rows`` is.
    """
    pieces = -(-row_count // max_rows)
    if multiple == 1 or max_rows % multiple or not row_count:
        return tuple(row_count * piece // pieces for piece in range(1, pieces + 1))
    size = -(-row_count // (pieces * multiple)) * multiple
    return tuple(min(row_count, end) for end in range(size, row_count + size, size))


def most_rows(ends: Sequence[int]) -> int:
    """Return the number of rows of the largest chunk; at least 1."""
    return max((end - start for start, end in itertools.pairwise((0, *ends))), default=1)


def rows_at(values: Tensor, where: slice | Tensor) -> Tensor:
    """Return the rows at some positions among all rows, [n] from [B, T]."""
    values = values.view(-1) if values.is_contiguous() else values.flatten()
    all_rows = isinstance(where, slice) and where.start == 0 and where.stop == values.numel()
    return values if all_rows else values[where]


def as_index(where: slice | Tensor, device: torch.device) -> Tensor:
    """Return the positions as int64 [n]."""
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
