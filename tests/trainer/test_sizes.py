"""Running out of memory: smaller sizes give the results of a run that had them at first, or an error."""

import pytest
import torch

from gspo_kernels.trainer import processes
from gspo_kernels.trainer.checkpoint import load_state
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.model import Policy
from gspo_kernels.trainer.rollout import ModelEngine
from tests.trainer.conftest import ROWS, batch_of, make_trainer, same, small_config, untimed, weights

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def in_order(completion_ids):
    """Return rewards of which no two in a group are equal, so that every completion is learned from."""
    return [float(place) for place in range(len(completion_ids))]


@pytest.fixture
def trainer_of(tokenizer):
    """Return a function that makes a trainer with these sizes, whose completions all have five tokens."""

    def make(output, tokens, completions, **update):
        update = {"micro_batch_tokens": tokens, "epochs": 2} | update
        config = small_config(output, update=update, rollout={"batch_size": completions})
        trainer = make_trainer(tokenizer, ROWS, in_order, config)
        trainer.engine.end_ids = []
        return trainer

    return make


def fail(monkeypatch, owner, name, error, when):
    """Let a method raise an error after it has run, if ``when`` holds for its arguments."""
    run = getattr(owner, name)

    def failing(self, *arguments):
        found = run(self, *arguments)
        if when(*arguments):
            raise error
        return found

    monkeypatch.setattr(owner, name, failing)


def test_halved_sizes_give_the_run_that_had_them(trainer_of, tmp_path, monkeypatch):
    """Nothing of the failed attempt is left. Memory runs out before the first optimizer step: when the second
    minibatch is scored, or when one of the two micro-batches of the first has left its gradient.
    """
    explicit = trainer_of(tmp_path / "explicit", 12, 4, steps=2)
    explicit.train()
    monkeypatch.setattr(processes, "AUTO", {"micro_batch_tokens": 4 * 24, "batch_size": 4 * 8})
    for error, learns, call in ((FULL, False, 1), (ON_CPU, True, 2)):
        calls, output = [], tmp_path / str(learns)

        def runs_out(prompts, completions, terms=None, mask=None, calls=calls, learns=learns, call=call):
            calls.append((terms is not None) == learns)
            return calls[-1] and sum(calls) == call

        with monkeypatch.context() as patch:
            fail(patch, Policy, "forward", error, runs_out)
            fail(patch, ModelEngine, "_complete", error, lambda prompts, sampling: len(prompts) > 4)
            auto = trainer_of(output, "auto", "auto", steps=2)
            auto.train()
        assert sum(calls) > call and same(weights(auto.model), weights(explicit.model))
        assert untimed(output) == untimed(tmp_path / "explicit")
    halved = {"update.micro_batch_tokens": 12, "rollout.batch_size": 4}
    assert load_state(auto.directory.latest_checkpoint())["sizes"] == halved
    again = trainer_of(output, "auto", 7, steps=3)
    again.train(resume=True)
    assert load_state(again.directory.latest_checkpoint())["sizes"] == halved | {"rollout.batch_size": 7}


def test_a_later_minibatch_is_repeated_alone(trainer_of, tmp_path, monkeypatch):
    """So is the scoring of a batch, as a recipe calls it."""
    explicit, auto = (trainer_of(tmp_path / str(size), size, 8, steps=1) for size in (12, "auto"))
    size, batch = auto.updater.micro_batch_tokens, batch_of(auto)
    expected, found = [], []
    for trainer, metrics in ((explicit, expected), (auto, found)):
        if trainer is auto:
            size.value = 24
            fail(monkeypatch, Policy, "forward", FULL, lambda p, c, terms=None, mask=None:
                 auto.updater.updates == 1 and terms is not None and size.value == 24)  # fmt: skip
        before = weights(trainer.model)
        metrics.append(trainer.updater.update(batch, 1))
        metrics.append(weights(trainer.model))
    assert auto.updater.updates == 4 and size.value == 12
    # sums have another order, which AdamW shows in elements with tiny gradients, so norms are compared
    trained = {name: weight for name, weight in expected[1].items() if not weight.equal(before[name])}
    assert trained
    for name, weight in trained.items():
        assert (found[1][name] - weight).norm() < 0.01 * (weight - before[name]).norm(), name
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-2, abs=1e-4), name
    size.value = 24
    fail(monkeypatch, Policy, "forward", FULL, lambda *_: size.value == 24)
    scored = auto.updater.score(auto.updater.policy, batch, 1).logprobs
    assert size.value == 12 and (scored < 0).all()


def test_what_cannot_shrink_is_an_error(trainer_of, tmp_path, monkeypatch):
    """The last checkpoint stays; sizes that were set do not change, and one sequence cannot be cut."""
    trainer = trainer_of(tmp_path, 24, 8)
    with monkeypatch.context() as patch, pytest.raises(InputError) as caught:
        fail(patch, Policy, "forward", FULL, lambda *_: trainer.step == 3)
        trainer.train()
    assert "out of memory with update.micro_batch_tokens = 24" in str(caught.value)
    assert trainer.directory.latest_checkpoint().name == "step_000002"
    monkeypatch.setattr(processes, "AUTO", {"micro_batch_tokens": 4 * 2, "batch_size": 4 * 2})
    trainer = trainer_of(tmp_path / "auto", "auto", "auto")
    batch, more = batch_of(trainer), "; .* a smaller rollout.max_new_tokens"
    for owner, name, size, call in (
        (ModelEngine, "_complete", "rollout.batch_size", trainer.evaluate),
        (Policy, "forward", "update.micro_batch_tokens", lambda: trainer.update(batch)),
    ):
        fail(monkeypatch, owner, name, FULL, lambda *_: True)
        with pytest.raises(InputError, match=f"{size} = 1{more}"):
            call()
