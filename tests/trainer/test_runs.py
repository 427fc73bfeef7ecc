"""Whole runs of a tiny model: what they write, going on, what is refused before a loss, warnings."""

import copy
import json
import math

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.advantages import gdpo
from gspo_kernels.trainer.checkpoint import RunDirectory
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.report import PATIENCE, read_metrics
from gspo_kernels.trainer.rollout import Completion
from tests.trainer.conftest import (
    batch_of,
    make_accelerator,
    make_trainer,
    same,
    small_config,
    tiny_qwen3,
    weights,
)


def test_what_a_run_writes(tmp_path, tokenizer, rows):
    def some(completion_ids):
        return [None if index % 2 else float(len(ids)) for index, ids in enumerate(completion_ids)]

    trainer = make_trainer(tokenizer, rows, some, small_config(tmp_path / "run", save_rollouts=True))
    before = weights(trainer.model)
    last = trainer.train()
    assert not same(before, weights(trainer.model))
    run = RunDirectory(tmp_path / "run")

    lines = run.metrics.read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert ["eval/greedy_accuracy" in record for record in records] == [True, False, True, False, True]
    assert all(v is None or math.isfinite(v) for record in records for v in record.values())
    keys = (
        "reward/mean reward/some groups_without_variance ratio/min ratio/max minibatch_2/clip_fraction/low "
    )
    for key in (keys + "entropy tokens_per_second completions/length memory/peak_gib mismatch/max").split():
        assert records[1][key] is not None
    assert last == records[-1]

    files = sorted(run.rollouts.iterdir())
    assert [path.name for path in files] == [f"step_00000{step}.jsonl" for step in (1, 2, 3, 4)]
    for path, metrics in zip(files, records[1:], strict=True):
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(kept) == 12
        assert metrics["reward/mean"] == pytest.approx(sum(r["reward"] for r in kept[::2]) / 6)
        for index, record in enumerate(kept):
            expected = None if index % 2 else len(record["token_ids"])
            assert record["prompt"] == rows[record["row"]]["prompt"]
            assert record["rewards"]["some"] == record["reward"] == expected
            assert len(record["logprobs"]) == len(record["token_ids"]) and max(record["logprobs"]) <= 0
            assert record["completion"] == tokenizer.decode(record["token_ids"], skip_special_tokens=True)

    assert run.plot.read_bytes().startswith(b"\x89PNG")
    loaded = AutoModelForCausalLM.from_pretrained(run.model)
    assert same(weights(loaded), weights(trainer.model))
    assert AutoTokenizer.from_pretrained(run.model)("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert not list(tmp_path.rglob(".unfinished*"))


def test_a_run_goes_on_longer_or_with_other_settings_by_force(tmp_path, tokenizer, rows, reward, capsys):
    make_trainer(tokenizer, rows, reward, small_config(tmp_path, update={"steps": 2})).train()
    finished = (tmp_path / "metrics.jsonl").read_text()

    def trainer(**sections):
        return make_trainer(tokenizer, rows, reward, small_config(tmp_path, **sections))

    for changes, words in (
        ({"steps": 2}, r"finished \(2 steps\)"),
        ({"learning_rate": 0.1}, r"update\.learning_rate: 0\.001 -> 0\.1.*--force"),
    ):
        with pytest.raises(InputError, match=words):
            trainer(update=changes).train(resume=True)
    with pytest.raises(InputError, match=r"checkpoint is of another model: it has .*layers"):
        other = tiny_qwen3(tokenizer, num_hidden_layers=3)
        make_trainer(tokenizer, rows, reward, small_config(tmp_path), model=other).train(resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == finished

    longer = trainer()
    longer.train(resume=True)
    straight = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "straight"))
    straight.train()
    assert same(weights(longer.model), weights(straight.model))
    capsys.readouterr()
    changed = trainer(update={"steps": 5, "learning_rate": 0.1}, reward_weights=[2.0])
    changed.train(resume=True, force=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "update.learning_rate: 0.001 -> 0.1" in printed and "reward_weights: None -> [2.0]" in printed
    assert changed.updater.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["reward", "engine", "evaluation"])
