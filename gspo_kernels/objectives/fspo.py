"""FSPO: the likelihood ratio of a whole sequence, clipped in a band that grows with its length."""

from dataclasses import dataclass

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import log_clip


@dataclass(frozen=True)
class FSPO(Objective):
    """Fair Sequence Policy Optimization (arXiv 2509.09177, third version), whose constants are unknown to us.

    ``S_i = sum_t(logp_t - old_t)``; ``loss_i = -min(exp(S_i) A_i, exp(clip(S_i, -log_clip_low sqrt(|y_i|),
    log_clip_high sqrt(|y_i|))) A_i)``; ``dloss_i/dlogp_t = -exp(S_i) A_i`` for every counted token of an
    unclipped sequence, else 0. S is the sum of a sequence's log-ratios, not their mean as in GSPO. The band
    grows like the standard deviation of S, to clip sequences of all lengths equally often.

    The square root in the band is from the abstract; the sum and the minimum are from a public implementation
    that cites the paper's Eqs. 3 to 5. Like that, this has no drift of the band (in the paper's first
    version) and no dual clip.

    Args:
        log_clip_low, log_clip_high: half-widths of the band for a length of 1; the defaults are that
            implementation's.
    """

    log_clip_low: float = 0.03
    log_clip_high: float = 0.03

    coefficient_scope = "sequence"
    level = "sequence"
    factorizes = True
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(log_clip_low=self.log_clip_low, log_clip_high=self.log_clip_high)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        assert batch.advantages is not None
        log_ratio, root = batch.layout.sum(batch.log_ratio), batch.lengths.sqrt()
        low, high = -self.log_clip_low * root, self.log_clip_high * root
        loss, cut_low, cut_high = log_clip(log_ratio, batch.advantages, low, high)
        return ObjectiveLoss(batch.weighted(loss), log_ratio, cut_low, cut_high)
