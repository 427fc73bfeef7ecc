"""How a hidden-state loss is cut into parts, chunks and matrix products: plain numbers, no tensors.

With N counted tokens, width H and vocabulary V one product is G = 2NHV operations. A *scope* is a set of
sequences that determine each other's coefficients: one sequence, a group, the batch. A *part* is a run of
scopes that is worked through in one way; f is the fraction of its rows that have a gradient.

| schedule | products | how |
|---|---|---|
| known | 3G | coefficients come from the token itself: log-probs and gradient from one chunk |
| aligned | (1 + 2f)G | chunks hold whole scopes: log-probs, coefficients, gradient of the same logits |
| deferred | 3G | a sequence's gradient is summed up without its coefficient, which multiplies the sum |
| frozen | 2G | no weight gradient: rows of dHidden wait for their coefficients |
| cached | (1 + 2f)G | rows p - onehot of the whole part wait for their coefficients |
| two_pass | (1 + 3f)G | the logits of rows with a gradient are computed once more |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from gspo_kernels.linear.cost import ACTIVE_FRACTION, Cost, Shapes, cost

SCHEDULES = ("known", "aligned", "deferred", "frozen", "cached", "two_pass")


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
    schedule: str, rows: Sequence[int], idle: int, shapes: Shapes, refusals: Refusals
) -> list[Part]:
    """Cut scopes into parts.

    Args:
        schedule: "auto", or any name but "known", which needs no parts.
        rows: counted rows of each scope; the last ``idle`` of them have no gradient, whatever the forward
            finds.
        idle: how many.
        shapes: sizes.
        refusals: of the call.

    Raises:
        ValueError: "aligned" by name, but a scope doesn't fit in a chunk.
    """
    working = len(rows) - idle
    parts = _working_parts(schedule, rows[:working], shapes, refusals)
    stop = working
    if parts and parts[-1].strategy == "aligned":
        last, held = parts[-1], parts[-1].rows
        while stop < len(rows) and held + rows[stop] <= shapes.chunk_rows:
            held += rows[stop]
            stop += 1
        parts[-1] = Part("aligned", last.start, stop, held, held - last.rows)
    rest = sum(rows[stop:])
    return [*parts, Part("forward", stop, len(rows), rest)] if rest else parts


def costs(part: Part, shapes: Shapes, active: float = ACTIVE_FRACTION) -> list[Cost]:
    """Of the rows with a gradient and of those without."""
    costs = [cost(part.strategy, part.rows - part.resting, shapes, active)]
    return [*costs, cost("forward", part.resting, shapes)] if part.resting else costs


def seconds_of(parts: Sequence[Part], shapes: Shapes) -> float:
    """What the model expects of parts."""
    steps = sum(part.strategy not in ("forward", "known") for part in parts)
    return steps * shapes.step + sum(price.seconds for part in parts for price in costs(part, shapes))


def _working_parts(schedule: str, rows: Sequence[int], shapes: Shapes, refusals: Refusals) -> list[Part]:
    if schedule in ("frozen", "cached", "two_pass"):
        return [Part(schedule, 0, len(rows), sum(rows))] if rows else []
    if schedule == "deferred":
        return [Part(schedule, i, i + 1, count) for i, count in enumerate(rows) if count]
    if schedule == "aligned" and rows and max(rows) > shapes.chunk_rows:
        raise ValueError(
            f"schedule: 'aligned' needs chunks that hold whole sequences (or groups), one has {max(rows)} "
            f"counted tokens but a chunk {shapes.chunk_rows} rows; raise max_chunk_bytes or use 'auto'"
        )
    if schedule == "aligned":
        return _joined(rows, [schedule] * len(rows), shapes)
    return _cheapest_parts(rows, shapes, refusals)


def _cheapest_parts(rows: Sequence[int], shapes: Shapes, refusals: Refusals) -> list[Part]:
    """Of scopes that fit a chunk all go one way, each longer one goes its own."""

    def allowed(names: Sequence[str], budgeted: int) -> list[str]:
        over = {"cached"} if over_budget(budgeted, shapes) else set()
        return [name for name in names if name not in over and refusals.of(name) is None]

    fitting = [count for count in rows if count <= shapes.chunk_rows]
    prices = {
        name: seconds_of([Part(name, 0, len(fitting), sum(fitting))], shapes)
        for name in allowed(("frozen", "cached", "two_pass"), sum(fitting))
    }
    # first, so that it wins where the price is the same but for rounding: it takes the least memory
    prices = {"aligned": seconds_of(_joined(fitting, ["aligned"] * len(fitting), shapes), shapes), **prices}
    bound = (1.0 + 1e-9) * min(prices.values())
    short = next(name for name, price in prices.items() if price <= bound)

    def strategy(count: int) -> str:
        if count <= shapes.chunk_rows:
            return short
        # neighbours share an evaluation, unless deferred; with a frozen head that would do the same products
        deferred = () if refusals.of("frozen") is None else ("deferred",)
        names = allowed((*deferred, "frozen", "cached", "two_pass"), count)
        steps = {"deferred": shapes.step}
        return min(names, key=lambda name: cost(name, count, shapes).seconds + steps.get(name, 0.0))

    return _joined(rows, [strategy(count) for count in rows], shapes)


def _overfull(strategy: str, scopes: int, rows: int, shapes: Shapes) -> bool:
    """Whether a part of so many scopes and rows is more than the strategy takes at once."""
    if strategy == "deferred":
        return scopes > 1
    if strategy == "aligned":
        return rows > shapes.chunk_rows
    return strategy == "cached" and over_budget(rows, shapes)


def over_budget(rows: int, shapes: Shapes) -> bool:
    """What is cached comes on top of the chunk, and may take as much again."""
    return rows * shapes.rows_itemsize > shapes.chunk_rows * shapes.logits_itemsize


def _joined(rows: Sequence[int], strategies: Sequence[str], shapes: Shapes) -> list[Part]:
    """Neighbours of one strategy as parts, each as much as that takes, of about the same size."""
    parts: list[Part] = []
    for strategy, run in itertools.groupby(range(len(rows)), strategies.__getitem__):
        members = list(run)
        target = float("inf")
        if strategy == "aligned":
            total = sum(rows[i] for i in members)
            target = total / max(1, -(-total // shapes.chunk_rows))
        first, held = members[0], 0
        for i in members:
            if i > first and (held >= target or _overfull(strategy, i + 1 - first, held + rows[i], shapes)):
                parts.append(Part(strategy, first, i, held))
                first, held = i, 0
            held += rows[i]
        parts.append(Part(strategy, first, members[-1] + 1, held))
    return [part for part in parts if part.rows]


def choose(schedule: str, refusals: Refusals, learns: bool, may_synchronise: bool) -> tuple[str, str]:
    """What serves a call, from what is known without looking at any value, and why.

    "two_pass" projects again in the backward; all others compute the gradient along with the loss. "auto"
    stands for parts chosen by cost.

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
    if refusals.of("aligned") is not None:
        return "two_pass", str(refusals.of("aligned"))
    if not may_synchronise:
        return "two_pass", "skip_inactive='none' reads no sequence lengths from the device"
    return "auto", "it is the cheapest by the cost model"
