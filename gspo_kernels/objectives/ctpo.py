"""CTPO: the likelihood ratio of all tokens so far, clipped in a band that grows with the position."""

import math
from dataclasses import KW_ONLY, dataclass

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import log_clip, running_sums


@dataclass(frozen=True)
class CTPO(Objective):
    """Cumulative Token Policy Optimization (arXiv 2605.07331), after the official code.

    ``c_t = exp(sum over u <= t of l_u)``; ``loss_t = -min(c_t A_t, clip(c_t, exp(-log_clip_low t^power),
    exp(log_clip_high t^power)) A_t)`` for the t-th counted token; ``dloss_t/dlogp_t = -c_t A_t`` where not
    clipped, else 0. The gradient is that of the token's own log-prob; the ratio of the tokens before it is
    detached, as in the code. Log-ratios are clamped to +-20 in the sum.

    Args:
        log_clip_low, log_clip_high: half-widths of the band at the first token; the defaults are the paper's.
        power: the exponent of the position in the band's growth; the default is the paper's.
        log_dual_clip: for A < 0 the log-ratio is at most this times ``t^power``, or None. The official script
            has 0.05; the paper's objective has none, according to text about it.
    """

    log_clip_low: float = 0.025
    log_clip_high: float = 0.05
    _: KW_ONLY
    power: float = 0.5
    log_dual_clip: float | None = None

    coefficient_scope = "sequence"
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(log_clip_low=self.log_clip_low, log_clip_high=self.log_clip_high)
        require_numbers(maximum=1.0, power=self.power)
        if self.log_dual_clip is not None:
            require_numbers(self.log_clip_high, log_dual_clip=self.log_dual_clip)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        width = running_sums(batch, batch.mask.to(batch.log_ratio.dtype)).clamp(min=1.0) ** self.power
        log_ratio = running_sums(batch, batch.log_ratio.clamp(-20.0, 20.0))
        log_ratio = log_ratio + finite.zero_with_gradient(batch.log_ratio)
        dual = math.inf if self.log_dual_clip is None else self.log_dual_clip * width
        low, high = -self.log_clip_low * width, self.log_clip_high * width
        loss, cut_low, cut_high = log_clip(log_ratio, batch.token_advantages(), low, high, dual)
        return ObjectiveLoss(batch.weighted(loss), log_ratio, cut_low, cut_high)
