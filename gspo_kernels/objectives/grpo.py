"""GRPO: PPO's clipped ratio per token."""

from dataclasses import dataclass
from typing import ClassVar

from gspo_kernels.objectives.base import Scope
from gspo_kernels.objectives.clip import ClippedRatio


@dataclass(frozen=True)
class GRPO(ClippedRatio):
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

    ratio_level = "token"
    coefficient_scope: ClassVar[Scope] = "token"
