"""A run's directory: checkpoints are whole or absent; exact restarts after kill -9, signals, full disks."""

import os
import random
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer.checkpoint import RunDirectory, defer_signals, load_state
from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.report import read_metrics
from tests.draws import shifted_seed
from tests.forks import exit_code, forked
from tests.trainer.conftest import ROWS, make_trainer, same, small_config, untimed, weights

INPUTS = {"rows": "the same"}


def prepare(run, *, resume=False, overwrite=False, force=False):
    run.open(TrainConfig(), INPUTS, resume=resume, overwrite=overwrite, force=force)


def save(run, step, text):
    state = {"step": step, "inputs": INPUTS, "text": text}
    run.save_checkpoint(state, {"weights/a": torch.ones(2)}, keep=1)


class Killed(BaseException):
    """An exception in place of the end of the process."""


@pytest.mark.parametrize(
    ("moment", "same_step"),
    [
        ("while writing", True),
        ("before the renames", False),
        ("before the renames", True),
        ("between the renames", True),
    ],
)
def test_a_kill_while_saving_keeps_a_checkpoint(tmp_path, monkeypatch, moment, same_step):
    run = RunDirectory(tmp_path)
    prepare(run)
    save(run, 1, "whole")

    def kill(*_, **__):
        raise Killed

    renames = iter([Path.rename, kill] if moment == "between the renames" else [kill])
    if moment == "while writing":
        monkeypatch.setattr("torch.distributed.checkpoint.save", kill)
    else:
        limited = partial(monkeypatch.setattr, Path, "rename", lambda *paths: next(renames)(*paths))
        monkeypatch.setattr("os.sync", limited)
    with pytest.raises(Killed):
        save(run, 1 if same_step else 2, "half")
    monkeypatch.undo()
    run.__exit__()  # The system releases the lock of a dead process.
    again = RunDirectory(tmp_path)
    prepare(again, resume=True)
    assert again.latest_checkpoint().name == "step_000001"
    assert load_state(again.latest_checkpoint())["text"] == "whole"
    assert [path.name for path in again.checkpoints.iterdir()] == ["step_000001"], "leftovers are removed"


def test_a_run_is_never_lost_by_accident(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(InputError, match="no run"):
        prepare(run, resume=True)
    prepare(run)
    run.metrics.write_text("{}\n")
    save(run, 1, "1")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"--resume.*--overwrite"):
        prepare(run)
    with pytest.raises(InputError, match="exclude"):
        prepare(run, resume=True, overwrite=True)
    with pytest.raises(InputError, match="force has no effect without resume"):
        prepare(run, overwrite=True, force=True)
    prepare(run, resume=True)
    assert run.metrics.exists() and run.latest_checkpoint() is not None
    prepare(run, overwrite=True)
    assert not run.metrics.exists() and run.latest_checkpoint() is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    # The directory of another run holds a base model, under the name that the run would use.
    other = RunDirectory(tmp_path / "other")
    other.model.mkdir(parents=True)
    (other.model / "a.txt").write_text("mine")
    for overwrite in (True, False):
        with pytest.raises(InputError, match="has model, and no run wrote that"):
            prepare(other, overwrite=overwrite)
    assert [path.name for path in other.path.rglob("*")] == ["model", "a.txt"]


def test_one_process_at_a_time_has_a_run(tmp_path):
    reader, sender = os.pipe()

    def hold():
        with RunDirectory(tmp_path) as run:
            prepare(run)
            run.metrics.write_text("{}\n")
            os.write(sender, b"x")
            time.sleep(600)

    child = forked(hold)
    try:
        os.read(reader, 1)
        for choice in ("resume", "overwrite"):
            with pytest.raises(InputError, match="another process works on the run"):
                prepare(RunDirectory(tmp_path), **{choice: True})
        assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with RunDirectory(tmp_path) as run:
        prepare(run, resume=True)


STEPS = 6


def run(output, tokenizer, *, resume=True, force=False, steps=STEPS, during=lambda: None):
    def reward(completion_ids):
        """Add numbers from Python's generator, which every step seeds anew."""
        during()
        return [sum(ids) % 7 + random.random() for ids in completion_ids]

    options = {"checkpoint": {"every": 1}, "evaluation": {"every": 3}}
    update = {"steps": steps, "learning_rate_decay": "cosine"}
    config = small_config(output, update=update, **options)
    make_trainer(tokenizer, ROWS, reward, config, eval_dataset=ROWS[:2]).train(resume=resume, force=force)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tokenizer):
    """Train without interruption; return the run's directory and its seconds."""
    output = tmp_path_factory.mktemp("straight")
    started = time.monotonic()
    assert exit_code(forked(partial(run, output, tokenizer, resume=False))) == 0
    return output, time.monotonic() - started


