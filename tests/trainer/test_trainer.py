"""Whole runs of a tiny model: what they write, resuming bit for bit, what is refused before a loss."""

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import (
    ConfigError,
    DataError,
    InputError,
    ModelError,
    RewardError,
    RunDirectoryError,
)
from gspo_kernels.trainer.run.checkpoint import saved_tensors
from gspo_kernels.trainer.run.files import RunDirectory
from gspo_kernels.trainer.run.metrics import read_metrics
from gspo_kernels.trainer.run.run import Run
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3


def make_trainer(own_tokenizer, rows, reward, config, **changes):
    arguments = {
        "model": tiny_qwen3(own_tokenizer),
        "tokenizer": own_tokenizer,
        "reward_functions": reward,
        "train_dataset": rows,
        "eval_dataset": rows[:3],
        "config": config,
    }
    return GSPOTrainer(**(arguments | changes))


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_a_run_writes(tmp_path, tokenizer, rows, reward, real_plots):
    trainer = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "run"))
    before = weights(trainer.model)
    last = trainer.train()
    assert not same(before, weights(trainer.model))
    run = RunDirectory(tmp_path / "run")

    lines = run.metrics.read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert ["eval/greedy_accuracy" in record for record in records] == [True, False, True, False, True]
    assert all(v is None or math.isfinite(v) for record in records for v in record.values())
    for key in ("reward/mean", "reward/letter_share", "groups_without_variance", "ratio/min", "ratio/max"):
        assert records[1][key] is not None
    for key in ("minibatch_2/clip_fraction/low", "entropy", "tokens_per_second", "completions/length"):
        assert records[1][key] is not None
    assert last == records[-1]

    assert run.plot.read_bytes().startswith(b"\x89PNG")
    loaded = AutoModelForCausalLM.from_pretrained(run.model)
    assert same(weights(loaded), weights(trainer.model))
    assert AutoTokenizer.from_pretrained(run.model)("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert not list(tmp_path.rglob(".unfinished*"))


@pytest.mark.parametrize("stop", [2, 3])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, tokenizer, rows, stop):
    """A crash after the checkpoint of step 2, at once or one step later, then --resume in a new trainer."""
    import random

    calls = []

    def noisy(prompts, completions, completion_ids, **columns):  # uses Python's generator
        calls.append(len(prompts))
        return [len(ids) + sum(ids) % 7 + random.random() for ids in completion_ids]

    def config(name):
        return small_config(tmp_path / name, update={"steps": 5, "warmup_updates": 20})

    straight = make_trainer(tokenizer, rows, noisy, config("straight"))
    straight.train()

    def crashing(*args, **columns):
        if crashed.step > stop:
            raise KeyboardInterrupt
        return noisy(*args, **columns)

    crashed = make_trainer(tokenizer, rows, crashing, config("resumed"))
    with pytest.raises(KeyboardInterrupt):
        crashed.train()
    torch.manual_seed(999)
    random.seed(999)
    resumed = make_trainer(
        tokenizer, rows, noisy, config("resumed"), model=tiny_qwen3(tokenizer, seed=7)
    )  # its weights must come from the checkpoint
    resumed.train(resume=True)
    assert same(weights(straight.model), weights(resumed.model))

    def comparable(name):
        timed = ("seconds", "tokens_per_second", "memory")
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return [
            {k.replace("crashing", "noisy"): v for k, v in record.items() if not k.startswith(timed)}
            for record in records
        ]

    assert comparable("straight") == comparable("resumed")


def test_resume_before_the_first_checkpoint_starts_again(tmp_path, tokenizer, rows, reward):
    straight = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "a"))
    straight.train()
    config = small_config(tmp_path / "b", checkpoint={"every": 100})

    def crashing(*args, **columns):
        if crashed.step == 2:
            raise KeyboardInterrupt
        return reward(*args, **columns)

    crashed = make_trainer(tokenizer, rows, crashing, config)
    with pytest.raises(KeyboardInterrupt):
        crashed.train()
    resumed = make_trainer(tokenizer, rows, reward, config)
    resumed.train(resume=True)
    assert same(weights(straight.model), weights(resumed.model))


