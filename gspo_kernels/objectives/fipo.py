"""FIPO: PPO's clip, weighted token by token by how the policy moved on what follows."""

import math
from dataclasses import KW_ONLY, dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import running_sums
from gspo_kernels.objectives.dapo import DAPO


@dataclass(frozen=True)
class FIPO(DAPO):
    """Future-KL Influenced Policy Optimization (arXiv 2603.19835), after the official code.

    ``F_t = sum over u >= t of 2^(-(u - t) / half_life) l_u``; ``f_t = clip(exp(F_t), 1 - influence_low, 1 +
    influence_high)``; ``loss_t = sg[f_t]`` times DAPO's; ``dloss_t/dlogp_t = -f_t r_t A_t`` where not
    clipped, else 0. Tokens with a ratio above ``dual_clip`` are not in the sum, and where A < 0 and the ratio
    is above ``safe_ratio``, f is at most 1. Log-ratios are clamped to +-20 in the sum. Distances are in
    counted tokens; those of the code are in positions, which differ if the mask has holes. Like ms-swift,
    this has no filter of sequences in which two tokens reach the dual clip. The defaults are those of the
    official 32B script.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
        half_life: the half-life of a token's influence, in tokens.
        influence_low, influence_high: range of f below and above 1; for small models the code has 0.2 twice.
        safe_ratio: see above; 4 is the code's and ms-swift's default.
    """

    _: KW_ONLY
    dual_clip: float | None = 10.0
    half_life: float = 32.0
    influence_low: float = 0.0
    influence_high: float = 0.2
    safe_ratio: float = 10.0

    coefficient_scope = "sequence"
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(1e-3, half_life=self.half_life)
        require_numbers(influence_low=self.influence_low, influence_high=self.influence_high)
        require_numbers(1.0, safe_ratio=self.safe_ratio)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        plain, log_ratio = super().evaluate(batch), batch.log_ratio
        within = log_ratio <= math.log(self.dual_clip or math.inf)
        moved = torch.where(within, log_ratio.clamp(-20.0, 20.0), 0.0)
        influence = running_sums(batch, moved, 2.0 ** (-1.0 / self.half_life), onwards=True).exp()
        influence = influence.clamp(1.0 - self.influence_low, 1.0 + self.influence_high)
        unsafe = (batch.token_advantages() < 0) & (log_ratio > math.log(self.safe_ratio))
        influence = torch.where(unsafe, influence.clamp(max=1.0), influence)
        return plain._replace(loss=finite.mul(influence, plain.loss))
