"""Sequences whose tokens lie on several ranks (context parallelism): sums over them, with their gradient.

Values of a sequence, and the loss, are the same on all ranks, and so is the gradient that reaches them.
Tokens, and their gradients, are a rank's own. So a sum over ranks hands its gradient on as it is, and what is
expanded to tokens gets the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_kernels.layout import Layout
from gspo_kernels.parallel.groups import gathered, rank_and_size, sum_


class _SumValues(torch.autograd.Function):
    """The sum over ranks; its gradient passes through as it is."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: str) -> Tensor:
        return sum_(group, local.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """The same values; their gradient becomes the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_(ctx.group, grad.clone(memory_format=torch.contiguous_format)), None


@dataclass(frozen=True, eq=False)
class AcrossRanks(Layout):
    """A layout of the tokens that are here, whose sums are those of all ranks; the same bits on each.

    Attributes:
        here: that of this rank's tokens, with as many sequences on all ranks.
        group: the process group's name.
    """

    here: Layout
    group: str

    @property
    def sequences(self) -> int:
        """Number of sequences, those without a token here included."""
        return self.here.sequences

    def sum(self, tokens: Tensor) -> Tensor:
        """Tokens -> [B], the same on all ranks; one all-reduce."""
        return self.over_ranks(self.here.sum(tokens))

    def expand(self, values: Tensor) -> Tensor:
        """[B] -> tokens; one all-reduce in the backward, if there is one."""
        return self.here.expand(_SumGradients.apply(values, self.group))

    def over_ranks(self, sums: Tensor) -> Tensor:
        """Sums of each rank -> of all ranks; one all-reduce."""
        return _SumValues.apply(sums, self.group)

    def largest(self, values: Tensor) -> Tensor:
        """The largest value of any rank; one gather, and NaN wherever a rank has it."""
        return gathered(self.group, values).amax(0)


class GatheredTokens:
    """The tokens of all ranks, sequence by sequence and, within each, in the order of ranks.

    Args:
        here: the layout of this rank's tokens.
        tokens: this rank's, for their shape and device.
        group: the process group's name.

    Attributes:
        cu_seqlens: int32 [B + 1] of the whole sequences, in which tokens are packed.
    """

    def __init__(self, here: Layout, tokens: Tensor, group: str):
        self._group, self._shape = group, tokens.shape
        counts = gathered(group, here.sum(torch.ones_like(tokens, dtype=torch.float64)).to(torch.int64))
        self.cu_seqlens = pad(counts.sum(0).cumsum(0), (1, 0)).to(torch.int32)
        totals = counts.sum(1)
        self._most = int(totals.max())
        ranks, sequences = counts.shape
        sequence = torch.arange(sequences, device=tokens.device).repeat(ranks)
        sequence = sequence.repeat_interleave(counts.flatten())
        rank = torch.arange(ranks, device=tokens.device).repeat_interleave(totals)
        place = torch.arange(len(rank), device=tokens.device) - (totals.cumsum(0) - totals)[rank]
        order = sequence.argsort(stable=True)
        self._places = (rank * self._most + place)[order]
        self._mine = (rank[order] == rank_and_size(group)[0]).nonzero().squeeze(1)

    def whole(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Values of each token that is here -> of all, [1, N]; one gather, of 8 bytes for each."""
        stacked = torch.stack([values.flatten().to(torch.float64) for values in local])
        every = gathered(self._group, pad(stacked, (0, self._most - stacked.shape[1])))
        packed = every.transpose(0, 1).flatten(1)[:, self._places]
        return [row.unsqueeze(0).to(values.dtype) for row, values in zip(packed, local, strict=True)]

    def local_part(self, whole: Tensor) -> Tensor:
        """Values of all tokens, [1, N] -> of those that are here."""
        return whole.squeeze(0)[self._mine].view(self._shape)
