"""DPO: log-sigmoid of the difference between a preferred and another sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives.base import PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Pairwise, reference_log_ratio


@dataclass(frozen=True, kw_only=True)
class DPO(Pairwise):
    """Direct Preference Optimization, from the paper's Eq. 7 (arXiv 2305.18290).

    ``S_i = sum_t(logp_t - ref_t)``; ``loss = mean over pairs of -log sigmoid(beta (S_w - S_l))``;
    ``dloss/dlogp_t = -beta sigmoid(-h) / P`` for every token of the winner, ``+`` for the loser's, with h the
    argument of the sigmoid and P the number of pairs.

    ``advantages`` hold levels: a lower level is preferred (chosen 1, rejected 2), and all sequences of a
    group with different levels form pairs. VerIPO (arXiv 2505.19000) alternates this loss with GRPO; we
    know its terms only from text about the paper.

    Args:
        beta: strength of the reference; the default is the usual one.
        min_gap: only levels that differ by more than this form pairs.
    """

    beta: float = 0.1
    min_gap: float = 0.0

    advantages_are = "levels"
    needs = ("ref_logprobs", "group_ids")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(beta=self.beta, min_gap=self.min_gap)

    def score(self, batch: PolicyBatch) -> Tensor:
        """S_i."""
        return batch.layout.sum(reference_log_ratio(batch))

    def pairs(self, values: Tensor) -> Tensor:
        """Return pairs whose first sequence has the lower level, by more than ``min_gap``."""
        return values.unsqueeze(1) - values.unsqueeze(2) > self.min_gap

    def pair_loss(self, gap: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return -log sigmoid(beta gap)."""
        return torch.logaddexp(-self.beta * gap, torch.zeros_like(gap))
