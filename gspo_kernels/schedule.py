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

SCHEDULES = ("known", "aligned", "deferred", "frozen", "cached", "two_pass")

ACTIVE_FRACTION = 0.85
"""What is assumed of rows whose gradient is not known to be zero: published GSPO runs clip 15% of tokens."""


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of a device: rates in operations and bytes per second, seconds per step.

    Attributes:
        operations: matrix products, by bytes of an operand's element.
        bandwidth: memory.
        step: one evaluation of the policy terms, with its look at the device.
        launch: the same where a kernel of the backend does it.
    """

    operations: dict[int, float]
    bandwidth: float
    step: float
    launch: float


MACHINES = {
    # two AVX2 cores, measured; only ratios matter, and those change little with the number of cores
    "cpu": Machine({2: 1.5e11, 4: 1.5e11, 8: 7e10}, 1.6e10, 1.3e-3, 3.5e-4),
    # an H100 by its data sheet at the rates that large products reach, a step as a few hundred launches; not
    # measured yet
    "cuda": Machine({2: 7e14, 4: 4.5e13, 8: 4.5e13}, 2.8e12, 2e-3, 2e-4),
}


@dataclass(frozen=True)
class Shapes:
    """The sizes that costs depend on.

    Attributes:
        vocabulary, width: V and H.
        chunk_rows: rows of logits that fit the budget.
        logits_itemsize, rows_itemsize, accumulator_itemsize, operand_itemsize: bytes of an element of the
            logits, of the rows p - onehot, of dWeight's sum, and of what the products multiply.
        trains_hidden, trains_weight: which gradients are wanted.
        one_launch: whether a kernel of the backend evaluates the policy terms.
        one_pass: whether the rows p - onehot of a chunk are written with its log-probs, gradient or not.
        device: "cpu", or a GPU.
    """

    vocabulary: int
    width: int
    chunk_rows: int
    logits_itemsize: int
    rows_itemsize: int
    accumulator_itemsize: int
    operand_itemsize: int
    trains_hidden: bool
    trains_weight: bool
    one_launch: bool
    one_pass: bool
    device: str

    @property
    def machine(self) -> Machine:
        """The rates of the device."""
        return MACHINES.get(self.device, MACHINES["cuda"])

    @property
    def step(self) -> float:
        """Seconds of one evaluation of the policy terms."""
        return self.machine.launch if self.one_launch else self.machine.step

    @property
    def accumulator_bytes(self) -> int:
        """Of dWeight's sum."""
        return self.vocabulary * self.width * self.accumulator_itemsize if self.trains_weight else 0


@dataclass(frozen=True)
class Cost:
    """The model's price of one part: products in units of 2VH operations per row, bytes moved, seconds."""

    products: float
    moved: float
    seconds: float


