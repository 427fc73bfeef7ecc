"""Context parallelism: the same numbers with sequences cut up, and the same bits on all ranks."""

import pytest

from tests.parallel.context_parallel import CASES
from tests.parallel.processes import run_cases


@pytest.fixture(scope="module", params=(2, 4))
def said(request, tmp_path_factory):
    module = "tests.parallel.context_parallel"
    return run_cases(module, request.param, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_ranks_equal_one_process(said, case):
    assert not said[case], said[case]
