"""What a call will do, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_kernels.linear.chunks import SIZES_BYTES, Call
from gspo_kernels.linear.schedule import SCHEDULES, Part, Refusals, Shapes, plan_parts, products
from gspo_kernels.linear.segments import SEGMENT
from gspo_kernels.ops.shards import statistics_bytes


@dataclass(frozen=True)
class Wire:
    """What ranks of a ``tp_group`` exchange for a row, and those of a ``cp_group`` for a call; else zeros.

    Attributes:
        statistics: bytes of what is gathered of a row that is projected.
        hidden: bytes of its hidden state, where those are scattered.
        gradient: bytes of its dHidden, where that is summed.
        sequences: bytes of what ranks of ``cp_group`` say and sum, and in how many collectives.
    """

    statistics: int = 0
    hidden: int = 0
    gradient: int = 0
    sequences: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, call: Call, shapes: Shapes, entropy: bool, sequences: tuple[int, int]) -> Wire:
        """From a call."""
        if not call.options.shard.group:
            return cls(sequences=sequences)
        own, chunking = shapes.accumulator_itemsize, call.chunking
        return cls(
            statistics_bytes(entropy, own),
            shapes.width * call.hidden.element_size() if chunking.scattered else 0,
            shapes.width * own if shapes.trains_hidden and chunking.reduce_hidden_grad else 0,
            sequences,
        )

    def overlaps(self, parts: Sequence[Part]) -> str:
        """What of it is under way while something is multiplied, in words."""
        first_pass = self.statistics and any(part.strategy in ("forward", "two_pass") for part in parts)
        said = {
            "dHidden's while dWeight is multiplied": self.gradient,
            "hidden states' while the chunk before is multiplied": self.hidden,
            "a first pass's statistics while the next chunk is multiplied": first_pass,
        }
        return ", ".join(words for words, holds in said.items() if holds) or "all of which are waited for"

    def sent(self, parts: Sequence[Part], shapes: Shapes) -> tuple[int, int]:
        """Bytes and messages of a call in which every row with a gradient turns out to have one.

        A chunk's gathered hidden states, or the parts of its dHidden for their ranks, count as one message.
        """
        total, messages = self.sequences
        if not self.statistics:
            return total, messages
        passes = 1 + any(part.strategy == "two_pass" for part in parts)
        total, messages = total + passes * SIZES_BYTES, messages + passes
        for part in parts:
            learning = part.rows - part.resting if part.strategy != "forward" else 0
            again = learning if part.strategy == "two_pass" else 0
            for rows, size in (
                (part.rows, self.statistics),
                (part.rows, self.hidden),
                (again, self.hidden),
                (learning, self.gradient),
            ):
                total += rows * size
                messages += -(-rows // shapes.chunk_rows) if size else 0
        return total, messages


@dataclass(frozen=True)
class SchedulePlan:
    """What a call will do.

    Attributes:
        schedule: a name, "mixed" where parts differ, or "forward" where nothing has a gradient.
        gemms: products over all counted rows, forward and backward: 3.0 is 6NHV operations. Rows that turn
            out to have no gradient make it fewer.
        chunk_rows: rows of logits that exist at once, at most.
        chunks: how many chunks there are in the forward.
        chunk_bytes: bytes of those logits.
        accumulator_bytes: dWeight's and dBias's sums, fp32 (fp64 for fp64 inputs).
        peak_bytes: all that lives beyond inputs, dHidden, dWeight and dBias.
        batch_invariant: whether products and sums are in a fixed order.
        sent_bytes: what a rank of ``tp_group`` and ``cp_group`` sends to each other, or puts into sums.
        messages: in how many collectives.
        overlaps: which of them run while something is multiplied, in words.
        reason: why this schedule.
        parts: rows by strategy.
        alternatives: of each other schedule, its products or why it is not exact.
    """

    schedule: str
    gemms: float
    chunk_rows: int
    chunks: int
    chunk_bytes: int
    accumulator_bytes: int
    peak_bytes: int
    batch_invariant: bool
    sent_bytes: int
    messages: int
    overlaps: str
    reason: str
    parts: dict[str, int]
    alternatives: dict[str, float | str]

    def __str__(self) -> str:
        """A few lines for people."""
        mebi = 2**20
        lines = [
            f"schedule {self.schedule}: {self.gemms:.2f} GEMMs over the counted tokens, "
            f"{self.chunks} chunk(s) of up to {self.chunk_rows} rows",
            f"  because {self.reason}",
            f"  memory beyond inputs and gradients: {self.peak_bytes / mebi:.1f} MiB "
            f"({self.chunk_bytes / mebi:.1f} MiB of logits)",
        ]
        if self.batch_invariant:
            lines.append("  batch-invariant: products and sums in a fixed order, whatever is computed along")
        if self.messages:
            lines.append(
                f"  between ranks: {self.sent_bytes / mebi:.3g} MiB in {self.messages} collectives, "
                f"{self.overlaps}"
            )
        if len(self.parts) > 1:
            lines.append("  tokens: " + ", ".join(f"{name} {rows}" for name, rows in self.parts.items()))
        for name, value in self.alternatives.items():
            lines.append(f"  not {name}: " + (value if isinstance(value, str) else f"{value:.2f} GEMMs"))
        return "\n".join(lines)


def explain(
    name: str,
    reason: str,
    rows: Sequence[int],
    idle: int,
    shapes: Shapes,
    refusals: Refusals,
    weight_itemsize: int,
    wire: Wire,
    invariant: bool,
) -> SchedulePlan:
    """The plan of a call that ``choose`` gave ``name``, ``invariant`` if it is batch-invariant; the rest as
    for ``plan_parts``.

    Raises:
        ValueError: as ``plan_parts``.
    """

    def parts_of(schedule: str) -> list[Part]:
        if not (shapes.trains_hidden or shapes.trains_weight):
            return [Part("forward", 0, len(rows), sum(rows))]
        if schedule == "known":
            return [Part("known", 0, len(rows), sum(rows))]
        return plan_parts(schedule, rows, idle, shapes.chunk_rows, refusals)

    def gemms_of(parts: list[Part]) -> float:
        return sum(products(part, shapes) for part in parts) / max(sum(rows), 1)

    def alternative(schedule: str) -> float | str:
        refused = refusals.of(schedule)
        if refused is not None:
            return refused
        try:
            return gemms_of(parts_of(schedule))
        except ValueError as error:
            return str(error).removeprefix(f"schedule: {schedule!r} ")

    parts = parts_of(name)
    by_strategy: dict[str, int] = {}
    for part in parts:
        by_strategy[part.strategy] = by_strategy.get(part.strategy, 0) + part.rows - part.resting
        if part.resting:
            by_strategy["forward"] = by_strategy.get("forward", 0) + part.resting
    used = [strategy for strategy in by_strategy if strategy != "forward"] or ["forward"]
    schedule = used[0] if len(used) == 1 else "mixed"
    most = min(shapes.chunk_rows, max((part.rows for part in parts), default=0))
    wider = shapes.rows_itemsize > shapes.logits_itemsize
    # rows that don't fit into the logits' memory have their own
    row = shapes.logits_itemsize + (shapes.rows_itemsize if wider else 0)
    chunk_bytes = most * shapes.vocabulary * row
    sent, messages = wire.sent(parts, shapes)
    copy = shapes.accumulator_bytes if shapes.accumulator_itemsize > weight_itemsize else 0
    held = SEGMENT * shapes.vocabulary * shapes.rows_itemsize if invariant and shapes.trains_weight else 0
    return SchedulePlan(
        schedule=schedule,
        gemms=gemms_of(parts),
        chunk_rows=most,
        chunks=sum(-(-part.rows // shapes.chunk_rows) for part in parts),
        chunk_bytes=chunk_bytes,
        accumulator_bytes=shapes.accumulator_bytes,
        peak_bytes=chunk_bytes
        + copy
        + held
        + (shapes.accumulator_bytes if any(part.strategy == "deferred" for part in parts) else 0),
        batch_invariant=invariant,
        sent_bytes=sent,
        messages=messages,
        overlaps=wire.overlaps(parts) if messages else "",
        reason=reason,
        parts=by_strategy,
        alternatives={other: alternative(other) for other in SCHEDULES if other not in (name, schedule)},
    )
