"""Linear: given coefficients times log-probs."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.finite import mul


@dataclass(frozen=True, kw_only=True)
class Linear(Objective):
    """``loss = sum(token_weights * logp)``, to backpropagate given coefficients through the fused losses.

    Use it to split an objective over groups or the batch into micro-batches: call ``policy_coefficients`` on
    the whole batch, and pass the coefficients of each part as ``token_weights``. It has no advantages; the
    default aggregation is "sum".
    """

    aggregation: str = "sum"

    coefficient_scope = "nothing"
    needs = ("token_weights",)
    needs_advantages = False
    needs_token_order = False
    ratio_only = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        assert batch.token_weights is not None
        never = torch.zeros_like(batch.mask)
        loss = mul(batch.token_weights, batch.logprobs)
        return ObjectiveLoss(batch.weighted(loss), batch.log_ratio, never, never)
