"""TRPA: preference pairs of mean log-ratios, with a trust region."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Pairwise, reference_log_ratio


@dataclass(frozen=True, kw_only=True)
class TRPA(Pairwise):
    """Trust Region Preference Approximation (arXiv 2504.04524), after the official code.

    ``z_i = mean_t(logp_t - ref_t)``; ``loss = mean over pairs of -log sigmoid(kappa beta (z_w - z_l)) + eta
    KL``, kappa = ``anisotropy`` where the winner has level 1, else 1; ``KL = mean_t(exp(-l_t) + l_t - 1)``
    with ``l_t = logp_t - old_t``. ``dloss/dlogp_t = -sum kappa beta sigmoid(-h) / (P |y_i|)`` over the pairs
    that sequence i wins, ``+`` over those it loses, ``+ n_i eta (1 - exp(-l_t)) / (2 P |y_i|)`` with n_i the
    number of its pairs and P that of all pairs.

    ``advantages`` hold levels: 1 is the best, a lower level wins, and all sequences of a group with different
    levels form pairs. The official code differs in three ways: its KL is the mean over all tokens of the
    batch instead of the pairs' sequences, it clamps the KL of a token at 10, and in a batch without pairs it
    pushes every sequence by its level, while here the loss is 0.

    Args:
        beta: strength of the reference.
        anisotropy: kappa, the factor on pairs that a sequence of level 1 wins.
        kl_coef: eta, the weight of the trust region's KL.
    """

    beta: float = 0.1
    anisotropy: float = 2.5
    kl_coef: float = 1e-3

    advantages_are = "levels"
    needs = ("ref_logprobs", "group_ids")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(beta=self.beta, anisotropy=self.anisotropy, kl_coef=self.kl_coef)

    def score(self, batch: PolicyBatch) -> Tensor:
        """z_i."""
        return batch.layout.sum(reference_log_ratio(batch)) / batch.lengths

    def pairs(self, values: Tensor) -> Tensor:
        """Return pairs whose first sequence has the lower level."""
        return values.unsqueeze(2) < values.unsqueeze(1)

    def pair_loss(self, gap: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return -log sigmoid of kappa beta gap."""
        h = self.beta * torch.where(first == 1, self.anisotropy * gap, gap)
        return torch.logaddexp(-h, torch.zeros_like(h))

    def penalty(self, batch: PolicyBatch) -> Tensor | None:
        """Return ``eta KL``, the KL a sequence's mean over its tokens."""
        if self.kl_coef == 0:
            return None
        return self.kl_coef * batch.layout.sum(finite.k3(batch.log_ratio)) / batch.lengths
