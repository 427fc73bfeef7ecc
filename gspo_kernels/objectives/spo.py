"""SPO: the ratio's gradient, pulled back by a square instead of a clip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch


@dataclass(frozen=True, kw_only=True)
class SPO(Objective):
    """Simple Policy Optimization (arXiv 2401.16025): a quadratic penalty instead of PPO's clip.

    ``loss_t = -A_t r_t + |A_t| (r_t - 1)^2 / (2 eps)``; ``dloss_t/dlogp_t = r_t (-A_t + |A_t| (r_t - 1) /
    eps)``, which turns around at ``r_t = 1 + eps`` for A > 0 and at ``1 - eps`` for A < 0. After the code of
    UniRL's ``drpo.py`` with ``penalty_mu_weighted=False``, and text about the paper. UniRL clamps log-ratios
    to +-20; this package does not.

    Args:
        eps: the width of the trust region of ratios; the default is that of the DRPO paper for both methods.
    """

    eps: float = 12.5
    aggregation: str = "token_mean"

    coefficient_scope = "token"
    ratio_only = True
    needs_token_order = False
    zero_advantage_is_inactive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("eps", self.eps, positive=True)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        ratio = finite.exp(batch.log_ratio.detach())
        return penalized_ratio(batch, self.eps, torch.ones_like(ratio), ratio)


def penalized_ratio(batch: PolicyBatch, eps: float, scale: Tensor, scaled_ratio: Tensor) -> ObjectiveLoss:
    """Return the loss ``-A r + |A| scale (r - 1)^2 / (2 eps)`` per token, from detached tokens.

    Value and slope are factored, because the difference of two infinite terms is NaN.
    """
    advantages, log_ratio = batch.token_advantages(), batch.log_ratio
    ratio, pull = finite.exp(log_ratio.detach()), advantages.abs() / eps
    value = finite.mul(ratio, finite.mul(pull, scaled_ratio - 2 * scale) / 2 - advantages) + pull * scale / 2
    slope = finite.mul(ratio, finite.mul(pull, scaled_ratio - scale) - advantages)
    loss = value + finite.mul(slope, finite.zero_with_gradient(log_ratio))
    return ObjectiveLoss(batch.weighted(loss), log_ratio)