def test_a_failure_leaves_a_checkpoint_and_the_run_goes_on_from_it(tmp_path, tokenizer, rows, reward, kind):
    """Checkpoints are asked for every 100 steps; the third step fails, or the evaluation after the second."""
    config = small_config(tmp_path / "failed", checkpoint={"every": 100})

    def failing(completion_ids):
        fails = trainer.step == 3 if kind == "reward" else trainer.step == 2 and len(completion_ids) == 3
        return [1.0] if fails and kind != "engine" else reward(completion_ids)

    trainer = make_trainer(tokenizer, rows, failing, config)
    if kind == "engine":
        generate = trainer.engine.generate

        def breaks(prompts, sampling):
            if trainer.step == 3:
                raise InputError("the engine is gone")
            return generate(prompts, sampling)

        trainer.engine.generate = breaks
    words = "the engine is gone" if kind == "engine" else "failing returned 1 values for (12|3) completions"
    with pytest.raises(InputError, match=words):
        trainer.train()
    assert RunDirectory(tmp_path / "failed").latest_checkpoint().name == "step_000002"
    records = read_metrics(tmp_path / "failed" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2] and records[2]["grad_norm"] > 0
    resumed = make_trainer(tokenizer, rows, reward, config, model=tiny_qwen3(tokenizer, seed=7))
    resumed.train(resume=True)
    straight = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "straight"))
    straight.train()
    assert same(weights(resumed.model), weights(straight.model))


def test_adapters_are_trained_alone_and_resume_bit_for_bit(tmp_path, tokenizer, rows, reward):
    def train(name, steps, resume=False):
        sections = {"lora": {"rank": 2}, "kl": {"beta": 0.05}}
        config = small_config(tmp_path / name, update={"steps": steps, "learning_rate": 0.05}, **sections)
        trainer = make_trainer(tokenizer, rows, reward, config)
        before = weights(trainer.model)
        trainer.train(resume=resume)
        after = weights(trainer.model)
        assert all(torch.equal(before[n], after[n]) == (".lora_" not in n) for n in before)
        return after, [r.get("kl/ref") for r in read_metrics(tmp_path / name / "metrics.jsonl")]

    straight, distances = train("straight", 4)
    train("resumed", 2)
    resumed = train("resumed", 4, resume=True)
    assert same(resumed[0], straight) and resumed[1] == distances and distances[-1] > 1e-6
    saved = RunDirectory(tmp_path / "resumed").latest_checkpoint()
    assert all(".lora_" in n for n in FileSystemReader(saved / "tensors").read_metadata().state_dict_metadata)


def test_an_engine_without_masks_is_named(tmp_path, tokenizer, rows, reward):
    class Maskless:
        def generate(self, prompts, sampling):
            return [Completion(torch.tensor([65]), True, torch.zeros(1)) for _ in prompts]

    config = small_config(tmp_path, rollout={"top_p": 0.9, "keep_sampling_mask": True})
    trainer = make_trainer(tokenizer, rows, reward, config, engine=Maskless())
    with pytest.raises(InputError, match=r"keep_sampling_mask: Maskless .*completions without a mask"):
        trainer.rollout()


def test_truncated_completions_are_kept_or_masked(tmp_path, tokenizer, rows, reward):
    batches = {}
    for choice in ("keep", "mask"):
        config = small_config(tmp_path, rollout={"truncated": choice, "max_new_tokens": 2})
        trainer = make_trainer(tokenizer, rows, reward, config)
        batches[choice] = batch_of(trainer)
    completions = batches["keep"].completions
    finished = torch.tensor([int(ids[-1]) in trainer.engine.end_ids for ids in completions])
    assert finished.any() and not finished.all()
    lengths = torch.tensor([len(ids) for ids in completions])
    assert torch.equal(batches["keep"].counted, lengths)
    assert torch.equal(batches["mask"].loss_mask, finished.repeat_interleave(lengths))
    # they still count in their group's mean
    assert torch.equal(batches["keep"].advantages, batches["mask"].advantages)


def test_rewards_that_do_not_apply_leave_completions_out(tmp_path, tokenizer, rows):
    def sometimes(prompts):
        return [None if index % 4 == 0 else float(index) for index in range(len(prompts))]

    batch = batch_of(make_trainer(tokenizer, rows, sometimes, small_config(tmp_path)))
    left_out = torch.arange(12) % 4 == 0
    assert torch.equal(batch.counted == 0, left_out)
    assert (batch.advantages[left_out] == 0).all()
    assert batch.advantages.view(3, 4)[0].tolist() == pytest.approx([0, -1, 0, 1], abs=1e-3)


