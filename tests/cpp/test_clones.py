"""Each clone of the C++ loops is as exact as the one that the loader picks here, which other tests run."""

import platform
import subprocess
import sys

import pytest

from tests.cpp.clones import CLONES, ROOT, build, runs_here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="there are clones for x86-64 alone"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clones") / "tree"


@pytest.mark.parametrize("clone", CLONES)
def test_each_clone_is_within_budget(clone, folder):
    if not runs_here(clone):
        pytest.skip(f"this processor does not run {clone}")
    if not any(runs_here(newer) for newer in CLONES[CLONES.index(clone) + 1 :]):
        pytest.skip(f"the loader picks {clone} here, so that every other test runs it")
    tests = [f"tests/cpp/test_{name}.py" for name in ("rows", "row_edges", "tokens")]
    chosen = ["-k", "counted_tokens or 2049 or temperature_per_row or far_from_zero or 16_bit"]
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--extension={build(clone, folder)}"]
    command = [sys.executable, "-m", "pytest", *options, *tests, *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
