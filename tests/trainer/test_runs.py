"""Whole runs of a tiny model: the files that they write, resuming, errors before any output, warnings."""

import copy
import json
import math
import os
import random
import shutil
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.advantages import gdpo, group_normalized
from gspo_kernels.trainer.checkpoint import RunDirectory, export_checkpoint
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.report import PATIENCE, read_metrics
from gspo_kernels.trainer.rollout import Completion
from tests.trainer.conftest import (
    LIMIT,
    ROWS,
    batch_of,
    copy_after,
    make_accelerator,
    make_trainer,
    model_of_varying_rope,
    odd_share,
    same,
    small_config,
    tiny_model,
    tiny_qwen3,
    weights,
)


def some(completion_ids):
    DRAWN.append(random.random())
    return [None if index % 2 else float(len(ids)) for index, ids in enumerate(completion_ids)]


DRAWN = []
"""The numbers that calls of the reward draw from Python's generator, which every step seeds anew."""


class Tracker(GeneralTracker):
    """A tracker that keeps the values that a run logs."""

    name, requires_logging_directory, main_process_only, tracker = "kept", False, True, None
    logged, finished, config = {}, [], {}
    store_init_configuration = config.update

    def log(self, values, step=None, **options):
        self.logged[step] = values

    def finish(self):
        self.finished.append(True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tokenizer):
    """Return a trainer after a run without interruption."""
    config = small_config(tmp_path_factory.mktemp("straight") / "run", save_rollouts=True)
    make_accelerator()
    trainer = make_trainer(tokenizer, ROWS, some, config, accelerator=Accelerator(log_with=[Tracker()]))
    DRAWN.clear()
    trainer.last = trainer.train()
    assert len(DRAWN) == 10 and len({*DRAWN}) == 6  # 4 steps, and 3 evaluations of 2 calls that draw alike
    return trainer


