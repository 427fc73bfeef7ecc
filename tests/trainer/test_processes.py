"""Two processes, DDP and FSDP2: the losses of one process, exact resume, memory, failures that end both."""

import sys
from functools import partial

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer import model as model_module
from gspo_kernels.trainer.checkpoint import RunDirectory, load_state
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.processes import check_processes, on_main
from gspo_kernels.trainer.report import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import (
    batch_of,
    copy_after,
    make_accelerator,
    make_trainer,
    odd_share,
    same,
    small_config,
    tiny_model,
    tiny_qwen3,
    weights,
)

ROWS = [{"prompt": prompt} for prompt in ("ab", "bcdefghijk", "c", "dabc", "ea", "fgh")]


def fsdp2(accelerator):
    """Set up sharding on a CPU. Accelerate by itself would run DDP instead."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def accelerator_of(kind, precision="fp32"):
    accelerator = make_accelerator(precision)
    return fsdp2(accelerator) if kind == "fsdp2" else accelerator


def whole(tensors):
    """Return copies of tensors, gathered where they are shards."""
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()
    }


KEPT = {"top_p": 0.9, "keep_sampling_mask": True}
IDLE = {"rollout": {"group_size": 2}, "update": {"minibatches": 6}}  # of one row, so a process has no work
SECTIONS = {
    "ddp of groups with a reference": {"objective": {"name": "DPO"}},
    "ddp with adapters, without work for one": {"lora": {"rank": 2}, "kl": {"beta": 0.1}, **IDLE},
    "ddp, centered": {"objective": {"name": "GRPO", "centering": 5}, "kl": {"beta": 0.1}},
    "fsdp2 without work for one": {"lora": {"rank": 2}, **IDLE},
    "fsdp2 in small parts with a reference and masks": {
        "kl": {"beta": 0.1}, "update": {"micro_batch_tokens": 9}, "rollout": KEPT,
    },
    # the clip range is too wide to bind: one rounding could turn a clip decision
    "fsdp2, checkpointing, bf16": {
        "update": {"gradient_checkpointing": True, "precision": "bf16"},
        "objective": {"clip_low": 0.9, "clip_high": 9.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SECTIONS)
def test_a_saved_rollout_gives_the_losses(tmp_path, tokenizer, case):
    """After two steps on the same rollout every metric of every minibatch agrees, and so do the weights."""
    sections = SECTIONS[case]
    precision = sections.get("update", {}).get("precision", "fp32")
    config = small_config(tmp_path, **sections)
    one = make_trainer(tokenizer, ROWS, odd_share, config)
    batch = batch_of(one)
    before = whole(one.updater.tensors())
    expected = [one.updater.update(batch, step) for step in (1, 2)]
    after = one.updater.tensors()

    def update(rank):
        accelerator = accelerator_of(case.split()[0].strip(","), precision)
        assert accelerator.num_processes == 2
        two = make_trainer(tokenizer, ROWS, odd_share, config, accelerator=accelerator)
        kinds = {type(p).__name__ for p in two.updater.policy.parameters()}
        assert kinds == {"DTensor" if case.startswith("fsdp2") else "Parameter"}, kinds
        found = [two.updater.update(batch, step) for step in (1, 2)]
        relative, floor, part = (0.05, 1e-2, 0.5) if precision == "bf16" else (1e-3, 2e-6, 2e-2)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert ours[name] == pytest.approx(value, rel=relative, abs=floor, nan_ok=True), name
        tensors = whole(two.updater.tensors())
        for name in (name for name in tensors if name.startswith("weights/")):
            moved = (after[name] - before[name]).norm()
            assert (tensors[name] - after[name]).norm() <= part * moved, name

    in_processes(2, update)


def test_nodes_without_a_shared_file_system(tmp_path, tokenizer, capfd):
    """The run prints its sizes, which do not shrink in several processes."""

    def train(rank):
        config = small_config(tmp_path / str(rank), update={"steps": 1}, save_rollouts=True)
        options = {"accelerator": accelerator_of("ddp"), "eval_dataset": None}
        last = make_trainer(tokenizer, ROWS, odd_share, config, **options).train()
        assert last["step"] == 1 and "reward/mean" in last

    in_processes(2, train)
    assert "(rollout.batch_size = 64, update.micro_batch_tokens = 24)" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_processes_resume_bitwise_and_export(tmp_path, tokenizer, kind, capfd):
    """A run continues in two processes, and then in one. Weights and optimizer are restored bit for bit.

    A change of the number of processes prints that sampling has new seeds.
    """

    def trainer(name, steps, processes=2):
        accelerator = accelerator_of(kind if processes == 2 else "one")
        config = small_config(tmp_path / name, update={"steps": steps}, checkpoint={"every": 1})
        return make_trainer(tokenizer, ROWS, odd_share, config, accelerator=accelerator)

    def train(rank):
        trainer("straight", 2).train()
        on_main(lambda: copy_after(1, tmp_path / "straight", tmp_path / "stopped"))
        last = trainer("stopped", 2)
        last.train(resume=True)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped" / "model")
        assert same(whole(dict(last.model.named_parameters())), dict(exported.named_parameters()))
        tensors = whole(last.updater.tensors())
        if rank == 0:
            torch.save(tensors, tmp_path / "saved.pt")

    in_processes(2, train)
    a, b = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("straight", "stopped")
    )
    assert same(weights(a), weights(b))
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "stopped")]
    assert [r["loss"] for r in records[0][1:]] == [r["loss"] for r in records[1][1:]]
    assert "sampling has new seeds" not in capfd.readouterr().out
    again = trainer("stopped", 3, 1)
    path = again.directory.latest_checkpoint()
    again.load_state_dict(load_state(path), path)
    assert same(whole(again.updater.tensors()), torch.load(tmp_path / "saved.pt"))
    again.train(resume=True)
    assert "sampling has new seeds" in capfd.readouterr().out
    assert [r["step"] for r in read_metrics(tmp_path / "stopped" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_no_process_gathers_weights_to_save_or_resume(tmp_path, tokenizer, monkeypatch):
    def work(rank):
        accelerator = fsdp2(make_accelerator())
        trainer = make_trainer(tokenizer, ROWS, odd_share, small_config(tmp_path), accelerator=accelerator)
        trainer.updater.update(batch_of(trainer))
        before = whole(trainer.updater.tensors())
        with monkeypatch.context() as patch:
            for name in ("full_tensor", "redistribute"):
                patch.setattr(DTensor, name, lambda *_, **__: pytest.fail("gathered"))
            trainer.save(trainer.state_dict())
            for tensor in trainer.updater.tensors().values():
                tensor.zero_()
            path = trainer.directory.latest_checkpoint()
            trainer.load_state_dict(load_state(path), path)
            shards = trainer.updater.tensors()
        assert all(isinstance(t, DTensor) for name, t in shards.items() if "/step/" not in name)
        assert same(whole(shards), before)

    in_processes(2, work)


@pytest.mark.parametrize("read_by_one", [False, True])
def test_models_of_several_processes_load_and_save(tmp_path, tokenizer, monkeypatch, read_by_one):
    """By default accelerate lets the first process read, which sends the others their shards."""
    prepare, has_read = model_module.fsdp2_prepare_model, []

    def noted(accelerator, policy):
        first = next(policy.parameters())
        has_read.append(not first.is_meta and bool(first.any()))  # transformers 5.17 makes zeros
        return prepare(accelerator, policy)

    models = {
        "tied rows that do not divide": tiny_qwen3(tokenizer, vocab_size=259, tie_word_embeddings=True),
        "experts that files have one by one": tiny_model("qwen3_moe", vocab_size=259),
    }
    for name, model in models.items():
        for each in (model, tokenizer):
            each.save_pretrained(tmp_path / name)

    def work(rank):
        for name, expected in models.items():
            config = small_config(tmp_path / name / "run", update={"steps": 1}, kl={"beta": 0.1})
            accelerator = fsdp2(make_accelerator())
            accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = read_by_one
            options = {"model": str(tmp_path / name), "accelerator": accelerator, "eval_dataset": None}
            with monkeypatch.context() as patch:  # as accelerate's launcher does on GPUs
                for flag in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
                    patch.setenv(flag, str(read_by_one))
                patch.setattr(model_module, "fsdp2_prepare_model", noted)
                flat = lambda prompts: [0.0] * len(prompts)  # noqa: E731  which moves no weight
                trainer = make_trainer(tokenizer, ROWS, flat, config, **options)
            found = whole(dict(trainer.model.named_parameters(remove_duplicate=False)))
            assert same(found, dict(expected.named_parameters(remove_duplicate=False))), name
            trainer.train()
        assert set(has_read) == {rank == 0 or not read_by_one}

    in_processes(2, work)
    for name, expected in models.items():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name / "run" / "model")
        assert same(weights(found), weights(expected)) and found.dtype == expected.dtype


@pytest.mark.parametrize("failing", ["reward", "engine"])
def test_a_failure_in_one_process_ends_all(tmp_path, tokenizer, failing):
    def reward(prompts, completion_ids):
        if failing == "reward" and "fgh" in prompts:
            raise ValueError("only one process sees this prompt")
        return odd_share(completion_ids)

    def train(rank):
        trainer = make_trainer(tokenizer, ROWS, reward, small_config(tmp_path))
        if failing == "engine" and rank == 1:
            inner = trainer.engine.generate
            gone = partial(sys.exit, "only one process ends")
            trainer.engine.generate = lambda *passed: gone() if trainer.step == 2 else inner(*passed)
        with pytest.raises((InputError, RuntimeError), match="only one process"):
            trainer.train()

    in_processes(2, train)
    assert RunDirectory(tmp_path).latest_checkpoint() is not None


def test_setups_that_would_train_otherwise_are_refused(monkeypatch):
    accelerator = make_accelerator()
    state = accelerator.state
    for change, words in (
        (("setenv", "WORLD_SIZE", "2"), "2 processes were started and accelerate set up 1"),
        (("setitem", vars(state), "_mixed_precision", "fp16"), "got fp16, expected no or bf16"),
        (("setattr", state, "distributed_type", DistributedType.DEEPSPEED), "FSDP version 2"),
    ):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=words):
            getattr(patch, change[0])(*change[1:])
            check_processes(accelerator)
    for name, value in (
        ("activation_checkpointing", True),
        ("ignored_modules", "lm_head"),
        ("mixed_precision_policy", MixedPrecisionPolicy(torch.bfloat16)),
    ):
        sharded = fsdp2(make_accelerator())
        check_processes(sharded)
        setattr(sharded.state.fsdp_plugin, name, value)
        with pytest.raises(InputError, match=name):
            check_processes(sharded)


OPTIONS = {
    "accumulation": {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4)},
    "dynamo": {"dynamo_backend": "eager"},
    "bf16": {"mixed_precision": "bf16"},
    "loaders": {
        "dataloader_config": DataLoaderConfiguration(split_batches=True, even_batches=False),
        "step_scheduler_with_optimizer": False,
    },
}
ENVIRONMENT = (
    "GRADIENT_ACCUMULATION_STEPS=4 DYNAMO_BACKEND=EAGER USE_DEEPSPEED=true USE_MEGATRON_LM=true "
    "USE_FSDP=true MIXED_PRECISION=fp16 MIXED_PRECISION=bf16 USE_CPU=true GRADIENT_CLIPPING=0.01"
)


@pytest.fixture(scope="module")
def updated(tokenizer, tmp_path_factory):
    """Return a function that updates a tiny model with an accelerator, and its result for a plain one."""
    config = small_config(tmp_path_factory.mktemp("plain"), update={"precision": "fp32"})

    def update(accelerator):
        trainer = make_trainer(tokenizer, ROWS, odd_share, config, accelerator=accelerator)
        return trainer.updater.update(batch_of(trainer)), whole(trainer.updater.tensors())

    return update, update(make_accelerator())


@pytest.mark.parametrize("setting", [*OPTIONS, *ENVIRONMENT.split()])
def test_accelerates_settings_change_no_update(updated, monkeypatch, setting):
    """A setting of accelerate's, in its environment or an `Accelerator`, changes nothing or is refused."""
    update, (metrics, tensors) = updated
    AcceleratorState._reset_state(reset_partial_state=True)
    if setting not in OPTIONS:
        monkeypatch.setenv(*f"ACCELERATE_{setting}".split("="))
    try:
        found = update(Accelerator(**OPTIONS[setting]) if setting in OPTIONS else None)
    except InputError as error:
        assert "accelerat" in str(error).lower()
    else:
        assert found[0] == metrics and same(found[1], tensors)
