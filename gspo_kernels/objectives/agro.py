"""AGRO: the regularized reward should be the same for all responses of a group."""

from dataclasses import dataclass

import torch

from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Groups, reference_log_ratio


@dataclass(frozen=True, kw_only=True)
class AGRO(Objective):
    """Any-Generation Reward Optimization's off-policy form (arXiv 2503.19612), not verified
    against the paper.

    ``q_i = R_i - beta sum_t(logp_t - ref_t)``; ``loss_i = (q_i - mean_group(q))^2 / 2``, whose mean over a
    group is half its variance; ``dloss/dlogp_t = -beta (q_i - mean_group(q)) / G``. Without an importance
    ratio, responses may be from any policy.

    ``advantages`` hold rewards.

    Args:
        beta: strength of the reference; its default is ours.
    """

    beta: float = 0.1

    coefficient_scope = "group"
    level = "sequence"
    advantages_are = "rewards"
    needs = ("ref_logprobs", "group_ids")
    needs_token_order = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(beta=self.beta)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        assert batch.advantages is not None
        groups = Groups.of(batch)
        regularized = batch.advantages - self.beta * batch.layout.sum(reference_log_ratio(batch))
        table = groups.table(regularized)
        residual = torch.where(groups.present, table - groups.mean(table), 0.0)
        loss = groups.flat(0.5 * residual.square())
        return ObjectiveLoss(batch.weighted(loss), batch.sequence_log_ratio())
