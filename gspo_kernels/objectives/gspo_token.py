"""GSPO-token: GSPO's ratio with advantages and weights of each token's own."""

from dataclasses import dataclass

from gspo_kernels.objectives.clip import ClippedRatio


@dataclass(frozen=True)
class GSPOToken(ClippedRatio):
    """The token-level variant of GSPO, from the paper's Eqs. 13 and 14 (arXiv 2507.18071).

    ``s_{i,t} = sg[s_i] pi_t / sg[pi_t]``; ``loss_t = -min(s_{i,t} A_t, clip(s_{i,t}, 1 - clip_low, 1 +
    clip_high) A_t)``; ``dloss_t/dlogp_t = -s_i A_t``, 0 where clipped, decided per token by the sign of A_t.
    Equal to GSPO in value, clipping and gradient when all A_t of a sequence are equal. Rollout weights are
    per token (as in verl). With ``lengths`` that are not the counts, values are summed over tokens, unlike
    GSPO's.

    Args:
        clip_low, clip_high: clip range below and above 1; the defaults are the paper's.
        dual_clip: upper bound on the ratio of tokens with negative advantage, or None.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    ratio_level = "sequence"
    coefficient_scope = "sequence"
    factorizes = True
