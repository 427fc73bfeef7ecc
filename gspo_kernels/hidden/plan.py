"""Plans of losses over hidden states, computed from plain numbers: steps, chunks and memory.

``choose`` selects the schedule by options and shapes, ``make_plan`` splits sequences into steps by their
lengths, and ``explain`` prints a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gspo_kernels.arguments.terms import Terms
from gspo_kernels.core.memory import HUGE_PAGES_FROM
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.hidden.call import Call, Decisions
from gspo_kernels.hidden.chunk import cut, most_rows
from gspo_kernels.hidden.gradients import ROUNDED_COLUMNS, block_width
from gspo_kernels.hidden.matmul import SEGMENT
from gspo_kernels.objectives.base import Objective

SUM_ROWS = {"cpu": 192, "cuda": 2048}
"""Minimum of rows for which an fp32 dWeight accumulator is faster than one more matmul of these rows, and for
which a group that doesn't fit in a chunk is deferred.

"deferred" saves one of two_pass's four matmuls, 2L VH operations for L rows. It moves 8VH bytes per chunk of
R rows and 12VH to add a sequence's sums; two_pass moves 8LH bytes of dHidden per block. On a GPU with 200
operations per byte, deferred is faster from L (2 / 200 + 8 / 4096 - 8 / R) = 12: 1,200 rows in chunks of
4,096 rows, 2,900 in chunks of 1,024. Measured on AMD AVX-512, one thread, V = 32,000, H = 512, in two chunks,
two_pass takes 0.57 (32 rows), 0.76 (64), 0.90 (128), 1.07 (256) and 1.14 (512) times as long in bf16, and
0.81, 0.87, 0.93, 1.06 and 1.14 times in fp32.

