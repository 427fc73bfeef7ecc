"""DAPO: GRPO with a higher upper bound and a mean over all tokens."""

from dataclasses import KW_ONLY, dataclass

from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True)
class DAPO(GRPO):
    """Decoupled clip and token-level loss of DAPO (arXiv 2503.14476).

    GRPO with bounds 0.2 below and 0.28 above 1 and one mean over all tokens of the *global* batch: under
    gradient accumulation pass its token count as ``normalizer``. From the paper. For dynamic sampling and the
    soft penalty on overlong completions see ``examples/recipes/dapo.py``.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
    """

    clip_high: float = 0.28
    _: KW_ONLY
    aggregation: str = "token_mean"