def assert_same_outcome(output, straight):
    models = (AutoModelForCausalLM.from_pretrained(each / "model") for each in (output, straight))
    assert untimed(output) == untimed(straight) and same(*map(weights, models))


def test_killed_at_random_moments(tmp_path, tokenizer, straight):
    """Kills hit sampling, updating, evaluating, saving or exporting; every second run ends a step first."""
    moments, directory = random.Random(shifted_seed(0)), RunDirectory(tmp_path)
    for kill in range(3):
        wanted = len(read_metrics(directory.metrics)) + kill % 2
        child = forked(partial(run, tmp_path, tokenizer, resume=directory.holds_a_run()))
        running = partial(os.waitid, os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        while len(read_metrics(directory.metrics)) < wanted and running() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.2) * straight[1])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not (directory.model.exists() and directory.plot.exists()):
        child = forked(partial(run, tmp_path, tokenizer, resume=directory.holds_a_run()))
        assert exit_code(child) == 0
    assert_same_outcome(tmp_path, straight[0])


def test_signals_save_and_exit(tmp_path, tokenizer, straight):
    """The run stops at SIGTERM, goes on, and stops at Ctrl-C."""
    reached = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        child = forked(partial(run, tmp_path, tokenizer, resume=reached > 0, during=partial(time.sleep, 0.1)))
        while len(read_metrics(tmp_path / "metrics.jsonl")) < reached + 2:
            time.sleep(0.01)
        os.kill(child, number)
        assert exit_code(child) == 128 + number
        before, reached = reached, read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
        assert before < reached < STEPS
        assert RunDirectory(tmp_path).latest_checkpoint().name == f"step_{reached:06d}"
    run(tmp_path, tokenizer)
    assert_same_outcome(tmp_path, straight[0])


def test_a_second_interrupt_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with defer_signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_run(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
    try:
        with defer_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [] if ignored else [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "ascii", "none"])
def test_output_never_ends_a_run(tmp_path, tokenizer, kind):
    """The reader leaves or the terminal closes during the first reward; the stream takes ASCII only; or there
    is no stream, as in a process that was started without one.
    """

    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    streams = {"pipe": os.pipe, "terminal": os.openpty}
    reader, writer = streams.get(kind, lambda: (log, os.dup(log)))()
    left = []

    def during():
        if not left:
            left.append(os.close(reader))
        print("\u2713 a reward prints", flush=True)

    def unheard():
        encoding = "ascii" if kind == "ascii" else "utf-8"
        sys.stdout = sys.stderr = None if kind == "none" else os.fdopen(writer, "w", encoding=encoding)
        run(tmp_path / "run", tokenizer, resume=False, steps=2, during=during)

    child = forked(unheard)  # which at its end flushes both streams
    for number in {reader, writer, log}:
        os.close(number)
    assert exit_code(child) == 0
    assert RunDirectory(tmp_path / "run").latest_checkpoint().name == "step_000002"
    written = (tmp_path / "log").read_text()
    assert all(
        (words in written) == (kind == "ascii") for words in ("\\u2713 a reward prints", "after 2 steps")
    )


def test_a_full_disk_loses_nothing(tmp_path, tokenizer, straight):
    """In a child process no file may exceed 20 kB, which is too little for a checkpoint or a model."""
    directory = RunDirectory(shutil.copytree(straight[0], tmp_path / "run"))

    def fails(words):
        def cramped():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            with pytest.raises(InputError, match=words):
                run(directory.path, tokenizer)

        kept = directory.latest_checkpoint()
        assert exit_code(forked(cramped)) == 0
        assert directory.latest_checkpoint() == kept and not list(tmp_path.rglob(".unfinished*"))

    shutil.rmtree(directory.model)
    fails(r"the model or the plot cannot be written: .*--resume")
    shutil.rmtree(directory.latest_checkpoint())
    fails(r"step 6 cannot be written.*step_000005")
    run(directory.path, tokenizer)
    assert_same_outcome(directory.path, straight[0])


def test_a_damaged_checkpoint_is_named(tmp_path, tokenizer, straight):
    directory = RunDirectory(shutil.copytree(straight[0], tmp_path / "run"))
    last = directory.latest_checkpoint()
    for name in ("state.pt", "tensors/__0_0.distcp", "tensors/.metadata"):
        content = (last / name).read_bytes()
        for damaged in (content[: len(content) // 2], None):
            (last / name).unlink() if damaged is None else (last / name).write_bytes(damaged)
            with pytest.raises(InputError, match=r"step_000006 is damaged.*remove it"):
                run(directory.path, tokenizer, steps=7, force=True)
        (last / name).write_bytes(content)
    for path in (last, directory.model):
        shutil.rmtree(path)
    run(directory.path, tokenizer)
    assert_same_outcome(directory.path, straight[0])
