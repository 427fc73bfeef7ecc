"""GPG: the plain policy gradient."""

from dataclasses import dataclass

import torch

from gspo_kernels.core.types import RatioWeight
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True, kw_only=True)
class GPG(Objective):
    """Group Policy Gradient (arXiv 2504.02546), after verl's ``gpg``: no ratio, no clip.

    ``loss_t = -A_t logp_t``; ``dloss_t/dlogp_t = -A_t``. Old log-probs only enter metrics.
    """

    aggregation: str = "token_mean"

    coefficient_scope = "nothing"
    factorizes = True
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        return policy_gradient(batch, torch.ones_like(batch.logprobs), batch.log_ratio)

    def ratio_weight(self) -> RatioWeight:
        """Return the weight 1."""
        return RatioWeight(1.0, 1.0)
