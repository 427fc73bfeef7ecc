"""The rows of a call by scope (sequences that determine each other's coefficients), and their terms."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.layout import Padded, layout_of
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.exactness import coefficients_depend_on
from gspo_kernels.linear.schedule import Part
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.policy import PolicyTerms, evaluate, token_shares


def known_coefficients(tokens: Tensor, terms: PolicyTerms) -> Tensor:
    """dLoss/dlogprobs of the objective alone, where log-probs don't matter; ``tokens`` gives the shape."""
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return evaluate(
        torch.zeros_like(tokens, dtype=torch.float64), None, alone, want_metrics=False
    ).grad_logprobs


def _per_token(value: Tensor | None, labels: Tensor) -> Tensor | None:
    """A number, or what broadcasts to the labels, as tokens."""
    return None if value is None else value.to(labels.device).expand(labels.shape)


def _token_terms(labels: Tensor, terms: PolicyTerms) -> PolicyTerms:
    """The same terms with every tensor expanded to tokens and aggregation as a share per token."""
    layout = layout_of(labels, terms.cu_seqlens)
    mask = torch.ones_like(labels, dtype=torch.bool) if terms.loss_mask is None else terms.loss_mask != 0
    shares = token_shares(labels, mask, terms)
    objective, weights, advantages = terms.objective, terms.token_weights, terms.advantages
    if from_spec(objective).coefficient_scope not in ("nothing", "token"):
        coefficients = known_coefficients(labels, terms)
        weights, advantages = torch.where(shares != 0, coefficients / shares, 0.0), None
        objective = Linear().spec
        rollout_weights = None
    else:
        rollout_weights = terms.rollout_weights

    def expand(values: Tensor | None) -> Tensor | None:
        return layout.expand(values) if values is not None and values.ndim == 1 else values

    return terms._replace(
        loss_mask=mask,
        cu_seqlens=None,
        advantages=expand(advantages),
        rollout_weights=expand(rollout_weights),
        token_weights=weights,
        kl_beta=_per_token(terms.kl_beta, labels),
        entropy_coef=_per_token(terms.entropy_coef, labels),
        lengths=None,
        group_ids=None,
        turn_ids=None,
        normalizer=None,
        skipped=None,
        token_shares=shares,
        objective=objective,
    )


def _chunk_terms(terms: PolicyTerms, where: slice | Tensor) -> PolicyTerms:
    """Rows of token terms, each its own sequence of one token."""
    tensors: dict[str, Any] = {
        name: value.flatten()[where].unsqueeze(1)
        for name, value in terms._asdict().items()
        if isinstance(value, Tensor)
    }
    return terms._replace(**tensors)


