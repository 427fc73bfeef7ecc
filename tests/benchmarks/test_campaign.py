"""A campaign continues if its stages fail, hang or break the device, within its time limit."""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks import __main__ as command_line
from benchmarks import campaign, report
from benchmarks.measure import SUITES

ROOT = Path(__file__).parent.parent.parent


def script(text):
    return [sys.executable, "-c", text]


STAGES = {
    "passes": "",
    "fails": "raise SystemExit('the reason')",
    "hangs": "import subprocess; subprocess.run(['sleep', '30'])",
}


def test_a_campaign_survives_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "command", lambda stage, device, out: script(STAGES[stage.name]))
    plan = [campaign.Stage(name, "suite", 5.0) for name in ("hangs", "fails", "passes")]
    plan.append(campaign.Stage("left out", "suite", 0))
    start = time.perf_counter()
    assert campaign.main(tmp_path, "cpu", 0.3, plan) == 0
    assert time.perf_counter() - start < 40
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert record["rehearsal"] and record["versions"]["torch"] == torch.__version__
    found = {stage["name"]: stage for stage in record["stages"]}
    assert {name: stage["status"] for name, stage in found.items()} == {
        "fails": "failed", "hangs": "out of time", "passes": "done", "left out": "out of time",
    }  # fmt: skip
    assert "the reason" in found["fails"]["reason"]
    rows = report.campaign_table(tmp_path).splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == [stage.name for stage in plan]
    assert "failed" in rows[3] and "the reason" in rows[3]


def test_a_contestant_that_breaks_a_device_is_skipped(tmp_path, monkeypatch):
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


def test_stages_name_suites_and_files():
    plan = campaign.stages()
    assert {stage.name for stage in plan if stage.kind == "suite"} <= SUITES.keys()
    files = {word for stage in plan for word in stage.arguments if word.startswith("tests/")}
    assert files and all((ROOT / path).exists() for path in files)


def test_failures_in_reports_of_tests_are_read(tmp_path):
    path = tmp_path / "report.xml"
    cases = {"a": "", "b": '<failure message="1 != 2"/>', "c": '<error message="no fixture"/>'}
    lines = "".join(f'<testcase classname="m" name="{name}">{x}</testcase>' for name, x in cases.items())
    counts = 'tests="3" failures="1" errors="1" skipped="0"'
    path.write_text(f"<testsuites><testsuite {counts}>{lines}</testsuite></testsuites>")
    stage = campaign.Stage("gpu tests", "tests", 1.0)
    campaign.read_tests(stage, path)
    assert stage.tests == {"tests": 3, "failures": 1, "errors": 1, "skipped": 0}
    assert stage.failures == ["m::b: 1 != 2", "m::c: no fixture"]
