"""The suite ``schedules``: every schedule over a grid of shapes, and the cost model's choice.

Each case runs all schedules that are exact for GSPO with the head trained or frozen, forward and backward, in
turn. "auto / best" is what the cost model's choice costs over the fastest; "model / measured" tells how well
the model knows the machine's rates, which don't matter to the choice, only their ratio does.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.measure import Entrant, rounds
from benchmarks.registry import Contestant, Options, suite
from gspo_kernels.linear.schedule import SCHEDULES


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
            names.remove("cached")  # it takes more memory than was allowed
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


LEAST, MOST, SPENT = 5, 31, 3.0
"""Rounds of a case: as many as take ``SPENT`` seconds, within these bounds."""


def measure(case: Case, repeats: int | None, device: torch.device) -> Case:
    """Fill in the times of a case."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens = case.sequences * case.length
    problem = gspo.draw("hidden", tokens, case.vocabulary, case.width, case.sequences, dtype, device)
    if case.frozen:
        problem = problem.situation("frozen head")
    if case.inactive:
        problem = problem.situation("half inactive")
    terms = (problem.labels, problem.old_logprobs, problem.advantages)

    def options(schedule: str) -> dict[str, Any]:
        return {"schedule": schedule, "max_chunk_bytes": case.chunk_rows * case.vocabulary * 4}

    def entrant(schedule: str) -> Entrant:
        def call(problem: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return gk.fused_linear_policy_loss(hidden, weight, *terms, **options(schedule)).loss

        return Entrant(Contestant(schedule, ("hidden",), lambda device: call), problem, call)

    plan = gk.explain_schedule(*problem.leaves(), *terms, **options("auto"))
    case.chosen, case.predicted = plan.schedule, plan.seconds
    running = []
    for name in ("auto", *SCHEDULES):
        try:
            one = entrant(name)
            one.once(device)
            running.append(one)
        except ValueError as error:
            case.refused[name] = str(error)
    if repeats is None:
        once = sum(one.time(device)["both"] for one in running)
        repeats = max(LEAST, min(MOST, round(SPENT / once)))
    times, _ = rounds(running, {}, repeats, device)
    case.seconds = {one.name: statistics.median(t[one.name]["both"] for t in times) for one in running}
    return case


def line(case: Case) -> str:
    """One line of the table."""
    shape = f"{case.sequences:>3} x {case.length:<5}{case.vocabulary:>7}{case.width:>6}{case.chunk_rows:>6}"
    kind = ("frozen " if case.frozen else "") + ("half " if case.inactive else "")
    times = " ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in case.seconds.items())
    model = case.predicted / case.seconds["auto"]
    return f"{shape}  {kind:<8}{case.chosen:<10}{case.best:<10}{case.loss:>6.2f}{model:>7.2f}  {times}"


@suite("schedules", "The cost model's choice against every schedule", everything=False)
def schedules(options: Options) -> dict[str, Any]:
    """Every point of ``GRID``."""
    print("sequences      V     H  rows          chosen    best      auto/best  model/measured  ms")
    cases = []
    for case in GRID[:1] if options.tiny else GRID:
        cases.append(measure(replace(case, seconds={}, refused={}), options.repeats, options.device))
        print(line(cases[-1]), flush=True)
    worst = max(cases, key=lambda case: case.loss)
    print(f"worst choice: {worst.loss:.2f} of the best's time; {line(worst)}")
    found = [{**asdict(case), "best": case.best, "loss": case.loss} for case in cases]
    return {"grid": found, "median_loss": statistics.median(case.loss for case in cases), "worst": worst.loss}
