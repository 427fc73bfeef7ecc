"""Clip-Cov: no gradient for a few tokens whose log-prob and advantage vary together."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.objectives.base import (
    Objective,
    ObjectiveLoss,
    PolicyBatch,
    require_clip_range,
    require_numbers,
)
from gspo_kernels.objectives.clip import ppo_clip


@dataclass(frozen=True)
class ClipCov(Objective):
    """Clip-Cov of "The Entropy Mechanism" (arXiv 2505.22617), after verl's code.

    ``cov_t = (A_t - mean A)(logp_t - mean logp)``, means over all counted tokens of the batch. The loss is
    GRPO's, but 0 for ``max(1, int(clip_cov_ratio N))`` tokens drawn at random among those that are not
    clipped and have ``clip_cov_lb < cov_t < clip_cov_ub``; ``dloss_t/dlogp_t = -r_t A_t`` for the others
    where not clipped, else 0. The metric "clip_fraction/high" counts the drawn tokens too.

    The draw depends on ``seed`` and on the candidates in the order of their covariance, not on the device,
    the layout or the order of sequences. Use a different seed in each step (``dataclasses.replace``). For
    micro-batches, use ``policy_coefficients`` of the whole batch, then ``Linear`` on each part.

    Args:
        clip_low, clip_high: clip range below and above 1.
        clip_cov_ratio: the fraction of all tokens that is drawn.
        clip_cov_lb, clip_cov_ub: the range of covariances of the drawn tokens.
        seed: the seed of the draw.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    seed: int = 0

    needs_token_order = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_clip_range(self.clip_low, self.clip_high, None)
        require_numbers(maximum=1.0, clip_cov_ratio=self.clip_cov_ratio)
        require_numbers(-float("inf"), clip_cov_lb=self.clip_cov_lb)
        require_numbers(self.clip_cov_lb, clip_cov_ub=self.clip_cov_ub)
        checks.integer("seed", self.seed)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        advantages = batch.token_advantages()
        loss, low, high = ppo_clip(batch.log_ratio, advantages, self.clip_low, self.clip_high, None)
        covariance = token_covariance(batch)
        candidates = batch.mask & ~(low | high)
        candidates &= (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub)
        drawn = self._draw(covariance, candidates, int(batch.mask.sum()))
        return ObjectiveLoss(
            batch.weighted(torch.where(drawn, 0.0, loss)), batch.log_ratio, low, high | drawn
        )

    def _draw(self, covariance: Tensor, candidates: Tensor, tokens: int) -> Tensor:
        where = candidates.flatten().nonzero().squeeze(1)
        where = where[covariance.flatten()[where].argsort(stable=True)]
        # on the CPU, for the same draw on every device
        generator = torch.Generator().manual_seed(self.seed)
        shuffled = torch.randperm(where.numel(), generator=generator, device="cpu")
        count = max(1, int(self.clip_cov_ratio * tokens))
        drawn = torch.zeros_like(candidates).flatten()
        drawn[where[shuffled[:count].to(where.device)]] = True
        return drawn.view_as(candidates)


def token_covariance(batch: PolicyBatch) -> Tensor:
    """Return ``(A_t - mean A)(logp_t - mean logp)`` per token, detached; arbitrary for masked tokens."""
    count = batch.mask.sum().clamp(min=1)

    def centered(values: Tensor) -> Tensor:
        return values - torch.where(batch.mask, values, 0.0).sum() / count

    return centered(batch.token_advantages()) * centered(batch.logprobs.detach())
