"""What a call will do, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_kernels.linear.cost import Shapes
from gspo_kernels.linear.schedule import SCHEDULES, Part, Refusals, costs, over_budget, plan_parts, seconds_of


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
            if schedule == "cached" and over_budget(sum(rows) - sum(rows[len(rows) - idle :]), shapes):
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
        gemms=sum(price.products for part in parts for price in costs(part, shapes, 1.0)) / max(total, 1),
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
