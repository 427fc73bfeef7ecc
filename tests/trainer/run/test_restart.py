"""Restart: SIGKILL at random moments, SIGTERM, a full disk, damage; the weights are those of one run."""

import os
import random
import resource
import shutil
import signal
import time
from functools import partial

import pytest
import torch

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.files import RunDirectory
from gspo_kernels.trainer.run.metrics import read_metrics
from gspo_kernels.trainer.run.run import noted
from tests.draws import shifted_seed
from tests.forks import exit_code, forked
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.test_trainer import same, weights

STEPS = 8


def noisy(prompts, completions, completion_ids, **columns):
    """Draws from Python's generator, whose state is part of a checkpoint."""
    return [sum(ids) % 7 + random.random() for ids in completion_ids]


def run(output, tokenizer, rows, *, resume, steps=STEPS, slow=0.0):
    def reward(*arguments, **columns):
        time.sleep(slow)
        return noisy(*arguments, **columns)

    make_accelerator()
    config = small_config(
        output, update={"steps": steps}, checkpoint={"every": 1}, evaluation={"every": 3, "prompts": 2}
    )
    trainer = GSPOTrainer(tiny_qwen3(tokenizer), tokenizer, reward, rows, rows[:2], config)
    trainer.train(resume=resume)


def outcome(output):
    timed = ("seconds", "tokens_per_second", "memory")
    records = [
        {key: value for key, value in record.items() if not key.startswith(timed)}
        for record in read_metrics(output / "metrics.jsonl")
    ]
    from transformers import AutoModelForCausalLM

    return records, weights(AutoModelForCausalLM.from_pretrained(output / "model"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tokenizer):
    """The run that nothing interrupts, and the seconds that it took."""
    rows = [{"prompt": prompt} for prompt in ("ab", "bcd", "c", "dabc", "ea", "fgh")]
    output = tmp_path_factory.mktemp("straight")
    started = time.monotonic()
    assert exit_code(forked(partial(run, output, tokenizer, rows, resume=False))) == 0
    return rows, outcome(output), time.monotonic() - started


def test_killed_at_five_random_moments(tmp_path, tokenizer, straight):
    """While sampling, updating, evaluating, saving or exporting: whatever the moment hits."""
    rows, expected, seconds = straight
    moments = random.Random(shifted_seed(0))
    for _ in range(5):
        resume = RunDirectory(tmp_path).holds_a_run()
        child = forked(partial(run, tmp_path, tokenizer, rows, resume=resume))
        time.sleep(moments.uniform(0.05, 0.35) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if RunDirectory(tmp_path).model.exists():
            break
    if not RunDirectory(tmp_path).model.exists():
        resume = RunDirectory(tmp_path).holds_a_run()
        child = forked(partial(run, tmp_path, tokenizer, rows, resume=resume))
        assert exit_code(child) == 0
    records, found = outcome(tmp_path)
    assert records == expected[0]
    assert same(found, expected[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits(tmp_path, tokenizer, straight, number):
    rows, expected, _ = straight
    child = forked(partial(run, tmp_path, tokenizer, rows, resume=False, slow=0.02))
    while len(read_metrics(tmp_path / "metrics.jsonl")) < 3:
        time.sleep(0.01)
    os.kill(child, number)
    assert exit_code(child) == 128 + number
    reached = read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
    assert 2 <= reached < STEPS
    assert RunDirectory(tmp_path).latest_checkpoint().name == f"step_{reached:06d}"
    child = forked(partial(run, tmp_path, tokenizer, rows, resume=True))
    assert exit_code(child) == 0
    records, found = outcome(tmp_path)
    assert records == expected[0]
    assert same(found, expected[1])


def test_a_second_interrupt_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with noted() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_disk_that_is_full_at_the_end_loses_nothing(tmp_path, tokenizer, rows):
    """No room for the model in a child, then none for the plot: --resume makes up for both."""
    run(tmp_path, tokenizer, rows, resume=False, steps=2)
    directory = RunDirectory(tmp_path)
    expected = outcome(tmp_path)[1]
    shutil.rmtree(directory.model)

    def cramped():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(RunDirectoryError, match=r"the model or the plot cannot be written: .*--resume"):
            run(tmp_path, tokenizer, rows, resume=True, steps=2)

    assert exit_code(forked(cramped)) == 0
    assert not directory.model.exists() and not list(tmp_path.rglob(".unfinished*"))
    run(tmp_path, tokenizer, rows, resume=True, steps=2)
    assert same(outcome(tmp_path)[1], expected)
    directory.plot.unlink()
    run(tmp_path, tokenizer, rows, resume=True, steps=2)
    assert directory.plot.exists()
    with pytest.raises(RunDirectoryError, match="is finished"):
        run(tmp_path, tokenizer, rows, resume=True, steps=2)


def test_a_full_disk_loses_no_checkpoint(tmp_path, tokenizer, rows):
    """Files may not grow beyond 20 kB in a child: what a checkpoint needs is more."""
    run(tmp_path, tokenizer, rows, resume=False, steps=2)
    kept = RunDirectory(tmp_path).latest_checkpoint()

    def cramped():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(RunDirectoryError, match=r"step 3 cannot be written.*step_000002"):
            run(tmp_path, tokenizer, rows, resume=True, steps=4)

    assert exit_code(forked(cramped)) == 0
    directory = RunDirectory(tmp_path)
    assert directory.latest_checkpoint() == kept
    assert not list(directory.path.rglob(".unfinished*"))
    run(tmp_path, tokenizer, rows, resume=True, steps=4)
    run(tmp_path / "straight", tokenizer, rows, resume=False, steps=4)
    assert same(outcome(tmp_path)[1], outcome(tmp_path / "straight")[1])


@pytest.mark.parametrize("name", ["state.pt", "tensors/__0_0.distcp", "tensors/.metadata"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, tokenizer, rows, damage, name):
    run(tmp_path, tokenizer, rows, resume=False, steps=2)
    last = RunDirectory(tmp_path).latest_checkpoint()
    file = last / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(RunDirectoryError, match=r"step_000002 is damaged.*remove it"):
        run(tmp_path, tokenizer, rows, resume=True, steps=3)
    shutil.rmtree(last)
    run(tmp_path, tokenizer, rows, resume=True, steps=3)
    assert torch.isfinite(torch.cat([w.flatten() for w in outcome(tmp_path)[1].values()])).all()


def test_a_checkpoint_of_another_version_is_refused_and_left(tmp_path, tokenizer, rows):
    """Such as one from before a recipe had a state."""
    run(tmp_path, tokenizer, rows, resume=False, steps=2)
    file = RunDirectory(tmp_path).latest_checkpoint() / "state.pt"
    state = torch.load(file, weights_only=True)
    for changes in ({"format": state["format"] + 1}, {"format": None}):
        older = {key: value for key, value in {**state, **changes}.items() if value is not None}
        torch.save(older, file)
        before = file.read_bytes()
        with pytest.raises(RunDirectoryError, match=r"step_000002 was written by another version"):
            run(tmp_path, tokenizer, rows, resume=True, steps=3)
        assert file.read_bytes() == before
    torch.save(state, file)
    run(tmp_path, tokenizer, rows, resume=True, steps=3)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3
