"""REAL: rewards are labels, and a sequence's log-ratio is the logit that they classify."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Groups


@dataclass(frozen=True, kw_only=True)
class REAL(Objective):
    """Rewards as Labels (arXiv 2602.05630), after the official code; ms-swift's agrees.

    ``s_i = mean_t(logp_t - old_t)``; the loss of a group is ``log(1 + sum_+ exp(-s_i / tau)) + log(1 +
    sum_- exp(s_i / tau))`` over successes and failures, 0 without both of them; ``dloss/dlogp_t =
    -w_i / (tau |y_i|)`` for a success, ``+`` for a failure, ``w_i = exp(.) / (1 + sum exp(.))``. A sequence's
    value is its group's loss; for groups of equal size the mean over sequences is the paper's mean over
    groups. A group's rollout weight is the mean of its sequences'. ``advantages`` hold rewards.

    Args:
        tau: temperature; the official script's and ms-swift's.
        threshold: a reward above this is a success. The paper's rewards are 0 and 1; ms-swift splits
            advantages at 0.
    """

    tau: float = 0.5
    threshold: float = 0.5

    coefficient_scope = "group"
    level = "sequence"
    advantages_are = "rewards"
    needs = ("group_ids",)
    needs_token_order = False
    ratio_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(1e-4, tau=self.tau)
        require_numbers(-float("inf"), threshold=self.threshold)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """Return the loss of each sequence's group."""
        assert batch.advantages is not None
        groups, log_ratio = Groups.of(batch), batch.sequence_log_ratio()
        success = groups.present & (groups.table(batch.advantages) > self.threshold)
        failure = groups.present & ~success
        both, scores = success.any(1, True) & failure.any(1, True), groups.table(log_ratio / self.tau)

        def classified(chosen: Tensor, logits: Tensor) -> Tensor:
            logits = torch.where(chosen & both, logits, -torch.inf)
            anchor = logits.new_zeros(logits.shape[0], 1)
            return finite.logsumexp(torch.cat([logits, anchor], 1))

        loss = classified(success, -scores) + classified(failure, scores)
        return ObjectiveLoss(batch.weighted(groups.flat(loss.expand_as(scores))), log_ratio)
