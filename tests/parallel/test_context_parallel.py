"""Context parallelism: the same numbers with sequences cut up, and the same bits on all ranks."""

import pytest

from tests.parallel.context_parallel import CASES
from tests.parallel.processes import run_cases


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return run_cases("tests.parallel.context_parallel", 2, tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return run_cases("tests.parallel.context_parallel", 4, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES[2]])
def test_two_ranks_equal_one_process(of_two, case):
    assert not of_two[case], of_two[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES[4]])
def test_four_ranks_equal_one_process(of_four, case):
    assert not of_four[case], of_four[case]
