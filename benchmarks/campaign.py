"""``python -m benchmarks campaign --out DIR``: tests and suites on a GPU, in nine minutes.

Every stage is a process with a share of the time: first the tests (GPU tests, compute-sanitizer, the tests of
the package on the device), then the suites, and at last the page with its plots. If a stage fails, hangs or
loses the device, that is recorded and the next one starts; a contestant that breaks the device is left out of
a second try. Time that a stage does not use goes to the next ones; no stage gets the time of those after it,
so the report is always written. DIR then holds a JSON file per suite, reports of pytest, the page, its plots,
and ``campaign.json`` with all outcomes. With ``--device cpu`` the same stages rehearse on tiny shapes.
"""

from __future__ import annotations

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
_DEVICE_BROKEN = 3


@dataclass
class Stage:
    """One process and its outcome.

    Attributes:
        name: also the suite's name where ``kind`` is "suite".
        kind: "tests", "suite" or "report".
        seconds: its share of nine minutes; in a shorter campaign proportionally less.
        arguments: after ``pytest``, or after ``python -m benchmarks run NAME``.
        status: "waiting", "done", "failed", "out of time" or "skipped".
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


# Tests of backends and of kernels. Tests that compile for other targets need no GPU and are left out.
_ON_DEVICE = (
    "tests/kernels/test_rows.py",
    "tests/kernels/test_sequence_ratio.py",
    "tests/test_invariants.py",
    "tests/test_equivalence.py",
    "tests/test_batch_invariance.py",
)


def stages() -> list[Stage]:
    """Return the tests, then the suites, the most important first: an early end loses the last ones."""
    return [
        Stage("gpu tests", "tests", 55, ("tests/gpu", "-k", "not sanitizer")),
        Stage("sanitizer", "tests", 55, ("tests/gpu", "-k", "sanitizer")),
        Stage("tests on the device", "tests", 65, (*_ON_DEVICE, "-k", "not cpp and not reference")),
        Stage("logits", "suite", 80),
        Stage("hidden", "suite", 160),
        Stage("step", "suite", 45),
        Stage("memory", "suite", 35),
        Stage("report", "report", 15),
    ]


STOPPING = 5.0
"""Seconds reserved for stopping a stage that is out of time."""


def limit_of(plan: Sequence[Stage], index: int, left: float, minutes: float) -> float:
    """Return a stage's seconds: its own share and what earlier stages left over, no later stage's share."""
    less = min(1.0, 60 * minutes / sum(stage.seconds for stage in plan))
    return left - less * (STOPPING + sum(stage.seconds for stage in plan[index + 1 :]))


def command(stage: Stage, device: str, out: Path) -> list[str]:
    """Return the command line of a stage."""
    if stage.kind == "tests":
        report = out / f"{stage.name.replace(' ', '_')}.xml"
        # compiling kernels takes most of the time
        workers = ["--numprocesses=8"] if device == "cuda" else []
        return [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *workers, *stage.arguments]
    if stage.kind == "report":
        return [sys.executable, "-m", "benchmarks", "report", "--results", str(out)]
    words = [sys.executable, "-m", "benchmarks", "run", stage.name, "--device", device, "--out", str(out)]
    words += ["--size", "tiny", "--repeats", "1", "--no-memory"] if device == "cpu" else []
    without = [f"{name}={reason}" for name, reason in stage.without.items()]
    return [*words, *stage.arguments, *(["--without", *without] if without else [])]


def environment(device: str) -> dict[str, str]:
    """Return the environment; in a rehearsal, kernels are interpreted and GPU tests run on the CPU."""
    rehearsal = {"TRITON_INTERPRET": "1", "GSPO_KERNELS_REHEARSE": "1"} if device == "cpu" else {}
    return os.environ | rehearsal


def run_limited(arguments: Sequence[str], limit: float, device: str, log: Path) -> int | None:
    """Run a process; return its exit status, or None if it was stopped, with its children, at the limit."""
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(device), stdout=file, stderr=subprocess.STDOUT,
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
    """Record the counts and the failures in pytest's report."""
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


def run_stage(stage: Stage, device: str, out: Path, limit: float) -> None:
    """Run a stage and record its outcome in it."""
    start = time.perf_counter()
    log = out / f"{stage.name.replace(' ', '_')}.log"
    for _ in range(3):
        left = limit - (time.perf_counter() - start)
        code = run_limited(command(stage, device, out), left, device, log)
        record = out / f"{stage.name}.json"
        if code != _DEVICE_BROKEN or not record.exists():
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
        read_tests(stage, out / f"{stage.name.replace(' ', '_')}.xml")


def main(out: Path, device: str, minutes: float, chosen: Sequence[Stage] | None = None) -> int:
    """Run all stages within ``minutes``; return 0 whatever their outcome, 2 without the device."""
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
        if limit < 1:
            stage.status, stage.reason = "skipped", "left out: no time left"
        else:
            print(f"{stage.name}: up to {limit:.0f} s", flush=True)
            run_stage(stage, device, out, limit)
            line = f"  {stage.status} in {stage.took} s {stage.tests or ''} {stage.reason}"
            print(line.rstrip(), flush=True)
        record = about | {"rehearsal": device == "cpu", "minutes": minutes}
        record["stages"] = [asdict(one) for one in plan]
        (out / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0
