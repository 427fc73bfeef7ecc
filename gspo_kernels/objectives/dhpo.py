"""DHPO: token and sequence ratios, each clipped, then mixed."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import (
    Objective,
    ObjectiveLoss,
    PolicyBatch,
    require_clip_range,
    require_numbers,
)
from gspo_kernels.objectives.clip import ppo_clip


@dataclass(frozen=True)
class DHPO(Objective):
    """Dynamic Hybrid Policy Optimization (arXiv 2601.05607), whose constants are unknown to us.

    Token ratios r_t and the sequence's ratio s are clipped as PPO does, each in its own range, and mixed:
    ``loss_t = alpha_t clipped(r_t, A_t) + (1 - alpha_t) clipped(s, A_t)``. In a mean over the sequence a
    token's coefficient is ``-(A / |y_i|) (alpha_t r_t [r_t unclipped] + mean_u(1 - alpha_u) s [s
    unclipped])``. alpha 1 is GRPO, alpha 0 GSPO. The structure (two clipped branches, a fixed or an
    entropy-guided mix) is from the paper. How the entropy guides the mix is our assumption: alpha_t is the
    token's entropy, detached, rescaled to [0, 1] over the sequence's counted tokens (0.5 if all are equal).
    Uncertain tokens then use their own ratio.

    Args:
        clip_low, clip_high: clip range of the token ratios; GRPO's.
        mix: alpha, a number from 0 to 1, or "entropy".
        sequence_clip_low, sequence_clip_high: clip range of the sequence ratio; GSPO's.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    mix: float | str = 0.5
    sequence_clip_low: float = 3e-4
    sequence_clip_high: float = 4e-4

    coefficient_scope = "sequence"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip_range(self.clip_low, self.clip_high, None)
        require_clip_range(self.sequence_clip_low, self.sequence_clip_high, None, "sequence_")
        if isinstance(self.mix, str):
            if self.mix != "entropy":
                raise ValueError(f"mix: got {self.mix!r}, expected a number from 0 to 1, or 'entropy'")
            # the entropy depends on the current logits, so coefficients are not known beforehand
            self._declare(needs=("entropy",), ratio_only=False)
        else:
            require_numbers(0.0, 1.0, mix=self.mix)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        advantages = batch.token_advantages()
        sequence_ratio = batch.per_token(batch.sequence_log_ratio())
        tokens, *by_token = ppo_clip(batch.log_ratio, advantages, self.clip_low, self.clip_high, None)
        sequences, *by_sequence = ppo_clip(
            sequence_ratio, advantages, self.sequence_clip_low, self.sequence_clip_high, None
        )
        alpha = self._alpha(batch)
        loss = finite.mul(alpha, tokens) + finite.mul(1.0 - alpha, sequences)
        low, high = (one & other for one, other in zip(by_token, by_sequence, strict=True))
        return ObjectiveLoss(batch.weighted(loss), batch.log_ratio, low, high)

    def _alpha(self, batch: PolicyBatch) -> Tensor:
        if not isinstance(self.mix, str):
            return torch.full_like(batch.log_ratio, self.mix, requires_grad=False)
        assert batch.entropy is not None
        entropy = batch.entropy.detach()
        lowest, highest = map(batch.per_token, batch.range_of(entropy))
        width = highest - lowest
        return torch.where(width > 0, (entropy - lowest) / torch.where(width > 0, width, 1.0), 0.5)
