"""The statistics of a call's rows, chunk by chunk."""

from __future__ import annotations

from torch import Tensor

from gspo_kernels.exact import exact_dtype
from gspo_kernels.linear.call import Call
from gspo_kernels.linear.chunk import Chunk
from gspo_kernels.types import RowStats, stats_dtype


class Scores:
    """Log-probs, log-sum-exp and entropy of a call, filled chunk by chunk.

    Attributes:
        call: the call.
        stats: the statistics of all rows, [B, T] each; zeros where nothing was projected.
    """

    def __init__(self, call: Call, entropy: bool, known: RowStats | None = None):
        """``known`` are the statistics of an earlier pass."""
        self.call = call
        if known is None:
            shape, dtype = call.labels.shape, stats_dtype(call.hidden.dtype)
            new = call.hidden.new_zeros
            known = RowStats(
                new(shape, dtype=dtype),
                new(shape, dtype=exact_dtype(call.labels.device)),
                new(shape, dtype=dtype) if entropy else None,
            )
        self.stats = known

    def forward(self, where: slice | Tensor) -> None:
        """Project rows that need only statistics."""
        call, entropy = self.call, self.stats.entropy is not None
        for chunk in call.chunks(where, call.products.statistics_rows(call.chunk_rows)):
            self.keep(chunk, call.products.statistics(chunk, entropy))

    def keep(self, chunk: Chunk, stats: RowStats) -> None:
        """Write a chunk's statistics into ``stats``."""
        for all_rows, part in zip(self.stats, stats, strict=True):
            if all_rows is not None and part is not None:
                all_rows.view(-1)[chunk.where] = part

    def at(self, where: slice | Tensor) -> RowStats:
        """Return the statistics of some rows, [1, n] each."""
        return self.stats.each(lambda stat: stat.view(1, -1)[:, where])
