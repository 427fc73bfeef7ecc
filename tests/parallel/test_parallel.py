"""The same numbers with the vocabulary or the sequences cut up, and the same bits on all ranks."""

import pytest

from tests.forks import in_processes
from tests.parallel.processes import run_cases
from tests.parallel.ranks import cases_of
from tests.test_docs import run

MODULES = (
    "agreement",
    "vocabulary",
    "vocabulary_ids",
    "vocabulary_teachers",
    "vocabulary_traffic",
    "sequences",
    "sequences_traffic",
)


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
@pytest.mark.parametrize("page", ["docs/parallel.md", "docs/integrations/parts.md"])
def test_the_page_runs_in_two_processes(page):
    in_processes(2, lambda rank: run(page))
