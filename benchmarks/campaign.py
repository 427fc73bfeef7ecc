"""``python -m benchmarks campaign --out DIR``: tests and suites on a GPU, in nine minutes.

Every stage is a process with a time limit, the most important first. If a stage fails, hangs or loses the
device, this is recorded and the next one starts; a contestant that breaks the device is skipped in a second
try. Unused time is passed on to the next stages, and the report is always written. DIR then contains a JSON
file per suite, reports of pytest, the page, its plots, and ``campaign.json`` with all outcomes.
``--device cpu`` is a dry run on tiny shapes.

Without a network, prepare the tree on a machine with the same processor and the same or an older glibc:

1. ``python setup.py build_ext --inplace`` builds the extension, for every Python and torch from 2.11 on.
2. ``pip download --no-deps --only-binary=:all: --python-version 3.12 --dest wheels NAMES`` fetches missing
   packages: the extra ``train`` with its dependencies, pytest, pytest-xdist, matplotlib, and contestants.
3. There, ``pip install --no-index --no-deps --target site wheels/*.whl`` and then ``PYTHONPATH=site python -m
   benchmarks campaign --out DIR && tar czf DIR.tgz DIR``. The package itself is used from the tree.

The suite ``hidden`` also measures every case with matmuls by tensor maps, and ``fixed`` the batch-invariant
matmul. If they are correct and faster, commit the results and set ``core.self_test.DEFAULT`` to "1".
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
DEVICE_BROKEN = 3
"""Exit status of a run in which a contestant broke the device."""


@dataclass
class Stage:
    """One process and its outcome.

    Attributes:
        name: the stage's name, or that of the suite.
        kind: "tests", "suite" or "report".
        seconds: its share of nine minutes, proportionally less in a shorter campaign; with 0 it runs if
            earlier stages leave ``SPARE`` seconds.
        arguments: after ``pytest``, or after ``python -m benchmarks run NAME``.
        status: "waiting", "done", "failed", "out of time", or "skipped".
    """

    name: str
    kind: str
    seconds: float
    arguments: tuple[str, ...] = ()
    status: str = "waiting"
    reason: str = ""
    took: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)

    def file(self, kind: str) -> str:
        """Return the name of its log or report."""
        return f"{self.name.replace(' ', '_')}.{kind}"


# Tests of backends and kernels, without those that compile for other targets.
_ON_DEVICE = (
    "tests/backends/test_exponentials.py",
    "tests/backends/test_rows.py",
    "tests/backends/test_sequence_ratio.py",
    "tests/test_invariants.py",
    "tests/test_equivalence.py",
    "tests/test_autograd.py",
    "tests/hidden/test_batch_invariance.py",
)
_OURS = ("--contestants", "ours", "naive PyTorch", "torch linear_cross_entropy")
PARALLEL = "--numprocesses=8"
"""Tests spend most of their time on compiling kernels. Those of the trainer are timed, and run alone."""
SPARE = 60.0
"""Minimum of seconds of a stage without a share."""
STOPPING = 5.0
"""Seconds reserved for stopping a stage that is out of time."""


def stages() -> list[Stage]:
    """Return the stages, the most important first."""
    return [
        # without the trainer's file, whose imports take seconds in each of the processes
        Stage("gpu tests", "tests", 40, ("tests/gpu/test_gpu.py", "-k", "not sanitizer", PARALLEL)),
        Stage("trainer", "tests", 60, ("tests/gpu/test_trainer.py",)),
        Stage("profile", "suite", 45),
        Stage("exponentials", "suite", 90),
        Stage("hidden", "suite", 190, _OURS),
        Stage("fixed", "suite", 40),
        Stage("logits", "suite", 25),
        Stage("step", "suite", 20),
        Stage("memory", "suite", 15),
        Stage("sanitizer", "tests", 0, ("tests/gpu/test_gpu.py", "-k", "sanitizer", PARALLEL)),
        Stage("tests on the device", "tests", 0, (*_ON_DEVICE, "-k", "not cpp and not reference", PARALLEL)),
        Stage("report", "report", 15),
    ]


def limit_of(plan: Sequence[Stage], index: int, left: float, minutes: float) -> float:
    """Return a stage's seconds: its share and the unused time of earlier stages."""
    less = min(1.0, 60 * minutes / sum(stage.seconds for stage in plan))
    return left - less * (STOPPING + sum(stage.seconds for stage in plan[index + 1 :]))


