"""``python -m benchmarks campaign --out DIR``: everything a GPU has to say, in nine minutes.

Stages run one after the other, each a process of its own with a share of the time: first what tells whether
the kernels are right (GPU tests, compute-sanitizer, the package's tests on the device), then the suites, a
sweep of kernel configurations, and the report with its plots. A stage that fails, hangs or loses the device
is recorded, and the rest goes on; a contestant that breaks the device is left out of a second try. What a
stage doesn't use of its time the next ones get, and none gets what is meant for those behind it, so that the
time holds and the report is written whatever happens. DIR then holds a JSON file per suite, pytest's reports,
the page and its plots, and ``campaign.json`` with what happened and what was left out. With ``--device cpu``
the same stages rehearse on tiny shapes.
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
    """One process, and what came of it.

    Attributes:
        name: also the suite's name where ``kind`` is "suite".
        kind: "tests", "suite" or "report".
        seconds: its share of nine minutes; of less time it gets proportionally less.
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


# The tests that take a backend, and the kernels' own. Compiling for other targets is the CPU's business.
_ON_DEVICE = (
    "tests/kernels/test_triton_rows.py",
    "tests/kernels/test_sequence_ratio.py",
    "tests/invariants",
    "tests/equivalence",
)


def stages() -> list[Stage]:
    """Whether the kernels are right, then in the order of what would be missed most."""
    return [
        Stage("gpu tests", "tests", 60, ("tests/gpu", "-k", "not sanitizer")),
        Stage("sanitizer", "tests", 40, ("tests/gpu", "-k", "sanitizer")),
        Stage("tests on the device", "tests", 50, (*_ON_DEVICE, "-k", "not cpp and not reference")),
        Stage("bandwidth", "suite", 45),
        Stage("hidden", "suite", 95),
        Stage("logits", "suite", 50),
        Stage("launches", "suite", 25),
        Stage("scoring", "suite", 35),
        Stage("tuning", "suite", 35),
        Stage("realistic", "suite", 20),
        Stage("step", "suite", 20),
        Stage("memory", "suite", 10),
        Stage("fidelity", "suite", 10),
        Stage("scaling", "suite", 15),
        Stage("report", "report", 20),
    ]


STOPPING = 5.0
"""Seconds of its share in which a stage that is out of time stops."""


def limit_of(plan: Sequence[Stage], index: int, left: float, minutes: float) -> float:
    """Seconds that a stage may take: its share, and what those before it have left; never the others'."""
    less = min(1.0, 60 * minutes / sum(stage.seconds for stage in plan))
    return left - less * (STOPPING + sum(stage.seconds for stage in plan[index + 1 :]))


def command(stage: Stage, device: str, out: Path) -> list[str]:
    """What a stage runs."""
    if stage.kind == "tests":
        report = out / f"{stage.name.replace(' ', '_')}.xml"
        return [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *stage.arguments]
    if stage.kind == "report":
        return [sys.executable, "-m", "benchmarks", "report", "--results", str(out)]
    tiny = ["--size", "tiny", "--repeats", "1", "--no-memory"] if device == "cpu" else []
    without = [f"{name}={reason}" for name, reason in stage.without.items()]
    options = ["--device", device, "--out", str(out), *tiny, *stage.arguments]
    return [
        *(sys.executable, "-m", "benchmarks", "run", stage.name),
        *options,
        *(["--without", *without] if without else []),
    ]


def environment(device: str) -> dict[str, str]:
    """In a rehearsal, kernels are interpreted and GPU tests run on the CPU."""
    rehearsal = {"TRITON_INTERPRET": "1", "GSPO_KERNELS_REHEARSE": "1"} if device == "cpu" else {}
    return os.environ | rehearsal


def run_limited(arguments: Sequence[str], limit: float, device: str, log: Path) -> int | None:
    """Exit status of a process that is stopped, with its children, after ``limit`` seconds: then None."""
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(device), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            # first politely: pytest then still writes its report
            for sign, patience in ((signal.SIGINT, 3.0), (signal.SIGKILL, 10.0)):
                os.killpg(process.pid, sign)
                try:
                    process.wait(timeout=patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return None


def read_tests(stage: Stage, report: Path) -> None:
    """Counts and names of failures from pytest's report."""
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
            stage.failures.append(
                f"{case.get('classname')}::{case.get('name')}: {' '.join(message[:2])[:300]}"
            )


def run_stage(stage: Stage, device: str, out: Path, limit: float) -> None:
    """Run a stage and fill in what came of it."""
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
    """Run all stages within ``minutes``; 0 whatever came of them, 2 without the device."""
    import torch

    from benchmarks.measure import machine

    if device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device here: torch.cuda.is_available() is False; --device cpu rehearses", file=sys.stderr
        )
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
            print(
                f"  {stage.status} in {stage.took} s {stage.tests or ''} {stage.reason}".rstrip(), flush=True
            )
        record = {
            **about,
            "rehearsal": device == "cpu",
            "minutes": minutes,
            "stages": [asdict(s) for s in plan],
        }
        (out / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0