def test_a_run_can_be_made_longer_but_not_changed(tmp_path, tokenizer, rows, reward):
    make_trainer(tokenizer, rows, reward, small_config(tmp_path, update={"steps": 2})).train()
    finished = (tmp_path / "metrics.jsonl").read_text()

    def trainer(**sections):
        return make_trainer(tokenizer, rows, reward, small_config(tmp_path, **sections))

    with pytest.raises(InputError, match="already holds a run"):
        trainer(update={"steps": 2}).train()
    with pytest.raises(InputError, match=r"finished \(2 steps\)"):
        trainer(update={"steps": 2}).train(resume=True)
    with pytest.raises(ConfigError, match=r"update\.learning_rate"):
        trainer(update={"steps": 3, "learning_rate": 0.1}).train(resume=True)
    with pytest.raises(InputError, match="the training dataset is another one"):
        make_trainer(tokenizer, rows[:5], reward, small_config(tmp_path)).train(resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == finished

    longer = trainer(update={"steps": 4})
    longer.train(resume=True)
    straight = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "straight"))
    straight.train()
    assert same(weights(longer.model), weights(straight.model))


def test_resuming_exports_a_run_killed_before_its_export(tmp_path, tokenizer, rows, reward, monkeypatch):
    config = small_config(tmp_path)
    killed = make_trainer(tokenizer, rows, reward, config)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            killed.train()
    assert not (tmp_path / "model").exists()
    make_trainer(tokenizer, rows, reward, config).train(resume=True)
    assert same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), weights(killed.model))


def test_evaluating_more_often_changes_nothing(tmp_path, tokenizer, rows, reward):
    often = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "a", evaluation={"every": 1}))
    often.train()
    never = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "b"), eval_dataset=None)
    never.train()
    assert same(weights(often.model), weights(never.model))


def test_truncated_completions_are_kept_or_masked(tmp_path, tokenizer, rows, reward):
    experiences = {}
    for choice in ("keep", "mask"):
        config = small_config(tmp_path, rollout={"truncated": choice, "max_new_tokens": 20})
        trainer = make_trainer(tokenizer, rows, reward, config)
        trainer.engine.end_ids = list(range(20))  # one token in thirteen ends a completion
        trainer.step = 1
        torch.manual_seed(0)
        experiences[choice], _ = trainer.rollout()
    completions = experiences["keep"].completions
    finished = torch.tensor([int(ids[-1]) in trainer.engine.end_ids for ids in completions])
    assert finished.any() and not finished.all()
    lengths = torch.tensor([len(ids) for ids in completions])
    assert torch.equal(experiences["keep"].counted, lengths)
    assert torch.equal(experiences["mask"].loss_mask, finished.repeat_interleave(lengths))
    # they still count in their group's mean
    assert torch.equal(experiences["keep"].advantages, experiences["mask"].advantages)


def test_rewards_that_do_not_apply_leave_completions_out(tmp_path, tokenizer, rows):
    def sometimes(prompts, completions, completion_ids, **columns):
        return [None if index % 4 == 0 else float(index) for index in range(len(prompts))]

    trainer = make_trainer(tokenizer, rows, sometimes, small_config(tmp_path))
    trainer.step = 1
    experience, _ = trainer.rollout()
    left_out = torch.arange(12) % 4 == 0
    assert torch.equal(experience.counted == 0, left_out)
    assert (experience.advantages[left_out] == 0).all()
    assert experience.advantages.view(3, 4)[0].tolist() == pytest.approx([0, -1, 0, 1], abs=1e-3)


def test_rollouts_keep_groups_together_and_pass_their_columns(tmp_path, tokenizer, rows):
    seen = []

    def record(prompts, completions, completion_ids, *, letter):
        seen.append((prompts, letter))
        return [0.0] * len(prompts)

    trainer = make_trainer(tokenizer, rows, record, small_config(tmp_path))
    for trainer.step in (1, 2):
        trainer.rollout()
    for prompts, letters in seen:
        assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 12, 4))
        assert letters == [prompt[0] for prompt in prompts]
    assert sorted(prompts[i] for prompts, _ in seen for i in (0, 4, 8)) == sorted(r["prompt"] for r in rows)


