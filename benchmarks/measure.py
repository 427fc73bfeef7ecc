"""Contestants, suites, and the runner, which judges the contestants of a case and measures them.

A *contestant* is a way to compute a task. Its decorated function takes the device, imports its dependencies,
and returns the call; if it raises ImportError or ``Missing``, tables show the reason. A *suite* is a function
from the options of a run to its record; most run a list of ``Case`` by ``run_cases``. Each suite's file has
its problem, its contestants, and its *floor*, the bare operations that times are divided by.

Contestants with a correct answer and the bare operations are interleaved, in alternating order. Peak memory
beyond the inputs is resident memory of a separate process on a CPU (Linux), and the allocator's on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks.judging import Judge
from benchmarks.tables import case_table, spread
from gspo_kernels.backends.cpp.products import best_instructions, multiplies
from gspo_kernels.core import memory

TASKS = ("logits", "hidden", "scoring")


class Missing(Exception):
    """A contestant is not available, with the reason."""


@dataclass(frozen=True)
class Contestant:
    """A way to compute a task.

    Attributes:
        name: its name in tables.
        task: one of ``TASKS``.
        load: device -> call. The call takes a problem and its leaves and returns the loss; for "scoring"
            the log-probs.
        precision: "float32" or "input", the precision of its logits (from logits: of its statistics). Plain
            PyTorch at this precision determines its budget.
        only_16_bit: whether it runs with 16-bit inputs only.
        roundings: problem -> number of roundings of a gradient's sum to the inputs' dtype.
        overwrites: whether its backward overwrites the logits, which are then restored, untimed.
        layout: "padded", "packed" or "next", see ``Problem.layout``; the conversion is untimed.
        ours: whether it is this package.
    """

    name: str
    task: str
    load: Callable[[torch.device], Callable[..., Any]]
    precision: str = "input"
    only_16_bit: bool = False
    roundings: Callable[[Any], int] = lambda problem: 1
    overwrites: bool = False
    layout: str = "padded"
    ours: bool = False

    def get(self, device: torch.device) -> Callable[..., Any]:
        """Return the call, or raise ``Missing`` with the reason; errors of this package are faults."""
        try:
            return self.load(device)
        except (ImportError, AttributeError, OSError) as error:
            if self.ours:
                raise
            raise Missing(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Suite:
    """A named set of measurements; ``everything`` says whether ``run all`` includes it."""

    name: str
    title: str
    run: Callable[[Options], dict[str, Any]]
    everything: bool = True


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        device: "cpu" or "cuda".
        size: "full", or "tiny" for a dry run with meaningless times.
        repeats: interleaved rounds that count; None for the suite's default.
        only: parts of names of contestants; empty for all.
        cases: parts of names of cases; empty for all.
        without: contestants to skip, with the reason for the tables.
        save: called after each case with the partial record.
    """

    device: torch.device
    size: str = "full"
    repeats: int | None = None
    only: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    save: Callable[[dict[str, Any]], None] = lambda known: None

    @property
    def tiny(self) -> bool:
        """Whether this is a dry run."""
        return self.size == "tiny"

    @property
    def dtype(self) -> str:
        """The dtype of most cases."""
        return "fp32" if self.device.type == "cpu" else "bf16"

    def choose(self, *, cpu: Any, gpu: Any, tiny: Any) -> Any:
        """Return the value for this run's device and size."""
        return tiny if self.tiny else cpu if self.device.type == "cpu" else gpu


CONTESTANTS: dict[tuple[str, str], Contestant] = {}
"""By task and name."""
SUITES: dict[str, Suite] = {}


