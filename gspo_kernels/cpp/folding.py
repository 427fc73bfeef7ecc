"""Statistics of rows whose logits come some columns at a time and are never stored whole (csrc/folds.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.cpp import _operators, _row_options
from gspo_kernels.cpp.products import INSTRUCTIONS
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

BLOCK = 2048
"""Columns that are folded at a time."""


class Folds:
    """See ``ops.backends.FoldingBackend.folds``."""

    def __init__(
        self,
        labels: Tensor,
        transform: LogitTransform,
        ignore_index: int,
        vocabulary: int,
        dtype: torch.dtype,
        entropy: bool,
    ):
        self._dtype, self._vocabulary, self._entropy = stats_dtype(dtype), vocabulary, entropy
        self._labels, self._ignore_index = labels.to(torch.int64).contiguous(), ignore_index
        self._options = _row_options(transform, ignore_index, self._dtype)
        blocks = -(-vocabulary // BLOCK)
        self._folds = torch.zeros(labels.numel(), 2 + 3 * blocks, dtype=torch.float64, device=labels.device)

    def add(self, logits: Tensor, first: int) -> None:
        """Fold logits [n, k] of the columns from ``first`` on: whole blocks, or all up to the last column."""
        _operators().fold_columns(
            logits.unsqueeze(0),
            self._labels,
            *self._options,
            first,
            self._vocabulary,
            self._entropy,
            self._folds,
        )

    def add_product(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, instructions: str = "best"
    ) -> None:
        """Fold all columns of hidden [n, H] @ weight [V, H].T + bias [V], computed as by
        ``products.multiply``. No thread holds more than a few hundred rows of a block.
        """
        _operators().fold_products(
            hidden.detach(),
            self._labels,
            *self._options,
            weight.detach(),
            None if bias is None else bias.detach().to(torch.float32).contiguous(),
            self._entropy,
            INSTRUCTIONS.index(instructions),
            self._folds,
        )

    def statistics(self) -> RowStats:
        """Return the statistics [1, n] of the rows, with the same bits as from stored logits."""
        shape, device = self._labels.shape, self._labels.device
        stats = RowStats(
            torch.empty(shape, dtype=self._dtype, device=device),
            torch.empty(shape, dtype=torch.float64, device=device),
            torch.empty(shape, dtype=self._dtype, device=device) if self._entropy else None,
        )
        _operators().folded_statistics(self._folds, self._labels, self._ignore_index, *stats)
        return stats
