"""Times of contestants in turn, the floor beside them, and peak memory.

A case draws a problem, judges every contestant on it, and lets those with a right answer and the *probes* (a
plain copy; the bare matrix products) take turns, in alternating direction. The floor of a case is a sum of
probes, by their medians. Peak memory, beyond inputs, is measured in a process of its own on CPU (resident
memory, Linux), and by the allocator on a GPU.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks.judge import Judge
from benchmarks.problem import Problem
from benchmarks.registry import CONTESTANTS, Contestant, Missing, Options, entrants
from benchmarks.resident import give_memory_back, peak_of_this_process
from gspo_kernels.cpp.products import best_instructions, multiplies

PACKAGES = (
    *("torch", "triton", "trl", "liger-kernel", "transformers", "cut-cross-entropy"),
    *("quack-kernels", "verl", "flash-attn"),
)
PATIENCE = 20.0
"""Seconds; a contestant that takes longer is timed once."""
ALLOTTED = 4.0
"""Seconds that a contestant may take of a case's rounds, but at least three."""
_LEAST = 2e-2
"""Seconds that one measurement takes at least; shorter calls are repeated."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One problem and who is to compute it.

    Attributes:
        name: unique in its suite.
        make: device -> problem.
        shape: what the tables say of it.
        wanted: regular expressions for whole names of contestants.
        floor: probes and how many times each; see ``probes``.
        floor_name: what this sum is, in words.
        repeats: rounds that count; 0 measures memory only.
        judge: problem -> what has ``verdict``.
        yardstick: the contestant that ratios are to, where there is no floor.
    """

    name: str
    make: Callable[[torch.device], Any]
    shape: dict[str, Any]
    wanted: Sequence[str]
    floor: dict[str, float] = field(default_factory=dict)
    floor_name: str = ""
    repeats: int = 5
    judge: Callable[[Any], Any] = Judge
    yardstick: str = ""


class DeviceBroken(RuntimeError):
    """After a contestant's error the device answers no more; ``name`` says whose."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


def machine(device: torch.device) -> dict[str, Any]:
    """Device and versions, for the record."""
    found = {"gspo_kernels": gk.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # the version with its build, which the package's metadata leave out
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} SMs"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        name += f", {torch.backends.cpu.get_cpu_capability()}"
        if multiplies(torch.bfloat16) and best_instructions(torch.bfloat16) == "amx":
            name += " and AMX"
    return {"device": name, "type": device.type, "versions": found}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Seconds between marks: of the processor, or of events in the GPU's stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Set a mark."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if self.device.type != "cuda":
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


def probes(problem: Problem, floor: dict[str, float]) -> dict[str, Call]:
    """The bare work that a floor is made of, to memory that exists.

    "copy" copies the logits. "logits", "dHidden" and "dWeight" are the products of the counted tokens in the
    inputs' dtype, and those "in fp32" of operands that were raised beforehand.
    """
    found: dict[str, Call] = {}
    if "copy" in floor:
        source = problem.inputs[0]
        target = torch.empty_like(source)
        found["copy"] = lambda: target.copy_(source)
    products = {name for name in floor if name != "copy"}
    if products:
        hidden, weight = problem.layout("packed" if not problem.mask.all() else "padded").inputs
        hidden = hidden.flatten(0, -2)
        logits = hidden.new_empty(len(hidden), len(weight))
        torch.mm(hidden, weight.t(), out=logits)
        found["logits"] = lambda: torch.mm(hidden, weight.t(), out=logits)
        if products != {"logits"}:
            scores = torch.softmax(logits, -1)
            grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
            found["dHidden"] = lambda: torch.mm(scores, weight, out=grad_hidden)
            found["dWeight"] = lambda: torch.mm(scores.t(), hidden, out=grad_weight)
    return {name: found[name] for name in floor}


@dataclass
class Entrant:
    """A contestant on a problem, with what was found."""

    contestant: Contestant
    problem: Any
    call: Call | None = None
    record: dict[str, Any] = field(default_factory=dict)
    inner: int = 1
    rounds: float = math.inf
    warm: bool = True

    @property
    def name(self) -> str:
        return self.contestant.name

    def once(self, device: torch.device) -> tuple[float, float, tuple[Any, ...]]:
        """Seconds of forward and backward of one call, and the loss and the gradients of the leaves."""
        leaves = self.problem.leaves(self.contestant.overwrites)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        synchronize(device)
        clock = Clock(device)
        clock.mark()
        loss = self.problem.call(self.call, leaves)
        clock.mark()
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if wanted:
            found = iter(torch.autograd.grad(loss, wanted))
            gradients = tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
            self.problem.finish(leaves, gradients)
        clock.mark()
        forward, backward = clock.seconds()
        return forward, backward, (loss.detach(), gradients)

    def time(self, device: torch.device) -> dict[str, float]:
        """Mean seconds of ``inner`` calls."""
        forward = backward = 0.0
        for _ in range(self.inner):
            more = self.once(device)
            forward, backward = forward + more[0] / self.inner, backward + more[1] / self.inner
        return {"forward": forward, "backward": backward, "both": forward + backward}


def reason(error: BaseException) -> str:
    """The first line of an error, for the tables."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"


