"""The same numbers with the vocabulary or the sequences cut up, and the same bits on all ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.processes import run_cases
from tests.parallel.ranks import cases_of
from tests.test_readme import blocks

MODULES = ("vocabulary", "vocabulary_ids", "vocabulary_traffic", "sequences", "sequences_traffic")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return run_cases(2, tmp_path_factory.mktemp("gloo"), MODULES)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return run_cases(4, tmp_path_factory.mktemp("gloo"), MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(2, MODULES))
def test_two_ranks_equal_one_process(of_two, case):
    assert not of_two[case], of_two[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(4, MODULES))
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