def test_a_reward_that_fails_in_the_middle_loses_nothing(tmp_path, tokenizer, rows, reward):
    def failing(prompts, *args, **columns):
        return reward(prompts, *args, **columns) if trainer.step < 3 else [1.0]

    trainer = make_trainer(tokenizer, rows, failing, small_config(tmp_path))
    with pytest.raises(RewardError, match="failing returned 1 values for 12 completions"):
        trainer.train()
    make_trainer(tokenizer, rows, reward, small_config(tmp_path)).train(resume=True)
    assert (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train_dataset": []}, DataError, "the training dataset is empty"),
        ({"train_dataset": [{"question": "a"}]}, DataError, "no 'prompt'"),
        ({"eval_dataset": []}, DataError, "the eval dataset is empty"),
        ({"train_dataset": [{"prompt": "a" * 60, "letter": "a"}]}, DataError, "60 tokens.*59"),
        ({"reward_functions": []}, RewardError, "no reward function"),
        ({"tokenizer": None}, ModelError, "tokenizer"),
        ({"model": "no/such/directory", "tokenizer": None}, ModelError, "no/such/directory"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path, tokenizer, rows, reward, changes, error, words
):
    with pytest.raises(error, match=words):
        make_trainer(tokenizer, rows, reward, small_config(tmp_path / "run"), **changes)
    assert not (tmp_path / "run").exists()


def test_accuracy_is_the_reward_that_was_chosen(tmp_path, tokenizer, rows, reward):
    def half(prompts, *args, **columns):
        return [0.5] * len(prompts)

    config = small_config(tmp_path, evaluation={"accuracy": "half"})
    trainer = make_trainer(tokenizer, rows, [reward, half], config)
    metrics = trainer.evaluate()
    assert metrics["eval/greedy_accuracy"] == metrics["eval/sampled_accuracy"] == 0.5
    assert metrics["eval/greedy/letter_share"] != 0.5
    with pytest.raises(ConfigError, match="no reward 'quarter'; there are letter_share, half"):
        make_trainer(
            tokenizer, rows, [reward, half], small_config(tmp_path, evaluation={"accuracy": "quarter"})
        )


def test_warnings_when_nothing_can_be_learned(tmp_path, tokenizer, rows, capsys):
    def constant(prompts, *args, **columns):
        return [0.7] * len(prompts)

    config = small_config(tmp_path, update={"steps": 6})
    trainer = make_trainer(tokenizer, rows, constant, config)
    before = weights(trainer.model)
    trainer.train()
    assert "nothing can be learned" in " ".join(capsys.readouterr().out.split())
    # and indeed, without weight decay, nothing moves
    assert same(before, weights(trainer.model))


def test_adapters_are_exported_with_the_weights_and_resume_bit_for_bit(tmp_path, tokenizer, rows, reward):
    pytest.importorskip("peft")
    sections = {"lora": {"rank": 2}, "kl": {"beta": 0.05}, "update": {"learning_rate": 0.05}}
    straight = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "straight", **sections))
    base = weights(straight.model)
    straight.train()
    trained = weights(straight.model)
    assert all(same({n: base[n]}, {n: trained[n]}) == ("lora" not in n) for n in base)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "model")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours, plain = straight.model(ids).logits, tiny_qwen3(tokenizer)(ids).logits
        torch.testing.assert_close(exported(ids).logits, ours, atol=1e-5, rtol=1e-5)
    assert (ours - plain).abs().max() > 1e-2

    changes = sections | {"update": sections["update"] | {"steps": 2}}
    make_trainer(tokenizer, rows, reward, small_config(tmp_path / "resumed", **changes)).train()
    resumed = make_trainer(tokenizer, rows, reward, small_config(tmp_path / "resumed", **sections))
    resumed.train(resume=True)
    assert same(weights(resumed.model), trained)
    checkpoint = RunDirectory(tmp_path / "resumed").latest_checkpoint()
    assert all(".lora_" in name for name in saved_tensors(checkpoint))
    assert (checkpoint / "state.pt").stat().st_size < 150_000


def test_adapters_on_the_head_are_refused(tmp_path, tokenizer, rows, reward):
    pytest.importorskip("peft")
    for targets, words in (("lm_head", "lm_head"), ("no_such_layer", "lora.target_modules")):
        config = small_config(tmp_path, lora={"rank": 2, "target_modules": targets})
        with pytest.raises(ModelError, match=words):
            make_trainer(tokenizer, rows, reward, config)


