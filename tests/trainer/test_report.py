"""Metrics files, warnings, printed lines, and the plot."""

import json
import math
import resource
import sys
import time
from types import SimpleNamespace

import pytest

from gspo_kernels.plots import plot_progress
from gspo_kernels.trainer.checkpoint import RunDirectory
from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.report import (
    EVALUATION,
    PATIENCE,
    STEP,
    SYMPTOMS,
    Report,
    metrics_line,
    read_metrics,
)
from tests.trainer.conftest import make_accelerator

RECORD = {
    "reward/mean": 0.25, "groups_without_variance": 0.5, "ratio/min": 0.99, "ratio/max": 1.01,
    "clip_fraction/low": 0.1, "clip_fraction/high": 0.2, "entropy": 1.5, "kl/old": 2e-5,
    "tokens_per_second": 1234.0,
}  # fmt: skip


def make_report(tmp_path, steps=20):
    config = TrainConfig(update={"steps": steps}, save_rollouts=True)
    directory = RunDirectory(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    return Report(config, make_accelerator(), directory)


def test_metrics_are_finite_or_null(tmp_path, capsys):
    report, path = make_report(tmp_path), tmp_path / "metrics.jsonl"
    report.begin(None, changed=[], evaluates=False)
    for step in range(4):
        report.step(step, {"a": math.nan, "b": -math.inf, "c": 0.5, "d": None})
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"step": 0, "a": None, "b": None, "c": 0.5, "d": None}
    with path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3]
    kept, discarded = (report.directory.rollouts / f"step_00000{step}.jsonl" for step in (2, 3))
    kept.parent.mkdir()
    for file in (kept, discarded):
        file.touch()
    report.begin(2, changed=["seed: 0 -> 1"], evaluates=False)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]
    assert [*kept.parent.iterdir()] == [kept]
    assert "seed: 0 -> 1" in capsys.readouterr().out and read_metrics(tmp_path / "none.jsonl") == []


def test_a_full_disk_or_a_tracker_never_ends_a_run(tmp_path, monkeypatch, capsys):
    """A file size limit cuts the line of step 2; with room again nothing is missing. Each of two outages is
    reported once. A tracker gets all steps although another one fails.
    """
    report = make_report(tmp_path)
    report.begin(None, changed=[], evaluates=True)

    def fail(values, step):
        if step != 4:
            raise RuntimeError("no server")

    logged = []
    trackers = {"remote": fail, "local": lambda values, step: logged.append(step)}
    trackers = [SimpleNamespace(name=name, log=log) for name, log in trackers.items()]
    monkeypatch.setattr(report.accelerator, "trackers", trackers)
    report.step(1, RECORD | {"step": 1})
    metrics, limit = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = metrics.read_text()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limit[1]))
        report.step(2, RECORD | {"step": 2})
        report.step(3, RECORD | {"step": 3})
        assert metrics.read_text() == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    report.step(4, RECORD | {"step": 4})
    assert [record["step"] for record in map(json.loads, metrics.read_text().splitlines())] == [1, 2, 3, 4]
    report.directory.metrics = tmp_path  # the next outage
    report.step(5, RECORD | {"step": 5})
    said = " ".join(capsys.readouterr().out.split())
    for what, count in (("metrics.jsonl", 2), ("the tracker remote", 2), ("the tracker local", 0)):
        assert said.count(f"warning: {what} cannot be written") == count
    assert logged == [1, 2, 3, 4, 5]
    assert "no server" in said


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_is_a_line_with_the_time_left(tmp_path, monkeypatch, capsys, terminal):
    """Every step on a terminal, otherwise every tenth; the time is that of all steps since the start."""
    report, now = make_report(tmp_path, steps=30), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for step in range(11, 31):  # resumed after step 10
        now[0] += 50.0
        report.step(step, RECORD | {"seconds": 50.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if "reward 0.250" in line]
    shown = [int(line.split()[1].removesuffix("/30")) for line in lines]
    assert shown == ([*range(11, 31)] if terminal else [20, 30])
    for step, line in zip(shown, lines, strict=True):
        assert line.endswith(f" {50 * (30 - step)} s left") and "ratio 0.9900..1.0100" in line
    assert "reward -" in metrics_line({}, STEP) and "greedy -" in metrics_line({}, EVALUATION)


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_peak_memory_in_the_platforms_unit(tmp_path, monkeypatch, platform, unit):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2**30 // unit))
    make_report(tmp_path).step(1, RECORD)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["memory/peak_gib"] == 1.0


FINE = {"reward/mean": 0.5, "groups_without_variance": 0.5, "completions/finished": 0.5}


@pytest.mark.parametrize(
    "symptom",
    [
        {"groups_without_variance": 1.0},
        {"clip_fraction/after_first": 0.97},
        {"minibatch_2/ratio/max": 1.0, "ratio/min": 1.0, "ratio/max": 1.0, "clip_fraction/after_first": 0.0},
        {"completions/finished": 0.0},
        {"reward/mean": None},
        {"updates_left_out": 1.0},
        {"mismatch/mean": 0.5},
        {"mismatch/mean": 1e-6, "mismatch/ratio": 1.2},
    ],
)
def test_warnings_come_after_some_steps_and_once(symptom):
    report = Report(TrainConfig(), None, RunDirectory("unused"))
    steps = [FINE | symptom] * (PATIENCE - 1) + [FINE] + [FINE | symptom] * (PATIENCE + 2)
    if not symptom.keys() & FINE.keys():  # a step that does not measure a symptom leaves its count alone
        unmeasured = [FINE, FINE | dict.fromkeys(symptom)]
        steps = [FINE | symptom] * (PATIENCE - 1) + unmeasured * 2 + [FINE | symptom] * 2
    warnings = [report.symptoms(metrics) for metrics in steps]
    (warning,) = (each for some in warnings for each in some)
    assert SYMPTOMS[next(iter(symptom))][1] in warning


@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")  # of other tests
def test_plot_of_any_run(tmp_path):
    for steps, evaluated in ((0, False), (1, False), (5, True)):
        records = [{"step": 0}]
        for n in range(1, steps + 1):
            records.append(RECORD | {"step": n, "reward/mean": None if n == 3 else n / 40})
        for record in records[::2] if evaluated else ():
            record |= {"mismatch/mean": 0.0}
            record |= {"eval/greedy_reward": 0.5, "eval/sampled_reward": 0.25}
        path = tmp_path / f"plots{steps}{evaluated}" / "progress.png"
        plot_progress(records, path)
        assert path.read_bytes().startswith(b"\x89PNG")
