"""The workflow files: each step can be run by hand, each action is pinned, each version is served."""

import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from release.version import tomllib

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
JOBS = {(name, job): about for name, one in WORKFLOWS.items() for job, about in one["jobs"].items()}
STEPS = [(*key, step) for key, job in JOBS.items() for step in job["steps"]]
COMMANDS = [(name, step["run"]) for name, _, step in STEPS if "run" in step]
MATRIX = re.compile(r"\$\{\{ matrix\.(\w+) \}\}")
PIN = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+(?:\.\d+)*)$")


def test_there_is_a_workflow_for_each_occasion():
    assert set(WORKFLOWS) == {"tests", "gpu", "docs", "release"}
    # YAML reads the key "on" as true
    assert {name: set(one[True]) for name, one in WORKFLOWS.items()} == {
        "tests": {"push", "pull_request"},
        "docs": {"push", "pull_request"},
        "gpu": {"schedule", "workflow_dispatch"},
        "release": {"push"},
    }


@pytest.mark.parametrize(("workflow", "command"), COMMANDS, ids=lambda value: value)
def test_a_step_is_a_make_target(workflow, command):
    words = command.split()
    assert words[0] == "make" and words[1] in re.search(r"\.PHONY: (.*)\n\.PHONY: (.*)", MAKEFILE)[0].split()
    for name in re.findall(r" (\w+)=", command):
        assert re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE), f"the Makefile has no variable {name}"
    for name in MATRIX.findall(command):
        jobs = [job for (where, _), job in JOBS.items() if where == workflow and "strategy" in job]
        assert any(name in job["strategy"]["matrix"] for job in jobs)
    if shutil.which("make") is None:
        pytest.skip("needs make")
    subprocess.run(["make", "-n", words[1]], cwd=ROOT, check=True, capture_output=True)


def test_actions_are_pinned_to_a_commit_and_say_its_version():
    pins = {}
    for path in FILES:
        for line in path.read_text().splitlines():
            if "uses:" in line:
                found = PIN.search(line)
                assert found, f"{path.name}: {line.strip()}"
                pins.setdefault(found[1], set()).add(found.groups()[1:])
    assert {action: len(found) for action, found in pins.items()} == dict.fromkeys(pins, 1)
    assert "pypa/gh-action-pypi-publish" in pins


def test_nobody_may_write_but_who_publishes():
    allowed = {("docs", "publish"): {"pages", "id-token"}, ("release", "publish"): {"id-token"}}
    assert all(one["permissions"] == {"contents": "read"} for one in WORKFLOWS.values())
    writing = {key: set(job["permissions"]) for key, job in JOBS.items() if "permissions" in job}
    assert writing == allowed
    assert "secrets." not in "".join(path.read_text() for path in FILES)
    assert all(("uses" in step) != ("run" in step) for *_, step in STEPS)
    for (name, _), job in JOBS.items():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= WORKFLOWS[name]["jobs"].keys()
    assert JOBS["release", "publish"]["needs"] == "try"


def test_versions_are_served_and_written_as_strings():
    """In YAML, 3.10 without quotes is the number 3.1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons, torches = SpecifierSet(project["requires-python"]), SpecifierSet(project["dependencies"][0][5:])
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    matrices = [job["strategy"]["matrix"] for job in JOBS.values() if "strategy" in job]
    single = [
        step["with"]["python-version"] for *_, step in STEPS if "python-version" in step.get("with", {})
    ]
    for version in chain(single, *(matrix.get("python", []) for matrix in matrices)):
        assert isinstance(version, str) and (MATRIX.fullmatch(version) or pythons.contains(version)), version
    for matrix in matrices:
        for version in matrix.get("torch", []):
            assert isinstance(version, str) and torches.contains(version), version
        if "torch" in matrix:
            assert pinned in matrix["torch"] and "3.10" in matrix["python"]
            assert f"{project['dependencies'][0].removeprefix('torch>=')}.0" in matrix["torch"]


def test_the_tests_run_where_there_is_no_triton(tmp_path):
    """On macOS: what needs Triton is skipped, and nothing else."""
    (tmp_path / "hide_triton.py").write_text("import sys\n\nsys.modules['triton'] = None\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    options = ["-m", "pytest", "-p", "hide_triton", "-p", "no:xdist", "tests/test_normalizer.py"]
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert re.search(r"^\d+ passed in", result.stdout, re.MULTILINE), result.stdout + result.stderr
