"""Results with vocabulary or sequences split over ranks: one process's numbers, one set of bits."""

import json
import traceback
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.distributed import agreement, results, traffic
from tests.distributed.ranks import CASES
from tests.forks import in_processes
from tests.test_docs import run

assert {case.__module__ for case, _ in CASES} == {each.__name__ for each in (agreement, results, traffic)}
NAMES = {size: [case.__name__ for case, sizes in CASES if size in sizes] for size in (2, 4)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a function of a group's size: each rank's errors by case. Cases of a size run once, together."""
    folder, known = tmp_path_factory.mktemp("ranks"), {}

    def work(rank):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        size, report = dist.get_world_size(), {}
        for case, sizes in CASES:
            if size in sizes:
                try:
                    case()
                except Exception:
                    report[case.__name__] = traceback.format_exc()
                dist.barrier()
        (folder / f"{size}_{rank}.json").write_text(json.dumps(report))

    def of(size):
        if size not in known:
            in_processes(size, work)
            known[size] = [json.loads((folder / f"{size}_{rank}.json").read_text()) for rank in range(size)]
        return known[size]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("size", "case"), [(size, name) for size in (2, 4) for name in NAMES[size]])
def test_ranks_equal_one_process(reports, size, case):
    failures = [report[case] for report in reports(size) if case in report]
    assert not failures, "".join(failures)


@pytest.mark.slow
def test_the_page_runs_in_two_processes():
    in_processes(2, lambda rank: run("docs/parallel.md"))
