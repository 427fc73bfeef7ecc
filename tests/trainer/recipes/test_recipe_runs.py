"""Whole runs of iGRPO and of turn-level groups: restart, processes, layouts, learning."""

import json
import operator

import pytest

from examples.recipes import igrpo as igrpo_example
from examples.recipes import turns as turns_example
from examples.recipes.tiny import rewards
from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.recipes.test_recipes import IGRPO, TURNS
from tests.trainer.run.test_processes import fsdp2
from tests.trainer.test_trainer import same, weights

RUNS = {"igrpo": IGRPO, "turns": {"turns": TURNS["turns"] | {"count": 2}}}
SHORT = {"update": {"steps": 3}, "evaluation": {"every": 5, "prompts": 2}}


def run(output, tokenizer, rows, reward, *, resume=False, accelerator=None, **sections):
    make_accelerator(sections["update"].get("precision", "fp32"))
    trainer = GSPOTrainer(
        tiny_qwen3(tokenizer),
        tokenizer,
        reward,
        rows,
        rows[:3],
        small_config(output, **sections),
        accelerator=accelerator,
    )
    trainer.train(resume=resume)
    return weights(trainer.model)


@pytest.mark.parametrize("recipe", RUNS)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, tokenizer, rows, reward, recipe):
    calls = []

    def crashing(*arguments, **columns):
        """Fails in the second stage of step 3, after the checkpoint of step 2."""
        calls.append(1)
        if len(calls) == evaluation + 3 * 2:
            raise KeyboardInterrupt
        return reward(*arguments, **columns)

    evaluation = 2 if recipe == "igrpo" else 4
    sections = RUNS[recipe] | SHORT
    expected = run(tmp_path / "straight", tokenizer, rows, reward, **sections)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", tokenizer, rows, crashing, **sections)
    assert [r["step"] for r in read_metrics(tmp_path / "stopped" / "metrics.jsonl")] == [0, 1, 2]
    found = run(tmp_path / "stopped", tokenizer, rows, reward, resume=True, **sections)
    assert same(found, expected)


KINDS: dict[str, dict] = {
    "ddp": {},
    "fsdp2": {},
    "fsdp2 with adapters": {"lora": {"rank": 2}},
    "fsdp2 in bf16": {"update": {"precision": "bf16"}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RUNS)
def test_two_processes_sample_what_one_does(tmp_path, tokenizer, rows, reward, recipe, kind):
    update = {"steps": 2} | KINDS[kind].get("update", {})
    sections = RUNS[recipe] | SHORT | KINDS[kind] | {"update": update, "save_rollouts": True}
    run(tmp_path / "one", tokenizer, rows, reward, **sections)

    def train(rank):
        accelerator = make_accelerator(update.get("precision", "fp32"))
        assert accelerator.num_processes == 2
        if kind.startswith("fsdp2"):
            accelerator = fsdp2(accelerator)
        config = small_config(tmp_path / "two", **sections)
        GSPOTrainer(
            tiny_qwen3(tokenizer), tokenizer, reward, rows, rows[:3], config, accelerator=accelerator
        ).train()

    in_processes(2, train)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [record.keys() for record in one] == [record.keys() for record in two]
    if "bf16" in kind:  # rounded in other places: other tokens now and then, after a step other weights
        ids = [first_rollout(tmp_path / name) for name in ("one", "two")]
        assert sum(map(operator.eq, *ids)) > 0.5 * len(ids[0])
        return
    for a, b in zip(one, two, strict=True):
        for key in a:
            if key.startswith(("reward/", "eval/", "igrpo/", "turns/", "completions/")):
                assert b[key] == pytest.approx(a[key], rel=1e-6), key


def first_rollout(output):
    """The token of every completion and place of a run's first step; None behind a completion's end."""
    lines = (output / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    return [token for line in lines for token in (json.loads(line)["token_ids"] + [None] * 5)[:5]]


@pytest.mark.parametrize("recipe", RUNS)
def test_layouts_take_the_same_steps(tmp_path, tokenizer, rows, reward, recipe):
    """Prompts of unequal lengths, which differ from those of the data; several epochs."""
    start = weights(tiny_qwen3(tokenizer))
    ends = {}
    for layout in ("padded", "packed", "shared_prefix"):
        update = {"steps": 1, "epochs": 2, "minibatches": 1, "layout": layout, "micro_batch_tokens": 90}
        sections = RUNS[recipe] | SHORT | {"update": update}
        ends[layout] = run(tmp_path / layout, tokenizer, rows, reward, **sections)

    def apart(a, b):
        return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5

    moved = apart(ends["padded"], start)
    assert moved > 0
    # Adam divides by the size of gradients, so rounding shows where these are next to nothing.
    assert all(apart(ends[layout], ends["padded"]) < 5e-3 * moved for layout in ends)


# Learning: the examples, shortened. Over seeds 0 to 4 refinements gained 0.13 to 0.23, and the later turns
# ended at 0.84 to 0.89.


def before_and_after(trainer, rows):
    trainer.eval_prompts = None
    before = rewards(trainer, rows)
    trainer.train()
    return before, rewards(trainer, rows)


@pytest.mark.slow
def test_refinements_get_better(tmp_path):
    trainer = igrpo_example.make_trainer(tmp_path, seed=0, steps=40)
    before, after = before_and_after(trainer, range(128))
    assert after["reward/refinements"] - before["reward/refinements"] > 0.1


@pytest.mark.slow
def test_turns_use_the_feedback(tmp_path):
    """Without it no guess can earn more than 0.75 on average, the middle's reward."""
    rows = list(range(turns_example.NUMBERS)) * 8
    before, after = before_and_after(turns_example.make_trainer(tmp_path, seed=0, steps=30), rows)
    assert before["reward/turn_1"] + 0.04 < after["reward/turn_1"] < 0.76
    for turn in ("reward/turn_2", "reward/turn_3"):
        assert before[turn] < 0.75 and after[turn] > 0.8
