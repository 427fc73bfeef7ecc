"""BNPO: GRPO with a mean over the tokens of the local batch."""

from dataclasses import dataclass

from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """GRPO divided by the token count of the batch at hand, after TRL's "bnpo" (arXiv 2506.02864).

    Besides the upper bound, the divisor differs from that of ``DAPO``: it is the token count of this call. So
    a token weighs more in a micro-batch of short sequences; do not pass ``normalizer``. The advantages of the
    paper (normalised by a Beta distribution) are not part of this objective.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
    """

    aggregation: str = "token_mean"