def test_trackers_get_the_metrics(tmp_path, tokenizer, rows, reward):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Kept(GeneralTracker):
        name, requires_logging_directory, main_process_only = "kept", False, True
        logged, finished, config, tracker = {}, False, None, None

        def store_init_configuration(self, values):
            Kept.config = values

        def log(self, values, step=None, **options):
            Kept.logged[step] = values

        def finish(self):
            Kept.finished = True

    make_accelerator()
    accelerator = Accelerator(log_with=[Kept()])
    make_trainer(tokenizer, rows, reward, small_config(tmp_path), accelerator=accelerator).train()
    assert Kept.finished and Kept.config["update.steps"] == 4
    assert sorted(Kept.logged) == [0, 1, 2, 3, 4]
    assert Kept.logged[4]["reward/mean"] == read_metrics(tmp_path / "metrics.jsonl")[4]["reward/mean"]
    make_accelerator()
    with pytest.raises(ConfigError, match="comet_ml is not installed"):
        make_trainer(tokenizer, rows, reward, small_config(tmp_path, trackers=["comet_ml"]))


def test_levels_and_rewards_reach_the_objectives_that_take_them(tmp_path, tokenizer, rows):
    def ranks(prompts, *args, **columns):
        return [3.0, 1.0, 3.0, 2.0] * (len(prompts) // 4)

    for name, expected in (("DPO", [1, 3, 1, 2]), ("REBEL", [3, 1, 3, 2])):
        trainer = make_trainer(tokenizer, rows, ranks, small_config(tmp_path, objective={"name": name}))
        trainer.step = 1
        experience, _ = trainer.rollout()
        assert experience.advantages.tolist() == expected * 3


@pytest.mark.parametrize("sections", [{"kl": {"beta": 0.1}}, {"lora": {"rank": 2}}], ids=str)
def test_a_run_that_needs_its_first_weights_does_not_go_on_with_others(
    tmp_path, tokenizer, rows, reward, sections
):
    config = small_config(tmp_path, update={"steps": 2}, **sections)
    make_trainer(tokenizer, rows, reward, config).train()
    longer = small_config(tmp_path, update={"steps": 3}, **sections)
    with pytest.raises(InputError, match="other weights than the one"):
        make_trainer(tokenizer, rows, reward, longer, model=tiny_qwen3(tokenizer, seed=1)).train(resume=True)
    make_trainer(tokenizer, rows, reward, longer).train(resume=True)


def test_a_run_goes_on_with_its_own_model_tokenizer_and_data_only(tmp_path, tokenizer, rows, reward):
    """Files may move, so contents are compared: as many rows with other texts, a layer more, another word."""
    config = small_config(tmp_path, update={"steps": 2})
    make_trainer(tokenizer, rows, reward, config).train()
    before = (tmp_path / "metrics.jsonl").read_text()
    longer = small_config(tmp_path, update={"steps": 3})
    other_words = copy.deepcopy(tokenizer)
    other_words.chat_template = "{{ messages }}"
    for changes, what in (
        ({"model": tiny_qwen3(tokenizer, num_hidden_layers=4)}, "the model's configuration"),
        ({"tokenizer": other_words}, "the tokenizer"),
        ({"train_dataset": [row | {"letter": "z"} for row in rows]}, "the training dataset"),
    ):
        with pytest.raises(RunDirectoryError, match=f"{what} is another one"):
            make_trainer(tokenizer, rows, reward, longer, **changes).train(resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    make_trainer(tokenizer, rows, reward, longer).train(resume=True)


def test_dropout_of_a_model_in_training_mode_confuses_nobody(tmp_path, tokenizer, rows, reward):
    model = tiny_qwen3(tokenizer, attention_dropout=0.5).train()
    make_trainer(tokenizer, rows, reward, small_config(tmp_path), model=model)


def test_weights_and_words_that_cannot_be_trained_are_named(tmp_path, tokenizer, rows, reward):
    broken = tiny_qwen3(tokenizer)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ModelError, match="holds numbers that are not finite"):
        make_trainer(tokenizer, rows, reward, small_config(tmp_path), model=broken)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["one more"])
    unknown = [*rows, rows[0] | {"prompt": "say one more"}]
    words = f"row {len(unknown)}: the prompt has token 258, but the model embeds only 258"
    with pytest.raises(DataError, match=words):
        make_trainer(tokenizer, unknown, reward, small_config(tmp_path), tokenizer=larger)
    padded = copy.deepcopy(larger)
    padded.pad_token = "one more"
    with pytest.raises(ModelError, match="padding token is 258"):
        make_trainer(tokenizer, rows, reward, small_config(tmp_path), tokenizer=padded)
