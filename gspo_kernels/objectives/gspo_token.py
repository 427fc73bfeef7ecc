"""GSPO-token: GSPO's ratio with advantages and weights of each token's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, ppo_clip, require_clip_range
from gspo_kernels.objectives.finite import zero_with_gradient


@dataclass(frozen=True)
class GSPOToken(Objective):
    """The token-level variant of GSPO, from the paper's Eqs. 13 and 14 (arXiv 2507.18071).

    ``s_{i,t} = sg[s_i] pi_t / sg[pi_t]``; ``loss_t = -min(s_{i,t} A_t, clip(s_{i,t}, 1 - clip_low, 1 +
    clip_high) A_t)``; ``dloss_t/dlogp_t = -s_i A_t``, 0 where clipped, decided per token by the sign of A_t.
    Equal to GSPO in value, clipping and gradient when all A_t of a sequence are equal; rollout weights stay
    per token (as in verl). With ``lengths`` other than the counts, GSPO's value stays one per sequence while
    this one's is a sum over tokens.

    Args:
        clip_low, clip_high: clip range below and above 1; the defaults are the paper's.
        dual_clip: upper bound on the ratio of tokens with negative advantage, or None.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None

    coefficient_scope: ClassVar[Literal["sequence"]] = "sequence"
    level: ClassVar[Literal["token"]] = "token"
    factorizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip_range(self.clip_low, self.clip_high, self.dual_clip)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """One value per token."""
        assert batch.advantages is not None
        sequence_ratio = batch.per_token(batch.sequence_log_ratio().detach())
        log_ratio = sequence_ratio + zero_with_gradient(batch.log_ratio)
        advantages = batch.per_token(batch.advantages)
        loss, low, high = ppo_clip(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return ObjectiveLoss(batch.weighted(loss), log_ratio, low, high)
