"""LUSPO: GSPO whose sequences weigh by their length."""

from dataclasses import KW_ONLY, dataclass

from gspo_kernels.objectives.gspo import GSPO


@dataclass(frozen=True)
class LUSPO(GSPO):
    """Length-Unbiased Sequence Policy Optimization (arXiv 2602.05261): GSPO's loss times |y_i|.

    ``loss_i = -|y_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)``; ``dloss_i/dlogp_t =
    -s_i A_i`` where not clipped, else 0. The factor |y_i| is that of the aggregation
    "sequence_mean_token_sum"; with "sequence_mean" this is GSPO. From the paper and TRL's
    ``loss_type="luspo"``.

    Args:
        clip_low, clip_high, dual_clip: as in GSPO; the defaults are the paper's.
    """

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    _: KW_ONLY
    aggregation: str = "sequence_mean_token_sum"
