"""SSPO: the geometric mean of soft gates on token ratios."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import by_sign, surrogate


def _sigmoid(log_ratio: Tensor, tau: Tensor) -> Tensor:
    x = tau * (finite.exp(log_ratio) - 1.0)
    return torch.log(4.0 / tau) - torch.logaddexp(torch.zeros_like(x), -x)


def _identity(log_ratio: Tensor, tau: Tensor) -> Tensor:
    return log_ratio


LOG_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sigmoid": _sigmoid, "identity": _identity}
"""Functions by name that return the log of a gate from log-ratios and temperatures (tokens); extensible."""


@dataclass(frozen=True, kw_only=True)
class SSPO(Objective):
    """Soft sequence policy optimization (arXiv 2602.19327), whose gate is unknown to us.

    ``W = exp(mean_t log gate(r_t))``; ``loss_i = -A_i W``; ``dloss_i/dlogp_t = -(A_i W / |y_i|) phi_t`` with
    ``phi_t = dlog gate/dlog r_t``. The structure is from the paper; the default gate ``(4 / tau) sigmoid(tau
    (r - 1))`` is SAPO's, with ``phi_t = tau (1 - sigmoid(tau (r_t - 1))) r_t``. At ratio 1 ``W phi_t`` is 1
    for any tau, the plain policy gradient as in GSPO. "identity" makes it GSPO without a clip.

    Args:
        gate: a name in ``LOG_GATES``.
        tau_positive, tau_negative: temperatures for A > 0 and else, above 0; SAPO's.
    """

    gate: str = "sigmoid"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    coefficient_scope = "sequence"
    level = "sequence"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("gate", self.gate, tuple(LOG_GATES))
        require_numbers(1e-6, tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        tau = by_sign(batch, self.tau_positive, self.tau_negative)
        log_gates = torch.where(batch.mask, LOG_GATES[self.gate](batch.log_ratio, tau), 0.0)
        weight = finite.exp(batch.layout.sum(log_gates) / batch.lengths)
        return surrogate(batch, weight, batch.sequence_log_ratio())
