"""DRPO: SPO's square with a trust region in probabilities instead of ratios."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.spo import SPO, penalized_ratio


@dataclass(frozen=True, kw_only=True)
class DRPO(SPO):
    """Divergence Regularized Policy Optimization (arXiv 2606.09821), after the official code, UniRL's.

    ``loss_t = -A_t r_t + |A_t| p_old_t (r_t - 1)^2 / (2 eps)``, p_old the label's probability when it was
    sampled; ``dloss_t/dlogp_t = r_t (-A_t + |A_t| p_old_t (r_t - 1) / eps)``, the smooth form of DPPO's mask
    by total variation. In the paper ``old_logprobs`` are the inference engine's. UniRL clamps log-ratios to
    +-20; this package does not. Not the DRPO of decoupled rewards (arXiv 2510.04474).

    Args:
        eps: the width of the trust region of probabilities; the default is the paper's, according to the
            code. For ``eps >= 1`` the gradient never changes its sign.
    """

    coefficient_scope = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, old = batch.log_ratio.detach(), batch.old_logprobs
        # p_old = 0: p_old r is the current probability
        log_scaled = torch.where(old.isinf(), batch.logprobs.detach(), old + log_ratio)
        return penalized_ratio(batch, self.eps, finite.exp(old), finite.exp(log_scaled))
