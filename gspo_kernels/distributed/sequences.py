"""Differentiable sums over sequences whose tokens are on several ranks (context parallelism).

Values per sequence, the loss and their gradients are the same on all ranks. The backward of a sum over ranks
is therefore the identity, and the backward of an expansion to tokens is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_kernels.core.layout import Layout
from gspo_kernels.distributed.groups import gathered, rank_and_size, sum_


class _SumValues(torch.autograd.Function):
    """The sum over ranks; its gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str) -> Tensor:
        return sum_(group, values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """The identity; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_(ctx.group, grad.clone(memory_format=torch.contiguous_format)), None


@dataclass(frozen=True, eq=False)
class AcrossRanks(Layout):
    """A layout whose sums are over the tokens of all ranks, bitwise identical on all ranks.

    Attributes:
        local: the layout of this rank's tokens; all ranks have the same number of sequences.
        group: the process group's name.
    """

    local: Layout
    group: str

    @property
    def sequences(self) -> int:
        """Return the number of sequences, including those without a token on this rank."""
        return self.local.sequences

    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each sequence: tokens -> [B], with one all-reduce."""
        return self.over_ranks(self.local.sum(tokens))

    def expand(self, values: Tensor) -> Tensor:
        """Expand values to tokens: [B] -> tokens, with one all-reduce in the backward."""
        return self.local.expand(_SumGradients.apply(values, self.group))

    def over_ranks(self, sums: Tensor) -> Tensor:
        """All-reduce sums."""
        return _SumValues.apply(sums, self.group)

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks, or NaN if any rank has NaN, with one all-gather."""
        return gathered(self.group, values).amax(0)


class GatheredTokens:
    """The tokens of all ranks by sequence and, within a sequence, in the order of ranks.

    Args:
        local: the layout of this rank's tokens.
        tokens: a tensor of the shape and device of this rank's tokens.
        group: the process group's name.

    Attributes:
        cu_seqlens: int32 [B + 1], the offsets of the whole sequences among the packed tokens.
    """

    def __init__(self, local: Layout, tokens: Tensor, group: str):
        self._group, self._shape = group, tokens.shape
        counts = gathered(group, local.sum(torch.ones_like(tokens, dtype=torch.float64)).to(torch.int64))
        self.cu_seqlens = pad(counts.sum(0).cumsum(0), (1, 0)).to(torch.int32)
        totals = counts.sum(1)
        self._max_count = int(totals.max())
        ranks, sequences = counts.shape
        sequence = torch.arange(sequences, device=tokens.device).repeat(ranks)
        sequence = sequence.repeat_interleave(counts.flatten())
        rank = torch.arange(ranks, device=tokens.device).repeat_interleave(totals)
        place = torch.arange(len(rank), device=tokens.device) - (totals.cumsum(0) - totals)[rank]
        order = sequence.argsort(stable=True)
        self._places = (rank * self._max_count + place)[order]
        self._mine = (rank[order] == rank_and_size(group)[0]).nonzero().squeeze(1)

    def gather(self, local_values: Sequence[Tensor]) -> list[Tensor]:
        """All-gather values to those of all tokens, [1, N], 8 bytes per value."""
        stacked = torch.stack([values.flatten().to(torch.float64) for values in local_values])
        every = gathered(self._group, pad(stacked, (0, self._max_count - stacked.shape[1])))
        packed = every.transpose(0, 1).flatten(1)[:, self._places]
        return [row.unsqueeze(0).to(values.dtype) for row, values in zip(packed, local_values, strict=True)]

    def local_part(self, values: Tensor) -> Tensor:
        """Select this rank's tokens from values of all tokens, [1, N]."""
        return values.squeeze(0)[self._mine].view(self._shape)