def contestant(name: str, *tasks: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the ``load`` of a contestant in each task."""

    def register(load: Callable[..., Any]) -> Callable[..., Any]:
        for task in tasks:
            if (task, name) in CONTESTANTS or task not in TASKS:
                raise ValueError(
                    f"contestant {name!r} for {task!r}: registered before, or not one of {TASKS}"
                )
            CONTESTANTS[task, name] = Contestant(name, task, load, **about)
        return load

    return register


def suite(name: str, title: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a suite; ``about`` as in ``Suite``."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        if name in SUITES:
            raise ValueError(f"suite {name!r}: registered before")
        SUITES[name] = Suite(name, title, run, **about)
        return run

    return register


def chosen_contestants(
    task: str, wanted: Sequence[str], options: Options, dtype: torch.dtype
) -> list[Contestant]:
    """Return a task's contestants whose names match a pattern as a whole and contain a requested part."""
    return [
        one
        for one in CONTESTANTS.values()
        if task == one.task
        and any(re.fullmatch(pattern, one.name) for pattern in wanted)
        and (not options.only or any(part in one.name for part in options.only))
        and not (one.only_16_bit and dtype.itemsize > 2)
    ]


# --- the runner

PACKAGES = (
    *("torch", "triton", "trl", "liger-kernel", "transformers", "cut-cross-entropy"),
    *("quack-kernels", "verl", "flash-attn"),
)
PATIENCE = 20.0
"""Seconds; a contestant whose call takes longer is timed once."""
ALLOTTED = 4.0
"""Seconds for all rounds of a contestant in a case; a contestant gets at least three rounds."""
_LEAST = 2e-2
"""Minimum of seconds of one measurement; shorter calls are repeated."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One problem and the contestants that compute it.

    Attributes:
        name: unique in its suite.
        make: device -> problem.
        shape: the shape that tables show.
        wanted: regular expressions for whole names of contestants.
        floor: the weight of each bare operation in the floor.
        bare: problem -> these operations by name, as calls.
        repeats: rounds that count; 0 measures memory only.
        judge: problem -> an object with the method ``verdict``.
    """

    name: str
    make: Callable[[torch.device], Any]
    shape: dict[str, Any]
    wanted: Sequence[str]
    floor: dict[str, float] = field(default_factory=dict)
    bare: Callable[[Any], dict[str, Call]] = lambda problem: {}
    repeats: int = 5
    judge: Callable[[Any], Any] = Judge


class DeviceBroken(RuntimeError):
    """The device stopped working after a contestant's error; ``args`` are its name and the reason."""


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device, the versions and the commit, for the record."""
    found = {"gspo_kernels": gk.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # the version with its build, which the package's metadata lack
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} SMs"
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {capability}"
        if multiplies(torch.bfloat16) and best_instructions(torch.bfloat16) == "amx":
            name += " and AMX"
    commit = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"device": name, "type": device.type, "versions": found, "commit": commit}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """A clock that sets marks: times of the processor, or events in the GPU's stream."""

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
        """Seconds from each mark to the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type != "cuda":
            return [b - a for a, b in pairs]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def peak_of(call: Call, device: torch.device) -> tuple[Any, int | None]:
    """Return what a call returns, and its peak bytes beyond what was allocated; None on a CPU."""
    if device.type != "cuda":
        return call(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return call(), torch.cuda.max_memory_allocated(device) - before


def time_probe(call: Call, device: torch.device) -> float:
    """Return the mean seconds of a probe, which is repeated like a contestant."""
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _LEAST and len(seconds) < 200):
        synchronize(device)
        clock = Clock(device)
        clock.mark()
        call()
        clock.mark()
        seconds += clock.seconds()
    return statistics.mean(seconds)


@dataclass
class Entrant:
    """A contestant in a case.

    Attributes:
        record: its entry in the result file.
        inner: calls per measurement.
        rounds: rounds that it may take.
        warm: whether it takes part in the round that does not count.
    """

    contestant: Contestant
    problem: Any
    call: Call | None = None
    record: dict[str, Any] = field(default_factory=dict)
    inner: int = 1
    rounds: float = math.inf
    warm: bool = True

    @property
    def name(self) -> str:
        """The contestant's name."""
        return self.contestant.name

    @property
    def right(self) -> bool:
        """Whether it may be timed."""
        return bool(self.record["status"] == "right")

    def once(self, device: torch.device, leaves: Any = None) -> tuple[float, float, tuple[Any, ...]]:
        """Call once; return seconds of forward and backward, and (loss, gradients of the leaves)."""
        leaves = leaves or self.problem.leaves(self.contestant.overwrites)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        synchronize(device)
        clock = Clock(device)
        clock.mark()
        loss = self.problem.call(self.call, leaves)
        clock.mark()
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if wanted:
            taken = iter(torch.autograd.grad(loss, wanted))
            gradients = tuple(next(taken) if leaf.requires_grad else None for leaf in leaves)
            self.problem.finish(leaves, gradients)
        clock.mark()
        forward, backward = clock.seconds()
        return forward, backward, (loss.detach(), gradients)

    def judge(self, judge: Any, case: Case, options: Options) -> None:
        """Load the contestant and judge its answer; record the reason if it may not be timed."""
        device, name = options.device, self.name
        if name in options.without:
            self.record.update(status="missing", reason=options.without[name])
            return
        with self.refusal(device):
            try:
                self.call = self.contestant.get(device)
            except Missing as missing:
                self.record.update(status="missing", reason=str(missing))
                return
            self.problem = self.problem.layout(self.contestant.layout)
            (*seconds, results), peak = peak_of(lambda: self.once(device), device)
            verdict = judge.verdict(self.contestant, *results)
            del results
            self.record |= {"errors": verdict.errors, "allowed": verdict.allowed, "share": verdict.share}
            if verdict.complaint:
                self.record.update(status="wrong", reason=verdict.complaint)
                return
            # The first call may have compiled and tuned: measure time and memory of a second one, unless the
            # first was long and compiled nothing.
            compiles = "compile" in name or device.type == "cuda"
            if (case.repeats or peak is not None) and (sum(seconds) < 0.5 or compiles):
                (*seconds, _), peak = peak_of(lambda: self.once(device), device)
            if peak is not None and not options.tiny:
                self.record["peak_bytes"] = peak
            took = max(sum(seconds), 1e-6)
            self.warm = took < 0.5
            self.inner = max(1, min(200, math.ceil(_LEAST / took)))
            self.rounds = 1 if took > PATIENCE else max(3, int(ALLOTTED / took))

    def time(self, device: torch.device) -> dict[str, float]:
        """Return the mean seconds of ``inner`` calls."""
        calls = [self.once(device)[:2] for _ in range(self.inner)]
        forward, backward = (statistics.fmean(phase) for phase in zip(*calls, strict=True))
        return {"forward": forward, "backward": backward, "both": forward + backward}

    @contextmanager
    def refusal(self, device: torch.device) -> Iterator[None]:
        """Record an error of the block; raise DeviceBroken if the device stopped working."""
        try:
            yield
            return
        except Exception as error:
            first = str(error).strip().split("\n")[0][:300]
            reason = f"{type(error).__name__}: {first}"
            self.record.update(status="refused", reason=reason)
        gc.collect()
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise DeviceBroken(self.name, reason) from error


def run_case(case: Case, options: Options) -> dict[str, Any]:
    """Judge, time and measure all contestants; return the record of the case."""
    device = options.device
    problem = case.make(device)
    judge = case.judge(problem)
    everyone = []
    for contestant in chosen_contestants(problem.task, case.wanted, options, problem.inputs[0].dtype):
        record = {
            "contestant": contestant.name, "ours": contestant.ours,
            "precision": contestant.precision,
            "status": "right", "reason": "", "share": None,
        }  # fmt: skip
        everyone.append(Entrant(contestant, problem, record=record))
        everyone[-1].judge(judge, case, options)
    del judge
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    repeats = case.repeats if options.repeats is None or not case.repeats else options.repeats
    bare = case.bare(problem) if repeats and case.floor else {}
    times: dict[str, list[dict[str, float]]] = {entrant.name: [] for entrant in everyone}
    floors = []
    for repeat in range(repeats + 1 if repeats else 0):  # the first round does not count
        probed = {name: time_probe(call, device) for name, call in bare.items()}
        for entrant in everyone[:: 1 if repeat % 2 else -1]:
            if entrant.right and (1 <= repeat <= entrant.rounds or (repeat == 0 and entrant.warm)):
                with entrant.refusal(device):
                    seconds = entrant.time(device)
                    times[entrant.name] += [seconds] if repeat else []
        if repeat:
            floors.append(sum(times_each * probed[name] for name, times_each in case.floor.items()))
    running = [entrant for entrant in everyone if entrant.right and repeats]
    for entrant in running:
        phases = {
            phase: [one[phase] for one in times[entrant.name]] for phase in ("forward", "backward", "both")
        }
        entrant.record["seconds"] = phases
        if case.floor:
            floor = statistics.median(floors)
            entrant.record["x_floor"] = spread([seconds / floor for seconds in phases["both"]])
    if device.type == "cpu" and not options.tiny:
        right = [entrant for entrant in everyone if entrant.right]
        measure_peaks_in_a_process(right, problem)
    return {
        "name": case.name,
        "task": problem.task,
        "shape": case.shape,
        "repeats": repeats,
        "floor": {"probes": case.floor if repeats else {}, "seconds": floors},
        "results": [entrant.record for entrant in everyone],
    }


def run_cases(cases: Sequence[Case], options: Options) -> list[dict[str, Any]]:
    """Run the selected cases; print the table of each."""
    records: list[dict[str, Any]] = []
    for case in cases:
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        records.append(run_case(case, options))
        options.save({"cases": records})
        print(case_table(records[-1]), flush=True)
    return records


# --- peak memory on the CPU (Linux)


def _resident(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


def give_memory_back() -> None:
    """Return large freed blocks to the system, to make resident memory the memory in use."""
    with suppress(OSError, AttributeError):
        for threshold in (-3, -1):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc
            ctypes.CDLL(None).mallopt(threshold, 131072)


def measure_peaks_in_a_process(entrants: Sequence[Entrant], problem: Any) -> None:
    """Record each entrant's peak bytes of resident memory beyond inputs, or the reason if there is none."""
    if not entrants or not Path("/proc/self/clear_refs").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.pt"
        torch.save((problem, [(one.name, one.warm or "compile" in one.name) for one in entrants]), path)
        command = [sys.executable, "-m", "benchmarks", "peaks", str(path)]
        root = Path(__file__).parent.parent
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    peaks = [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("peak_bytes ")]
    for entrant, peak in zip(entrants, peaks, strict=False):
        entrant.record["peak_bytes"] = peak
    for entrant in entrants[len(peaks) :]:
        last = "".join(run.stderr.strip().splitlines()[-1:])
        entrant.record["reason"] = f"no peak memory: exit status {run.returncode} of its process: {last}"


def print_peaks(path: Path) -> None:
    """Print a line with each contestant's peak, that of the second call if the first one warms up."""
    give_memory_back()
    problem, asked = torch.load(path, weights_only=False)
    device = torch.device("cpu")
    for name, twice in asked:
        contestant = CONTESTANTS[problem.task, name]
        entrant = Entrant(contestant, problem.layout(contestant.layout), contestant.get(device))
        if twice:
            entrant.once(device)
        leaves = entrant.problem.leaves(entrant.contestant.overwrites)
        gc.collect()
        memory.release()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        entrant.once(device, leaves)
        print("peak_bytes", _resident("VmHWM") - before, flush=True)
        del leaves
