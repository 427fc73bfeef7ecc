"""Sequences whose tokens lie on several ranks (context parallelism): sums over them, with their gradient.

Values of a sequence, and the loss, are the same on all ranks, and so is the gradient that reaches them.
Tokens, and their gradients, are a rank's own. So a sum over ranks hands its gradient on as it is, and what is
expanded to tokens gets the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.layout import Layout
from gspo_kernels.parallel.groups import gathered, sum_


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: str) -> Tensor:
        return sum_(group, own.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Shared(torch.autograd.Function):
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
        return self.here.expand(_Shared.apply(values, self.group))

    def over_ranks(self, sums: Tensor) -> Tensor:
        """One all-reduce."""
        return _Sum.apply(sums, self.group)

    def largest(self, values: Tensor) -> Tensor:
        """One gather; NaN wherever a rank has it."""
        return gathered(self.group, values).amax(0)
