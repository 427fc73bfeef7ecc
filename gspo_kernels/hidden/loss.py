"""The operator of a loss from hidden states: make a plan, then loop over its steps.

The forward computes the gradient along with the loss, step by step, as coefficients depend on one group of
sequences and the outer divisor on masks and lengths only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import LinearOperands
from gspo_kernels.arguments.terms import SPECS, Terms, check_values, shows_inactive
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.layout import copy_async
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.distributed.groups import sum_
from gspo_kernels.hidden.call import Call, Decisions, call_of
from gspo_kernels.hidden.chunk import as_index, rows_at
from gspo_kernels.hidden.gradients import HeadGradients, save_gradients, take_gradients
from gspo_kernels.hidden.plan import SUM_ROWS, Plan, make_plan
from gspo_kernels.hidden.schedules import SCHEDULES, LossAccumulators, Part, known_with_centering
from gspo_kernels.logits.centering import CenteringRows
from gspo_kernels.logits.logprobs import LogprobRows
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.evaluate import metric_names


class LinearLoss(NamedTuple):
    """Loss and metrics of ``PolicyStep``, log-probs, entropy or an empty tensor, and gradients."""

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradients: HeadGradients


@matrix_operator
def linear_policy(
    operands: LinearOperands,
    terms: Terms,
    decisions: Decisions,
    ids: Tensor | None,
    sampler_logprobs: Tensor | None,
    factors: Tensor | None,
) -> LinearLoss:
    """Return a loss from hidden states, its log-probs and its gradients.

    The last three tensors are those of ``CenteringRows``, or None without score centering.
    """
    centering: CenteringRows | None = None
    if ids is not None and sampler_logprobs is not None and factors is not None:
        centering = CenteringRows(ids, sampler_logprobs, factors)
    call = call_of(operands, decisions if centering is None else None, whole_logits=centering is not None)
    terms = check_values(call.labels, terms)
    plan, terms = plan_of(call, terms, decisions)
    out = LossAccumulators(call, decisions, plan, terms, centering)
    for part in parts_of(call, terms, plan):
        schedule = SCHEDULES[part.step.schedule] if centering is None else known_with_centering
        schedule(call, part, out)
    out.sequence_sums = None  # free the memory for the rounded dWeight
    evaluated, (logprobs, _, entropy) = out.evaluation(), out.stats
    loss, entropy = evaluated.loss, logprobs.new_empty(0) if entropy is None else entropy
    if centering is not None:
        centered = sum_(terms.cp_group, out.centered) if terms.cp_group else out.centered
        loss = (loss + centered).to(loss.dtype)
    return LinearLoss(loss, evaluated.metrics, logprobs, entropy, out.gradients())


def plan_of(call: Call, terms: Terms, decisions: Decisions) -> tuple[Plan, Terms]:
    """Return the plan of a loss, and its terms with the outer divisor as normalizer if lengths determine it.

    This syncs with the device unless the host has the lengths.
    """
    matmul, sum_rows = call.matmul, SUM_ROWS["cpu" if call.hidden.is_cpu else "cuda"]
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
        min_deferred_rows=sum_rows if decisions.can_defer else 0,
        min_aligned_rows=sum_rows if decisions.requires_grad.weight and matmul.rounds_early else 0,
        by_columns=matmul.by_columns,
        batch_invariant=call.chunking.batch_invariant,
        # ranks share sequences, or sums over sequences have a fixed order
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
    """Return for each sequence its rows, 1 if it has no gradient, and its group (None: each is a group)."""
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
        # every sequence has T rows: no sync needed
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
    """Copy the inputs of all steps to the device, then yield step by step."""
    if plan.steps and plan.steps[0].schedule == "known":
        yield Part(plan.steps[0], call.projected, rows_at(call.labels, call.projected), terms)
        return
    total, padded = sum(plan.lengths), terms.cu_seqlens is None
    where = call.positions(total)  # in the order of the plan
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
        # whole padded sequences in order: views suffice
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
        table = copy_async(table, labels.device)
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


@linear_policy.register_fake
def _(operands: LinearOperands, terms: Terms, decisions: Decisions, *_: Any) -> LinearLoss:
    stats = LogprobRows.fake(operands.labels, operands.hidden.dtype, decisions.entropy)
    sums, entropy = stats_dtype(operands.hidden.dtype), stats.entropy if decisions.entropy else None
    return LinearLoss(
        stats.logprobs.new_empty((), dtype=sums),
        stats.logprobs.new_empty(len(metric_names(terms, entropy)), dtype=sums),
        stats.logprobs,
        stats.entropy,
        HeadGradients.fake(operands, decisions.requires_grad, normalized=True),
    )


class LinearPolicyFunction(torch.autograd.Function):
    """Loss, metrics, log-probs and entropy; the forward also computes the gradients.

    The arguments are whether the call is traced, those of ``linear_policy``, and the fields of the operands.
    """

    @staticmethod
    def forward(
        ctx: Any, traced: bool, terms: Terms, decisions: Decisions, centering: tuple[Any, ...], *fields: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arguments = (LinearOperands(*fields), terms, decisions, *centering)
        result = linear_policy(*arguments)
        save_gradients(ctx, result.gradients, decisions.requires_grad, linear_policy, arguments, traced)
        ctx.mark_non_differentiable(result.metrics, result.logprobs, result.entropy)
        return result.loss, result.metrics, result.logprobs, result.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        gradients = (None,) * 3 if grad is None else take_gradients(ctx, grad)
        return *(None,) * 4, *gradients, *(None,) * (len(ctx.needs_input_grad) - 7)
