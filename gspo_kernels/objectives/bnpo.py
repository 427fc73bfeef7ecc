"""BNPO: GRPO with a mean over the tokens of the local batch."""

from dataclasses import dataclass

from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class BNPO(GRPO):
    """GRPO divided by the token count of the batch at hand, after TRL's "bnpo" (arXiv 2506.02864).

    It differs from ``DAPO`` in the upper bound and in the divisor, which is the token count of this call.
    Tokens therefore weigh more in a micro-batch of short sequences; do not pass ``normalizer``. The paper's
    advantages (normalized by a Beta distribution) are not part of this objective.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
    """

    aggregation: str = "token_mean"
