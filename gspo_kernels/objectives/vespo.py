"""VESPO: a smooth weight on the trajectory's ratio."""

import math
from dataclasses import dataclass

import torch

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import by_sign, policy_gradient

_LOG_MAX = 20.0
_LOG_MIN = math.log(1e-8)


@dataclass(frozen=True, kw_only=True)
class VESPO(Objective):
    """Variational Sequence-level Soft Policy Optimization (arXiv 2602.10693).

    ``W = exp(sum_t (logp_t - old_t))``; ``phi(W) = W^k exp(lambda (1 - W))``; ``loss_t = -sg[phi(W)] A_t
    logp_t``; ``dloss_t/dlogp_t = -phi(W) A_t``, with k and lambda by the sign of the advantage. As in the
    official code and TRL, log-ratios are clamped to +-20 and log W to [log 1e-8, 20]. TRL's W includes the
    ratio to the rollout policy; to do the same, pass the rollout's log-probs as ``old_logprobs``. Rollout
    weights multiply the loss. The mean over all tokens is TRL's.

    Args:
        k_positive, lambda_positive: for A >= 0; the defaults are TRL's.
        k_negative, lambda_negative: for A < 0.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    aggregation: str = "token_mean"

    coefficient_scope = "sequence"
    factorizes = True
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(k_positive=self.k_positive, k_negative=self.k_negative)
        require_numbers(1e-4, lambda_positive=self.lambda_positive, lambda_negative=self.lambda_negative)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        total = batch.layout.sum(batch.log_ratio.clamp(-_LOG_MAX, _LOG_MAX))
        log_ratio = batch.per_token(total.clamp(_LOG_MIN, _LOG_MAX))
        # where A = 0 any phi gives 0
        k = by_sign(batch, self.k_positive, self.k_negative)
        decay = by_sign(batch, self.lambda_positive, self.lambda_negative)
        weight = torch.exp(k * log_ratio - decay * torch.expm1(log_ratio))
        return policy_gradient(batch, weight, log_ratio)
