"""SAPO: a sigmoid gate instead of a clip."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import by_sign, surrogate


@dataclass(frozen=True, kw_only=True)
class SAPO(Objective):
    """Soft Adaptive Policy Optimization (arXiv 2511.20347).

    ``loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))`` with ``tau = tau_positive`` for A > 0, else
    ``tau_negative``; ``dloss_t/dlogp_t = -4 A_t sigmoid' r_t``, where ``sigmoid' = sigmoid (1 - sigmoid)`` is
    1/4 at r = 1: there it is the plain policy gradient. From the paper; TRL and verl agree.

    Args:
        tau_positive, tau_negative: temperatures, above 0; the defaults are the paper's.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    coefficient_scope = "token"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(1e-6, tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        tau = by_sign(batch, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (finite.exp(batch.log_ratio) - 1.0))
        return surrogate(batch, 4.0 / tau * gate, batch.log_ratio)
