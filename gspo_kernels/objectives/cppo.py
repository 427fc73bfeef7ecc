"""CPPO: DPPO's mask by probabilities, with a weight per position and a budget for the tokens before."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.clip import running_sums, surrogate


@dataclass(frozen=True, kw_only=True)
class CPPO(Objective):
    """Cumulative Prefix-divergence Policy Optimization (arXiv 2606.10968), binary form, from Eqs. 8 to 11.

    ``loss_t = -keep_t A_t r_t``; ``dloss_t/dlogp_t = -keep_t A_t r_t``. The t-th of T counted tokens has the
    divergence ``D_t = |p_t - p_old_t|`` of the label's probabilities and the weight ``w_t = 1 - (1 -
    min_weight) (t - 1) / (T - 1)``. A token is kept where ``A_t (r_t - 1) <= 0``, or where ``w_t D_t <=
    min(bound, bound + prefix_bound sum_{u<t} w_u - sum_{u<t} w_u D_u)``. A sequence's ``prefix_bound`` is the
    90th percentile of its D_t, clamped (Eq. 22). UniRL's code agrees, but clamps log-ratios to +-20 and
    counts masked tokens. The paper's main runs compute D_t over the 20 most likely tokens, which is not
    supported. Its ``old_logprobs`` are the inference engine's.

    Args:
        bound: bound of a token's divergence; 0.2 for the paper's MoE model, 0.15 for its dense ones.
        min_weight: the last token's weight.
        prefix_bound_low, prefix_bound_high: range of the bound on the mean divergence of the tokens before.
            Equal values fix it, such as 0.015 in the paper for a post-trained model.
    """

    bound: float = 0.2
    min_weight: float = 0.8
    prefix_bound_low: float = 0.02
    prefix_bound_high: float = 0.04
    aggregation: str = "token_mean"

    coefficient_scope = "sequence"
    zero_advantage_is_inactive = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(bound=self.bound, prefix_bound_low=self.prefix_bound_low)
        require_numbers(maximum=1.0, min_weight=self.min_weight)
        require_numbers(self.prefix_bound_low, prefix_bound_high=self.prefix_bound_high)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, mask = batch.log_ratio, batch.mask
        divergence = (batch.logprobs.detach().exp() - batch.old_logprobs.exp()).abs()
        position = running_sums(batch, mask.to(log_ratio.dtype)) - 1.0
        last = batch.per_token(batch.layout.sum(mask.to(log_ratio.dtype))) - 1.0
        weight = 1.0 - (1.0 - self.min_weight) * position / last.clamp(min=1.0)
        spent = weight * divergence
        prefix_bound = _percentile_90(batch, divergence).clamp(self.prefix_bound_low, self.prefix_bound_high)
        allowed = batch.per_token(prefix_bound) * (running_sums(batch, weight) - weight)
        left = self.bound + (allowed - (running_sums(batch, spent) - spent)).clamp(max=0.0)
        advantages, beyond = batch.token_advantages(), batch.mask & (spent > left)
        low = beyond & (advantages < 0) & (log_ratio < 0)
        high = beyond & (advantages > 0) & (log_ratio > 0)
        ratio = torch.where(low | high, 0.0, finite.exp(log_ratio))
        return surrogate(batch, ratio, log_ratio, low, high)


def _percentile_90(batch: PolicyBatch, values: Tensor) -> Tensor:
    """Return the 90th percentile of each sequence's counted tokens, [B], interpolated linearly."""
    counted = batch.layout.sum(batch.mask.to(values.dtype))
    tokens = batch.layout.sum(torch.ones_like(values)).long()
    # each sequence's counted tokens in order, then its masked ones
    order = torch.where(batch.mask, values, math.inf).flatten().argsort()
    order = order[batch.sequence_ids().flatten()[order].argsort(stable=True)]
    ordered = torch.cat([values.flatten()[order], values.new_zeros(2)])
    place = 0.9 * (counted - 1.0).clamp(min=0.0)
    lower = tokens.cumsum(0) - tokens + place.long()
    return torch.lerp(ordered[lower], ordered[lower + 1], place.frac())
