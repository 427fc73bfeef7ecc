"""Groups of sequences as rows of a table, and losses over pairs within groups."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo_kernels.core.exact import exact
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch


class Groups:
    """Mapping of values [B] to a table [groups, size] with one row per group.

    Attributes:
        present: entries of sequences with a counted token.
    """

    def __init__(self, group_ids: Tensor, nonempty: Tensor):
        ordered, self._order = torch.sort(group_ids, stable=True)
        _, rows, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        columns = torch.arange(rows.numel(), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        self._places = (rows, columns)
        self._shape = (counts.numel(), int(counts.max()) if counts.numel() else 0)
        self.present = self.table(nonempty)

    @classmethod
    def of(cls, batch: PolicyBatch) -> Groups:
        """Return the groups of a batch."""
        assert batch.group_ids is not None
        return cls(batch.group_ids, batch.layout.sum(exact(batch.mask)) > 0)

    def table(self, values: Tensor) -> Tensor:
        """Convert [B] to a table [groups, size], padded with zeros."""
        return values.new_zeros(self._shape).index_put(self._places, values[self._order])

    def flat(self, table: Tensor) -> Tensor:
        """Convert a table [groups, size] back to [B]."""
        return table[self._places][self._order.argsort()]

    def sum(self, table: Tensor) -> Tensor:
        """Return the sum over the sequences present in each group, in the table's shape."""
        return torch.where(self.present, table, 0.0).sum(1, keepdim=True).expand(self._shape)

    def mean(self, table: Tensor) -> Tensor:
        """Return the mean over the sequences present in each group, in the table's shape."""
        return self.sum(table) / self.sum(torch.ones_like(table)).clamp(min=1.0)

    def softmax(self, table: Tensor) -> Tensor:
        """Return the softmax over the sequences present in each group; 0 elsewhere."""
        weights = torch.where(self.present, table, -torch.inf).softmax(1)
        return torch.where(self.present, weights, 0.0)


def reference_log_ratio(batch: PolicyBatch) -> Tensor:
    """Return ``token_weights * (logprobs - ref_logprobs)`` per token."""
    assert batch.ref_logprobs is not None
    d = finite.difference(batch.logprobs, batch.ref_logprobs)
    return d if batch.token_weights is None else finite.mul(batch.token_weights, d)


@dataclass(frozen=True)
class Pairwise(Objective):
    """A loss of pairs (i, j) of sequences within a group, a function of the difference of their scores.

    With "sequence_mean" the outer divisor is the number of pairs of the call, or the ``normalizer``. Each of
    a pair's two sequences gets half of the pair's value, which other aggregations reduce. The rollout weight
    of a pair is the mean of its sequences' weights.
    """

    coefficient_scope = "group"
    level = "sequence"
    needs: ClassVar[tuple[str, ...]] = ("group_ids",)
    needs_token_order = False

    @abstractmethod
    def score(self, batch: PolicyBatch) -> Tensor:
        """Return the scores [B], differentiable in ``batch.logprobs``."""

    @abstractmethod
    def pairs(self, values: Tensor) -> Tensor:
        """Return which (i, j) are pairs, [groups, size, size], from the table of ``advantages``."""

    @abstractmethod
    def pair_loss(self, gap: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of ``gap = score_i - score_j``; ``first``, ``second``: i's and j's advantages."""

    def penalty(self, batch: PolicyBatch) -> Tensor | None:
        """Return penalties [B] or None; the mean of a pair's penalties is added to its loss."""
        return None

    def outer_divisor(self) -> tuple[str, float]:
        """Count pairs instead of sequences for "sequence_mean"."""
        return ("pairs", 1.0) if self.aggregation == "sequence_mean" else super().outer_divisor()

    def count_pairs(self, advantages: Tensor, group_ids: Tensor, nonempty: Tensor) -> Tensor:
        """Return the number of pairs of a call."""
        groups = Groups(group_ids, nonempty)
        return exact(self._pairs(groups, groups.table(advantages)).sum())

    def paired(self, advantages: Tensor, group_ids: Tensor, nonempty: Tensor) -> Tensor:
        """Return which sequences are in a pair, [B] bool."""
        groups = Groups(group_ids, nonempty)
        pairs = self._pairs(groups, groups.table(advantages))
        return groups.flat(pairs.any(1) | pairs.any(2))

    def _pairs(self, groups: Groups, values: Tensor) -> Tensor:
        return self.pairs(values) & groups.present.unsqueeze(2) & groups.present.unsqueeze(1)

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """Return half of the losses of each sequence's pairs."""
        assert batch.advantages is not None
        groups = Groups.of(batch)
        scores, values = groups.table(self.score(batch)), groups.table(batch.advantages)
        pairs = self._pairs(groups, values)
        gap = torch.where(pairs, scores.unsqueeze(2) - scores.unsqueeze(1), 0.0)
        each = torch.where(pairs, self.pair_loss(gap, values.unsqueeze(2), values.unsqueeze(1)), 0.0)
        loss = groups.flat(0.5 * (each.sum(1) + each.sum(2)))
        penalty = self.penalty(batch)
        if penalty is not None:
            times = groups.flat((pairs.sum(1) + pairs.sum(2)).to(penalty.dtype))
            loss = loss + finite.mul(0.5 * times, penalty)
        return ObjectiveLoss(batch.weighted(loss), batch.sequence_log_ratio())
