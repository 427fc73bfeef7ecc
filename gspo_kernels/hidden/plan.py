"""Plans of losses over hidden states, computed from plain numbers: steps and chunks.

``choose`` selects the schedule by options and shapes, and ``make_plan`` splits sequences into steps by their
lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gspo_kernels.arguments.terms import Terms
from gspo_kernels.hidden.call import Decisions
from gspo_kernels.hidden.chunk import cut, most_rows
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
SCHEDULE_NAMES = ("known", "frozen", "aligned", "deferred", "two_pass")


def unsupported(objective: Objective, terms: Terms, decisions: Decisions, invariant: bool) -> dict[str, str]:
    """Return by schedule why it is not exact for a call, or not batch-invariant if ``invariant``."""
    name, depends_on = type(objective).__name__, decisions.depends_on
    excluded: dict[str, str] = {}
    if depends_on not in ("nothing", "token"):
        what = f"{name} off-policy" if objective.ratio_only else name
        if terms.kl_beta is not None and terms.kl_ratio_weighted:
            what = f"kl_ratio_weighted with {what}"
        excluded["known"] = (
            f"it needs coefficients that depend on one token alone, but {what} makes them "
            f"depend on the {depends_on}"
        )
    # "deferred" is not exact if the tokens of a sequence have more than one coefficient
    if terms.kl_beta is not None:
        excluded["deferred"] = "kl_beta adds a coefficient per token"
    elif not objective.factorizes:
        excluded["deferred"] = f"{name}'s coefficients are not one number per sequence"
    elif terms.advantages is not None and terms.advantages.ndim == 2:
        excluded["deferred"] = f"advantages per token give {name} coefficients per token"
    elif terms.rollout_weights is not None and terms.rollout_weights.ndim == 2 and objective.level == "token":
        excluded["deferred"] = f"rollout_weights per token give {name} coefficients per token"
    if terms.entropy_coef is not None:
        why = "entropy_coef adds a gradient that is not a multiple of the log-prob's"
        excluded |= dict.fromkeys(("deferred", "frozen"), why)
    if decisions.requires_grad.weight or decisions.requires_grad.bias:
        excluded.setdefault("frozen", "the lm_head's weight or bias needs a gradient")
    if terms.cp_group:
        why = "cp_group has tokens of the same sequences on other ranks"
        excluded |= dict.fromkeys(("aligned", "deferred"), why)
    if invariant:
        excluded.setdefault("deferred", "batch-invariant mode sums dWeight in segments, not in sequences")
        if depends_on == "token":
            excluded.setdefault(
                "known", "batch-invariant mode takes coefficients from whole sequences, as other schedules do"
            )
        if depends_on in ("group", "batch"):
            why = f"batch-invariant mode evaluates coefficients of the {depends_on} for the whole batch"
            excluded |= dict.fromkeys(("aligned", "frozen"), why)
    if terms.skipped is not None and depends_on in ("group", "batch"):
        why = f"skip_inactive='all' skips sequences on which {name}'s coefficients depend"
        excluded |= dict.fromkeys(("aligned", "frozen"), why)
    return excluded


def choose(
    schedule: str, excluded: dict[str, str], learns: bool, may_synchronize: bool, memory: str = "auto"
) -> tuple[str, str]:
    """Return the schedule of a call and the reason for it, without reading values.

    "two_pass" recomputes logits in the backward; all others compute the gradient along with the loss. "auto"
    is resolved for each group by its length.

    Args:
        schedule: "auto" or a name.
        excluded: the result of ``unsupported``.
        learns: whether any input requires a gradient.
        may_synchronize: whether a host-device sync for sequence lengths is allowed.
        memory: "auto" or "least".

    Raises:
        ValueError: unknown name, a schedule that is not exact for the call, or a schedule with
            memory="least".
    """
    if not isinstance(schedule, str) or schedule not in ("auto", *SCHEDULE_NAMES):
        raise ValueError(
            f"schedule: got {schedule!r}, expected 'auto' or one of {', '.join(map(repr, SCHEDULE_NAMES))}"
        )
    if memory == "least" and schedule != "auto":
        raise ValueError(f"schedule: got {schedule!r}, expected 'auto' with memory='least'")
    if schedule in excluded:
        raise ValueError(f"schedule: {schedule!r} is not exact here: {excluded[schedule]}; use 'auto'")
    if not learns:
        return "two_pass", "no input requires a gradient: forward matmul only"
    if schedule != "auto":
        return schedule, "it was passed"
    if memory == "least" and ("frozen" in excluded or not may_synchronize):
        return "two_pass", "memory='least' avoids large chunks of logits and an fp32 dWeight accumulator"
    if memory == "least":
        return "frozen", "the lm_head is frozen, and memory='least' keeps only dHidden"
    if "known" not in excluded:
        return "known", "every token's coefficient is known beforehand or depends on its own log-prob only"
    if not may_synchronize:
        return "two_pass", "skip_inactive='none' does not sync with the device to read sequence lengths"
    if "frozen" not in excluded:
        return "frozen", "the lm_head is frozen, and dHidden is multiplied by its coefficients afterwards"
    if "aligned" in excluded:
        return "two_pass", excluded["aligned"]
    return "auto", "sequences (or groups) that fit in a chunk share chunks, longer ones have separate steps"


class Step(NamedTuple):
    """Some of a plan's sequences, and their schedule.

    Attributes:
        schedule: a key of ``schedules.SCHEDULES``.
        first, last: the sequences ``plan.sequences[first:last]``.
        start, stop: their rows, in the order of the plan's sequences.
        inactive_rows: the number of rows at the end that have no gradient.
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
        sequences: the sequences in the order of the steps; those of a group are adjacent, and only groups
            may have sequences without rows.
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
    min_deferred_rows: int = 0,
    min_aligned_rows: int = 0,
    by_columns: bool = False,
    batch_invariant: bool = False,
    one_evaluation: bool = False,
) -> Plan:
    """Split sequences into steps.

    Args:
        schedule: "auto", a name of ``SCHEDULE_NAMES``, or "forward" without gradients.
        lengths: the number of rows of each sequence.
        inactive: 1 for sequences that are known to have no gradient before the forward.
        groups: the group of each sequence, if coefficients depend on a whole group.
        chunk_rows: the rows of logits that fit the budget.
        least_rows: the same if all rows are projected twice.
        multiple: chunk sizes are rounded down to a multiple of this.
        min_statistics_rows: rows per chunk for statistics alone, if larger.
        min_deferred_rows: minimum of rows to defer a group that doesn't fit in a chunk, or 0 for never.
        min_aligned_rows: fewer rows of groups that fit join a two_pass step, see ``SUM_ROWS``.
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
        ranges = [GroupRange(schedule, 0, len(sizes))]
    else:
        limits = (chunk_rows, min_deferred_rows, min_aligned_rows)
        ranges = _ranges(schedule, sizes, len(active), *limits)
    served = [each for each in ranges if each.schedule != "forward"]
    names = {each.schedule for each in served}
    if names == {"two_pass"}:
        chunk_rows = least_rows
    if one_evaluation:  # it needs all log-probs, so steps that are only projected come first
        ranges = [each for each in ranges if each.schedule == "forward"] + served

    group_ends = [0, *itertools.accumulate(map(len, order))]
    row_ends = [0, *itertools.accumulate(sizes)]
    chunks = [cut(row_ends[stop] - row_ends[first], chunk_rows, multiple) for _, first, stop, _ in ranges]
    max_rows = max((most_rows(ends) for ends in chunks), default=1)
    steps = []
    for (name, first, stop, inactive_rows), ends in zip(ranges, chunks, strict=True):
        rows, sequences = (row_ends[first], row_ends[stop]), (group_ends[first], group_ends[stop])
        if name in ("forward", "two_pass") and min_statistics_rows > max_rows:
            ends = cut(rows[1] - rows[0], min_statistics_rows, multiple)
        steps.append(Step(name, *sequences, *rows, inactive_rows, ends))
    fits = len(served) == 1 and (
        names == {"two_pass"} or sum(sizes[served[0].first : served[0].stop]) <= chunk_rows
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


class GroupRange(NamedTuple):
    """The groups ``first`` to ``stop``, which share a step, and the number of their rows without gradient."""

    schedule: str
    first: int
    stop: int
    inactive_rows: int = 0


def _ranges(
    schedule: str,
    sizes: Sequence[int],
    active: int,
    chunk_rows: int,
    min_deferred_rows: int,
    min_aligned_rows: int,
) -> list[GroupRange]:
    """Return the groups of each step; only the first ``active`` groups may have a gradient."""
    if schedule == "aligned" and max(sizes[:active], default=0) > chunk_rows:
        raise ValueError(
            f"schedule: 'aligned' needs chunks that hold whole sequences (or groups), got one of "
            f"{max(sizes[:active])} counted tokens for chunks of {chunk_rows} rows; raise max_chunk_bytes "
            "or use 'auto'"
        )
    schedules = [schedule] * active
    if schedule == "auto":
        longer = ["deferred" if 0 < min_deferred_rows <= size else "two_pass" for size in sizes[:active]]
        schedules = [
            "aligned" if size <= chunk_rows else name for size, name in zip(sizes, longer, strict=False)
        ]
        fitting = sum(size for size, name in zip(sizes, schedules, strict=False) if name == "aligned")
        if "two_pass" in schedules and "deferred" not in schedules and fitting < min_aligned_rows:
            schedules = ["two_pass"] * active
    ranges: list[GroupRange] = []
    for name, run in itertools.groupby(range(active), schedules.__getitem__):
        members = list(run)
        # adjacent groups share a step, in aligned steps of similar size; each deferred group is a step
        max_rows = {"aligned": chunk_rows, "deferred": 0}.get(name, math.inf)
        total = sum(sizes[members[0] : members[-1] + 1])
        target = total / max(1, -(-total // chunk_rows)) if name == "aligned" else max_rows
        first, count = members[0], 0
        for i in members:
            if i > first and (count >= target or count + sizes[i] > max_rows):
                ranges.append(GroupRange(name, first, i))
                first, count = i, 0
            count += sizes[i]
        ranges.append(GroupRange(name, first, members[-1] + 1))
    ranges = [each for each in ranges if sum(sizes[each.first : each.stop])]
    stop = active
    if ranges and ranges[-1].schedule == "aligned":
        # inactive groups fill up the last chunk
        first = ranges[-1].first
        of_last = count = sum(sizes[first : ranges[-1].stop])
        while stop < len(sizes) and count + sizes[stop] <= chunk_rows:
            count += sizes[stop]
            stop += 1
        ranges[-1] = GroupRange("aligned", first, stop, count - of_last)
    return [*ranges, GroupRange("forward", stop, len(sizes))] if sum(sizes[stop:]) else ranges
