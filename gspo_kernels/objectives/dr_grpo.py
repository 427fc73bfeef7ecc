"""Dr. GRPO: GRPO with a constant divisor."""

from dataclasses import dataclass

from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO Done Right (arXiv 2503.20783): GRPO whose token sums are divided by a constant, not by |y_i|.

    Loss and coefficient of a token are GRPO's. The sum over a sequence is divided by
    ``aggregation_constant``, the maximum completion length, which has no default:
    ``DrGRPO(aggregation_constant=4096)``. From the paper and its code. The paper's advantages are not divided
    by the standard deviation: ``advantages.group_normalized(..., scale="none")``.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
    """

    aggregation: str = "constant"