def test_what_a_run_writes(straight, tokenizer):
    run = straight.directory
    assert not same(weights(tiny_qwen3(tokenizer)), weights(straight.model))

    lines = run.metrics.read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert ["eval/greedy_reward" in record for record in records] == [True, False, True, False, True]
    assert all(v is None or math.isfinite(v) for record in records for v in record.values())
    keys = (
        "reward/mean reward/some groups_without_variance ratio/min ratio/max minibatch_2/clip_fraction/low "
    )
    for key in (keys + "entropy tokens_per_second completions/length memory/peak_gib mismatch/max").split():
        assert records[1][key] is not None
    assert straight.last == records[-1]
    assert Tracker.finished and Tracker.config["update.steps"] == 4 and sorted(Tracker.logged) == [*range(5)]
    assert Tracker.logged[2]["reward/mean"] == records[2]["reward/mean"]

    files = sorted(run.rollouts.iterdir())
    assert [path.name for path in files] == [f"step_00000{step}.jsonl" for step in (1, 2, 3, 4)]
    for path, metrics in zip(files, records[1:], strict=True):
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(kept) == 12
        assert metrics["reward/mean"] == pytest.approx(sum(r["reward"] for r in kept[::2]) / 6)
        rewards = torch.tensor([math.nan if r["reward"] is None else r["reward"] for r in kept])
        advantages = group_normalized(rewards, group_size=4).nan_to_num(0.0)
        assert [r["advantage"] for r in kept] == pytest.approx(advantages.tolist())
        for index, record in enumerate(kept):
            expected = None if index % 2 else len(record["token_ids"])
            assert record["prompt"] == ROWS[record["row"]]["prompt"]
            assert record["prompt_ids"] == tokenizer(record["prompt"])["input_ids"]
            assert record["rewards"]["some"] == record["reward"] == expected
            assert record["step"] == metrics["step"] and record["columns"] == {"letter": record["prompt"][0]}
            assert len(record["logprobs"]) == len(record["token_ids"]) and max(record["logprobs"]) <= 0
            assert record["completion"] == tokenizer.decode(record["token_ids"], skip_special_tokens=True)

    assert run.plot.read_bytes().startswith(b"\x89PNG")
    loaded = AutoModelForCausalLM.from_pretrained(run.model)
    assert same(weights(loaded), weights(straight.model))
    assert AutoTokenizer.from_pretrained(run.model)("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert not list(run.path.rglob(".unfinished*"))


@pytest.mark.parametrize(
    ("held_out", "warned"),
    [(ROWS[:3], "3 of 3 eval prompts"), ([{"prompt": "zz"}, ROWS[0]], "1 of 2"), ([{"prompt": "zz"}], "")],
)
def test_eval_reward_and_prompts_that_are_trained_on(tmp_path, tokenizer, capsys, held_out, warned):
    def tens(completions):
        return [10.0] * len(completions)

    config = small_config(tmp_path, reward_weights=[2.0, 0.5])
    trainer = make_trainer(tokenizer, ROWS, [tens, odd_share], config, eval_dataset=held_out)
    said = " ".join(capsys.readouterr().out.split())
    assert (warned in said) if warned else ("in the training dataset too" not in said)
    metrics = trainer.evaluate()
    weighted = 2.0 * metrics["eval/greedy/tens"] + 0.5 * metrics["eval/greedy/odd_share"]
    assert metrics["eval/greedy_reward"] == pytest.approx(weighted)


def test_trackers_get_metrics_and_settings(tmp_path, tokenizer, monkeypatch):
    """accelerate calls a SummaryWriter, which takes no lists, and wandb; both are stand-ins."""
    board, wandb = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr(torch.utils, "tensorboard", board, raising=False)
    writer, folder = board.SummaryWriter.return_value, f"{tmp_path}/mine/trackers"
    for steps, flags in ((1, {}), (2, {"resume": True})):
        options = {"trackers": ["tensorboard", "wandb"], "reward": ["a.py:f", "b.py:g"]}
        config = small_config(tmp_path / "mine", update={"steps": steps}, **options)
        make_accelerator()
        accelerator = Accelerator(project_dir=folder)
        accelerator.log_with = [LoggerType.TENSORBOARD, LoggerType.WANDB]
        rest = {"accelerator": accelerator, "eval_dataset": None}
        make_trainer(tokenizer, ROWS, some, config, **rest).train(**flags)
        # a resumed run purges later steps of TensorBoard's, and is a new one in wandb
        expected = ((f"{folder}/gspo",), {"purge_step": 2 if flags else 0})
        assert board.SummaryWriter.call_args == expected
        assert wandb.init.call_args.kwargs == {"project": "gspo", "name": "mine", "dir": folder}
    plain = writer.add_hparams.call_args.args[0]
    assert {*map(type, plain.values())} <= {bool, int, float, str} and "b.py:g" in plain["reward"]
    logged = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert any({"tokens_per_second", "memory/peak_gib"} <= values.keys() for values in logged)
    assert writer.add_hparams.call_count == 1  # each call is another run of TensorBoard's
    settings = [call.args[0]["update.steps"] for call in wandb.config.update.call_args_list]
    assert settings == [1, 2], "a resumed run is a new one in wandb, which needs its settings"


def test_failures_leave_a_checkpoint(tmp_path, tokenizer, monkeypatch, straight):
    """The evaluation after step 2 fails, then the reward in step 3, then the engine in step 4.

    Rewards change grad mode and directory, the engine clears prompts; relative paths are those of the start.
    """
    for each in (tiny_qwen3(tokenizer), tokenizer):
        each.save_pretrained(tmp_path / "base")
    rows = copy.deepcopy(ROWS)

    def trainer_that(fails):
        def some_values(completion_ids):
            torch.set_grad_enabled(False)
            os.chdir(tmp_path)
            shutil.rmtree("gone", ignore_errors=True)
            Path("gone").mkdir()
            os.chdir("gone")
            evaluates = len(completion_ids) == 3
            wrong = {"evaluation": trainer.step == 2 and evaluates, "reward": trainer.step == 3}
            return [1.0] if wrong.get(fails, False) else some(completion_ids)

        def generate(prompts, sampling):
            if fails == "engine" and trainer.step == 4:
                raise SystemExit("the engine is gone")
            completions = inner(prompts, sampling)
            for prompt in prompts:
                prompt.clear()
            return completions

        monkeypatch.chdir(tmp_path)
        config = small_config("run", model="base", checkpoint={"every": 100}, save_rollouts=True)
        trainer = make_trainer(tokenizer, rows, some_values, config, model="base")
        inner, trainer.engine.generate = trainer.engine.generate, generate
        return trainer

    for fails, words, reached in (
        ("evaluation", "some_values returned 1 values for 3 completions", 2),
        ("reward", "some_values returned 1 values for 12 completions", 2),
        ("engine", "the engine is gone", 3),
    ):
        trainer = trainer_that(fails)
        with torch.enable_grad(), pytest.raises((InputError, SystemExit), match=words):
            trainer.train(resume=fails != "evaluation")
        assert trainer.directory.latest_checkpoint().name == f"step_00000{reached}"
        records = read_metrics(trainer.directory.metrics)
        assert [record["step"] for record in records] == [*range(reached + 1)]
        assert records[-1]["grad_norm"] > 0
        assert len([*trainer.directory.rollouts.iterdir()]) == reached
    trainer = trainer_that("no more")
    tokens = copy.deepcopy(trainer.train_prompts.tokens)
    trainer.train(resume=True)
    assert trainer.train_prompts.tokens == tokens and rows == ROWS
    assert trainer.config.output == str(tmp_path / "run")  # vLLM gets weights there
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert same(weights(saved), weights(straight.model))


def test_a_run_resumes_with_no_fewer_steps(tmp_path, tokenizer):
    """Its last evaluation is that of its last step, although the run was meant to be longer."""

    def train(steps, fails=False, **flags):
        def odd(completion_ids):
            return [] if fails and trainer.step == 4 else odd_share(completion_ids)

        config = small_config(tmp_path, update={"steps": steps})
        trainer = make_trainer(tokenizer, ROWS, odd, config)
        return trainer.train(**flags)

    with pytest.raises(InputError, match="returned 0 values"):
        train(6, fails=True)
    with pytest.raises(InputError, match=r"update\.steps: got 2, expected at least 3"):
        train(2, resume=True, force=True)
    last = train(3, resume=True)
    assert last["step"] == 3 and last["eval/greedy/odd"] >= 0


def test_resumed_runs_take_other_settings_by_force(tmp_path, tokenizer, straight, capsys):
    path = shutil.copytree(straight.directory.path, tmp_path / "run")
    finished = (path / "metrics.jsonl").read_text()

    def trainer(model=None, rows=ROWS, **sections):
        config = small_config(path, save_rollouts=True, **sections)
        return make_trainer(tokenizer, rows, some, config, model=model)

    other = tiny_qwen3(tokenizer, num_hidden_layers=3)
    for words, changes in (
        (r"finished \(4 steps\)", {}),
        (r"update\.learning_rate: 0\.001 -> 0\.1.*--force", {"update": {"learning_rate": 0.1}}),
        (r"checkpoint is of another model: it has .*layers", {"update": {"steps": 5}, "model": other}),
        (r"dataset, or their order: 6 rows \w+ -> 6 rows \w+\); --force", {"rows": ROWS[::-1]}),
        (r"dataset, or their order: 6 rows \w+ -> 5 rows \w+\); --force", {"rows": ROWS[:5]}),
    ):
        with pytest.raises(InputError, match=words):
            trainer(**changes).train(resume=True)
    assert (path / "metrics.jsonl").read_text() == finished
    capsys.readouterr()
    changed = trainer(update={"steps": 5, "learning_rate": 0.1}, reward_weights=[2.0], rows=ROWS[::-1])
    changed.train(resume=True, force=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "update.learning_rate: 0.001 -> 0.1" in printed and "reward_weights: None -> [2.0]" in printed
    assert "rows of the dataset, or their order: 6 rows" in printed
    assert changed.updater.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert [record["step"] for record in read_metrics(path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("sections", [{}, {"kl": {"beta": 0.1}}, {"lora": {"rank": 2}}], ids=str)
def test_weights_that_no_checkpoint_has_stay_the_same(tmp_path, tokenizer, sections):
    """The reference and frozen weights must be the same; the model's path may change."""

    def train(seed, steps, **flags):
        config = small_config(tmp_path, model=f"path{steps}", update={"steps": steps}, **sections)
        model = tiny_qwen3(tokenizer, seed=seed)
        trainer = make_trainer(tokenizer, ROWS, odd_share, config, model=model, eval_dataset=None)
        return trainer.train(**flags)

    train(0, 1)
    refused = pytest.raises(InputError, match=r"weights of the model: .*--force")
    with refused if sections else nullcontext():
        train(1, 2, resume=True)
    assert train(0, 3, resume=True)["step"] == 3


CENTRED = {"name": "CISPO", "min_ratio": 0.0, "max_ratio": 2.0, "centering": 5}


@pytest.mark.parametrize(
    "sections",
    [{"objective": CENTRED}, {"lora": {"rank": 64}, "kl": {"beta": 0.05}}],
    ids=["centred", "lora"],
)
def test_a_run_resumes_bit_for_bit(tmp_path, tokenizer, sections):
    """Adapters are trained and saved alone. Centering moves the weights."""

    def train(name, steps, resume=False, **changes):
        update = {"steps": steps, "learning_rate": 0.05, "warmup_updates": 3}
        config = small_config(tmp_path / name, update=update, **sections | changes)
        trainer = make_trainer(
            tokenizer, ROWS, odd_share, config, model=tiny_qwen3(tokenizer, hidden_size=64)
        )
        before = weights(trainer.model)
        trainer.train(resume=resume)
        after, records = weights(trainer.model), read_metrics(tmp_path / name / "metrics.jsonl")[1:]
        trained = {n for n in before if ".lora_" in n or "lora" not in sections}
        assert {n for n in before if not torch.equal(before[n], after[n])} == trained
        return after, [(r["grad_norm"], r["entropy"], r.get("kl/ref")) for r in records]

    straight = train("straight", 3)
    copy_after(2, tmp_path / "straight", tmp_path / "resumed")
    resumed = train("resumed", 3, resume=True)
    assert same(resumed[0], straight[0]) and resumed[1] == straight[1]
    if "objective" in sections:
        plain = train("plain", 3, objective=CENTRED | {"centering": 0})
        assert not same(plain[0], straight[0])
    else:
        assert straight[1][-1][2] > 1e-6
        saved = RunDirectory(tmp_path / "resumed").latest_checkpoint()
        names = FileSystemReader(saved / "tensors").read_metadata().state_dict_metadata
        assert all(".lora_" in n for n in names)


MERGED = "a merged PeftModel"
GIVEN = ["a directory", "a name", "a 16-bit model", MERGED, "a model, partly frozen"]


@pytest.mark.parametrize(
    ("given", "family", "adapters", "tied"),
    [
        *((given, "qwen3", "", number % 2 == 0) for number, given in enumerate(GIVEN)),
        *(
            ("a directory", "qwen3", modules, tied)
            for modules, tied in (("all-linear", True), ("q_proj", False))
        ),
        *((given, "qwen3", "all-linear", True) for given in ("a 16-bit model", MERGED)),
        ("a directory", "qwen3_moe", "", True),
    ],
)
def test_each_export_loads_as_what_was_trained(
    tmp_path, tokenizer, monkeypatch, given, family, adapters, tied
):
    """Exported adapters alone are those that were trained."""
    base = tiny_model(family, tokenizer, tie_word_embeddings=tied)
    for each in (base, tokenizer):
        each.save_pretrained(tmp_path / "a" / "base")
    monkeypatch.chdir(tmp_path)
    model = {"a directory": Path("a/base").absolute(), "a name": "a/base"}.get(given) or copy.deepcopy(base)
    if given == "a 16-bit model":
        base, model = base.bfloat16(), model.bfloat16()
    if given == MERGED:
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
        model = peft.PeftModel(model, model.peft_config["default"]).merge_and_unload()
        base = copy.deepcopy(model.requires_grad_(True))
    if given == "a model, partly frozen":
        model.get_input_embeddings().requires_grad_(False)
    update = {"steps": 1, "learning_rate": 0.5 if adapters else 0.1}
    lora = {"rank": 2 * bool(adapters), "target_modules": adapters or None}
    config = small_config("run", model="a/base", update=update, lora=lora)
    trainer = make_trainer(tokenizer, ROWS, odd_share, config, model=model)
    if adapters:
        trained = {name.split(".")[-4] for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert "lm_head" not in trained and (
            trained == {adapters} or (adapters == "all-linear" and len(trained) == 7)
        )
    trainer.train()
    folders = [tmp_path / "run" / "model"]
    if given in GIVEN[:2]:
        monkeypatch.chdir(tmp_path / "a")
        export_checkpoint(tmp_path / "run", tmp_path / "exported")
        folders.append(tmp_path / "exported")
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        before, trained = (model(ids).logits.float().log_softmax(-1) for model in (base, trainer.model))
        moved = (trained - before).abs().max()
        for path in folders:
            saved = AutoModelForCausalLM.from_pretrained(path)
            off = (saved(ids).logits.float().log_softmax(-1) - trained).abs().max()
            assert off < (0.1 if saved.dtype == torch.bfloat16 else 1e-3) * moved and moved > 0.1
            assert saved.config.tie_word_embeddings == tied
            if adapters:
                adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), path / "adapter")
                assert torch.equal(adapted(ids).logits.float().log_softmax(-1), trained)


def test_what_reaches_the_update(tmp_path, tokenizer):
    """The update sees truncated completions, rewards that do not apply, levels, GDPO."""
    batches = {}
    for choice in ("keep", "mask"):
        config = small_config(tmp_path, rollout={"truncated": choice, "max_new_tokens": 2})
        trainer = make_trainer(tokenizer, ROWS, odd_share, config)
        batches[choice] = batch_of(trainer)
    completions = batches["keep"].completions
    finished = torch.tensor([int(ids[-1]) in trainer.engine.end_ids for ids in completions])
    assert finished.any() and not finished.all()
    lengths = torch.tensor([len(ids) for ids in completions])
    assert torch.equal(batches["keep"].counted, lengths)
    assert torch.equal(batches["mask"].loss_mask, finished.repeat_interleave(lengths))
    # Masked completions still count in their group's mean.
    assert torch.equal(batches["keep"].advantages, batches["mask"].advantages)

    def sometimes(prompts):
        return [None if index % 4 == 0 else float(index) for index in range(len(prompts))]

    def ranks(prompts):
        return [3.0, 1.0, 3.0, 2.0] * (len(prompts) // 4)

    def other(prompts):
        return [0.0, 1.0, 0.0, 1.0] * (len(prompts) // 4)

    def batch(rewards, **sections):
        return batch_of(make_trainer(tokenizer, ROWS, rewards, small_config(tmp_path, **sections)))

    found, left_out = batch(sometimes), torch.arange(12) % 4 == 0
    assert torch.equal(found.counted == 0, left_out) and (found.advantages[left_out] == 0).all()
    assert found.advantages.view(3, 4)[0].tolist() == pytest.approx([0, -1, 0, 1], abs=1e-3)
    for name, expected in (("DPO", [1, 3, 1, 2]), ("REBEL", [3, 1, 3, 2])):
        assert batch(ranks, objective={"name": name}).advantages.tolist() == expected * 3
    found = batch([ranks, other], advantages="gdpo", reward_weights=[1.0, 0.5])
    table, each = torch.tensor([[3.0, 1, 3, 2], [0, 1, 0, 1]]).repeat(1, 3).T, torch.tensor([1.0, 0.5])
    assert torch.equal(found.advantages, gdpo(table, group_size=4, weights=each))


def test_a_column_that_is_not_json_ends_no_run(tmp_path, tokenizer, capsys):
    rows = [{**row, "table": {(1, 2): 3}} for row in ROWS]
    config = small_config(tmp_path, update={"steps": 1}, save_rollouts=True)
    last = make_trainer(tokenizer, rows, odd_share, config, eval_dataset=None).train()
    assert last["step"] == 1 and "rollouts/ cannot be written" in capsys.readouterr().out


def test_a_seed_has_an_effect(tmp_path, tokenizer):
    """A seed decides what is sampled of one prompt, not only in which order prompts come."""
    found = []
    for seed in (0, 0, 1):
        trainer = make_trainer(tokenizer, ROWS[:1], odd_share, small_config(tmp_path, seed=seed))
        inner = trainer.rollout
        trainer.rollout = lambda inner=inner: found.append(inner()) or found[-1]
        trainer.take_step()
    first, same_seed, other = ([sample.ids.tolist() for sample in each.samples] for each in found)
    assert first == same_seed != other


def test_options_that_change_no_other_run_here(tmp_path, tokenizer):
    """Options of memory, precision and the optimizer."""

    def made(**sections):
        config = small_config(tmp_path / "run", **sections)
        return make_trainer(tokenizer, ROWS, odd_share, config, accelerator=None)

    def passes(**update):
        """Return the numbers of forward passes through the policy and its first layer in an update."""
        trainer, seen = made(update={"micro_batch_tokens": 1000, **update}), Counter()
        batch, policy = batch_of(trainer), trainer.updater.policy
        for name, module in (("policy", policy), ("layer", trainer.model.model.layers[0].mlp)):
            module.register_forward_pre_hook(lambda *_, name=name: seen.update([name]))
        trainer.update(batch)
        return seen

    whole, small, again = passes(), passes(micro_batch_tokens=4), passes(gradient_checkpointing=True)
    assert small["policy"] > whole["policy"] == again["policy"] and again["layer"] > whole["layer"]
    assert made(rollout={"batch_size": 5}).engine.batch_size == 5
    update = {"weight_decay": 1e5, "learning_rate": 1e-6, "steps": 1}
    trainer = made(update=update)
    before = weights(trainer.model)
    trainer.update(batch_of(trainer))
    for name, weight in weights(trainer.model).items():  # two updates, and each gradient moves it by 1e-6
        torch.testing.assert_close(weight, before[name] * 0.9**2, rtol=0, atol=1e-5)
    for precision, used, mixed in (("auto", "fp32", "no"), ("bf16", "bf16", "bf16")):
        AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps the first precision
        trainer = made(update={"precision": precision})
        assert trainer.accelerator.mixed_precision == mixed
        assert trainer.config.update.precision == trainer.updater.config.update.precision == used


def test_bad_input_is_refused_before_writing(tmp_path, tokenizer):
    class Maskless:
        def generate(self, prompts, sampling):
            return [Completion(torch.tensor([65]), True, torch.zeros(1)) for _ in prompts]

    def first_letter(completions, letter):
        return [1.0] * len(letter)

    def mean(completions):
        return [1.0] * len(completions)

    broken = tiny_qwen3(tokenizer)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    frozen = tiny_qwen3(tokenizer).requires_grad_(False)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["one more"])
    padded = copy.deepcopy(larger)
    padded.pad_token = "one more"
    prompts = peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)
    prompts, adapted = (
        peft.get_peft_model(tiny_qwen3(tokenizer), kind)
        for kind in (prompts, peft.LoraConfig(target_modules=["q_proj"]))
    )
    unknown = [*ROWS, ROWS[0] | {"prompt": "say one more"}]
    embeds = f"row {len(unknown)}: the prompt has token 258, but the model embeds only 258"
    for words, changes in (
        ("no 'prompt'", {"dataset": [{"question": "a"}]}),
        ("the eval dataset is empty", {"eval_dataset": []}),
        ("columns of the eval dataset .none.", {"rewards": first_letter, "eval_dataset": [{"prompt": "a"}]}),
        ("reward function mean", {"rewards": mean}),
        ("no reward function", {"rewards": []}),
        ("tokenizer", {"tokenizer": None}),
        ("not finite", {"model": broken}),
        ("all are frozen", {"model": frozen}),
        *(("model: got PeftModel.* with adapters", {"model": each}) for each in (adapted, prompts)),
        ("model: got Qwen3ForCausalLM with adapters", {"model": adapted.get_base_model()}),
        ("model: got OptimizedModule", {"model": torch.compile(tiny_qwen3(tokenizer))}),
        (embeds, {"tokenizer": larger, "dataset": unknown}),
        ("lora.target_modules: got .'nope'.", {"config": {"rank": 2, "target_modules": "nope"}}),
        (
            "neither the embeddings nor the head",
            {"config": {"rank": 2, "target_modules": ["q_proj", "lm_head"]}},
        ),
        ("padding token is 258", {"tokenizer": padded}),
    ):
        config = small_config(tmp_path / "run", lora=changes.pop("config", {}))
        with pytest.raises(InputError, match=words):
            make_trainer(tokenizer, ROWS, odd_share, config, **changes)
    for tracker, words in (
        ("comet_ml", "comet_ml is not installed"),
        ("nosuch", "^trackers: .* nosuch"),
    ):
        with pytest.raises(InputError, match=words):
            make_accelerator()
            config = small_config(tmp_path / "run", trackers=[tracker])
            make_trainer(tokenizer, ROWS, odd_share, config, accelerator=None)
    config = small_config(tmp_path / "run", rollout={"top_p": 0.9, "keep_sampling_mask": True})
    with pytest.raises(InputError, match=r"keep_sampling_mask: Maskless .*completions without a mask"):
        make_trainer(tokenizer, ROWS, odd_share, config, engine=Maskless()).rollout()
    assert not (tmp_path / "run").exists()
    dropout = tiny_qwen3(tokenizer, attention_dropout=0.5).train()  # which is allowed
    make_trainer(tokenizer, ROWS, odd_share, small_config(tmp_path), model=dropout)


def test_warnings_when_nothing_can_be_learned(tmp_path, tokenizer, capsys):
    steps = {"evaluation": {"every": 100}, "checkpoint": {"every": 100}}
    config = small_config(tmp_path / "flat", update={"steps": PATIENCE + 1}, **steps)
    trainer = make_trainer(tokenizer, ROWS, lambda prompts: [0.7] * len(prompts), config)
    before = weights(trainer.model)
    trainer.train()
    assert "nothing can be learned" in " ".join(capsys.readouterr().out.split())
    assert same(before, weights(trainer.model))  # without weight decay nothing moves
    for keep in (False, True):
        rollout = {"top_p": 0.9, "keep_sampling_mask": keep}
        config = small_config(tmp_path / str(keep), rollout=rollout, update={"steps": 1}, **steps)
        model = tiny_qwen3(tokenizer, initializer_range=0.1)
        last = make_trainer(tokenizer, ROWS, odd_share, config, model=model, eval_dataset=None).train()
        assert capsys.readouterr().out.count("rollout.keep_sampling_mask") == (not keep)
        assert (last["mismatch/mean"] < 1e-5) == keep


def test_outgrown_rope_frequencies_are_warned_about(tmp_path, tokenizer, capsys):
    longest = max(len(row["prompt"]) for row in ROWS)  # a byte is a token
    for room, count in ((LIMIT - longest, 0), (LIMIT - longest + 1, 1)):
        model = model_of_varying_rope("longrope", tokenizer)
        config = small_config(tmp_path / str(room), rollout={"max_new_tokens": room})
        make_trainer(tokenizer, ROWS, odd_share, config, model=model)
        assert capsys.readouterr().out.count(f"frequencies beyond {LIMIT} tokens") == count
