"""REBEL: regress differences of rewards by differences of log-ratios."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives.base import PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Pairwise


@dataclass(frozen=True, kw_only=True)
class REBEL(Pairwise):
    """Regression to relative rewards (arXiv 2404.16767), after the official code.

    ``S_i = sum_t(logp_t - old_t)``; ``loss = mean over pairs of (S_i - S_j - eta (R_i - R_j))^2``;
    ``dloss/dlogp_t = +-2 residual / P`` for every token of the pair's first and second sequence, with P the
    number of pairs. The paper writes eta under the log-ratios instead, which is the same loss over eta^2.

    ``advantages`` hold rewards, and all sequences of a group form pairs.

    Args:
        eta: log-ratio per unit of reward.
    """

    eta: float = 1.0

    advantages_are = "rewards"
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(eta=self.eta)

    def score(self, batch: PolicyBatch) -> Tensor:
        """S_i."""
        return batch.layout.sum(batch.log_ratio)

    def pairs(self, values: Tensor) -> Tensor:
        """Every pair once."""
        size = values.shape[1]
        return torch.ones(size, size, dtype=torch.bool, device=values.device).triu(1).unsqueeze(0)

    def pair_loss(self, gap: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The squared residual."""
        return (gap - self.eta * (first - second)).square()
