"""PrimeIPO: the ratio's gradient, masked by the change of a token's probability for either sign of A."""

import math
from dataclasses import dataclass

import torch

from gspo_kernels.core.types import RatioWeight
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import surrogate


@dataclass(frozen=True, kw_only=True)
class PrimeIPO(Objective):
    """INTELLECT Policy Optimization, prime-rl's default loss; not Identity Preference Optimization.

    ``loss_t = -keep_t A_t min(r_t, max_ratio) + kl_tau l_t^2`` with ``keep_t`` where ``|p_t - p_old_t| <=
    eps``, p and p_old the label's probabilities; ``dloss_t/dlogp_t = -keep_t A_t min(r_t, max_ratio) + 2
    kl_tau l_t``. From prime-rl's code and its pull requests 1930, 3418 and 3586. There is no paper; it
    derives from DPPO (arXiv 2602.04879), which masks by the advantage's sign. The squared log-ratio includes
    tokens that are not kept. In prime-rl ``old_logprobs`` are the inference engine's. Rollout weights
    multiply both terms. prime-rl's option ``score_centering`` is ``centering=`` of the losses.

    Args:
        eps: bound of the change of a token's probability; 0.3 since pull request 3586, 0.1 before.
        max_ratio: bound of the ratio; bounded ratios keep their gradient.
        kl_tau: weight of the squared log-ratio; 1e-3 before pull request 3586, which removed it.
    """

    eps: float = 0.3
    max_ratio: float = 1e4
    kl_tau: float = 0.0
    aggregation: str = "token_mean"

    coefficient_scope = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(eps=self.eps, kl_tau=self.kl_tau)
        require_numbers(1.0, max_ratio=self.max_ratio)
        if self.kl_tau:
            self._declare(zero_advantage_is_inactive=False)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, moved = batch.log_ratio, batch.logprobs.detach().exp() - batch.old_logprobs.exp()
        low, high = moved < -self.eps, moved > self.eps
        capped = log_ratio.detach().clamp(max=math.log(self.max_ratio))
        ratio = finite.exp(capped + finite.zero_with_gradient(log_ratio))
        out = surrogate(batch, torch.where(low | high, 0.0, ratio), log_ratio, low, high)
        pull = batch.weighted(finite.mul(self.kl_tau * log_ratio, log_ratio)) if self.kl_tau else 0.0
        return out._replace(loss=out.loss + pull)

    def ratio_weight(self) -> RatioWeight | None:
        """Return the capped ratio of kept tokens; None with ``kl_tau``."""
        return None if self.kl_tau else RatioWeight(high=self.max_ratio, eps=self.eps)
