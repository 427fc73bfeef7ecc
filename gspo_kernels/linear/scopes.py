"""The rows of a call by scope (sequences that determine each other's coefficients), and their terms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.layout import Padded
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.schedule import Part
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.parallel.groups import Rehearsal, rehearsed
from gspo_kernels.plan import coefficients_depend_on, ratio_of
from gspo_kernels.sequence_ratio import RatioOperands
from gspo_kernels.step import evaluate_objective
from gspo_kernels.terms import ArgSpec, Terms, check_values, inactive_sequences


def without_logprobs(tokens: Tensor, terms: Terms) -> tuple[Tensor, Terms]:
    """Log-probs and terms that give dLoss/dlogprobs of the objective alone, where log-probs don't matter;
    ``tokens`` gives the shape.
    """
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return torch.zeros_like(tokens, dtype=torch.float64), alone


def known_coefficients(tokens: Tensor, terms: Terms, backend: str) -> Tensor:
    """dLoss/dlogprobs of the objective alone, where log-probs don't matter; only in operators."""
    logprobs, alone = without_logprobs(tokens, terms)
    ratio = ratio_of(alone, backend)
    return evaluate_objective(logprobs, None, alone, backend, ratio, want_metrics=False).grad_logprobs


def token_terms(tokens: Tensor, terms: Terms, backend: str) -> Terms:
    """The same terms with every tensor expanded to tokens, and aggregation as a share per token."""
    layout, mask = terms.layout(tokens), terms.counted(tokens)
    shares = Aggregation.of(tokens, terms).token_shares()

    def expanded(form: ArgSpec, value: Tensor) -> Tensor:
        if form.shape == "broadcast":
            return _per_token(value, tokens)
        return layout.expand(value) if form.shape != "tokens" and value.ndim == 1 else value

    # what the shares have taken in, and what only objectives over more than a token look at
    done = terms._replace(
        cu_seqlens=None, lengths=None, normalizer=None, skipped=None, group_ids=None, cp_group=""
    )
    alone = done.each(expanded)._replace(loss_mask=mask, token_shares=shares)
    if from_spec(terms.objective).coefficient_scope in ("nothing", "token"):
        return alone
    coefficients = known_coefficients(tokens, terms, backend)
    weights = torch.where(shares != 0, coefficients / shares, 0.0)
    return alone._replace(
        advantages=None, rollout_weights=None, token_weights=weights, objective=Linear().spec
    )


def rehearse(tokens: Tensor, terms: Terms, schedule: str, entropy: bool, backend: str) -> Rehearsal:
    """What a call sends in the group of ``terms.cp_group``, where it takes a schedule; ``tokens`` gives shape
    and device, ``entropy`` says whether there is one.
    """
    with rehearsed(terms.cp_group) as rehearsal:
        terms = check_values(tokens, terms._replace(cp_group=rehearsal.name))
        if schedule == "known":
            if coefficients_depend_on(from_spec(terms.objective), terms) == "nothing":
                known_coefficients(tokens, terms, backend)
            else:
                token_terms(tokens, terms, backend)
        logprobs = torch.zeros(tokens.shape, device=tokens.device)
        evaluate_objective(
            logprobs,
            torch.zeros_like(logprobs) if entropy else None,
            terms,
            backend,
            ratio_of(terms, backend),
        )
    return rehearsal


def chunk_terms(terms: Terms, where: slice | Tensor) -> Terms:
    """Rows of token terms, each its own sequence of one token."""
    return terms.each(lambda _, value: value.flatten()[where].unsqueeze(1))


def _per_token(value: Tensor, tokens: Tensor) -> Tensor:
    """A number, or what broadcasts to the tokens, as tokens."""
    return value.to(tokens.device).expand(tokens.shape)


