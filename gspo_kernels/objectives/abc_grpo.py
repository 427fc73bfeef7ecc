"""ABC-GRPO: bounds on both sides for either sign of the advantage."""

from dataclasses import dataclass

import torch

from gspo_kernels.core.types import RatioWeight
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import by_sign, log_bounds, surrogate


@dataclass(frozen=True, kw_only=True)
class ABCGRPO(Objective):
    """Adaptive-Boundary-Clipping GRPO (arXiv 2601.03895): four bounds and no minimum.

    ``loss_t = -A_t clip(r_t, 1 - low, 1 + high)`` with the bounds of the advantage's sign; ``dloss_t/dlogp_t
    = -A_t r_t`` inside them, 0 on either side. From the paper, which numbers its bounds e1 to e4, upper
    bounds first. Bounds are keyword-only, because other objectives have the lower bound first.

    Args:
        positive_low, positive_high: clip range below and above 1 for A > 0; the paper's e2 and e1.
        negative_low, negative_high: the same for A <= 0; the paper's e4 and e3.
    """

    positive_low: float = 0.2
    positive_high: float = 0.2
    negative_low: float = 0.2
    negative_high: float = 0.2

    coefficient_scope = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(0.0, 1.0, positive_low=self.positive_low, negative_low=self.negative_low)
        require_numbers(positive_high=self.positive_high, negative_high=self.negative_high)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio = batch.log_ratio
        positive_low, positive_high, _ = log_bounds(self.positive_low, self.positive_high, None)
        negative_low, negative_high, _ = log_bounds(self.negative_low, self.negative_high, None)
        log_low = by_sign(batch, positive_low, negative_low)
        log_high = by_sign(batch, positive_high, negative_high)
        low, high = log_ratio < log_low, log_ratio > log_high
        bounded = torch.where(low, log_low, torch.where(high, log_high, log_ratio))
        return surrogate(batch, finite.exp(bounded), log_ratio, low, high)

    def ratio_weight(self) -> tuple[RatioWeight, RatioWeight]:
        """Return the ratio inside the bounds of each sign."""
        return (
            RatioWeight(1.0 - self.positive_low, 1.0 + self.positive_high, "zero"),
            RatioWeight(1.0 - self.negative_low, 1.0 + self.negative_high, "zero"),
        )
