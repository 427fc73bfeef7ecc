"""Tensor parallelism: the same numbers with the vocabulary cut up, and the same bits on all ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.processes import run_cases
from tests.parallel.tensor_parallel import CASES
from tests.test_readme import blocks


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return run_cases("tests.parallel.tensor_parallel", 2, tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return run_cases("tests.parallel.tensor_parallel", 4, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES[2]])
def test_two_ranks_equal_one_process(of_two, case):
    assert not of_two[case], of_two[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES[4]])
def test_four_ranks_equal_one_process(of_four, case):
    assert not of_four[case], of_four[case]


@pytest.mark.slow
def test_the_page_runs_in_two_processes(tmp_path):
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks("docs/parallel.md")))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, *command], check=True, cwd=root, env=environment, timeout=200)
