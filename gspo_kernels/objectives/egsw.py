"""EGSW: GRPO's loss, weighted by a softmax of advantage and entropy over the group."""

from dataclasses import KW_ONLY, dataclass

from gspo_kernels.core import checks
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import Groups
from gspo_kernels.objectives.grpo import GRPO


@dataclass(frozen=True)
class EGSW(GRPO):
    """Entropy-Guided Sequence Weighting (arXiv 2503.22456), from text about the paper; its alpha and
    temperature are unknown to us.

    ``w_i = softmax over the group of (A_i + alpha H_i) / temperature`` with H_i the mean entropy of the
    sequence's tokens; ``loss_t = w_i`` times GRPO's; ``dloss_t/dlogp_t = -w_i r_t A_t`` where not clipped,
    else 0. The weights are detached and sum to 1 over a group. This is the trajectory-wise form; the paper
    also has one that weighs position by position.

    Args:
        clip_low, clip_high, dual_clip: as in GRPO.
        alpha: advantage per nat of entropy; its default is ours.
        temperature: divisor of the softmax's argument; its default is ours.
    """

    _: KW_ONLY
    alpha: float = 1.0
    temperature: float = 1.0

    coefficient_scope = "group"
    needs = ("entropy", "group_ids")
    needs_token_order = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(alpha=self.alpha)
        checks.number("temperature", self.temperature, positive=True)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        assert batch.advantages is not None and batch.entropy is not None
        groups = Groups.of(batch)
        merit = batch.per_sequence(batch.advantages) + self.alpha * batch.per_sequence(batch.entropy)
        weights = groups.flat(groups.softmax(groups.table(merit.detach() / self.temperature)))
        plain = super().evaluate(batch)
        return plain._replace(loss=finite.mul(batch.per_token(weights), plain.loss))
