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
    sampled; ``dloss_t/dlogp_t = r_t (-A_t + |A_t| p_old_t (r_t - 1) / eps)``. It is the smooth form of DPPO's
    mask by total variation. There ``old_logprobs`` are the inference engine's. UniRL clamps log-ratios to
    +-20; this package does not. Another DRPO, of decoupled rewards (arXiv 2510.04474), is not this one.

    Args:
        eps: the width of the trust region of probabilities; the default is the paper's, as the code says. The
            gradient turns around within reach for ``eps`` below 1 alone, as a probability moves by less.
    """

    coefficient_scope = "token"
    ratio_only = False
    needs_token_order = False
    zero_advantage_is_inactive = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """One value per token."""
        log_ratio, old = batch.log_ratio.detach(), batch.old_logprobs
        # a probability that was 0 has an infinite ratio, and their product is the current one
        log_scaled = torch.where(old.isinf(), batch.logprobs.detach(), old + log_ratio)
        return penalized_ratio(batch, self.eps, finite.exp(old), finite.exp(log_scaled))