class Pieces:
    """The rows of a call as packed batches of pieces of its sequences, wherever they are cut.

    For clipped ratios and penalties of which a token's coefficient follows from its own log-prob, the length
    of its sequence, and what the outer divisor counts.
    """

    def __init__(self, call: Call, terms: Terms, level: str, where: slice | Tensor):
        labels = call.labels
        layout, aggregation = terms.layout(labels), Aggregation.of(labels, terms)
        self._offsets = terms.cu_seqlens
        if isinstance(where, Tensor):
            ends = layout.sum(call.counted.to(torch.float64)).cumsum(0).to(torch.int32)
            self._offsets = torch.nn.functional.pad(ends, (1, 0))
        elif self._offsets is None:
            rows, length = labels.shape
            self._offsets = length * torch.arange(rows + 1, dtype=torch.int32, device=labels.device)
        weights = RatioOperands.of(labels, terms, level).weights

        def flat(form: ArgSpec, value: Tensor) -> Tensor:
            return _of_tokens(form, value, labels, where)

        self._terms = (
            terms._replace(
                cu_seqlens=None, skipped=None, lengths=aggregation.lengths, rollout_weights=weights
            )
            .each(flat)
            ._replace(normalizer=aggregation.total)
        )

    def at(self, rows: slice) -> Terms:
        """Those of some rows."""
        ends = (self._offsets - rows.start).clamp(0, rows.stop - rows.start)
        return self._terms.each(lambda form, value: value[:, rows] if value.ndim == 2 else value)._replace(
            cu_seqlens=ends
        )


def _of_tokens(form: ArgSpec, value: Tensor, tokens: Tensor, where: slice | Tensor) -> Tensor:
    """A term, flat [1, n] at some positions if it is one per token."""
    if value.ndim == 0 or form.shape in ("number", "offsets"):
        return value
    if form.shape == "broadcast":
        value = _per_token(value, tokens)
    return value if value.ndim == 1 else value.flatten()[where].unsqueeze(0)


