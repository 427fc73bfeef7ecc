"""The workflow files: each step can be run by hand, each action is pinned, each version is supported."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from release.version import tomllib

ROOT = Path(__file__).parent.parent
TEXTS = {path.stem: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {(name, job): about for name, one in WORKFLOWS.items() for job, about in one["jobs"].items()}
STEPS = [(name, job, step) for (name, job), about in JOBS.items() for step in about["steps"]]
RUN = {step["run"]: JOBS[name, job] for name, job, step in STEPS if "run" in step}
MATRIX = re.compile(r"\$\{\{ matrix\.(\w+) \}\}")
MAKE = shutil.which("make")


@pytest.mark.skipif(MAKE is None, reason="needs make")
@pytest.mark.parametrize("command", RUN)
def test_a_step_is_a_make_target(command):
    make, target, *_ = command.split()
    makefile = (ROOT / "Makefile").read_text()
    assert make == "make" and re.search(rf"^\.PHONY: .*\b{target}\b", makefile, re.MULTILINE)
    for name in re.findall(r" (\w+)=", command):
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile has no variable {name}"
    for name in MATRIX.findall(command):
        assert name in RUN[command]["strategy"]["matrix"]
    subprocess.run([MAKE, "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.skipif(MAKE is None, reason="needs make")
def test_the_makefile_offers_every_command_of_a_release():
    command = [MAKE, "-n", "dist", "KINDS=pure", "TAG=v9"]
    environment = os.environ | {"MAKEFLAGS": ""}
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    for command in ("version --tag v9", "build pure --out dist", "check --out dist", "install --out dist"):
        assert f"-m release {command}" in said.stdout


def test_actions_are_pinned_to_a_commit_and_say_its_version():
    pins = {}
    for line in "".join(TEXTS.values()).splitlines():
        if "uses:" in line:
            found = re.search(r"uses: ([\w./-]+)@([0-9a-f]{40} # v\d+(?:\.\d+)*)$", line)
            assert found, line
            assert pins.setdefault(found[1], found[2]) == found[2], line


def test_nobody_may_write_but_who_publishes():
    assert all(one["permissions"] == {"contents": "read"} for one in WORKFLOWS.values())
    writing = {key: set(job["permissions"]) for key, job in JOBS.items() if "permissions" in job}
    assert writing == {("docs", "publish"): {"pages", "id-token"}, ("release", "publish"): {"id-token"}}
    assert JOBS["release", "publish"]["needs"] == "try"
    assert "secrets." not in "".join(TEXTS.values())


def test_versions_are_served_and_written_as_strings():
    """In YAML, 3.10 without quotes is the number 3.1. The oldest versions and the pinned one are tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons, torches = SpecifierSet(project["requires-python"]), SpecifierSet(project["dependencies"][0][5:])
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    oldest = f"{project['dependencies'][0].removeprefix('torch>=')}.0"
    matrices = [job["strategy"]["matrix"] for job in JOBS.values() if "strategy" in job]
    chosen = [step.get("with", {}).get("python-version", "3.10") for *_, step in STEPS]
    for version in [*chosen, *(version for matrix in matrices for version in matrix.get("python", []))]:
        assert isinstance(version, str) and (MATRIX.fullmatch(version) or pythons.contains(version)), version
    for matrix in (matrix for matrix in matrices if "torch" in matrix):
        for version in matrix["torch"]:
            assert isinstance(version, str) and torches.contains(version), version
        assert {pinned, oldest} <= {*matrix["torch"]} and "3.10" in matrix["python"]


@pytest.mark.slow
def test_the_tests_run_where_there_is_no_triton(tmp_path):
    """As on macOS: tests that need no Triton run without it."""
    (tmp_path / "hide_triton.py").write_text("import sys\n\nsys.modules['triton'] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    options = ["-m", "pytest", "-p", "hide_triton", "-p", "no:xdist", "tests/test_normalizer.py"]
    command = [sys.executable, *options]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert re.search(r"^\d+ passed in", result.stdout, re.MULTILINE), result.stdout + result.stderr
