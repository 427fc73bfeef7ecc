"""GRPO: PPO's clipped ratio per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, ppo_clip, require_clip_range


@dataclass(frozen=True)
class GRPO(Objective):
    """Group Relative Policy Optimization (arXiv 2402.03300): PPO's clip with group advantages.

    ``r_t = exp(logp_t - old_t)``; ``loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)``;
    ``dloss_t/dlogp_t = -r_t A_t`` where not clipped, else 0. The KL term is the losses' ``kl_beta``.

    Args:
        clip_low, clip_high: clip range below and above 1.
        dual_clip: for A < 0 the loss is at most ``-dual_clip A`` and has no gradient beyond (dual-clip PPO,
            arXiv 1912.09729), or None.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    coefficient_scope: ClassVar[Literal["token"]] = "token"
    level: ClassVar[Literal["token"]] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip_range(self.clip_low, self.clip_high, self.dual_clip)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """One value per token."""
        assert batch.advantages is not None
        advantages = batch.per_token(batch.advantages)
        loss, low, high = ppo_clip(batch.log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return ObjectiveLoss(batch.weighted(loss), batch.log_ratio, low, high)
