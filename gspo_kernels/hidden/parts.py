"""The numbers that a plan is made from, and the rows and terms of each of its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import SPECS, Terms, shows_inactive
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.layout import queued
from gspo_kernels.hidden.call import Call, Decisions
from gspo_kernels.hidden.chunk import as_index, rows_at
from gspo_kernels.hidden.plan import SUM_ROWS, Plan, Step, make_plan
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec


class Part(NamedTuple):
    """What a step works on.

    Attributes:
        step: of the plan.
        where: the positions of its rows among the flattened rows of the call.
        labels: [n].
        terms: of its rows, with the call's outer divisor: as a packed batch, or padded where whole padded
            sequences stay in place. Where the plan has ``one_evaluation``: the call's terms.
    """

    step: Step
    where: slice | Tensor
    labels: Tensor
    terms: Terms


def plan_of(call: Call, terms: Terms, decisions: Decisions) -> tuple[Plan, Terms]:
    """Return the plan of a loss, and its terms with the outer divisor as normalizer if lengths give it.

    Lengths that the host doesn't know are read in one host-device sync.
    """
    matmul, device = call.matmul, "cpu" if call.hidden.is_cpu else "cuda"
    schedule = decisions.schedule if any(decisions.requires_grad) else "forward"
    groups: list[int] | None = None
    if schedule == "known":
        lengths, inactive = [call.row_count], [0]
    else:
        lengths, inactive, groups = _lengths(call, terms, decisions)
    plan = make_plan(
        schedule,
        lengths,
        inactive,
        groups,
        chunk_rows=call.chunk_rows,
        least_rows=call.least_rows,
        multiple=matmul.multiple,
        min_statistics_rows=matmul.min_statistics_rows,
        defers=decisions.defers,
        joins=SUM_ROWS[device] if decisions.requires_grad.weight and matmul.rounds_early else 0,
        by_columns=matmul.by_columns,
        batch_invariant=call.chunking.batch_invariant,
        # other ranks have tokens of the same sequences, or sums over sequences need one order
        one_evaluation=bool(terms.cp_group)
        or (call.chunking.batch_invariant and decisions.depends_on in ("group", "batch")),
    )
    divided_by, _ = from_spec(terms.objective).outer_divisor()
    given = terms.normalizer is not None or terms.skipped is not None or terms.cp_group
    by_length = divided_by == "tokens" and terms.lengths is not None
    by_sums = given or by_length or divided_by in ("pairs", "prompts")
    if schedule == "known" or not call.chunking.compact or by_sums:
        return plan, terms
    counts = {"tokens": sum(lengths), "sequences": sum([length > 0 for length in lengths])}
    number, where = counts.get(divided_by, 1) or 1, call.labels.device
    total = torch.full((), number, dtype=exact_dtype(where), device=where)
    return plan, terms._replace(normalizer=total)


def _lengths(call: Call, terms: Terms, decisions: Decisions) -> tuple[list[int], list[int], list[int] | None]:
    """Return by sequence: its rows; 1 if it has no gradient, whatever the forward gives, and is skipped; and
    its group, or None where each sequence is a group.
    """
    grouped = decisions.depends_on == "group" and terms.group_ids is not None
    skips = decisions.skips and shows_inactive(terms)
    counts: list[int] = []
    inactive: list[int] = []
    unknown: list[Tensor] = []
    if call.chunking.lengths is not None:
        counts, inactive = call.chunking.lengths.tolist()
    elif call.chunking.compact:
        labels, ignore_index = call.labels, call.options.ignore_index
        advantages = terms.advantages if skips else None
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
    groups = numbers.pop() if grouped else None
    if numbers:
        counts = numbers[0]
    if len(numbers) == 2:
        inactive = numbers[1]
    if groups is None and decisions.depends_on in ("group", "batch"):
        groups = [0] * len(counts)
    return counts, inactive if skips else [0] * len(counts), groups


def parts_of(call: Call, terms: Terms, plan: Plan) -> Iterator[Part]:
    """Copy what all steps need to the device, then yield step by step."""
    if plan.steps and plan.steps[0].schedule == "known":
        yield Part(plan.steps[0], call.projected, rows_at(call.labels, call.projected), terms)
        return
    total, padded = sum(plan.lengths), terms.cu_seqlens is None
    # positions of all rows in the order of the plan
    all_rows = not call.chunking.compact or total == call.labels.numel()
    where = call.index(None if all_rows else call.counted, total)
    if not plan.in_order:
        index, starts = as_index(where, call.labels.device), [0, *itertools.accumulate(plan.lengths)]
        where = torch.cat([index[starts[i] : starts[i + 1]] for i in plan.sequences])
    labels = rows_at(call.labels, where)
    spans = [slice(step.start, step.stop) for step in plan.steps]
    places: list[Any] = spans if isinstance(where, slice) else [where[span] for span in spans]
    if plan.one_evaluation:
        for step, span, place in zip(plan.steps, spans, places, strict=True):
            yield Part(step, place, labels[span], terms)
        return
    if not plan.steps:
        return
    if terms.normalizer is None:
        terms = terms._replace(normalizer=Aggregation(call.labels, terms).total)
    # [B] if there is one per sequence, otherwise one per token
    values: dict[str, Tensor] = {}
    call_terms = terms._replace(skipped=None, cu_seqlens=None)
    for name, spec in SPECS.items():
        value = getattr(call_terms, name)
        if value is not None and value.ndim:
            spread = spec.shape == "broadcast"
            values[name] = value.to(labels.device).expand(call.labels.shape) if spread else value
    in_place = isinstance(where, slice) and plan.sequences == tuple(range(len(plan.lengths)))
    if in_place and padded and not call.chunking.batch_invariant:
        # whole padded sequences in their order: nothing has to be looked up
        for step, span in zip(plan.steps, spans, strict=True):
            sliced: dict[str, Any] = {name: value[step.first : step.last] for name, value in values.items()}
            yield Part(step, span, labels[span], call_terms._replace(**sliced))
        return
    ends = [0, *itertools.accumulate(plan.lengths[i] for i in plan.sequences)]
    numbers = list(plan.sequences)
    for step in plan.steps:
        numbers += [end - step.start for end in ends[step.first : step.last + 1]]
    table = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    if not labels.is_cpu:
        table = queued(table, labels.device)
    sizes = [step.last - step.first + 1 for step in plan.steps]
    order, *offsets = table.split([len(plan.sequences), *sizes])
    # [B] or [1, n]
    ordered = {
        name: value[order] if value.ndim == 1 else value.flatten()[where].unsqueeze(0)
        for name, value in values.items()
    }
    for step, span, place, cu_seqlens in zip(plan.steps, spans, places, offsets, strict=True):
        of_step: dict[str, Any] = {
            name: value[step.first : step.last] if value.ndim == 1 else value[:, span]
            for name, value in ordered.items()
        }
        yield Part(step, place, labels[span], call_terms._replace(**of_step, cu_seqlens=cu_seqlens))
