"""TL-GRPO: one importance ratio per turn of a conversation."""

from dataclasses import dataclass

from gspo_kernels.objectives.clip import ClippedRatio


@dataclass(frozen=True)
class TLGRPO(ClippedRatio):
    """Turn-level GRPO (arXiv 2601.16480) with GSPO's ratio over the turn: k is the turn of token t.

    ``s_k = exp(mean over the turn's counted tokens of (logp_t - old_t))``; ``loss_t = -min(s_k A_t, clip(s_k,
    1 - clip_low, 1 + clip_high) A_t)``; ``dloss_t/dlogp_t = -s_k A_t`` where not clipped, else 0. With one
    turn per sequence it is GSPO-token, with one per token GRPO.

    Advantages per turn are from the paper (pass them per token); the ratio per turn is this package's option.
    For the paper's ratio per token use ``GRPO`` with the same advantages. The clip range is that of GSPO's
    paper, for segments of a sequence's length; we have not read one for turns.

    A turn is the tokens of a sequence that have the same id; they need not be adjacent. Counted tokens of no
    turn (-1) have a ratio of 1.

    Args:
        clip_low, clip_high: clip range below and above 1.
        dual_clip: upper bound on the ratio of tokens with negative advantage, or None.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    ratio_level = "turn"
    coefficient_scope = "turn"
    needs = ("turn_ids",)