In a two_pass call with a bf16 weight, fewer rows of groups that fit in a chunk join two_pass. Otherwise they
need the fp32 accumulator: two_pass writes it (4VH bytes), their chunk adds to it (8VH), and it is rounded
(6VH), where one matmul writes 2VH. These 16VH bytes take as long as a matmul of 1,600 rows. Measured as
above, with 300 other rows, separate steps take 1.10 (32 rows), 1.07 (64), 1.03 (128) and 0.95 (256) times as
long."""
SCHEDULES = ("known", "frozen", "aligned", "deferred", "two_pass")


def unsupported(objective: Objective, terms: Terms, decisions: Decisions, invariant: bool) -> dict[str, str]:
    """Return by schedule why it is not exact for a call, or not batch-invariant if ``invariant``."""
    name, depends_on = type(objective).__name__, decisions.depends_on
    reasons: dict[str, str] = {}
    if depends_on not in ("nothing", "token"):
        what = f"{name} off-policy" if objective.ratio_only else name
        if terms.kl_beta is not None and terms.kl_ratio_weighted:
            what = f"kl_ratio_weighted with {what}"
        reasons["known"] = (
            f"it needs coefficients that depend on one token alone, but {what} makes them "
            f"depend on the {depends_on}"
        )
    # "deferred" is not exact if the tokens of a sequence have more than one coefficient
    if terms.kl_beta is not None:
        reasons["deferred"] = "kl_beta adds a coefficient per token"
    elif not objective.factorizes:
        reasons["deferred"] = f"{name}'s coefficients are not one number per sequence"
    elif terms.advantages is not None and terms.advantages.ndim == 2:
        reasons["deferred"] = f"advantages per token give {name} coefficients per token"
    elif terms.rollout_weights is not None and terms.rollout_weights.ndim == 2 and objective.level == "token":
        reasons["deferred"] = f"rollout_weights per token give {name} coefficients per token"
    if terms.entropy_coef is not None:
        why = "entropy_coef adds a gradient that is not a multiple of the log-prob's"
        reasons |= dict.fromkeys(("deferred", "frozen"), why)
    if decisions.requires_grad.weight or decisions.requires_grad.bias:
        reasons.setdefault("frozen", "the lm_head's weight or bias needs a gradient")
    if terms.cp_group:
        why = "cp_group has tokens of the same sequences on other ranks"
        reasons |= dict.fromkeys(("aligned", "deferred"), why)
    if invariant:
        reasons.setdefault("deferred", "batch-invariant mode sums dWeight in segments, not in sequences")
        if depends_on == "token":
            reasons.setdefault(
                "known", "batch-invariant mode takes coefficients from whole sequences, as other schedules do"
            )
        if depends_on in ("group", "batch"):
            why = f"batch-invariant mode evaluates coefficients of the {depends_on} for the whole batch"
            reasons |= dict.fromkeys(("aligned", "frozen"), why)
    if terms.skipped is not None and depends_on in ("group", "batch"):
        why = f"skip_inactive='all' skips sequences on which {name}'s coefficients depend"
        reasons |= dict.fromkeys(("aligned", "frozen"), why)
    return reasons


def choose(
    schedule: str, reasons: dict[str, str], learns: bool, may_synchronize: bool, memory: str = "auto"
) -> tuple[str, str]:
    """Return the schedule of a call and the reason for it, without reading values.

    "two_pass" recomputes logits in the backward; all others compute the gradient along with the loss. "auto"
    is resolved for each group by its length.

    Args:
        schedule: "auto" or a name.
        reasons: the result of ``unsupported``.
        learns: whether any input requires a gradient.
        may_synchronize: whether a host-device sync for sequence lengths is allowed.
        memory: "auto" or "least".

    Raises:
        ValueError: unknown name, a schedule that is not exact for the call, or a schedule with
            memory="least".
    """
    if not isinstance(schedule, str) or schedule not in ("auto", *SCHEDULES):
        raise ValueError(
            f"schedule: got {schedule!r}, expected 'auto' or one of {', '.join(map(repr, SCHEDULES))}"
        )
    if memory == "least" and schedule != "auto":
        raise ValueError(f"schedule: got {schedule!r}, expected 'auto' with memory='least'")
    if schedule in reasons:
        raise ValueError(f"schedule: {schedule!r} is not exact here: {reasons[schedule]}; use 'auto'")
    if not learns:
        return "two_pass", "no input requires a gradient: forward matmul only"
    if schedule != "auto":
        return schedule, "it was passed"
    if memory == "least" and ("frozen" in reasons or not may_synchronize):
        return "two_pass", "memory='least' avoids large chunks of logits and an fp32 dWeight accumulator"
    if memory == "least":
        return "frozen", "the lm_head is frozen, and memory='least' keeps only dHidden"
    if "known" not in reasons:
        return "known", "every token's coefficient is known beforehand or depends on its own log-prob only"
    if not may_synchronize:
        return "two_pass", "skip_inactive='none' does not sync with the device to read sequence lengths"
    if "frozen" not in reasons:
        return "frozen", "the lm_head is frozen, and dHidden is multiplied by its coefficients afterwards"
    if "aligned" in reasons:
        return "two_pass", reasons["aligned"]
    return "auto", "sequences (or groups) that fit in a chunk share chunks, longer ones have separate steps"


class Step(NamedTuple):
    """Some of a plan's sequences, and their schedule.

    Attributes:
        schedule: a key of ``schedules.SCHEDULES``.
        first, last: the sequences ``plan.sequences[first:last]``.
        start, stop: their rows, in the order of the plan's sequences.
        inactive_rows: the number of rows at the end that have no gradient and are only projected.
        ends: the ends of chunks, relative to ``start``; for "two_pass" those of its first pass.
    """

    schedule: str
    first: int
    last: int
    start: int
    stop: int
    inactive_rows: int = 0
    ends: tuple[int, ...] = ()

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The steps of a call.

    Attributes:
        steps: in the order in which they run.
        sequences: all sequences with rows in the order of the steps; those of a group are adjacent.
        lengths: the number of rows of every sequence of the call, in the call's order.
        in_order: whether the sequences with rows have the order of the call.
        chunk_rows: the rows of logits that fit the budget.
        max_rows: the most rows of logits in a chunk.
        one_product: whether dWeight is one matmul of all rows with a gradient, which share a chunk or are
            recomputed by blocks of columns.
        one_evaluation: whether the objective is evaluated once for all tokens instead of once per step.
    """

    steps: tuple[Step, ...]
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    in_order: bool
    chunk_rows: int
    max_rows: int
    one_product: bool
    one_evaluation: bool

    def longest(self, schedule: str) -> int:
        """Return the most rows of a step with this schedule."""
        return max((step.row_count for step in self.steps if step.schedule == schedule), default=0)