def enter(case: Case, problem: Any, options: Options, judge: Any) -> list[Entrant]:
    """Load and judge everyone; those without a right answer keep a reason."""
    device, found = options.device, []
    dtype = problem.inputs[0].dtype
    for contestant in entrants(problem.task, case.wanted, options, dtype):
        entrant = Entrant(contestant, problem)
        record = entrant.record = {
            "contestant": contestant.name,
            "ours": contestant.ours,
            "precision": contestant.precision_for(problem.task),
            "status": "right",
            "reason": "",
        }
        found.append(entrant)
        if contestant.name in options.without:
            record.update(status="missing", reason=options.without[contestant.name])
            continue
        try:
            entrant.call = contestant.get(device)
        except Missing as missing:
            record.update(status="missing", reason=str(missing))
            continue
        try:
            entrant.problem = problem.layout(contestant.layout)
            base = _allocated(device)
            *seconds, results = entrant.once(device)
            if device.type == "cuda" and options.memory:
                record["peak_bytes"] = torch.cuda.max_memory_allocated(device) - base
            verdict = judge.verdict(contestant, *results)
            del results
            record.update(
                errors=_finite(verdict.errors), allowed=_finite(verdict.allowed), share=verdict.share
            )
            if verdict.complaint:
                record.update(status="wrong", reason=verdict.complaint)
            else:
                # The first call warmed up and may have compiled. A second one tells how long a call takes,
                # unless the first was long and compiled nothing.
                if case.repeats and (sum(seconds) < 0.5 or "compile" in contestant.name):
                    *seconds, _ = entrant.once(device)
                took = max(sum(seconds), 1e-6)
                entrant.warm = took < 0.5
                entrant.inner = max(1, min(200, math.ceil(_LEAST / took)))
                entrant.rounds = 1 if took > PATIENCE else max(3, int(ALLOTTED / took))
        except Exception as error:
            record.update(status="refused", reason=reason(error))
            del error
            _survive(contestant.name, record["reason"], device)
        record["share"] = record.get("share") if math.isfinite(record.get("share") or math.inf) else None
    return found


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _survive(name: str, reason: str, device: torch.device) -> None:
    """Clean up after an error, or say that the device is beyond that."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceBroken(name, reason) from error


def _probe(call: Call, device: torch.device) -> float:
    """Mean seconds of a probe, over as many calls as a measurement takes."""
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _LEAST and len(seconds) < 200):
        synchronize(device)
        clock = Clock(device)
        clock.mark()
        call()
        clock.mark()
        seconds += clock.seconds()
    return statistics.mean(seconds)


def rounds(
    running: Sequence[Entrant], bare: dict[str, Call], repeats: int, device: torch.device
) -> tuple[list[dict[str, dict[str, float]]], list[dict[str, float]]]:
    """Seconds of contestants and probes by round, after one that does not count."""
    times: list[dict[str, dict[str, float]]] = []
    probed: list[dict[str, float]] = []
    gc.collect()
    for repeat in range(repeats + 1):
        here, found = {}, {}
        for name, call in bare.items():
            found[name] = _probe(call, device)
        for entrant in running[:: 1 if repeat % 2 else -1]:
            # a warm-up round changes nothing for those whose call takes long
            if 1 <= repeat <= entrant.rounds or (repeat == 0 and entrant.warm):
                try:
                    here[entrant.name] = entrant.time(device)
                except Exception as error:
                    entrant.record.update(status="refused", reason=reason(error))
                    entrant.rounds = 0
                    del error
                    _survive(entrant.name, entrant.record["reason"], device)
        if repeat:
            times.append(here)
            probed.append(found)
    return times, probed


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest, highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def run_case(case: Case, options: Options) -> dict[str, Any]:
    """Everything about one case, for the record."""
    device = options.device
    problem = case.make(device)
    judge = case.judge(problem)
    found = enter(case, problem, options, judge)
    del judge
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    repeats = case.repeats if options.repeats is None or not case.repeats else options.repeats
    running = [entrant for entrant in found if entrant.record["status"] == "right" and repeats]
    bare = probes(problem, case.floor) if repeats else {}
    times, probed = rounds(running, bare, repeats, device)
    running = [entrant for entrant in running if entrant.record["status"] == "right"]
    floors = [sum(case.floor[name] * one[name] for name in case.floor) for one in probed]
    for entrant in running:
        mine = [one[entrant.name] for one in times if entrant.name in one]
        kept = {phase: [one[phase] for one in mine] for phase in ("forward", "backward", "both")}
        entrant.record["seconds"] = kept
        if case.floor:
            usual = statistics.median(floors)
            entrant.record["x_floor"] = spread([seconds / usual for seconds in kept["both"]])
        entrant.record["x_contestants"] = {
            other.name: statistics.median(
                one[entrant.name]["both"] / one[other.name]["both"]
                for one in times
                if entrant.name in one and other.name in one
            )
            for other in running
            if other is not entrant
        }
    record: dict[str, Any] = {
        "name": case.name,
        "task": problem.task,
        "shape": case.shape,
        "repeats": repeats,
        **({"yardstick": case.yardstick} if case.yardstick else {}),
        "floor": {"name": case.floor_name, "probes": case.floor, "seconds": floors},
        "rates": rates(problem, probed) if repeats else {},
        "results": [entrant.record for entrant in found],
    }
    if device.type == "cpu" and options.memory:
        peaks = peaks_in_a_process([e for e in found if e.record["status"] == "right"], problem)
        for entrant in found:
            if entrant.name in peaks:
                entrant.record["peak_bytes"] = peaks[entrant.name]
    return record


def rates(problem: Problem, probed: Sequence[dict[str, float]]) -> dict[str, float]:
    """The machine's rates by the probes: bytes and operations per second."""
    found = {}
    for name in probed[0] if probed else ():
        seconds = statistics.median(one[name] for one in probed)
        if name == "copy":
            source = problem.inputs[0]
            found["copy_bandwidth"] = 2 * source.numel() * source.element_size() / seconds
        else:
            operations = 2 * float(problem.mask.sum()) * problem.inputs[1].numel()
            found[f"gemm_rate {name}"] = operations / seconds
    return found


