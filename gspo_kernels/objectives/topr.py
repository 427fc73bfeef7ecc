"""TOPR: successes as in supervised learning, failures weighted by a ratio of at most 1."""

from dataclasses import dataclass

import torch

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True, kw_only=True)
class TOPR(Objective):
    """Tapered Off-Policy REINFORCE (arXiv 2503.14286).

    ``W = exp(sum_t (logp_t - old_t))``, the trajectory's ratio; ``loss_t = -A_t logp_t`` for A > 0, else
    ``-sg[min(W, 1)] A_t logp_t``; ``dloss_t/dlogp_t = -A_t`` or ``-min(W, 1) A_t``. From the paper, whose
    log-likelihood of a trajectory is a sum over tokens, which determines the aggregation. Some code uses the
    token's ratio instead (``ratio_level="token"``), unlike the paper.

    Args:
        ratio_level: "sequence", the trajectory's ratio, or "token".
    """

    ratio_level: str = "sequence"
    aggregation: str = "sequence_mean_token_sum"

    coefficient_scope = "sequence"
    factorizes = True
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("ratio_level", self.ratio_level, ("sequence", "token"))
        if self.ratio_level == "token":
            self._declare(coefficient_scope="token", factorizes=False)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        by_sequence = self.ratio_level == "sequence"
        log_ratio = batch.per_token(batch.layout.sum(batch.log_ratio)) if by_sequence else batch.log_ratio
        gains = batch.token_advantages() > 0
        weight = finite.exp(torch.where(gains, 0.0, log_ratio.clamp(max=0.0)))
        return policy_gradient(batch, weight, log_ratio, None, ~gains & (log_ratio > 0))
