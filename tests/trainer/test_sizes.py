"""Running out of memory: smaller sizes give the results of a run that had them at first, or an error."""

import pytest
import torch

from gspo_kernels.trainer import processes
from gspo_kernels.trainer.checkpoint import load_state
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.model import Policy
from gspo_kernels.trainer.report import read_metrics
from gspo_kernels.trainer.rollout import ModelEngine
from tests.trainer.conftest import ROWS, batch_of, make_trainer, same, small_config, weights

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


def results(trainer):
    """Return weights, and metrics but for times and memory."""
    records = read_metrics(trainer.directory.metrics)
    timed = ("seconds", "tokens_per_second", "memory")
    return weights(trainer.model), [
        {key: value for key, value in record.items() if not key.startswith(timed)} for record in records
    ]


def fail(monkeypatch, owner, name, error, when):
    """Let a method raise an error after it has run, if ``when`` holds for its arguments."""
    run = getattr(owner, name)

    def failing(self, *arguments):
        found = run(self, *arguments)
        if when(*arguments):
            raise error
        return found

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("error", "learns", "call"), [(FULL, False, 1), (ON_CPU, True, 2)], ids=["scoring", "learning"]
)
def test_halved_sizes_give_the_run_that_had_them(trainer_of, tmp_path, monkeypatch, error, learns, call):
    """Nothing of the failed attempt is left. Memory runs out before the first optimizer step: when the second
    minibatch is scored, or when one of the two micro-batches of the first has left its gradient.
    """
    explicit = trainer_of(tmp_path / "explicit", 12, 4, steps=2)
    explicit.train()
    monkeypatch.setattr(processes, "AUTO", {"micro_batch_tokens": 4 * 24, "batch_size": 4 * 8})
    calls = []

    def runs_out(prompts, completions, terms=None, mask=None):
        calls.append((terms is not None) == learns)
        return calls[-1] and sum(calls) == call

    with monkeypatch.context() as patch:
        fail(patch, Policy, "forward", error, lambda *given: auto.step > 0 and runs_out(*given))
        fail(patch, ModelEngine, "_complete", error, lambda prompts, sampling: len(prompts) > 4)
        auto = trainer_of(tmp_path / "auto", "auto", "auto", steps=2)
        auto.train()
    assert sum(calls) > call and same(results(auto)[0], results(explicit)[0])
    assert results(auto)[1] == results(explicit)[1]
    halved = {"update.micro_batch_tokens": 12, "rollout.batch_size": 4}
    assert load_state(auto.directory.latest_checkpoint())["sizes"] == halved
    again = trainer_of(tmp_path / "auto", "auto", 7, steps=3)
    again.train(resume=True)
    assert load_state(again.directory.latest_checkpoint())["sizes"] == halved | {"rollout.batch_size": 7}


def test_a_later_minibatch_is_repeated_alone(trainer_of, tmp_path, monkeypatch):
    explicit, auto = (trainer_of(tmp_path / str(size), size, 8, steps=1) for size in (12, "auto"))
    before = weights(explicit.model)
    explicit.train()
    auto.updater.micro_batch_tokens.value = 24
    fail(monkeypatch, Policy, "forward", FULL, lambda p, c, terms=None, mask=None: auto.updater.updates == 1
         and terms is not None and auto.updater.micro_batch_tokens.value == 24)  # fmt: skip
    auto.train()
    assert auto.updater.updates == 4 and auto.updater.micro_batch_tokens.value == 12
    (found, records), (expected, truth) = results(auto), results(explicit)
    # sums have another order, which AdamW shows in elements with tiny gradients, so norms are compared
    trained = {name: weight for name, weight in expected.items() if not weight.equal(before[name])}
    assert trained
    for name, weight in trained.items():
        assert (found[name] - weight).norm() < 0.01 * (weight - before[name]).norm(), name
    for name, value in truth[1].items():
        assert records[1][name] == pytest.approx(value, rel=1e-2, abs=1e-4), name


def test_scores_of_a_recipe_shrink_as_well(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, "auto", 8)
    trainer.updater.micro_batch_tokens.value = 24
    fail(monkeypatch, Policy, "forward", FULL, lambda *_: trainer.updater.micro_batch_tokens.value == 24)
    scored = trainer.updater.score(trainer.updater.policy, batch_of(trainer), 1).logprobs
    assert trainer.updater.micro_batch_tokens.value == 12 and (scored < 0).all()


def test_what_cannot_shrink_is_an_error(trainer_of, tmp_path, monkeypatch):
    """The last checkpoint stays; sizes that were set do not change, and one sequence cannot be cut."""
    trainer = trainer_of(tmp_path, 24, 8)
    fail(monkeypatch, Policy, "forward", FULL, lambda *_: trainer.step == 3)
    with pytest.raises(InputError, match=r"out of memory with update\.micro_batch_tokens = 24"):
        trainer.train()
    assert trainer.directory.latest_checkpoint().name == "step_000002"
    monkeypatch.setattr(processes, "AUTO", {"micro_batch_tokens": 4 * 24, "batch_size": 4 * 8})
    trainer = trainer_of(tmp_path / "auto", "auto", "auto")
    trainer.step = 2
    fail(monkeypatch, ModelEngine, "_complete", FULL, lambda *_: True)
    with pytest.raises(InputError, match=r"rollout\.batch_size = 1; .* a smaller rollout\.max_new_tokens"):
        trainer.evaluate()
    monkeypatch.undo()
    fail(monkeypatch, Policy, "forward", FULL, lambda *_: True)
    with pytest.raises(InputError, match=r"update\.micro_batch_tokens = .* rollout\.max_new_tokens"):
        trainer.update(trainer.compare(trainer.rollout()))
