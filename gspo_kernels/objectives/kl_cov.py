"""KL-Cov: a KL penalty on the tokens whose log-prob and advantage vary together most."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip_cov import token_covariance


@dataclass(frozen=True, kw_only=True)
class KLCov(Objective):
    """KL-Cov of "The Entropy Mechanism" (arXiv 2505.22617), after verl's code.

    ``cov_t = (A_t - mean A)(logp_t - mean logp)``, means over all counted tokens of the batch;
    ``loss_t = -r_t A_t``, unclipped, and ``+ ppo_kl_coef |l_t|`` with ``l_t = logp_t - old_t`` for the
    ``max(1, int(kl_cov_ratio N))`` tokens of largest covariance; ``dloss_t/dlogp_t = -r_t A_t``, there
    ``+ ppo_kl_coef sign(l_t)``.

    For micro-batches, use ``policy_coefficients`` of the whole batch, then ``Linear`` on each part.

    Args:
        kl_cov_ratio: the fraction of all tokens that is penalized.
        ppo_kl_coef: weight of the penalty; 1 is the default of verl's code, 0.1 that of its configuration.
    """

    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 1.0

    needs_token_order = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(maximum=1.0, kl_cov_ratio=self.kl_cov_ratio)
        require_numbers(ppo_kl_coef=self.ppo_kl_coef)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        # finite, as sums over advantages of both signs would otherwise be NaN
        bounded = batch.log_ratio.detach().clamp(max=700.0) + finite.zero_with_gradient(batch.log_ratio)
        loss = -finite.mul(batch.token_advantages(), finite.exp(bounded))
        covariance = torch.where(batch.mask, token_covariance(batch), -torch.inf).flatten()
        count = max(1, int(self.kl_cov_ratio * int(batch.mask.sum())))
        largest = torch.zeros_like(batch.mask).flatten()
        largest[covariance.argsort(descending=True, stable=True)[:count]] = True
        penalty = torch.where(largest.view_as(batch.mask), self.ppo_kl_coef * batch.log_ratio.abs(), 0.0)
        return ObjectiveLoss(batch.weighted(loss + penalty), batch.log_ratio)
