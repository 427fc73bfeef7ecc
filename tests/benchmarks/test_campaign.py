"""A campaign that survives whatever its stages do, and what only it measures."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import bandwidth, campaign, launches
from benchmarks.registry import SUITES, Options

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="full sizes are for the campaign")
def test_bandwidth_is_that_of_the_bytes_that_must_move(monkeypatch):
    def broken(rows):
        raise RuntimeError("does not compile")

    walks = {walk.name: walk for walk in bandwidth.WALKS}
    chosen = [walks["log-probs, bf16"], walks["backward, fp32 to bf16 in place"], walks["scale, bf16"]]
    monkeypatch.setattr(bandwidth, "WALKS", [*chosen, replace(chosen[0], name="broken", call=broken)])
    lines = bandwidth.bandwidth(Options(torch.device("cpu"), "tiny"))["lines"]
    assert [line.get("bytes", 0) / (6 * 300) for line in lines] == [2, 6, 4, 0]
    assert lines[-1]["missing"] == "RuntimeError: does not compile"
    for line in lines[:-1]:
        assert line["share_of_a_copy"] == pytest.approx(line["bandwidth"] / line["copy_bandwidth"])


def test_operators_of_a_step_are_counted():
    x, steps = torch.randn(3), []

    def step():
        steps.append(x.exp())

    found = launches.counted(step, torch.device("cpu"))
    assert len(steps) == 2 and found["operators"] == 1 and found["kernels"] == found["waits"] == 0


def test_every_step_whose_launches_are_counted_runs():
    names = []
    for name, step in launches.steps(Options(torch.device("cpu"), "tiny")):
        names.append(name)
        assert all(gradient.isfinite().all() for gradient in step())
    assert len(names) == 21


def script(text):
    return [sys.executable, "-c", text]


def test_a_hanging_stage_is_stopped_with_its_children(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = time.perf_counter()
    assert campaign.run_limited(script(child), 1.0, "cpu", tmp_path / "log") is None
    assert time.perf_counter() - start < 20


STAGES = {
    "passes": "",
    "fails": "raise SystemExit('the reason')",
    "hangs": "import time; time.sleep(60)",
}


def test_a_campaign_goes_on_whatever_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "command", lambda stage, device, out: script(STAGES[stage.name]))
    plan = [campaign.Stage(name, "suite", 5.0) for name in ("hangs", "fails", "passes")]
    assert campaign.main(tmp_path, "cpu", 0.4, plan) == 0
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert record["rehearsal"] and record["versions"]["torch"] == torch.__version__
    found = {stage["name"]: stage for stage in record["stages"]}
    assert {name: stage["status"] for name, stage in found.items()} == {
        "fails": "failed", "hangs": "out of time", "passes": "done",
    }  # fmt: skip
    assert "the reason" in found["fails"]["reason"]


def test_who_breaks_the_device_is_left_out_of_the_next_try(tmp_path, monkeypatch):
    asked = []

    def command(stage, device, out):
        asked.append(dict(stage.without))
        if len(asked) == 1:
            broken = {"broken": {"by": "rough kernel", "reason": "illegal access"}}
            (tmp_path / "hidden.json").write_text(json.dumps(broken))
            return script(f"raise SystemExit({command_line.DEVICE_BROKEN})")
        return script("")

    monkeypatch.setattr(campaign, "command", command)
    stage = campaign.Stage("hidden", "suite", 30.0)
    campaign.run_stage(stage, "cpu", tmp_path, 30.0)
    assert asked == [{}, {"rough kernel": "broke the device: illegal access"}]
    assert stage.status == "done"


def test_reports_of_tests_are_read(tmp_path):
    tests, xml = tmp_path / "test_it.py", tmp_path / "report.xml"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'no'\ndef test_c(): pytest.skip('x')"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={xml}", str(tests)]
    subprocess.run([*command, "--rootdir", str(tmp_path)], capture_output=True, check=False)
    stage = campaign.Stage("gpu tests", "tests", 1.0)
    campaign.read_tests(stage, xml)
    assert stage.tests == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    assert len(stage.failures) == 1 and "test_b" in stage.failures[0] and "no" in stage.failures[0]


@pytest.mark.parametrize("minutes", (2.0, 9.0, 30.0))
@pytest.mark.parametrize("hanging", (True, False))
def test_the_time_holds_whatever_the_stages_do(minutes, hanging):
    plan, left, less = campaign.stages(), 60 * minutes, min(1.0, minutes / 9)
    for index, stage in enumerate(plan):
        limit = campaign.limit_of(plan, index, left, minutes)
        assert limit >= 0.99 * less * (stage.seconds - campaign.STOPPING) > 0, stage.name
        left -= limit + less * campaign.STOPPING if hanging else 0.5 * less
    assert left > -1e-6


def test_the_stages_fit_into_nine_minutes():
    plan = campaign.stages()
    assert sum(stage.seconds for stage in plan) <= 540
    assert [stage.kind for stage in plan][:3] == ["tests"] * 3 and plan[-1].kind == "report"
    for stage in plan:
        words = campaign.command(stage, "cuda", Path("out"))
        if stage.kind == "suite":
            assert stage.name in SUITES and words[words.index("--device") + 1] == "cuda"
        for path in (word for word in stage.arguments if word.startswith("tests/")):
            assert (ROOT / path).exists(), path
