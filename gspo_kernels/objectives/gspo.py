"""GSPO: one length-normalized, clipped importance ratio per sequence."""

from dataclasses import dataclass

from gspo_kernels.core.types import RatioClip
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.clip import ClippedRatio, ppo_clip


@dataclass(frozen=True)
class GSPO(ClippedRatio):
    """Group Sequence Policy Optimization, from the paper's Eqs. 5 and 7 (arXiv 2507.18071).

    ``s_i = exp(mean_t(logp_t - old_t))``; ``loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high)
    A_i)``; ``dloss_i/dlogp_t = -s_i A_i / |y_i|`` for every counted token of an unclipped sequence, else 0.

    Rollout weights are averaged over the sequence (as in TRL); advantages are one per sequence.

    Args:
        clip_low, clip_high: clip range below and above 1; the defaults are the paper's.
        dual_clip: upper bound on the ratio of sequences with negative advantage (TRL's ``delta``), or None.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    ratio_level = "sequence"
    coefficient_scope = "sequence"
    level = "sequence"
    factorizes = True
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        assert batch.advantages is not None
        log_ratio = batch.sequence_log_ratio()
        loss, low, high = ppo_clip(log_ratio, batch.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return ObjectiveLoss(batch.weighted(loss), log_ratio, low, high)

    def ratio_form(self) -> RatioClip | None:
        """Return the clipped ratio per sequence; None for subclasses with a different loss."""
        return self.ratio_form_of(GSPO)
