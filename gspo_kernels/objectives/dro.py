"""DRO: a policy gradient with a quadratic pull towards the old policy."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True, kw_only=True)
class DRO(Objective):
    """Direct Reward Optimization per token, after verl's ``dro``.

    The paper (arXiv 2405.19107) has one value per sequence, and a learned value function instead of A.
    ``loss_t = -(A_t logp_t - beta/2 l_t^2)`` with ``l_t = logp_t - old_t``; ``dloss_t/dlogp_t = -A_t +
    beta l_t``, which a zero advantage does not make zero. Rollout weights multiply both terms.

    Args:
        beta: weight of the quadratic term; the default is ours, verl has none and requires ``dro_beta``.
    """

    beta: float = 0.1
    aggregation: str = "token_mean"

    coefficient_scope = "token"
    needs_token_order = False
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(beta=self.beta)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        gradient = policy_gradient(batch, torch.ones_like(batch.logprobs), batch.log_ratio)
        pull = batch.weighted(finite.mul(0.5 * self.beta * batch.log_ratio, batch.log_ratio))
        return gradient._replace(loss=gradient.loss + pull)
