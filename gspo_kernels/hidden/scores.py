"""The statistics of a call's rows, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.types import RowStats, stats_dtype
from gspo_kernels.hidden.call import Call
from gspo_kernels.hidden.chunk import Chunk


class Scores:
    """Log-probs, log-sum-exp and entropy of a call, filled chunk by chunk.

    Attributes:
        call: the call.
        stats: the statistics of all rows, [B, T] each; zeros where nothing was projected.
    """

    def __init__(self, call: Call, entropy: bool, known: RowStats | None = None, all_rows: bool = False):
        """``known`` are the statistics of an earlier pass. ``all_rows``: every row will be projected."""
        self.call, self._all_rows = call, all_rows
        if known is None:
            shape, device = call.labels.shape, call.labels.device
            dtype, new = stats_dtype(call.hidden.dtype), torch.empty if all_rows else torch.zeros
            known = RowStats(
                new(shape, dtype=dtype, device=device),
                new(shape, dtype=exact_dtype(device), device=device),
                new(shape, dtype=dtype, device=device) if entropy else None,
            )
        self.stats = known

    def forward(self, where: slice | Tensor) -> None:
        """Project rows that need only statistics."""
        call, entropy = self.call, self.stats.entropy is not None
        for chunk in call.chunks(where, call.products.statistics_rows(call.products.max_rows)):
            self.keep(chunk, call.products.statistics(chunk, entropy))

    def keep(self, chunk: Chunk, stats: RowStats) -> None:
        """Write a chunk's statistics into ``stats``."""
        if self._all_rows and chunk.size == self.call.labels.numel():
            self.stats = stats.each(lambda stat: stat.view(self.call.labels.shape))
            return
        for all_rows, part in zip(self.stats, stats, strict=True):
            if all_rows is not None and part is not None:
                all_rows.view(-1)[chunk.where] = part

    def at(self, where: slice | Tensor) -> RowStats:
        """Return the statistics of some rows, [1, n] each."""
        return self.stats.each(lambda stat: stat.view(1, -1)[:, where])
