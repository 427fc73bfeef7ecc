"""How a hidden-state loss is cut into parts, chunks and matrix products: plain numbers, no tensors.

With N counted tokens, width H and vocabulary V one product is G = 2NHV operations. A *scope* is a set of
sequences that determine each other's coefficients: one sequence, a group, the batch. A *part* is a run of
scopes that is worked through in one way; f is the fraction of its rows that have a gradient.

| schedule | products | how |
|---|---|---|
| known | 3G | coefficients come from the token itself: log-probs and gradient from one chunk |
| frozen | 2G | no weight gradient: rows of dHidden wait for their coefficients |
| aligned | (1 + 2f)G | chunks hold whole scopes: log-probs, coefficients, gradient of the same logits |
| deferred | 3G | a sequence's gradient is summed up without its coefficient, which multiplies the sum |
| two_pass | (1 + 3f)G | the logits of rows with a gradient are computed once more |

"auto" is the first row of the table that is exact for the call: scopes that fit in a chunk are aligned, each
longer one is deferred. Where nothing needs a gradient there is only the forward product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SCHEDULES = ("known", "frozen", "aligned", "deferred", "two_pass")


@dataclass(frozen=True)
class Shapes:
    """The sizes that products and memory depend on.

    Attributes:
        vocabulary, width: V and H.
        chunk_rows: rows of logits that fit the budget.
        logits_itemsize, rows_itemsize, accumulator_itemsize: bytes of an element of the logits, of the rows
            p - onehot, and of dWeight's sum.
        trains_hidden, trains_weight: which gradients are wanted.
    """

    vocabulary: int
    width: int
    chunk_rows: int
    logits_itemsize: int
    rows_itemsize: int
    accumulator_itemsize: int
    trains_hidden: bool
    trains_weight: bool

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the tensor that dWeight is summed in."""
        return self.vocabulary * self.width * self.accumulator_itemsize if self.trains_weight else 0


@dataclass(frozen=True)
class Refusals:
    """Why schedules are not exact for a call, by name; what is absent is exact."""

    reasons: dict[str, str] = field(default_factory=dict)

    def of(self, schedule: str) -> str | None:
        """The reason, or None."""
        return self.reasons.get(schedule)

    def check(self, schedule: str) -> None:
        """Refuse an unknown name, or a schedule that is not exact.

        Raises:
            ValueError: with the reason.
        """
        if schedule not in ("auto", *SCHEDULES):
            raise ValueError(
                f"schedule: got {schedule!r}, expected 'auto' or one of {', '.join(map(repr, SCHEDULES))}"
            )
        reason = self.of(schedule)
        if reason is not None:
            raise ValueError(f"schedule: {schedule!r} is not exact here: {reason}; use 'auto'")


@dataclass(frozen=True)
class Part:
    """Scopes ``start`` to ``stop`` (as ordered by the plan) and how they are worked through.

    The last ``resting`` of the ``rows`` have no gradient: they only share the projection.
    """

    strategy: str
    start: int
    stop: int
    rows: int
    resting: int = 0


def plan_parts(
    schedule: str, rows: Sequence[int], idle: int, chunk_rows: int, refusals: Refusals
) -> list[Part]:
    """Cut scopes into parts.

    Args:
        schedule: "auto", or any name but "known", which needs no parts.
        rows: counted rows of each scope; the last ``idle`` of them have no gradient, whatever the forward
            finds.
        idle: how many.
        chunk_rows: rows of logits that fit the budget.
        refusals: of the call.

    Raises:
        ValueError: "aligned" by name, but a scope doesn't fit in a chunk.
    """
    working = rows[: len(rows) - idle]
    if schedule == "aligned" and working and max(working) > chunk_rows:
        raise ValueError(
            f"schedule: 'aligned' needs chunks that hold whole sequences (or groups), one has {max(working)} "
            f"counted tokens but a chunk {chunk_rows} rows; raise max_chunk_bytes or use 'auto'"
        )
    strategies = [schedule] * len(working)
    if schedule == "auto":
        longer = "deferred" if refusals.of("deferred") is None else "two_pass"
        strategies = ["aligned" if count <= chunk_rows else longer for count in working]
    parts = _joined(working, strategies, chunk_rows)
    stop = len(working)
    if parts and parts[-1].strategy == "aligned":
        last, held = parts[-1], parts[-1].rows
        while stop < len(rows) and held + rows[stop] <= chunk_rows:
            held += rows[stop]
            stop += 1
        parts[-1] = Part("aligned", last.start, stop, held, held - last.rows)
    rest = sum(rows[stop:])
    return [*parts, Part("forward", stop, len(rows), rest)] if rest else parts


def products(part: Part, shapes: Shapes) -> float:
    """Products of a part in which every row that can have a gradient has one, in units of 2VH operations."""
    gradients = shapes.trains_hidden + shapes.trains_weight
    of_row = {"forward": 0, "frozen": shapes.trains_hidden, "two_pass": 1 + gradients}
    learning = (part.rows - part.resting) * of_row.get(part.strategy, gradients)
    return learning + part.rows


def _joined(rows: Sequence[int], strategies: Sequence[str], chunk_rows: int) -> list[Part]:
    """Neighbours of one strategy as parts: aligned ones of about the same size, deferred ones alone."""
    parts: list[Part] = []
    for strategy, run in itertools.groupby(range(len(rows)), strategies.__getitem__):
        members = list(run)
        most = {"aligned": chunk_rows, "deferred": 0}.get(strategy, math.inf)
        total = sum(rows[i] for i in members)
        target = total / max(1, -(-total // chunk_rows)) if strategy == "aligned" else most
        first, held = members[0], 0
        for i in members:
            if i > first and (held >= target or held + rows[i] > most):
                parts.append(Part(strategy, first, i, held))
                first, held = i, 0
            held += rows[i]
        parts.append(Part(strategy, first, members[-1] + 1, held))
    return [part for part in parts if part.rows]


def choose(schedule: str, refusals: Refusals, learns: bool, may_synchronise: bool) -> tuple[str, str]:
    """What serves a call, from what is known without looking at any value, and why.

    "two_pass" projects again in the backward; all others compute the gradient along with the loss. "auto"
    stands for parts: scopes that fit in a chunk, and longer ones.

    Args:
        schedule: "auto" or a name.
        refusals: of the call.
        learns: whether any input needs a gradient.
        may_synchronise: whether sequence lengths may be read from the device.

    Raises:
        ValueError: unknown name, or a schedule that is not exact for the call.
    """
    refusals.check(schedule)
    if not learns:
        return "two_pass", "no input needs a gradient, so there is only the forward product"
    if schedule != "auto":
        return schedule, "asked for"
    if refusals.of("known") is None:
        return "known", "every token's coefficient is known beforehand or a function of its own log-prob"
    if not may_synchronise:
        return "two_pass", "skip_inactive='none' reads no sequence lengths from the device"
    if refusals.of("frozen") is None:
        return "frozen", "the lm_head is frozen, so only dHidden waits for its coefficients"
    if refusals.of("aligned") is not None:
        return "two_pass", str(refusals.of("aligned"))
    return "auto", "whole sequences (or groups) that fit in a chunk share it, longer ones go by themselves"