def test_levels_rewards_and_gdpo_reach_the_objectives(tmp_path, tokenizer, rows):
    def ranks(prompts):
        return [3.0, 1.0, 3.0, 2.0] * (len(prompts) // 4)

    def other(prompts):
        return [0.0, 1.0, 0.0, 1.0] * (len(prompts) // 4)

    for name, expected in (("DPO", [1, 3, 1, 2]), ("REBEL", [3, 1, 3, 2])):
        config = small_config(tmp_path, objective={"name": name})
        assert batch_of(make_trainer(tokenizer, rows, ranks, config)).advantages.tolist() == expected * 3
    config = small_config(tmp_path, advantages="gdpo", reward_weights=[1.0, 0.5])
    found = batch_of(make_trainer(tokenizer, rows, [ranks, other], config)).advantages
    table, weights = torch.tensor([[3.0, 1, 3, 2], [0, 1, 0, 1]]).repeat(1, 3).T, torch.tensor([1.0, 0.5])
    assert torch.equal(found, gdpo(table, group_size=4, weights=weights))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": [{"question": "a"}]}, "no 'prompt'"),
        ({"eval_dataset": []}, "the eval dataset is empty"),
        ({"rewards": []}, "no reward function"),
        ({"tokenizer": None}, "tokenizer"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, tokenizer, rows, reward, changes, words):
    with pytest.raises(InputError, match=words):
        make_trainer(tokenizer, rows, reward, small_config(tmp_path / "run"), **changes)
    assert not (tmp_path / "run").exists()


def test_warnings_when_nothing_can_be_learned_or_sampling_cuts(tmp_path, tokenizer, rows, reward, capsys):
    config = small_config(tmp_path / "flat", update={"steps": PATIENCE + 1})
    trainer = make_trainer(tokenizer, rows, lambda prompts: [0.7] * len(prompts), config)
    before = weights(trainer.model)
    trainer.train()
    assert "nothing can be learned" in " ".join(capsys.readouterr().out.split())
    assert same(before, weights(trainer.model))  # and indeed, without weight decay, nothing moves
    for keep in (False, True):
        rollout = {"top_p": 0.9, "keep_sampling_mask": keep}
        config = small_config(tmp_path / str(keep), rollout=rollout, update={"steps": 2})
        model = tiny_qwen3(tokenizer, initializer_range=0.1)
        make_trainer(tokenizer, rows, reward, config, model=model).train()
        steps = read_metrics(tmp_path / str(keep) / "metrics.jsonl")[1:]
        assert capsys.readouterr().out.count("sampling cuts off") == (0 if keep else 1)
        assert (max(each["mismatch/mean"] for each in steps) < 1e-5) == keep


def test_trackers_get_the_metrics(tmp_path, tokenizer, rows, reward):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Kept(GeneralTracker):
        name, requires_logging_directory, main_process_only, tracker = "kept", False, True, None
        logged, finished, config = {}, [], {}
        store_init_configuration = config.update

        def log(self, values, step=None, **options):
            self.logged[step] = values

        def finish(self):
            self.finished.append(True)

    make_accelerator()
    accelerator = Accelerator(log_with=[Kept()])
    make_trainer(tokenizer, rows, reward, small_config(tmp_path), accelerator=accelerator).train()
    assert Kept.finished and Kept.config["update.steps"] == 4 and sorted(Kept.logged) == [0, 1, 2, 3, 4]
    assert Kept.logged[4]["reward/mean"] == read_metrics(tmp_path / "metrics.jsonl")[4]["reward/mean"]
    config = small_config(tmp_path, trackers=["comet_ml"])
    with pytest.raises(InputError, match="comet_ml is not installed"):
        make_accelerator()
        make_trainer(tokenizer, rows, reward, config, accelerator=None)


def test_models_that_cannot_be_trained_are_named(tmp_path, tokenizer, rows, reward):
    def refused(words, **changes):
        with pytest.raises(InputError, match=words):
            make_trainer(tokenizer, changes.pop("dataset", rows), reward, small_config(tmp_path), **changes)

    broken = tiny_qwen3(tokenizer)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    refused("not finite", model=broken)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["one more"])
    unknown = [*rows, rows[0] | {"prompt": "say one more"}]
    words = f"row {len(unknown)}: the prompt has token 258, but the model embeds only 258"
    refused(words, tokenizer=larger, dataset=unknown)
    padded = copy.deepcopy(larger)
    padded.pad_token = "one more"
    refused("padding token is 258", tokenizer=padded)
    dropout = tiny_qwen3(tokenizer, attention_dropout=0.5).train()  # which confuses nobody
    make_trainer(tokenizer, rows, reward, small_config(tmp_path), model=dropout)