def make_plan(
    schedule: str,
    lengths: Sequence[int],
    inactive: Sequence[int],
    groups: Sequence[int] | None = None,
    *,
    chunk_rows: int,
    least_rows: int,
    multiple: int = 1,
    min_statistics_rows: int = 1,
    defers: int = 0,
    joins: int = 0,
    by_columns: bool = False,
    batch_invariant: bool = False,
    one_evaluation: bool = False,
) -> Plan:
    """Split sequences into steps.

    Args:
        schedule: "auto", a name of ``SCHEDULES``, or "forward" without gradients.
        lengths: the number of rows of each sequence.
        inactive: 1 for sequences that are known to have no gradient before the forward.
        groups: the group of each sequence, if coefficients depend on a whole group.
        chunk_rows: the rows of logits that fit the budget.
        least_rows: the same if all rows are projected twice.
        multiple: chunk sizes are rounded down to a multiple of this.
        min_statistics_rows: rows per chunk for statistics alone, if larger.
        defers: minimum of rows to defer a group that doesn't fit in a chunk, or 0 for never.
        joins: fewer rows than this of groups that fit join a two_pass step, see ``SUM_ROWS``.
        by_columns: whether logits are recomputed by blocks of columns.
        batch_invariant: whether rows keep their order.
        one_evaluation: see ``Plan``.

    Raises:
        ValueError: ``schedule="aligned"`` with a group that doesn't fit in a chunk.
    """
    grouped = [[i] for i, length in enumerate(lengths) if length]
    if groups is not None:
        members: dict[int, list[int]] = {}
        for i, group in enumerate(groups):
            members.setdefault(group, []).append(i)
        grouped = list(members.values())
    sized = [(group, sum([lengths[i] for i in group])) for group in grouped]
    idle = [each for each in sized if all(inactive[i] for i in each[0])]
    active = [each for each in sized if not all(inactive[i] for i in each[0])]
    # groups that fit a chunk come last, before inactive ones; batch-invariant segments keep their order
    if not batch_invariant:
        active = [e for e in active if e[1] > chunk_rows] + [e for e in active if e[1] <= chunk_rows]
    order, sizes = [group for group, _ in active + idle], [size for _, size in active + idle]
    if schedule in ("known", "forward"):
        parts = [(schedule, 0, len(sizes), 0)]
    else:
        parts = _parts(schedule, sizes, len(active), chunk_rows, defers, joins)
    served = [part for part in parts if part[0] != "forward"]
    names = {name for name, *_ in served}
    if names == {"two_pass"}:
        chunk_rows = least_rows
    if one_evaluation:  # it needs all log-probs, so steps that are only projected come first
        parts = [part for part in parts if part[0] == "forward"] + served

    group_ends = [0, *itertools.accumulate(map(len, order))]
    row_ends = [0, *itertools.accumulate(sizes)]
    chunks = [cut(row_ends[stop] - row_ends[start], chunk_rows, multiple) for _, start, stop, _ in parts]
    max_rows = max((most_rows(ends) for ends in chunks), default=1)
    steps = []
    for (name, start, stop, inactive_rows), ends in zip(parts, chunks, strict=True):
        rows, sequences = (row_ends[start], row_ends[stop]), (group_ends[start], group_ends[stop])
        if name in ("forward", "two_pass") and min_statistics_rows > max_rows:
            ends = cut(rows[1] - rows[0], min_statistics_rows, multiple)
        steps.append(Step(name, *sequences, *rows, inactive_rows, ends))
    fits = len(served) == 1 and (
        names == {"two_pass"} or sum(sizes[served[0][1] : served[0][2]]) <= chunk_rows
    )
    present = [i for group in order for i in group if lengths[i]]
    return Plan(
        steps=tuple(steps),
        sequences=tuple([i for group in order for i in group]),
        lengths=tuple(lengths),
        in_order=present == sorted(present),
        chunk_rows=chunk_rows,
        max_rows=max_rows,
        one_product=by_columns and fits and names != {"deferred"},
        one_evaluation=one_evaluation or (len(steps) == 1 and not batch_invariant),
    )