class Scopes:
    """The rows of a call by scope: scopes in the order of their parts, those without any gradient last.

    Attributes:
        rows: rows of each scope.
        idle: how many scopes, the last ones, have no gradient whatever the forward finds.
    """

    def __init__(self, call: Call, terms: PolicyTerms, skip: bool):
        self.call, self.terms = call, terms
        self.layout = layout_of(call.labels, terms.cu_seqlens)
        counts = self._counts()
        scopes = self._scopes(counts)
        idle = self._idle(terms) if skip else None
        if idle is not None:
            gone = idle.tolist()
            working = [scope for scope in scopes if not all(gone[i] for i in scope)]
            resting = [scope for scope in scopes if all(gone[i] for i in scope)]
        else:
            working, resting = scopes, []
        self.idle = len(resting)
        # those that fit a chunk together, next to those that only need a projection
        working.sort(key=lambda scope: sum(counts[i] for i in scope) <= call.chunk_rows)
        scopes = working + resting
        self.rows = [sum(counts[i] for i in scope) for scope in scopes]
        self._sequences = [i for scope in scopes for i in scope]
        self._sequence_ends = [0, *itertools.accumulate(len(scope) for scope in scopes)]
        self._row_ends = [0, *itertools.accumulate(counts[i] for i in self._sequences)]
        self.where = self._positions(counts)

    def _counts(self) -> list[int]:
        """Rows of each sequence."""
        call, layout = self.call, self.layout
        if isinstance(layout, Padded) and not call.compact:
            return [layout.length] * layout.sequences
        kept = call.counted if call.compact else torch.ones_like(call.counted)
        return [int(count) for count in layout.sum(kept.to(torch.float64)).tolist()]

    def _scopes(self, counts: list[int]) -> list[list[int]]:
        scope = coefficients_depend_on(from_spec(self.terms.objective), self.terms)
        if scope not in ("group", "batch"):
            return [[i] for i, count in enumerate(counts) if count]
        if scope == "batch" or self.terms.group_ids is None:
            return [list(range(len(counts)))] if counts else []
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(self.terms.group_ids.tolist()):
            groups.setdefault(group, []).append(i)
        return list(groups.values())

    def _idle(self, terms: PolicyTerms) -> Tensor | None:
        """[B], sequences without gradient whatever the forward finds; None where no advantage tells."""
        terms_of_tokens = terms.kl_beta is not None or terms.entropy_coef is not None
        if terms.advantages is None or terms_of_tokens:
            return None
        if not from_spec(terms.objective).zero_advantage_is_inactive:
            return None
        idle = terms.advantages == 0
        if idle.ndim == 2:
            idle = self.layout.sum((~idle & self.call.counted).to(torch.float64)) == 0
        return idle

    def _positions(self, counts: list[int]) -> slice | Tensor:
        """Positions of all rows in the order of the scopes."""
        call = self.call
        where = call.index(call.counted if call.compact else None)
        present = [i for i, count in enumerate(counts) if count]
        if [i for i in self._sequences if counts[i]] == present:
            return where
        index = torch.arange(where.stop, device=call.labels.device) if isinstance(where, slice) else where
        starts = [0, *itertools.accumulate(counts)]
        return torch.cat([index[starts[i] : starts[i + 1]] for i in self._sequences])

    def rows_of(self, part: Part) -> slice | Tensor:
        """Positions of a part's rows among the flattened rows of the call."""
        first, last = self._sequence_range(part)
        rows = slice(self._row_ends[first], self._row_ends[last])
        return rows if isinstance(self.where, slice) else self.where[rows]

    def _sequence_range(self, part: Part) -> tuple[int, int]:
        return self._sequence_ends[part.start], self._sequence_ends[part.stop]

    def terms_of(self, part: Part, total: Tensor) -> PolicyTerms:
        """The part as a packed batch of its own; ``total`` is what the outer divisor counts in the call."""
        terms, labels = self.terms, self.call.labels
        first, last = self._sequence_range(part)
        where = self.rows_of(part)
        ends = self._row_ends[first : last + 1]
        sequences = torch.tensor(self._sequences[first:last], device=labels.device)

        def select(value: Tensor | None) -> Tensor | None:
            if value is None or value.ndim == 0:
                return value
            return value[sequences] if value.ndim == 1 else value.flatten()[where].unsqueeze(0)

        def select_broadcast(value: Tensor | None) -> Tensor | None:
            return value if value is None or value.ndim == 0 else select(_per_token(value, labels))

        return terms._replace(
            old_logprobs=select(terms.old_logprobs),
            advantages=select(terms.advantages),
            loss_mask=select(terms.loss_mask),
            ref_logprobs=select(terms.ref_logprobs),
            rollout_weights=select(terms.rollout_weights),
            token_weights=select(terms.token_weights),
            lengths=select(terms.lengths),
            group_ids=select(terms.group_ids),
            turn_ids=select(terms.turn_ids),
            kl_beta=select_broadcast(terms.kl_beta),
            entropy_coef=select_broadcast(terms.entropy_coef),
            cu_seqlens=torch.tensor([end - ends[0] for end in ends], dtype=torch.int32, device=labels.device),
            normalizer=total,
            skipped=None,
        )
