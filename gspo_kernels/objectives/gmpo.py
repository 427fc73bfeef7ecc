"""GMPO: the geometric mean of clipped token ratios."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import surrogate


@dataclass(frozen=True)
class GMPO(Objective):
    """Geometric-Mean Policy Optimization (arXiv 2507.20673).

    ``l_t = logp_t - old_t``, clamped to at most ``log_clip_high`` for A > 0, to at least ``-log_clip_low``
    for A < 0; ``loss_i = -A_i exp(mean_t l_t)``; ``dloss_i/dlogp_t = -(A_i / |y_i|) exp(mean_u l_u)`` where
    l_t is not clamped, else 0. From the paper; its range is (e^-0.4, e^0.4). verl uses the geometric mean of
    per-token rollout weights, this package their mean.

    Args:
        log_clip_low, log_clip_high: clip range of the log-ratio below and above 0.
    """

    log_clip_low: float = 0.4
    log_clip_high: float = 0.4

    coefficient_scope = "sequence"
    level = "sequence"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(log_clip_low=self.log_clip_low, log_clip_high=self.log_clip_high)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, advantages = batch.log_ratio, batch.token_advantages()
        low = (advantages < 0) & (log_ratio < -self.log_clip_low)
        high = (advantages > 0) & (log_ratio > self.log_clip_high)
        bounded = torch.where(low, -self.log_clip_low, log_ratio)
        bounded = torch.where(high, self.log_clip_high, bounded)
        mean = batch.layout.sum(bounded) / batch.lengths
        return surrogate(batch, finite.exp(mean), mean, low, high)