def _parts(
    schedule: str, sizes: Sequence[int], active: int, chunk_rows: int, defers: int, joins: int
) -> list[tuple[str, int, int, int]]:
    """Return schedule, first group, end and inactive rows of each step; only the first ``active`` groups may
    have a gradient.
    """
    if schedule == "aligned" and max(sizes[:active], default=0) > chunk_rows:
        raise ValueError(
            f"schedule: 'aligned' needs chunks that hold whole sequences (or groups), got one of "
            f"{max(sizes[:active])} counted tokens for chunks of {chunk_rows} rows; raise max_chunk_bytes "
            "or use 'auto'"
        )
    schedules = [schedule] * active
    if schedule == "auto":
        longer = ["deferred" if 0 < defers <= size else "two_pass" for size in sizes[:active]]
        schedules = [
            "aligned" if size <= chunk_rows else name for size, name in zip(sizes, longer, strict=False)
        ]
        fitting = sum(size for size, name in zip(sizes, schedules, strict=False) if name == "aligned")
        if "two_pass" in schedules and "deferred" not in schedules and fitting < joins:
            schedules = ["two_pass"] * active
    parts: list[tuple[str, int, int, int]] = []
    for name, run in itertools.groupby(range(active), schedules.__getitem__):
        members = list(run)
        # adjacent groups share a step, in aligned steps of similar size; each deferred group is a step
        max_rows = {"aligned": chunk_rows, "deferred": 0}.get(name, math.inf)
        total = sum(sizes[members[0] : members[-1] + 1])
        target = total / max(1, -(-total // chunk_rows)) if name == "aligned" else max_rows
        first, count = members[0], 0
        for i in members:
            if i > first and (count >= target or count + sizes[i] > max_rows):
                parts.append((name, first, i, 0))
                first, count = i, 0
            count += sizes[i]
        parts.append((name, first, members[-1] + 1, 0))
    parts = [part for part in parts if sum(sizes[part[1] : part[2]])]
    stop = active
    if parts and parts[-1][0] == "aligned":
        # inactive groups fill up the last chunk
        first = parts[-1][1]
        of_last = count = sum(sizes[first : parts[-1][2]])
        while stop < len(sizes) and count + sizes[stop] <= chunk_rows:
            count += sizes[stop]
            stop += 1
        parts[-1] = ("aligned", first, stop, count - of_last)
    return [*parts, ("forward", stop, len(sizes), 0)] if sum(sizes[stop:]) else parts


@dataclass(frozen=True)
class SchedulePlan:
    """The plan of a ``fused_linear_policy_loss`` call.

    Attributes:
        schedule: the schedule's name, or "mixed" if sequences have different schedules.
        reason: the reason for this schedule.
        products: matmuls over the counted tokens, in units of the forward's: 3.0 is 6NHV operations. Rows
            that turn out to have no gradient are counted.
        multiplied_by: the matmul implementation, see ``matmul.select_matmul``.
        peak_bytes: peak memory of forward and backward beyond the inputs.
        gradient_bytes: the part of it that gradients of hidden states and weight take at the end.
        parts: counted tokens by schedule; those under "forward" have no gradient.
    """

    schedule: str
    reason: str
    products: float
    peak_bytes: int
    gradient_bytes: int
    parts: dict[str, int]
    multiplied_by: str

    def __str__(self) -> str:
        """Describe the plan in four lines."""
        tokens = ", ".join(f"{name} {count}" for name, count in self.parts.items())
        return (
            f"schedule {self.schedule}, because {self.reason}\n"
            f"  {self.products:.2f} matrix products over the counted tokens ({tokens})\n"
            f"  multiplied by {self.multiplied_by}\n"
            f"  {self.peak_bytes / 2**20:.1f} MiB of memory beyond inputs at the peak; "
            f"{self.gradient_bytes / 2**20:.1f} MiB are gradients"
        )


CENTERING_BYTES = {"known": (51, 16, 146, 31), "two_pass": (75, 16, 119, 5)}
"""Bytes per id of score centering: for all rows before the first chunk and kept during chunks, and for a
chunk's rows while their gradient is written and while it is multiplied. Measured peaks verify the sums.
"""


def explain(reason: str, call: Call, plan: Plan, decisions: Decisions, ids: int = 0) -> SchedulePlan:
    """Describe a plan; ``ids`` is the number of ids per row with score centering, including the label."""
    needs = decisions.requires_grad
    trained, total = needs.weight or needs.bias, sum(plan.lengths)
    products, tokens = 0, dict[str, int]()
    for step in plan.steps:
        gradients = {"forward": 0, "two_pass": 1 + needs.hidden + trained}
        active = step.row_count - step.inactive_rows
        products += step.row_count + active * gradients.get(step.schedule, needs.hidden + trained)
        tokens[step.schedule] = tokens.get(step.schedule, 0) + active
        if step.inactive_rows:
            tokens["forward"] = tokens.get("forward", 0) + step.inactive_rows
    used = [name for name in tokens if name != "forward"] or ["forward"]
    served_by = used[0] if len(used) == 1 else "mixed"
    memory, name = memory_of(call, plan, decisions, ids), call.matmul.name
    return SchedulePlan(served_by, reason, products / max(total, 1), *memory, tokens, name)


def memory_of(call: Call, plan: Plan, decisions: Decisions, ids: int) -> tuple[int, int]:
    """Return a call's peak bytes beyond inputs, and the bytes of its gradients."""
    matmul, needs, hidden = call.matmul, decisions.requires_grad, call.hidden
    wide, narrow, H = stats_dtype(hidden.dtype).itemsize, hidden.element_size(), hidden.shape[-1]
    trained = matmul.trained.numel() if needs.weight else 0
    of_hidden = hidden.numel() * narrow if needs.hidden else 0
    of_weight = trained * matmul.trained.element_size()
    rows, count = plan.max_rows, sum(plan.lengths)
    all_rows = count == call.labels.numel() and plan.in_order
    scores, kept_bytes, with_row = matmul.statistics_bytes(rows), 0, 0
    if ids:
        before, kept_bytes, written, with_row = (ids * each for each in CENTERING_BYTES[decisions.schedule])
        copied, kept_bytes = 0 if all_rows else 16 * ids, kept_bytes * call.labels.numel()
        with_row += copied
        # a mask excludes a row's ids
        writing = kept_bytes + rows * (matmul.row_bytes + written + copied + matmul.vocabulary // 8)
        scores = max(before * call.labels.numel(), writing)
    if not any(needs):
        return scores, 0
    # besides logits a row has its hidden state (unless read in place), this times its coefficient, and
    # dHidden
    in_backward = decisions.schedule == "two_pass" and not call.chunking.batch_invariant
    in_place = hidden.is_contiguous() and count == call.labels.numel() and (all_rows or in_backward)
    operand = matmul.trained.shape[1] * matmul.operand_dtype.itemsize if needs.weight else 0
    row = (0 if in_place else H * narrow) + operand + (H * wide if needs.hidden else 0) + with_row
    longest = count if in_backward else plan.longest("two_pass")
    width, kept = 0 if ids else block_width(call, longest, plan.chunk_rows), list[int]()
    chunk, sums = rows * matmul.row_bytes, trained * wide
    once = plan.one_product and (in_backward or matmul.rounds_early) and not ids
    if once and of_weight < sums:
        if matmul.rows_from_project and not width:
            row += 2 * H * wide  # recomputed rows of dWeight, see ``HeadSums.add_label_residual``
        if matmul.rows_dtype == torch.float16 or not matmul.writes_16_bits:
            kept = [min(width or matmul.vocabulary, ROUNDED_COLUMNS) * matmul.trained.shape[1] * wide]
        sums = of_weight
    if once and width:
        chunk = longest * width * matmul.row_bytes // matmul.vocabulary
        scores += 0 if in_backward else sums
        at_work = chunk + sum(kept) + longest * row + sums
        at_the_end = longest * (row - operand) + of_hidden + sums
    else:
        at_the_end = of_hidden + sums + (of_weight if of_weight < sums else 0)
        if plan.longest("deferred"):
            kept = [sums]  # of one sequence
        if not matmul.any_order and trained:
            sums += SEGMENT * matmul.vocabulary * matmul.rows_dtype.itemsize  # an unfinished segment
        at_work = chunk + sum(kept) + max(rows, longest if width else 0) * row + of_hidden + sums
        scores += of_hidden + sums if ids and (rows < count or not hidden.is_cpu) else 0
    if hidden.is_cpu:
        # cached pages
        at_the_end += sum(size for size in (chunk, *kept) if size >= HUGE_PAGES_FROM)
    return max(scores, at_work + kept_bytes, at_the_end + kept_bytes), of_hidden + of_weight
