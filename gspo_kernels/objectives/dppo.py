"""DPPO: a trust region in probabilities instead of ratios."""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True)
class DPPO(Objective):
    """Divergence PPO in its binary form (arXiv 2602.04879), after verl's ``dppo_tv`` and ``dppo_kl``.

    ``loss_t = -keep_t A_t sg[min(r_t, max_ratio)] logp_t``; ``dloss_t/dlogp_t = -keep_t A_t min(r_t,
    max_ratio)``. The label's probabilities are p and p_old. With "tv", total variation, a token with A > 0 is
    kept while ``p - p_old <= bound_high``, one with A <= 0 while ``p - p_old >= -bound_low``. With "kl" and
    ``k = KL(Bern(p_old), Bern(p))``, a token with A > 0 is kept while ``k <= bound_high`` or ``p <= p_old``,
    one with A <= 0 while ``k <= bound_low`` or ``p >= p_old``. verl adds 1e-8 to the probabilities inside its
    KL, and clamps log-ratios to +-20; this package does neither.

    Args:
        bound_low, bound_high: bounds of the divergence for A <= 0 and for A > 0; 0.2 is verl's default for
            any method's clip range, not a constant of the paper.
        divergence: "tv" or "kl".
        max_ratio: bound of the ratio as a weight; 20 in verl's code, 3 from its config.
    """

    bound_low: float = 0.2
    bound_high: float = 0.2
    _: KW_ONLY
    divergence: str = "tv"
    max_ratio: float = 20.0
    aggregation: str = "token_mean"

    coefficient_scope = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("divergence", self.divergence, ("tv", "kl"))
        require_numbers(bound_low=self.bound_low, bound_high=self.bound_high)
        require_numbers(1.0, max_ratio=self.max_ratio)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        logp = batch.logprobs.detach()
        old, gains = batch.old_logprobs, batch.token_advantages() > 0
        if self.divergence == "tv":
            change = logp.exp() - old.exp()
            low, high = ~gains & (change < -self.bound_low), gains & (change > self.bound_high)
        else:
            divergence = _bernoulli_kl(old, logp)
            low = ~gains & (divergence > self.bound_low) & (logp < old)
            high = gains & (divergence > self.bound_high) & (logp > old)
        weight = finite.exp(batch.log_ratio.clamp(max=math.log(self.max_ratio)))
        weight = torch.where(low | high, 0.0, weight)
        return policy_gradient(batch, weight, batch.log_ratio, low, high)


def _bernoulli_kl(old: Tensor, new: Tensor) -> Tensor:
    """Return KL(Bern(p_old), Bern(p)) from log-probs, clamped to at most 0."""
    old, new = old.clamp(max=0.0), new.clamp(max=0.0)
    chosen = finite.mul(old.exp(), old - new)
    others = finite.mul(-torch.expm1(old), torch.log(-torch.expm1(old)) - torch.log(-torch.expm1(new)))
    return chosen + others
