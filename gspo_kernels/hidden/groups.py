"""The rows of a call by group (sequences that determine each other's coefficients), and their terms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import SPECS, ArgSpec, Terms, shows_inactive
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.layout import queued
from gspo_kernels.hidden.call import Call
from gspo_kernels.hidden.chunk import as_index, rows_at
from gspo_kernels.hidden.schedule import SUM_ROWS, Part, plan_parts
from gspo_kernels.logits.plan import Plan, ratio_clip_of
from gspo_kernels.logits.policy_step import evaluate_objective
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.linear import Linear


def without_logprobs(tokens: Tensor, terms: Terms) -> tuple[Tensor, Terms]:
    """Return log-probs (zeros) and terms that give dLoss/dlogprobs of the objective alone, without KL and
    entropy bonus, where log-probs don't matter. ``tokens`` gives the shape.
    """
    known = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return torch.zeros_like(tokens, dtype=exact_dtype(tokens.device)), known


def known_coefficients(tokens: Tensor, terms: Terms, backend: str) -> Tensor:
    """Return dLoss/dlogprobs of the objective alone, where log-probs don't matter. For use in operators."""
    logprobs, known = without_logprobs(tokens, terms)
    ratio_clip = ratio_clip_of(known, backend)
    return evaluate_objective(logprobs, None, known, backend, ratio_clip, want_metrics=False).grad_logprobs


_LINEAR = Linear().spec


def token_terms(tokens: Tensor, terms: Terms, backend: str) -> Terms:
    """Return the terms with every tensor expanded to tokens, and the aggregation as a share per token.

    An objective over more than a token becomes ``Linear``, with its known coefficients as token weights.
    """
    layout = terms.layout(tokens)
    shares = Aggregation(tokens, terms).token_shares()

    def expanded(spec: ArgSpec, value: Tensor) -> Tensor:
        if spec.shape == "broadcast":
            return value.to(tokens.device).expand(tokens.shape)
        return layout.expand(value) if spec.shape != "tokens" and value.ndim == 1 else value

    # the shares contain these fields already, or only objectives over more than a token use them
    rest = terms._replace(
        cu_seqlens=None, lengths=None, normalizer=None, skipped=None, group_ids=None, cp_group=""
    )
    per_token = rest.each(expanded)._replace(loss_mask=terms.counted(tokens), token_shares=shares)
    if from_spec(terms.objective).coefficient_scope in ("nothing", "token"):
        return per_token
    coefficients = known_coefficients(tokens, terms, backend)
    weights = torch.where(shares != 0, coefficients / shares, 0.0)
    return per_token._replace(advantages=None, rollout_weights=None, token_weights=weights, objective=_LINEAR)


