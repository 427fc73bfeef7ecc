"""CISPO: a policy gradient weighted by the clipped ratio."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from gspo_kernels.core import checks
from gspo_kernels.core.types import RatioWeight
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, Scope, require_numbers
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True)
class CISPO(Objective):
    """Clipped importance-sampling weights of MiniMax-M1 (arXiv 2506.13585): every token keeps a gradient.

    ``loss_t = -sg[clip(r_t, min_ratio, max_ratio)] A_t logp_t``; ``dloss_t/dlogp_t = -clip(r_t, min_ratio,
    max_ratio) A_t``. From the paper. The bounds are ratios: TRL's ``epsilon_high`` is ``max_ratio``; verl's
    ``clip_ratio_low`` and ``clip_ratio_high`` are ``min_ratio=1 - low, max_ratio=1 + high``. We have not read
    the paper's bounds; 5 is TRL's recommendation.

    Args:
        min_ratio, max_ratio: bounds of the weight, 0 <= min_ratio <= 1, min_ratio <= max_ratio, max_ratio >
            0. A ``max_ratio`` below 1, such as TRL's and Liger's default of 0.2, is active at ratio 1 and a
            factor on nearly every token.
    """

    min_ratio: float = 0.0
    max_ratio: float = 5.0
    _: KW_ONLY
    aggregation: str = "token_mean"

    coefficient_scope: ClassVar[Scope] = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(0.0, 1.0, min_ratio=self.min_ratio)
        checks.number("max_ratio", self.max_ratio, positive=True, minimum=self.min_ratio)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        low = math.log(self.min_ratio) if self.min_ratio else -math.inf
        high = math.log(self.max_ratio)
        weight = finite.exp(batch.log_ratio.clamp(low, high))
        below, above = batch.log_ratio < low, batch.log_ratio > high
        return policy_gradient(batch, weight, batch.log_ratio, below, above)

    def ratio_weight(self) -> RatioWeight:
        """Return the truncated ratio."""
        return RatioWeight(self.min_ratio, self.max_ratio)
