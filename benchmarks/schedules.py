"""``python -m benchmarks.schedules`` times every schedule over a grid of shapes, and the cost model's choice.

Each case runs all schedules that are exact for GSPO with the head trained or frozen, forward and backward, in
turn. "auto / best" is what the cost model's choice costs over the fastest; "model / measured" tells how well
the model knows the machine's rates, which don't matter to the choice, only their ratio does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.hidden import versions
from gspo_kernels.schedule import SCHEDULES


@dataclass
class Case:
    """One point of the grid; times are medians in seconds."""

    sequences: int
    length: int
    vocabulary: int
    width: int
    chunk_rows: int
    frozen: bool
    inactive: bool
    chosen: str = ""
    predicted: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest schedule by name."""
        names = [name for name in self.seconds if name != "auto"]
        if self.sequences * self.length > self.chunk_rows:
            names.remove("cached")  # takes more memory than was allowed
        return min(names, key=self.seconds.__getitem__)

    @property
    def loss(self) -> float:
        """What the choice costs over the best."""
        return self.seconds["auto"] / self.seconds[self.best]


GRID = [
    Case(sequences, length, vocabulary, width, chunk_rows, frozen, inactive)
    for vocabulary, width in ((4000, 64), (32000, 128), (16000, 512))
    for sequences, length in ((32, 16), (4, 256), (1, 1024))
    for chunk_rows in (96, 512)
    for frozen, inactive in ((False, False), (True, False), (False, True))
]


def measure(case: Case, repeats: int) -> Case:
    """Fill in the times of a case."""
    problem = gspo.draw(
        case.sequences * case.length, case.vocabulary, case.width, case.sequences, torch.float32
    )
    if case.frozen:
        problem = problem.situation("frozen head")
    if case.inactive:
        problem = problem.situation("half inactive")

    def options(schedule: str) -> dict[str, Any]:
        return {"schedule": schedule, "max_chunk_bytes": case.chunk_rows * case.vocabulary * 4}

    def arguments() -> tuple[Any, ...]:
        return (*gspo.leaves(problem), problem.labels, problem.old_logprobs, problem.advantages)

    def run(schedule: str) -> None:
        hidden, weight, *rest = arguments()
        loss = gk.fused_linear_policy_loss(hidden, weight, *rest, **options(schedule)).loss
        gspo.differentiate(loss, hidden, weight)

    plan = gk.explain_schedule(*arguments(), **options("auto"))
    case.chosen, case.predicted = plan.schedule, plan.seconds
    times: dict[str, list[float]] = {}
    for name in ("auto", *SCHEDULES):
        try:
            run(name)
            times[name] = []
        except ValueError as error:
            case.refused[name] = str(error)
    for repeat in range(repeats):
        for name in list(times)[:: 1 if repeat % 2 else -1]:
            start = time.perf_counter()
            run(name)
            times[name].append(time.perf_counter() - start)
    case.seconds = {name: statistics.median(found) for name, found in times.items()}
    return case


def line(case: Case) -> str:
    """One line of the table."""
    shape = f"{case.sequences:>3} x {case.length:<5}{case.vocabulary:>7}{case.width:>6}{case.chunk_rows:>6}"
    kind = ("frozen " if case.frozen else "") + ("half " if case.inactive else "")
    times = " ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in case.seconds.items())
    model = case.predicted / case.seconds["auto"]
    return f"{shape}  {kind:<8}{case.chosen:<10}{case.best:<10}{case.loss:>6.2f}{model:>7.2f}  {times}"


def main(argv: Sequence[str] | None = None) -> list[Case]:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedules", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", type=int, nargs="+", help="indices into the grid; default: all")
    parser.add_argument("--json", type=Path, help="also write device, versions and all times there")
    given = parser.parse_args(argv)
    grid = GRID if given.cases is None else [GRID[i] for i in given.cases]
    print("sequences      V     H  rows          chosen    best      auto/best  model/measured  ms")
    cases = []
    for case in grid:
        cases.append(measure(case, given.repeats))
        print(line(case), flush=True)
    worst = max(cases, key=lambda case: case.loss)
    print(f"worst choice: {worst.loss:.2f} of the best's time; {line(worst)}")
    if given.json:
        record = {
            "benchmark": "schedules",
            "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
            "versions": versions(),
            "repeats": given.repeats,
            "cases": [asdict(case) for case in cases],
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return cases


if __name__ == "__main__":
    main()
