"""MinPRO: CISPO whose ratio is multiplied by the smallest ratio of the tokens before."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.cispo import CISPO
from gspo_kernels.objectives.clip import policy_gradient


@dataclass(frozen=True)
class MinPRO(CISPO):
    """Minimum Prefix Ratio (arXiv 2601.22718), from text about the paper; its bounds are unknown to us.

    ``loss_t = -sg[clip(m_t r_t, min_ratio, max_ratio)] A_t logp_t`` with ``m_t = min_{u<t} r_u`` over the
    sequence's counted tokens, 1 for the first; ``dloss_t/dlogp_t = -clip(m_t r_t, min_ratio, max_ratio)
    A_t``. The minimum replaces the product of previous ratios, whose variance grows with the length.

    Args:
        min_ratio, max_ratio: bounds of the weight, as in CISPO: the formula has ``1 - eps_low`` and
            ``1 + eps_high``. The defaults are CISPO's.
    """

    coefficient_scope = "sequence"
    zero_advantage_is_inactive = True
    ratio_only = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        log_ratio, before = batch.log_ratio.detach(), _smallest_before(batch)
        weight = torch.where(before == -math.inf, before, before + log_ratio)
        low = math.log(self.min_ratio) if self.min_ratio else -math.inf
        high = math.log(self.max_ratio)
        below, above = weight < low, weight > high
        return policy_gradient(batch, finite.exp(weight.clamp(low, high)), batch.log_ratio, below, above)


def _smallest_before(batch: PolicyBatch) -> Tensor:
    """Return per token the smallest log-ratio of the sequence's previous counted tokens, 0 for the first."""
    ids = batch.sequence_ids()
    smallest = torch.where(batch.mask, batch.log_ratio.detach(), math.inf)
    # shift by one token
    same = ids == torch.cat([ids[:, :1] - 1, ids[:, :-1]], 1)
    smallest = torch.where(same, torch.cat([smallest[:, :1], smallest[:, :-1]], 1), math.inf)
    reach = 1
    while reach < smallest.shape[1]:
        same = ids[:, reach:] == ids[:, :-reach]
        farther = torch.where(same, smallest[:, :-reach], math.inf)
        smallest = torch.cat([smallest[:, :reach], torch.minimum(smallest[:, reach:], farther)], 1)
        reach *= 2
    return torch.where(smallest == math.inf, 0.0, smallest)