def command(stage: Stage, device: str, out: Path) -> list[str]:
    """Return the command line of a stage."""
    if stage.kind == "tests":
        parallel = device == "cuda" and importlib.util.find_spec("xdist")
        words = [word for word in stage.arguments if parallel or word != PARALLEL]
        reports = [f"--junit-xml={out / stage.file('xml')}", f"--results={out}"]
        return [sys.executable, "-m", "pytest", "-q", *reports, *words]
    if stage.kind == "report":
        return [sys.executable, "-m", "benchmarks", "report", "--results", str(out)]
    words = [sys.executable, "-m", "benchmarks", "run", stage.name, "--device", device, "--out", str(out)]
    words += ["--size", "tiny", "--repeats", "1"] if device == "cpu" else []
    without = [f"{name}={reason}" for name, reason in stage.without.items()]
    return [*words, *stage.arguments, *(["--without", *without] if without else [])]


def run_limited(arguments: Sequence[str], limit: float, device: str, log: Path) -> int | None:
    """Run a process; return its exit status, or None if it was stopped, with its children, at the limit."""
    # in a rehearsal, kernels are interpreted and GPU tests run on the CPU
    rehearsal = {"TRITON_INTERPRET": "1", "GSPO_KERNELS_REHEARSE": "1"} if device == "cpu" else {}
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=os.environ | rehearsal, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            # SIGINT first: pytest then still writes its report
            for sign, patience in ((signal.SIGINT, 3.0), (signal.SIGKILL, 10.0)):
                os.killpg(process.pid, sign)
                try:
                    process.wait(timeout=patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return None


def read_tests(stage: Stage, report: Path) -> None:
    """Record the counts and the failures in pytest's report, or why it skipped every test."""
    if not report.exists():
        return
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        return
    stage.tests = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    for case in suite.iter("testcase"):
        found = case.find("failure") if case.find("failure") is not None else case.find("error")
        if found is not None:
            message = (found.get("message") or "").splitlines()
            name = f"{case.get('classname')}::{case.get('name')}"
            stage.failures.append(f"{name}: {' '.join(message[:2])[:300]}")
    if 0 < stage.tests["tests"] == stage.tests["skipped"]:
        # of a file that could not be imported, only the text has the reason, in quotes
        found = {(skip.get("message") or "", skip.text or "") for skip in suite.iter("skipped")}
        reasons = {text[:-2].partition("Skipped: ")[2] or message for message, text in found}
        stage.status, stage.reason = "skipped", "; ".join(sorted(reasons))


def run_stage(stage: Stage, device: str, out: Path, limit: float) -> None:
    """Run a stage and record its outcome in it."""
    start = time.perf_counter()
    log = out / stage.file("log")
    for _ in range(3):
        left = limit - (time.perf_counter() - start)
        code = run_limited(command(stage, device, out), left, device, log)
        record = out / f"{stage.name}.json"
        if code != DEVICE_BROKEN or not record.exists():
            break
        broken = json.loads(record.read_text())["broken"]
        stage.without[broken["by"]] = f"broke the device: {broken['reason']}".replace("=", " ")
    stage.took = round(time.perf_counter() - start, 1)
    stage.status = "out of time" if code is None else "done" if code == 0 else "failed"
    if code is None:
        stage.reason = f"stopped after {limit:.0f} s; what was written until then is kept"
    elif code:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        stage.reason = " | ".join(lines[-3:])[:600]
    if stage.kind == "tests":
        read_tests(stage, out / stage.file("xml"))


def main(out: Path, device: str, minutes: float, chosen: Sequence[Stage] | None = None) -> int:
    """Run all stages within ``minutes``; return 0 regardless of their outcome, 2 without the device."""
    import torch

    from benchmarks.measure import machine

    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; --device cpu rehearses", file=sys.stderr)
        return 2
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about = machine(torch.device(device))
    plan = list(stages() if chosen is None else chosen)
    end = time.perf_counter() + 60 * minutes
    for index, stage in enumerate(plan):
        limit = limit_of(plan, index, end - time.perf_counter(), minutes)
        if stage.kind == "tests" and not importlib.util.find_spec("pytest"):
            stage.status, stage.reason = "skipped", "pytest is not installed"
        elif limit < (1 if stage.seconds else SPARE):
            stage.status, stage.reason = "out of time", "left out: no time left"
        else:
            print(f"{stage.name}: up to {limit:.0f} s", flush=True)
            run_stage(stage, device, out, limit)
        line = f"{stage.name}: {stage.status} in {stage.took} s"
        print(line, *([stage.tests] if stage.tests else []), stage.reason, flush=True)
        record = about | {"rehearsal": device == "cpu", "minutes": minutes}
        record["stages"] = [asdict(one) for one in plan]
        (out / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0
