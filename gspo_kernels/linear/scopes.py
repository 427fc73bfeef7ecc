"""The rows of a call by scope (sequences that determine each other's coefficients), and their terms."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.evaluate import evaluate
from gspo_kernels.layout import Padded
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.exactness import coefficients_depend_on
from gspo_kernels.linear.schedule import Part
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.terms import Form, Terms, idle_sequences


def known_coefficients(tokens: Tensor, terms: Terms) -> Tensor:
    """dLoss/dlogprobs of the objective alone, where log-probs don't matter; ``tokens`` gives the shape."""
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return evaluate(
        torch.zeros_like(tokens, dtype=torch.float64), None, alone, want_metrics=False
    ).grad_logprobs


def token_terms(tokens: Tensor, terms: Terms) -> Terms:
    """The same terms with every tensor expanded to tokens, and aggregation as a share per token."""
    layout, mask = terms.layout(tokens), terms.counted(tokens)
    shares = Aggregation(layout, mask, terms).token_shares()

    def expanded(form: Form, value: Tensor) -> Tensor:
        if form.shape == "broadcast":
            return _per_token(value, tokens)
        return layout.expand(value) if form.shape != "tokens" and value.ndim == 1 else value

    # what the shares have taken in, and what only objectives over more than a token look at
    done = terms._replace(cu_seqlens=None, lengths=None, normalizer=None, skipped=None, group_ids=None)
    alone = done.each(expanded)._replace(loss_mask=mask, token_shares=shares)
    if from_spec(terms.objective).coefficient_scope in ("nothing", "token"):
        return alone
    coefficients = known_coefficients(tokens, terms)
    weights = torch.where(shares != 0, coefficients / shares, 0.0)
    return alone._replace(
        advantages=None, rollout_weights=None, token_weights=weights, objective=Linear().spec
    )


def chunk_terms(terms: Terms, where: slice | Tensor) -> Terms:
    """Rows of token terms, each its own sequence of one token."""
    return terms.each(lambda _, value: value.flatten()[where].unsqueeze(1))


def _per_token(value: Tensor, tokens: Tensor) -> Tensor:
    """A number, or what broadcasts to the tokens, as tokens."""
    return value.to(tokens.device).expand(tokens.shape)


class Scopes:
    """The rows of a call by scope: scopes in the order of their parts, those without any gradient last.

    Attributes:
        rows: rows of each scope.
        idle: how many scopes, the last ones, have no gradient whatever the forward finds.
    """

    def __init__(self, call: Call, terms: Terms, skip: bool):
        self.call, self.terms = call, terms
        self.layout = terms.layout(call.labels)
        counts = self._counts()
        scopes = self._scopes(counts)
        idle = idle_sequences(call.labels, terms) if skip else None
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

    def _positions(self, counts: list[int]) -> slice | Tensor:
        """Positions of all rows in the order of the scopes."""
        call = self.call
        where = call.projected
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

    def terms_of(self, part: Part, total: Tensor) -> Terms:
        """The part as a packed batch of its own; ``total`` is what the outer divisor counts in the call."""
        terms, labels = self.terms, self.call.labels
        first, last = self._sequence_range(part)
        where = self.rows_of(part)
        ends = self._row_ends[first : last + 1]
        sequences = torch.tensor(self._sequences[first:last], device=labels.device)

        def select(form: Form, value: Tensor) -> Tensor:
            if value.ndim == 0 or form.shape in ("number", "offsets"):
                return value
            if form.shape == "broadcast":
                value = _per_token(value, labels)
            elif value.ndim == 1:
                return value[sequences]
            return value.flatten()[where].unsqueeze(0)

        offsets = torch.tensor([end - ends[0] for end in ends], dtype=torch.int32, device=labels.device)
        part_terms = terms._replace(skipped=None).each(select)
        return part_terms._replace(cu_seqlens=offsets, normalizer=total)