class Scopes:
    """The rows of a call by scope: scopes in the order of their parts, those without any gradient last.

    Attributes:
        rows: rows of each scope.
        idle: how many scopes, the last ones, have no gradient whatever the forward finds.
    """

    def __init__(self, call: Call, terms: Terms, skip: bool):
        self.call, self.terms = call, terms
        self.layout = terms.layout(call.labels)
        counts, idle, groups = self._known(skip)
        scopes = self._scopes(counts, groups)
        working = [scope for scope in scopes if not all(idle[i] for i in scope)]
        resting = [scope for scope in scopes if all(idle[i] for i in scope)]
        self.idle = len(resting)
        # those that fit a chunk together, next to those that only need a projection; segments come in order
        if not call.head.fixed:
            working.sort(key=lambda scope: sum(counts[i] for i in scope) <= call.chunk_rows)
        scopes = working + resting
        self.rows = [sum(counts[i] for i in scope) for scope in scopes]
        self._sequences = [i for scope in scopes for i in scope]
        self._sequence_ends = [0, *itertools.accumulate(len(scope) for scope in scopes)]
        self._row_ends = [0, *itertools.accumulate(counts[i] for i in self._sequences)]
        self.where = self._positions(counts)
        self._as_they_are = self._equal and self._sequences == list(range(len(counts)))
        self._ends: dict[Part, Tensor] = {}
        self._labels = call.labels
        self._ordered = terms

    @property
    def _equal(self) -> bool:
        """Whether every sequence has the same rows, which no one needs to look up."""
        return isinstance(self.layout, Padded) and not self.call.compact

    def _known(self, skip: bool) -> tuple[list[int], list[int], list[int] | None]:
        """Of each sequence its rows, whether it has no gradient whatever the forward finds, and its group.

        One look at the device, for what isn't known without.
        """
        call, layout, sequences = self.call, self.layout, self.layout.sequences
        asked: dict[str, Tensor] = {}
        if not self._equal:
            kept = call.counted if call.compact else torch.ones_like(call.counted)
            asked["counts"] = layout.sum(kept.to(torch.float64))
        idle = inactive_sequences(call.labels, self.terms) if skip else None
        if idle is not None:
            asked["idle"] = idle
        if self._depend_on == "group" and self.terms.group_ids is not None:
            asked["groups"] = self.terms.group_ids
        known: dict[str, list[int]] = {"idle": [0] * sequences}
        if isinstance(layout, Padded):
            known["counts"] = [layout.length] * sequences
        if asked:
            seen = torch.stack([value.to(torch.int64) for value in asked.values()]).tolist()
            known |= dict(zip(asked, seen, strict=True))
        return known["counts"], known["idle"], known.get("groups")

    @property
    def _depend_on(self) -> str:
        return coefficients_depend_on(from_spec(self.terms.objective), self.terms)

    def _scopes(self, counts: list[int], group_of: list[int] | None) -> list[list[int]]:
        if self._depend_on not in ("group", "batch"):
            return [[i] for i, count in enumerate(counts) if count]
        if group_of is None:
            return [list(range(len(counts)))] if counts else []
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(group_of):
            groups.setdefault(group, []).append(i)
        return list(groups.values())

    def _positions(self, counts: list[int]) -> slice | Tensor:
        """Positions of all rows in the order of the scopes."""
        call = self.call
        where = call.index(call.counted if call.compact else None, sum(counts))
        present = [i for i, count in enumerate(counts) if count]
        if [i for i in self._sequences if counts[i]] == present:
            return where
        index = torch.arange(where.stop, device=call.labels.device) if isinstance(where, slice) else where
        starts = [0, *itertools.accumulate(counts)]
        return torch.cat([index[starts[i] : starts[i + 1]] for i in self._sequences])

    def bring(self, parts: Sequence[Part]) -> None:
        """Bring to the device what ``terms_of`` these parts needs there, all of it at once."""
        if not parts:
            return
        device, length = self.call.labels.device, self.call.labels.shape[1]
        ranges = [self._sequence_range(part) for part in parts]
        sizes = [last - first + 1 for first, last in ranges]
        order: slice | Tensor = slice(None)
        if self._as_they_are:
            last = (max(sizes) - 1) * length
            longest = torch.arange(0, last + 1, length, dtype=torch.int32, device=device)
            ends = [longest[:size] for size in sizes]
        else:
            found = list(self._sequences)
            for first, last in ranges:
                found += [end - self._row_ends[first] for end in self._row_ends[first : last + 1]]
            table = torch.tensor(found, dtype=torch.int32)
            # pinned, so that the host doesn't wait for the copy
            pinned = table.pin_memory() if device.type == "cuda" else table
            order, *ends = pinned.to(device, non_blocking=True).split([len(self._sequences), *sizes])
        self._ends = dict(zip(parts, ends, strict=True))
        self._labels = self.call.labels.flatten()[self.where]

        def in_order(form: ArgSpec, value: Tensor) -> Tensor:
            value = _of_tokens(form, value, self.call.labels, self.where)
            return value[order] if value.ndim == 1 and form.shape != "offsets" else value

        self._ordered = self.terms._replace(skipped=None).each(in_order)

    def labels_of(self, part: Part) -> Tensor:
        """The labels [n] of a part that has been brought."""
        first, last = self._sequence_range(part)
        return self._labels[self._row_ends[first] : self._row_ends[last]]

    def rows_of(self, part: Part) -> slice | Tensor:
        """Positions of a part's rows among the flattened rows of the call."""
        first, last = self._sequence_range(part)
        rows = slice(self._row_ends[first], self._row_ends[last])
        return rows if isinstance(self.where, slice) else self.where[rows]

    def _sequence_range(self, part: Part) -> tuple[int, int]:
        return self._sequence_ends[part.start], self._sequence_ends[part.stop]

    def terms_of(self, part: Part, total: Tensor) -> Terms:
        """A part, once it has been brought, as a packed batch of its own; ``total`` is what the outer divisor
        counts in the call.
        """
        first, last = self._sequence_range(part)
        rows = slice(self._row_ends[first], self._row_ends[last])

        def select(form: ArgSpec, value: Tensor) -> Tensor:
            if value.ndim == 1 and form.shape != "offsets":
                return value[first:last]
            return value[:, rows] if value.ndim == 2 else value

        return self._ordered.each(select)._replace(cu_seqlens=self._ends[part], normalizer=total)