def cost(strategy: str, rows: int, shapes: Shapes, active: float = ACTIVE_FRACTION) -> Cost:
    """What working through ``rows`` rows by ``strategy`` (a schedule, or "forward") takes."""
    gradients = shapes.trains_hidden + shapes.trains_weight
    logits = rows * shapes.vocabulary * shapes.logits_itemsize
    scores = rows * shapes.vocabulary * shapes.rows_itemsize
    chunks = -(-rows // shapes.chunk_rows)
    adding = 2.0 * shapes.accumulator_bytes  # read and written for each chunk that reaches dWeight
    active_chunks = -(-int(rows * active) // shapes.chunk_rows) if active else 0
    products, moved = 1.0, 2.0 * logits
    making = scores if shapes.one_pass else logits + scores  # rows from logits
    if strategy == "known":
        products += gradients
        moved += making + chunks * adding
    elif strategy == "aligned":
        products += active * gradients
        moved += (1.0 if shapes.one_pass else active) * making + adding
    elif strategy == "deferred":
        products += gradients
        moved += making + (chunks + 1.5) * adding
    elif strategy == "frozen":
        products += shapes.trains_hidden
        moved += making
    elif strategy == "cached":
        products += active * gradients
        moved += making + 2 * active * scores + active_chunks * adding
    elif strategy == "two_pass":
        products += active * (1 + gradients)
        moved += active * (2 * logits + making) + active_chunks * adding
    machine = shapes.machine
    operations = 2.0 * shapes.vocabulary * shapes.width * rows * products
    seconds = operations / machine.operations[shapes.operand_itemsize] + moved / machine.bandwidth
    return Cost(products * rows, moved, seconds)


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


def _costs(part: Part, shapes: Shapes, active: float = ACTIVE_FRACTION) -> list[Cost]:
    """Of the rows with a gradient and of those without."""
    costs = [cost(part.strategy, part.rows - part.resting, shapes, active)]
    return [*costs, cost("forward", part.resting, shapes)] if part.resting else costs


def seconds_of(parts: Sequence[Part], shapes: Shapes) -> float:
    """What the model expects of parts."""
    steps = sum(part.strategy not in ("forward", "known") for part in parts)
    return steps * shapes.step + sum(price.seconds for part in parts for price in _costs(part, shapes))


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
        over = {"cached"} if _over_budget(budgeted, shapes) else set()
        return [name for name in names if name not in over and refusals.of(name) is None]

    fitting = [count for count in rows if count <= shapes.chunk_rows]
    prices = {
        name: seconds_of([Part(name, 0, len(fitting), sum(fitting))], shapes)
        for name in allowed(("frozen", "cached", "two_pass"), sum(fitting))
    }
    # first, so that it wins where the price is the same
    prices = {"aligned": seconds_of(_joined(fitting, ["aligned"] * len(fitting), shapes), shapes), **prices}
    short = min(prices, key=prices.__getitem__)

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
    return strategy == "cached" and _over_budget(rows, shapes)


def _over_budget(rows: int, shapes: Shapes) -> bool:
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


@dataclass(frozen=True)
class SchedulePlan:
    """What a call will do, and what the cost model expects of it.

    Attributes:
        schedule: a name, "mixed" where parts differ, or "forward" where nothing has a gradient.
        gemms: products over all counted rows, forward and backward: 3.0 is 6NHV operations. Rows that turn
            out to have no gradient make it fewer; ``ACTIVE_FRACTION`` is assumed where that isn't known.
        chunk_rows: rows of logits that exist at once, at most.
        chunks: how many chunks there are in the forward.
        chunk_bytes: bytes of those logits.
        accumulator_bytes: dWeight's and dBias's sums, fp32 (fp64 for fp64 inputs).
        peak_bytes: all that lives beyond inputs, dHidden, dWeight and dBias.
        seconds: by the cost model.
        reason: why this schedule.
        parts: rows by strategy.
        alternatives: of each other schedule, the model's seconds or why it is not possible.
    """

    schedule: str
    gemms: float
    chunk_rows: int
    chunks: int
    chunk_bytes: int
    accumulator_bytes: int
    peak_bytes: int
    seconds: float
    reason: str
    parts: dict[str, int]
    alternatives: dict[str, float | str]

    def __str__(self) -> str:
        """A few lines for people."""
        mebi = 2**20
        lines = [
            f"schedule {self.schedule}: {self.gemms:.2f} GEMMs over the counted tokens, {self.chunks} "
            f"chunk(s) of up to {self.chunk_rows} rows",
            f"  because {self.reason}",
            f"  memory beyond inputs and gradients: {self.peak_bytes / mebi:.1f} MiB "
            f"({self.chunk_bytes / mebi:.1f} MiB of logits); by the cost model {self.seconds * 1e3:.3g} ms",
        ]
        if len(self.parts) > 1:
            lines.append("  tokens: " + ", ".join(f"{name} {rows}" for name, rows in self.parts.items()))
        for name, value in self.alternatives.items():
            lines.append(f"  not {name}: " + (value if isinstance(value, str) else f"{value * 1e3:.3g} ms"))
        return "\n".join(lines)


def extra_bytes(strategy: str, rows: int, shapes: Shapes) -> int:
    """What a strategy keeps beyond one chunk of logits."""
    if strategy == "deferred":
        return shapes.accumulator_bytes
    if strategy == "cached":
        return rows * shapes.vocabulary * shapes.rows_itemsize
    return 0


def explain(
    name: str,
    reason: str,
    rows: Sequence[int],
    idle: int,
    shapes: Shapes,
    refusals: Refusals,
    weight_itemsize: int,
) -> SchedulePlan:
    """The plan of a call that ``choose`` gave ``name``; the rest as for ``plan_parts``.

    Raises:
        ValueError: as ``plan_parts``.
    """

    def parts_of(schedule: str) -> list[Part]:
        if not (shapes.trains_hidden or shapes.trains_weight):
            return [Part("forward", 0, len(rows), sum(rows))]
        if schedule == "known":
            return [Part("known", 0, len(rows), sum(rows))]
        return plan_parts(schedule, rows, idle, shapes, refusals)

    def alternative(schedule: str) -> float | str:
        refused = refusals.of(schedule)
        if refused is not None:
            return refused
        try:
            seconds = seconds_of(parts_of(schedule), shapes)
            if schedule == "cached" and _over_budget(sum(rows) - sum(rows[len(rows) - idle :]), shapes):
                return f"{seconds * 1e3:.3g} ms, but its rows take more memory than another chunk"
            return seconds
        except ValueError as error:
            return str(error).removeprefix(f"schedule: {schedule!r} ")

    parts = parts_of(name)
    by_strategy: dict[str, int] = {}
    for part in parts:
        by_strategy[part.strategy] = by_strategy.get(part.strategy, 0) + part.rows - part.resting
        if part.resting:
            by_strategy["forward"] = by_strategy.get("forward", 0) + part.resting
    used = [strategy for strategy in by_strategy if strategy != "forward"] or ["forward"]
    schedule = name if name != "auto" else used[0] if len(used) == 1 else "mixed"
    total = sum(rows)
    most = min(shapes.chunk_rows, max((part.rows for part in parts), default=0))
    wider = shapes.rows_itemsize > shapes.logits_itemsize
    # rows that don't fit into the logits' memory have their own
    row = shapes.logits_itemsize + (shapes.rows_itemsize if wider else 0)
    chunk_bytes = most * shapes.vocabulary * row
    copy = shapes.accumulator_bytes if shapes.accumulator_itemsize > weight_itemsize else 0
    return SchedulePlan(
        schedule=schedule,
        gemms=sum(price.products for part in parts for price in _costs(part, shapes, 1.0)) / max(total, 1),
        chunk_rows=most,
        chunks=sum(-(-part.rows // shapes.chunk_rows) for part in parts),
        chunk_bytes=chunk_bytes,
        accumulator_bytes=shapes.accumulator_bytes,
        peak_bytes=chunk_bytes
        + copy
        + max((extra_bytes(p.strategy, p.rows, shapes) for p in parts), default=0),
        seconds=seconds_of(parts, shapes),
        reason=reason,
        parts=by_strategy,
        alternatives={other: alternative(other) for other in SCHEDULES if other not in (name, schedule)},
    )


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
