"""BNPO: GRPO with a mean over the tokens of the local batch."""

from dataclasses import dataclass

from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """GRPO divided by the token count of the batch at hand, after TRL's "bnpo" (arXiv 2506.02864).

    The difference from ``DAPO`` besides the upper bound is the divisor: here it is what this call sees, so a
    token weighs more in a micro-batch of short sequences; do not pass ``normalizer``. The advantages of the
    paper (normalised by a Beta distribution) are not part of it.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
    """

    aggregation: str = "token_mean"
