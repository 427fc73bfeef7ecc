"""Building blocks of objectives: clipped ratios at several levels, and a weighted policy gradient."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gspo_kernels.core.types import RatioClip, RatioWeight
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_clip_range


def ppo_clip(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped loss ``-min(r A, clip(r, 1-low, 1+high) A)``, and for A < 0 at most ``-dual A``.

    Clip decisions are taken on the log-ratio; a value on a bound is not clipped. Returns the loss and the
    masks of values clipped by the lower and by the upper bounds.
    """
    return log_clip(log_ratio, advantages, *log_bounds(low, high, dual))


def log_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    log_low: float | Tensor,
    log_high: float | Tensor,
    log_dual: float | Tensor = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip like ``ppo_clip`` at bounds of the log-ratio, which may differ between tokens."""
    gains, losses = advantages > 0, advantages < 0
    clipped_low = losses & (log_ratio < log_low)
    over_high, over_dual = gains & (log_ratio > log_high), losses & (log_ratio > log_dual)
    bounded = torch.where(clipped_low, log_low, log_ratio)
    bounded = torch.where(over_high, log_high, bounded)
    bounded = torch.where(over_dual, log_dual, bounded)
    return -finite.mul(advantages, finite.exp(bounded)), clipped_low, over_high | over_dual


def log_bounds(low: float, high: float, dual: float | None) -> tuple[float, float, float]:
    """Return the log-ratios log(1-low), log(1+high) and log(dual), or +inf without a dual clip."""
    log_low = math.log1p(-low) if low < 1 else -math.inf
    return log_low, math.log1p(high), math.inf if dual is None else math.log(dual)


@dataclass(frozen=True)
class ClippedRatio(Objective):
    """PPO's clip per token, on the ratio of the token or of its segment.

    ``loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)``; ``dloss_t/dlogp_t = -r_t A_t``
    where not clipped, decided by the sign of A_t, else 0. A subclass sets the level of r as ``ratio_level``.

    Args:
        clip_low, clip_high: clip range below and above 1.
        dual_clip: for A < 0 the loss is at most ``-dual_clip A`` and has no gradient beyond (dual-clip PPO,
            arXiv 1912.09729), or None.
    """

    clip_low: float
    clip_high: float
    _: KW_ONLY
    dual_clip: float | None = None

    ratio_level: ClassVar[Literal["token", "turn", "sequence"]]
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip_range(self.clip_low, self.clip_high, self.dual_clip)
        low, high = self.clip_low, self.clip_high
        if self.ratio_level == "sequence" and 0.5 <= low < 1.0 < high < 2.0:
            raise ValueError(
                f"clip_low, clip_high: got {low} and {high}, which look like bounds of the ratio; expected "
                f"distances from 1: clip_low={1 - low:.6g}, clip_high={high - 1:.6g} for {low} to {high}"
            )

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, advantages = batch.log_ratio_of(self.ratio_level), batch.token_advantages()
        loss, low, high = ppo_clip(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return ObjectiveLoss(batch.weighted(loss), log_ratio, low, high)

    def ratio_form(self) -> RatioClip | None:
        """Return the clipped ratio per token; None for longer segments or a subclass's different loss."""
        return self.ratio_form_of(ClippedRatio) if self.ratio_level == "token" else None

    def ratio_weight(self) -> tuple[RatioWeight, RatioWeight] | None:
        """Return the ratio where PPO's clip lets the gradient pass; None for ratios of longer segments."""
        if self.ratio_level != "token":
            return None
        positive = RatioWeight(0.0, 1.0 + self.clip_high, "zero")
        highest = math.inf if self.dual_clip is None else self.dual_clip
        return positive, RatioWeight(max(0.0, 1.0 - self.clip_low), highest, "zero")

    def ratio_form_of(self, cls: type[Objective]) -> RatioClip | None:
        """Return the clipped ratio at this level, with this aggregation, if ``evaluate`` is ``cls``'s."""
        if type(self).evaluate is not cls.evaluate:
            return None
        bounds = log_bounds(self.clip_low, self.clip_high, self.dual_clip)
        divisor, scale = self.outer_divisor()
        return RatioClip(*bounds, self.aggregation != "sequence_mean", divisor, scale, self.level)


def by_sign(batch: PolicyBatch, positive: float, negative: float) -> Tensor:
    """Return per token ``positive`` where A > 0, else ``negative``."""
    advantages = batch.token_advantages()
    return torch.where(advantages > 0, advantages.new_tensor(positive), negative)


def running_sums(batch: PolicyBatch, values: Tensor, decay: float = 1.0, *, onwards: bool = False) -> Tensor:
    """Return per token the sum over the sequence's counted tokens up to it, or ``onwards`` from it; detached.

    A value k counted tokens away has the weight ``decay ** k``. The number of steps is logarithmic in the
    length.
    """
    ids, sums = batch.sequence_ids(), torch.where(batch.mask, values.detach(), 0.0)
    factors = torch.where(batch.mask, torch.full_like(sums, decay), 1.0)
    if onwards:
        ids, sums, factors = ids.flip(1), sums.flip(1), factors.flip(1)
    reach = 1
    while reach < sums.shape[1]:
        same = ids[:, reach:] == ids[:, :-reach]
        farther = torch.where(same, factors[:, reach:] * sums[:, :-reach], 0.0)
        sums = torch.cat([sums[:, :reach], sums[:, reach:] + farther], 1)
        factors = torch.cat([factors[:, :reach], factors[:, reach:] * factors[:, :-reach]], 1)
        reach *= 2
    return sums.flip(1) if onwards else sums


def surrogate(batch: PolicyBatch, gain: Tensor, log_ratio: Tensor, *clipped: Tensor | None) -> ObjectiveLoss:
    """Return the loss ``-A gain``, where ``gain`` is a function of the ratio: tokens or [B].

    ``clipped`` are ``ObjectiveLoss.clipped_low`` and ``clipped_high``, if there are bounds.
    """
    assert batch.advantages is not None
    advantages = batch.advantages if gain.ndim == 1 else batch.token_advantages()
    loss = -finite.mul(advantages, gain)
    return ObjectiveLoss(batch.weighted(loss), log_ratio, *clipped)


def policy_gradient(
    batch: PolicyBatch, weight: Tensor, log_ratio: Tensor, *clipped: Tensor | None
) -> ObjectiveLoss:
    """Return the loss ``-sg[weight] A logp`` per token; its gradient is ``-weight A`` for any weight.

    ``clipped``: see ``surrogate``.
    """
    logprobs = batch.logprobs
    if batch.token_weights is not None:
        logprobs = finite.mul(batch.token_weights, logprobs)
    gain = finite.mul(batch.per_token(weight.detach()), logprobs)
    return surrogate(batch, gain, batch.per_token(log_ratio), *clipped)
