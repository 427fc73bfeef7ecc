"""Two processes: DDP and FSDP2 take the steps of one process, whatever the lengths of completions."""

import functools
import json
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import ConfigError, RewardError
from gspo_kernels.trainer.run.files import RunDirectory
from gspo_kernels.trainer.run.metrics import read_metrics
from gspo_kernels.trainer.run.processes import check_processes
from tests.forks import in_processes
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.test_trainer import weights

ROWS = [{"prompt": prompt} for prompt in ("ab", "bcdefghijk", "c", "dabc", "ea", "fgh")]
ENDS = list(range(90))  # a third of the vocabulary ends a completion: lengths from 1 to 5


def odd_share(prompts, completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def fails_where_it_is_called_last(prompts, completions, completion_ids, **columns):
    if "fgh" in prompts:
        raise ValueError("only one process sees this prompt")
    return odd_share(prompts, completions, completion_ids)


def make_trainer(output, tokenizer, accelerator, reward=odd_share, **sections):
    update = {"steps": 3, "micro_batch_tokens": 24} | sections.pop("update", {})
    config = small_config(output, update=update, checkpoint={"every": 2}, **sections)
    model = tiny_qwen3(tokenizer)
    trainer = GSPOTrainer(model, tokenizer, reward, ROWS, ROWS[:3], config, accelerator=accelerator)
    trainer.engine.end_ids = ENDS
    return trainer


def fsdp2(accelerator):
    """Sharding on a CPU, which accelerate refuses to set up by itself (it runs DDP instead)."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def vector(model):
    return torch.cat([w.flatten() for _, w in sorted(weights(model).items())])


KEPT = {"top_p": 0.9, "keep_sampling_mask": True}
SECTIONS = {
    "ddp": {},
    "ddp without work for one": {"update": {"minibatches": 12, "steps": 2}},
    "ddp of groups with a reference": {"objective": {"name": "DPO"}},
    "ddp with adapters": {"lora": {"rank": 2}, "kl": {"beta": 0.1}, "rollout": KEPT},
    "fsdp2 in small parts": {"update": {"micro_batch_tokens": 9}, "rollout": KEPT},
    "fsdp2 without work for one": {"update": {"minibatches": 12, "steps": 2}},
    "fsdp2 with a reference": {"kl": {"beta": 0.1}},
    "fsdp2 with adapters": {"lora": {"rank": 2}},
    "fsdp2, checkpointing, bf16": {"update": {"gradient_checkpointing": True, "precision": "bf16"}},
}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory, tokenizer):
    """Return the weights before and after a run, and its metrics; one run for cases with equal sections."""

    @functools.cache
    def outcome(sections):
        output, sections = tmp_path_factory.mktemp("one"), json.loads(sections)
        accelerator = make_accelerator(sections.get("update", {}).get("precision", "fp32"))
        trainer = make_trainer(output, tokenizer, accelerator, **sections)
        before = vector(trainer.model)
        trainer.train()
        after = vector(AutoModelForCausalLM.from_pretrained(output / "model"))
        return before, after, read_metrics(output / "metrics.jsonl")

    return lambda sections: outcome(json.dumps(sections))


@pytest.mark.parametrize("case", SECTIONS)
def test_two_processes_take_the_steps_of_one(tmp_path, tokenizer, in_one_process, case):
    sections = SECTIONS[case]
    precision = sections.get("update", {}).get("precision", "fp32")
    before, one, records = in_one_process(sections)

    def train(rank):
        accelerator = make_accelerator(precision)
        assert accelerator.num_processes == 2
        if case.startswith("fsdp2"):
            accelerator = fsdp2(accelerator)
        trainer = make_trainer(tmp_path, tokenizer, accelerator, **sections)
        kinds = {type(p).__name__ for p in trainer.updater.policy.parameters()}
        assert kinds == {"DTensor" if case.startswith("fsdp2") else "Parameter"}, kinds
        trainer.train()

    in_processes(2, train)
    two = vector(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    moved = (one - before).norm() if "adapters" not in case else (one - one.mean()).norm() * 1e-2
    assert moved > 0
    # Adam divides by the size of gradients, so rounding shows where these are next to nothing.
    assert (two - one).norm() < (0.2 if precision == "bf16" else 5e-3) * moved
    for a, b in zip(records, read_metrics(tmp_path / "metrics.jsonl"), strict=True):
        assert a.keys() == b.keys()
        if precision == "fp32" and a["step"] > 0:
            assert b.get("reward/mean") == pytest.approx(a.get("reward/mean"))
            assert b.get("minibatch_1/grad_norm") == pytest.approx(a.get("minibatch_1/grad_norm"), rel=1e-2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_run_in_two_processes_resumes_bit_for_bit(tmp_path, tokenizer, kind):
    def train(rank):
        wrap = fsdp2 if kind == "fsdp2" else lambda accelerator: accelerator
        for name, steps, resume in (("straight", 3, False), ("stopped", 1, False), ("stopped", 3, True)):
            accelerator = wrap(make_accelerator())
            trainer = make_trainer(tmp_path / name, tokenizer, accelerator, update={"steps": steps})
            trainer.train(resume=resume)

    in_processes(2, train)
    a, b = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("straight", "stopped")
    )
    assert torch.equal(vector(a), vector(b))
    # and one process goes on from a checkpoint of two
    one = make_trainer(tmp_path / "stopped", tokenizer, make_accelerator(), update={"steps": 4})
    one.train(resume=True)
    assert RunDirectory(tmp_path / "stopped").latest_checkpoint().name == "step_000004"


def test_a_failure_in_one_process_ends_all(tmp_path, tokenizer):
    def train(rank):
        trainer = make_trainer(tmp_path, tokenizer, make_accelerator(), fails_where_it_is_called_last)
        with pytest.raises(RewardError, match="only one process sees this prompt"):
            trainer.train()

    started = time.monotonic()
    in_processes(2, train)
    assert time.monotonic() - started < 300


def leaves(prompts, completions, completion_ids, **columns):
    if "fgh" in prompts:
        sys.exit(0)
    return odd_share(prompts, completions, completion_ids)


def test_a_reward_that_exits_in_one_process_is_an_error_in_all(tmp_path, tokenizer):
    def train(rank):
        trainer = make_trainer(tmp_path, tokenizer, make_accelerator(), leaves)
        with pytest.raises(RewardError, match=r"leaves raised SystemExit\(0\)"):
            trainer.train()

    in_processes(2, train)


@pytest.mark.parametrize(
    "sections", [{}, {"lora": {"rank": 2}, "kl": {"beta": 0.1}}], ids=["weights", "adapters"]
)
def test_sharded_bf16_training_exports_the_fp32_weights(tmp_path, tokenizer, sections):
    sections = {"update": {"precision": "bf16", "steps": 2, "learning_rate": 1e-2}, **sections}

    def train(rank):
        trainer = make_trainer(tmp_path, tokenizer, fsdp2(make_accelerator("bf16")), **sections)
        trainer.train()
        state = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert exported.dtype == torch.float32
        for name, weight in exported.named_parameters():
            if name in state and name.replace(".weight", ".lora_A.default.weight") not in state:
                assert torch.equal(weight, state[name]), name

    in_processes(2, train)
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.layers[0].mlp.up_proj.weight
    rounded = moved.bfloat16().float()
    assert (moved != rounded).float().mean() > 0.9


def test_fsdp_that_was_asked_for_and_not_set_up_is_refused(monkeypatch):
    accelerator = make_accelerator()
    check_processes(accelerator)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP was asked for"):
        check_processes(accelerator)


def test_activation_checkpointing_that_would_be_left_out_is_refused():
    accelerator = fsdp2(make_accelerator())
    check_processes(accelerator)
    accelerator.state.fsdp_plugin.activation_checkpointing = True
    with pytest.raises(ConfigError, match=r"use update\.gradient_checkpointing"):
        check_processes(accelerator)


def test_compilation_that_would_be_left_out_is_refused(monkeypatch):
    from accelerate.utils import DynamoBackend

    accelerator = fsdp2(make_accelerator())
    monkeypatch.setattr(accelerator.state.dynamo_plugin, "backend", DynamoBackend.INDUCTOR)
    with pytest.raises(ConfigError, match="dynamo_backend under FSDP"):
        check_processes(accelerator)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MULTI_XPU"])
def test_other_ways_are_refused(monkeypatch, kind):
    from accelerate.utils import DistributedType

    accelerator = make_accelerator()
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType[kind])
    with pytest.raises(ConfigError, match="one process, DDP and FSDP version 2"):
        check_processes(accelerator)
