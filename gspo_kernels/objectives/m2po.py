"""M2PO: mask the largest log-ratios until their mean square is small, instead of a clip."""

from dataclasses import dataclass

import torch

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import surrogate


@dataclass(frozen=True, kw_only=True)
class M2PO(Objective):
    """Second-Moment Trust Policy Optimization, from the paper's Algorithm 1 and Eq. 5 (arXiv 2510.01161).

    ``loss_t = -M_t r_t A_t``; ``dloss_t/dlogp_t = -M_t r_t A_t``. M masks the tokens of largest ``l_t^2``,
    one by one, until the mean of ``l_t^2`` over the rest is at most ``threshold``. Only tokens that their
    advantage pushed away from the old policy (A > 0 and r > 1, or A < 0 and r < 1) are in that mean and may
    be masked. Masked tokens count in the divisor, as in the paper.

    Tokens of equal ``l_t^2`` are masked together, independent of their order. The paper's code clips at a
    bound derived from that mean instead; AReaL compares the policies before the update. For micro-batches,
    use ``policy_coefficients`` of the whole batch, then ``Linear`` on each part.

    Args:
        threshold: bound of the mean squared log-ratio; the paper's.
        one_sided: if False, all tokens are in the mean and may be masked, as in AReaL.
    """

    threshold: float = 0.04
    one_sided: bool = True
    aggregation: str = "token_mean"

    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(threshold=self.threshold)
        checks.flag("one_sided", self.one_sided)
        if not self.one_sided:  # tokens with a zero advantage are in the mean
            self._declare(zero_advantage_is_inactive=False)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, squares = batch.log_ratio, batch.log_ratio.detach().square()
        region = batch.mask & (batch.token_advantages() * log_ratio > 0) if self.one_sided else batch.mask
        ordered = torch.where(region, squares, torch.inf).flatten().sort().values
        counts = torch.arange(1, ordered.numel() + 1, device=ordered.device)
        kept = (ordered.cumsum(0) / counts <= self.threshold).sum()
        first_out = torch.cat([ordered, ordered.new_full((1,), torch.inf)]).take(kept)
        out = region & (squares >= first_out)
        gain = torch.where(out, 0.0, finite.exp(log_ratio))
        return surrogate(batch, gain, log_ratio, out & (log_ratio < 0), out & (log_ratio > 0))
