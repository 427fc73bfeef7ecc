"""Two processes that share the vocabulary, timed beside one."""

import json
import os

import pytest

from benchmarks import __main__ as command_line
from benchmarks import ranks


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are given to processes on Linux only")
def test_both_kinds_are_judged_and_take_turns(tmp_path):
    options = ["--size", "tiny", "--repeats", "2", "--out", str(tmp_path)]
    assert command_line.main(["run", "ranks", *options]) == 0
    record = json.loads((tmp_path / "ranks.json").read_text())
    assert {len(seconds) for seconds in record["seconds"].values()} == {2}
    assert set(record["seconds"]) == set(ranks.KINDS) and len(record["ratios"]) == 2
    assert record["ratio"] > 0 and all(ratio > 0 for ratio in record["ratios"])


def test_an_answer_that_is_off_has_no_time(monkeypatch):
    """The gate, on made-up steps."""
    found = {"seconds": 1.0, "loss": -1.0, "hidden": 2.0, "weight": 3.0}
    steps = iter([found, found | {"weight": 3.001}])
    monkeypatch.setattr(ranks, "step", lambda workers: next(steps))
    monkeypatch.setattr(ranks, "Worker", FakeWorker)
    with pytest.raises(RuntimeError, match=r"weight: 3\.001 on 2 ranks, 3\.0 on one"):
        command_line.main(["run", "ranks", "--size", "tiny"])


class FakeWorker:
    """Has no process."""

    def __init__(self, *_):
        self.process = self

    def kill(self):
        pass

    def wait(self):
        pass