def run_cases(cases: Sequence[Case], options: Options) -> list[dict[str, Any]]:
    """All cases that the options ask for; prints each table as it is done."""
    from benchmarks.tables import case_table

    records: list[dict[str, Any]] = []
    for case in cases:
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        records.append(run_case(case, options))
        if options.save is not None:
            options.save(records)
        print(case_table(records[-1]), flush=True)
    return records


# --- peak memory on the CPU


def peaks_in_a_process(found: Sequence[Entrant], problem: Any) -> dict[str, int]:
    """Bytes of resident memory beyond inputs, by contestant; empty where the system can't tell."""
    if not found or not Path("/proc/self/clear_refs").exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "problem.pt"
        asked = [(entrant.name, entrant.warm or "compile" in entrant.name) for entrant in found]
        torch.save((problem, asked), where)
        command = [sys.executable, "-m", "benchmarks", "peaks", str(where)]
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["contestant"]: line["bytes"] for line in lines}


def print_peaks(where: Path) -> None:
    """Print a line per contestant; where a first call also warms something up, the second is measured."""
    give_memory_back()
    problem, asked = torch.load(where, weights_only=False)
    device = torch.device("cpu")
    for name, twice in asked:
        entrant = Entrant(CONTESTANTS[name], problem.layout(CONTESTANTS[name].layout))
        entrant.call = entrant.contestant.get(device)
        if twice:
            entrant.once(device)
        leaves = entrant.problem.leaves(entrant.contestant.overwrites)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with peak_of_this_process() as peak:
            loss = entrant.problem.call(entrant.call, leaves)
            if wanted:
                gradients = torch.autograd.grad(loss, wanted)
                entrant.problem.finish(wanted, gradients)
                del gradients
            del loss
            used = peak()
        del leaves, wanted
        print(json.dumps({"contestant": name, "bytes": used}), flush=True)
