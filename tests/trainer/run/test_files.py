"""Checkpoints: all or nothing, and the directory of a run is never lost by accident."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.checkpoint import random_state, set_random_state
from gspo_kernels.trainer.run.files import RunDirectory, write_directory
from tests.forks import forked


def writer(text):
    def write(path):
        (path / "inner").mkdir()
        (path / "inner" / "a.txt").write_text(text)

    return write


def test_newest_checkpoints_are_kept(tmp_path):
    run = RunDirectory(tmp_path)
    run.prepare(resume=False, overwrite=False)
    assert run.latest_checkpoint() is None
    for step in (5, 20, 100):
        run.save_checkpoint(step, writer(str(step)), keep=2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000020", "step_000100"]
    assert (run.latest_checkpoint() / "inner" / "a.txt").read_text() == "100"


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("moment", ["while writing", "before the rename"])
def test_a_kill_while_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch, moment, same_step):
    run = RunDirectory(tmp_path)
    run.prepare(resume=False, overwrite=False)
    run.save_checkpoint(1, writer("whole"), keep=1)

    def write(path):
        writer("half")(path)
        if moment == "while writing":
            raise Killed

    if moment == "before the rename":
        monkeypatch.setattr("pathlib.Path.rename", lambda *args: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        run.save_checkpoint(1 if same_step else 2, write, keep=1)
    monkeypatch.undo()
    run.release()  # as the system does for a process that is gone
    again = RunDirectory(tmp_path)
    again.prepare(resume=True, overwrite=False)
    assert again.latest_checkpoint().name == "step_000001"
    assert (again.latest_checkpoint() / "inner" / "a.txt").read_text() == "whole"
    assert [path.name for path in again.checkpoints.iterdir()] == ["step_000001"], "leftovers are removed"


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    final = tmp_path / "model"
    write_directory(final, writer("old"))
    (final / "stale").write_text("")
    write_directory(final, writer("new"))
    assert [path.name for path in final.iterdir()] == ["inner"]
    assert (final / "inner" / "a.txt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_is_never_lost_by_accident(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(RunDirectoryError, match="no run"):
        run.prepare(resume=True, overwrite=False)
    run.prepare(resume=False, overwrite=False)
    run.metrics.write_text("{}\n")
    run.save_checkpoint(1, writer("1"), keep=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"--resume.*--overwrite"):
        run.prepare(resume=False, overwrite=False)
    with pytest.raises(RunDirectoryError, match="exclude"):
        run.prepare(resume=True, overwrite=True)
    run.prepare(resume=True, overwrite=False)
    assert run.metrics.exists() and run.latest_checkpoint() is not None
    run.prepare(resume=False, overwrite=True)
    assert not run.metrics.exists() and run.latest_checkpoint() is None
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_no_run_wrote_is_never_touched(tmp_path):
    """A base model lies where the run is to go, under the names that a run would use."""
    (tmp_path / "config.yaml").write_text("mine")
    writer("mine")(tmp_path)
    (tmp_path / "inner").rename(tmp_path / "model")
    for choice in ({"resume": True}, {"overwrite": True}, {}):
        choice = {"resume": False, "overwrite": False} | choice
        with pytest.raises(RunDirectoryError, match=r"no run"):
            RunDirectory(tmp_path).prepare(**choice)
    with pytest.raises(RunDirectoryError, match=r"holds config.yaml, model, and no run wrote that"):
        RunDirectory(tmp_path).prepare(resume=False, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "model"]
    assert (tmp_path / "config.yaml").read_text() == (tmp_path / "model" / "a.txt").read_text() == "mine"


def test_one_process_at_a_time_and_a_dead_one_keeps_nothing(tmp_path):
    reader, sender = os.pipe()

    def hold():
        with RunDirectory(tmp_path) as run:
            run.prepare(resume=False, overwrite=False)
            run.metrics.write_text("{}\n")
            os.write(sender, b"x")
            time.sleep(600)

    child = forked(hold)
    try:
        os.read(reader, 1)
        for choice in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
            with pytest.raises(RunDirectoryError, match="another process works on the run"):
                RunDirectory(tmp_path).prepare(**choice)
        assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with RunDirectory(tmp_path) as run:
        run.prepare(resume=True, overwrite=False)


def test_random_states_survive_a_file(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    np.random.randn()  # leaves half a pair of normals behind
    torch.save(random_state(), tmp_path / "state.pt")
    first = draw()
    assert draw() != first
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first
