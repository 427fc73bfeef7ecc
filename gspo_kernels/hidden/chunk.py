"""Chunks of rows that are projected together: their size, hidden states, logits and gradient rows."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.core import bits
from gspo_kernels.core.types import LogitRows, RowOptions, RowStats

MIN_CHUNK_BYTES = 64 * 2**20
"""Bytes that a default chunk may take regardless of its number of rows."""
CHUNK_BYTES = 256 * 2**20
"""Most bytes of a default chunk with more than the minimum of rows."""
CHUNK_ROWS = {"cpu": (1024, 2048), "cuda": (4096, 4096)}
"""Fewest and most rows of a default chunk. Accumulating dWeight is then cheap next to the matmuls."""
ALL_ROWS_BYTES = 2**30
"""On a GPU all rows of a call may share a chunk of up to this many bytes, or the bytes of a bf16 weight.
dWeight is then one matmul without an fp32 accumulator of twice the weight's bytes. On a CPU one chunk takes
as long as two (4,096 rows of 32,000 logits and 1,536 of 151,936: 1.00 and 0.98 times)."""
MEMORY_SHARE = 16
"""A default chunk takes at most the device's memory divided by this."""


def default_chunk_bytes(
    row_bytes: int, total_memory: int, device: str, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return the default of ``max_chunk_bytes``.

    It is the size of the rows that fit ``CHUNK_BYTES``, clamped to ``CHUNK_ROWS``, at least
    ``MIN_CHUNK_BYTES`` and at most ``total_memory / MEMORY_SHARE``.

    Args:
        row_bytes: bytes of one row of logits.
        total_memory: the device's memory in bytes.
        device: the device's type; all but "cpu" are treated as GPUs.
        all_rows: rows of a call that may share a chunk, see ``ALL_ROWS_BYTES``, or 0.
        weight_bytes: bytes of the weight.
    """
    min_rows, max_rows = CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"])
    size = max(min_rows * row_bytes, min(max_rows * row_bytes, CHUNK_BYTES), MIN_CHUNK_BYTES)
    if device != "cpu" and all_rows * row_bytes <= max(weight_bytes, ALL_ROWS_BYTES):
        size = max(size, all_rows * row_bytes)
    return min(size, max(total_memory // MEMORY_SHARE, 1))


@functools.cache
def host_memory() -> int:
    """Return the bytes of memory available to this process: the machine's or its cgroup's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def chunk_rows(
    row_bytes: int, max_chunk_bytes: int, device: torch.device, all_rows: int = 0, weight_bytes: int = 0
) -> int:
    """Return the number of rows of logits that fit ``max_chunk_bytes`` (0: the default), at least 1."""
    if not max_chunk_bytes:
        on_gpu = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
        max_chunk_bytes = default_chunk_bytes(row_bytes, total, device.type, all_rows, weight_bytes)
    return max(1, max_chunk_bytes // row_bytes)


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