class CoefficientGroups:
    """The rows of a call by group: groups in the order of their parts, groups without any gradient last.

    Attributes:
        row_counts: the number of rows of each group.
        inactive: how many groups at the end have no gradient, whatever the forward gives.
        all_rows: whether every row of the call is in a group.
        in_place: whether these are padded sequences in the order of the call.
        total: the call's ``Aggregation.total``, 0-d, where the host knows it; otherwise None.
        parts: the groups cut into parts.
        in_one_product: whether dWeight is one product of all rows with a gradient, however many columns at a
            time: these rows share a chunk, or are projected again some columns at a time.
    """

    def __init__(self, call: Call, terms: Terms, plan: Plan):
        self._call, self._terms, depends_on, skip = call, terms, plan.depends_on, plan.leaves_out
        compact, grouped = call.chunking.compact, depends_on == "group" and terms.group_ids is not None
        counts, without, ids = _lengths(call, terms, skip, grouped)
        present_sequences = [i for i, count in enumerate(counts) if count]

        groups = [[i] for i in present_sequences]
        if depends_on in ("group", "batch"):
            members: dict[int, list[int]] = {}
            for i, group in enumerate(ids):
                members.setdefault(group, []).append(i)
            groups = list(members.values())
        idle = {i for i, inactive in enumerate(without) if inactive}
        working = [group for group in groups if not idle.issuperset(group)]
        inactive_groups = [group for group in groups if idle.issuperset(group)]

        def rows_in(group: list[int]) -> int:
            return sum(map(counts.__getitem__, group))

        # groups that fit a chunk go last, next to those that are only projected; segments keep their order
        if not call.chunking.batch_invariant:
            working.sort(key=lambda group: rows_in(group) <= call.chunk_rows)
        groups = working + inactive_groups
        self.inactive = len(inactive_groups)
        self.row_counts = [rows_in(group) for group in groups]
        self._sequences = [i for group in groups for i in group]
        self._sequence_ends = [0, *itertools.accumulate(map(len, groups))]
        self._row_ends = [0, *itertools.accumulate(map(counts.__getitem__, self._sequences))]

        # positions of all rows in the order of the groups
        total, tokens = sum(counts), call.labels.numel()
        self._where = call.index(call.counted if compact and total < tokens else None, total)
        if [i for i in self._sequences if counts[i]] != present_sequences:
            index, starts = as_index(self._where, call.labels.device), [0, *itertools.accumulate(counts)]
            self._where = torch.cat([index[starts[i] : starts[i + 1]] for i in self._sequences])
        # whole padded sequences in their order: nothing has to be looked up
        in_order = isinstance(self._where, slice) and self._sequences == list(range(len(counts)))
        self.in_place = in_order and terms.cu_seqlens is None and not call.chunking.batch_invariant
        self.all_rows = isinstance(self._where, slice)
        self.total = None
        divided_by, _ = from_spec(terms.objective).outer_divisor()
        asks = terms.normalizer is not None or terms.skipped is not None or terms.cp_group
        by_length = divided_by == "tokens" and terms.lengths is not None
        if compact and not (asks or by_length or divided_by in ("pairs", "prompts")):
            number = {"tokens": total, "sequences": len(present_sequences)}.get(divided_by, 1) or 1
            self.total = torch.full(
                (), number, dtype=exact_dtype(call.labels.device), device=call.labels.device
            )

        joins = 0
        if plan.requires_grad.weight and call.products.rounds_early:
            joins = SUM_ROWS["cpu" if call.hidden.is_cpu else "cuda"]
        if not any(plan.requires_grad):
            self.parts = [Part("forward", 0, len(groups), total)]
        elif plan.schedule == "known":
            self.parts = [Part("known", 0, len(groups), total)]
        else:
            chunk_rows = call.chunk_rows
            self.parts = plan_parts(
                plan.schedule, self.row_counts, self.inactive, chunk_rows, plan.defers, joins
            )
        served = [part for part in self.parts if part.schedule != "forward"]
        names = {part.schedule for part in served}
        if names == {"two_pass"}:
            call.chunk_rows = call.least_rows
        fits = len(served) == 1 and (names == {"two_pass"} or served[0].row_count <= call.chunk_rows)
        self.in_one_product = call.products.by_columns and fits and names != {"deferred"}

    def prepare(
        self, parts: Sequence[Part], terms: Terms, at_once: bool
    ) -> Iterator[tuple[Part, slice | Tensor, Tensor, Terms]]:
        """Copy what all parts need to the device at once, then yield part by part.

        ``at_once``: the call's own terms, not the parts', will be evaluated.

        Yields:
            Each part, the positions of its rows among the flattened rows of the call, their labels [n], and
            their terms with the call's outer divisor: as a packed batch, or padded where groups are in place.
        """
        labels, where = rows_at(self._call.labels, self._where), self._where
        if at_once:
            for part in parts:
                first, last = self._sequence_ends[part.start], self._sequence_ends[part.stop]
                span = slice(self._row_ends[first], self._row_ends[last])
                yield (
                    part,
                    span if isinstance(where, slice) else rows_at(where, span),
                    rows_at(labels, span),
                    terms,
                )
            return
        if terms.normalizer is None:
            terms = terms._replace(normalizer=Aggregation(self._call.labels, terms).total)
        # [B] if there is one per sequence, otherwise one per token
        values: dict[str, Tensor] = {}
        call_terms = terms._replace(skipped=None, cu_seqlens=None)
        for name, spec in SPECS.items():
            value = getattr(call_terms, name)
            if value is not None and value.ndim:
                spread = spec.shape == "broadcast"
                values[name] = value.to(labels.device).expand(self._call.labels.shape) if spread else value
        if self.in_place:
            length = self._call.labels.shape[1]
            for part in parts:
                first, last = self._sequence_ends[part.start], self._sequence_ends[part.stop]
                span = slice(first * length, last * length)
                sliced: dict[str, Any] = {name: value[first:last] for name, value in values.items()}
                yield part, span, labels[span], call_terms._replace(**sliced)
            return
        if not parts:
            return
        ends = self._row_ends
        ranges = [(self._sequence_ends[part.start], self._sequence_ends[part.stop]) for part in parts]
        numbers = list(self._sequences)
        for first, last in ranges:
            numbers += [end - ends[first] for end in ends[first : last + 1]]
        table = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        if not labels.is_cpu:
            table = queued(table, labels.device)
        order, *offsets = table.split([len(self._sequences), *(last - first + 1 for first, last in ranges)])
        # [B] or [1, n]
        ordered = {
            name: value[order] if value.ndim == 1 else value.flatten()[where].unsqueeze(0)
            for name, value in values.items()
        }
        for part, (first, last), cu_seqlens in zip(parts, ranges, offsets, strict=True):
            span = slice(ends[first], ends[last])
            part_terms: dict[str, Any] = {
                name: value[first:last] if value.ndim == 1 else value[:, span]
                for name, value in ordered.items()
            }
            terms = call_terms._replace(**part_terms, cu_seqlens=cu_seqlens)
            yield part, span if isinstance(where, slice) else where[span], labels[span], terms


def _lengths(call: Call, terms: Terms, skip: bool, grouped: bool) -> tuple[list[int], list[int], list[int]]:
    """Return by sequence: its rows; 1 if it has no gradient, whatever the forward gives, and is left out; and
    its group. What the host doesn't know it reads in one look.
    """
    counts: list[int] = []
    inactive: list[int] = []
    unknown: list[Tensor] = []
    skip = skip and shows_inactive(terms)
    if call.chunking.lengths is not None:
        counts, inactive = call.chunking.lengths.tolist()
    elif call.chunking.compact:
        labels, ignore_index = call.labels, call.options.ignore_index
        advantages = terms.advantages if skip else None
        unknown.append(call.hidden_kernels.lengths(labels, ignore_index, terms.cu_seqlens, advantages))
    elif terms.cu_seqlens is None:
        # every sequence has T rows, so nothing is read from the device
        counts = [call.labels.shape[1]] * call.labels.shape[0]
    else:
        unknown.append(terms.cu_seqlens.diff().unsqueeze(0))
    if grouped:
        assert terms.group_ids is not None
        unknown.append(terms.group_ids.unsqueeze(0))
    numbers = [] if not unknown else (unknown[0] if len(unknown) == 1 else torch.cat(unknown)).tolist()
    groups = numbers.pop() if grouped else [0] * len(numbers[0] if numbers else counts)
    if numbers:
        counts = numbers[0]
    if len(numbers) == 2:
        inactive = numbers[1]
    return counts, inactive if skip else [0] * len(counts), groups
