"""Processes that share weight matrices or sequences take the steps of one process."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import ConfigError, ModelError, RewardError
from gspo_kernels.trainer.run.arrangement import Arrangement
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.run.test_processes import (
    ENDS,
    ROWS,
    fails_where_it_is_called_last,
    fsdp2,
    odd_share,
    vector,
)

IN_PARTS = {"micro_batch_tokens": 9, "steps": 2}
TAUGHT = {"objective": {"name": "GRPO"}, "distillation": {"teacher": "TEACHER", "reward_coef": 1.0}}
CASES = {
    "tensor": ({"tensor": 2}, {"update": IN_PARTS, "kl": {"beta": 0.1}}),
    "tensor, every option": (
        {"tensor": 2},
        {
            "update": {"layout": "shared_prefix", "steps": 2, "gradient_checkpointing": True},
            "rollout": {"top_p": 0.9, "keep_sampling_mask": True},
            **TAUGHT,
        },
    ),
    "context": (
        {"context": 2},
        {"update": {"minibatches": 12, "steps": 2}, "kl": {"beta": 0.1}, **TAUGHT},
    ),
    "context in each of two parts": (
        {"context": 2},
        {
            "update": {"steps": 2, "gradient_checkpointing": True, "entropy_coef": 0.01},
            "rollout": {"top_p": 0.9, "keep_sampling_mask": True},
            "objective": {"name": "TLGRPO"},
        },
    ),
    "context, fsdp2": (
        {"context": 2},
        {"update": IN_PARTS, "lora": {"rank": 2}, "objective": {"name": "DPO"}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model whose heads and vocabulary can be cut; the vocabulary into uneven parts."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("tiny", "teacher")):
        tiny_qwen3(tokenizer, seed, num_key_value_heads=2).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "tiny"


def make_trainer(folder, output, accelerator, reward=odd_share, **sections):
    config = small_config(output, checkpoint={"every": 2}, **sections)
    trainer = GSPOTrainer(str(folder), None, reward, ROWS, ROWS[:3], config, accelerator=accelerator)
    trainer.engine.end_ids = ENDS
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_take_the_steps_of_one(tmp_path, folder, case):
    teacher = str(folder.with_name("teacher"))
    parallel, sections = json.loads(json.dumps(CASES[case]).replace("TEACHER", teacher))
    alone = make_trainer(folder, tmp_path / "one", make_accelerator(), **sections)
    before = vector(alone.model)
    alone.train()

    def train(rank):
        accelerator = make_accelerator()
        if "fsdp2" in case:
            accelerator = fsdp2(accelerator)
        trainer = make_trainer(folder, tmp_path / "two", accelerator, parallel=parallel, **sections)
        head = trainer.model.get_output_embeddings().weight
        assert isinstance(head, DTensor) == ("tensor" in case or "fsdp2" in case)
        trainer.train()
        if case == "tensor":  # and goes on from its checkpoint
            update = sections["update"] | {"steps": 3}
            longer = {**sections, "update": update, "parallel": parallel}
            make_trainer(folder, tmp_path / "two", make_accelerator(), **longer).train(resume=True)

    in_processes(4 if "parts" in case else 2, train)
    one, two = (
        vector(AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")) for name in ("one", "two")
    )
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for a, b in zip(*records, strict=False):
        assert a.keys() == b.keys()
        if a["step"] > 0:
            assert b.get("reward/mean") == pytest.approx(a.get("reward/mean"))
            assert b.get("minibatch_1/grad_norm") == pytest.approx(a.get("minibatch_1/grad_norm"), rel=1e-2)
    if case == "tensor":
        make_trainer(
            folder,
            tmp_path / "one",
            make_accelerator(),
            **{**sections, "update": sections["update"] | {"steps": 3}},
        ).train(resume=True)
        one = vector(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model"))
    moved = (one - before).norm() if "lora" not in sections else (one - one.mean()).norm() * 1e-2
    # Adam divides by the size of gradients, so rounding shows where these are next to nothing.
    assert moved > 0 and (two - one).norm() < 5e-3 * moved


def test_a_reward_that_fails_where_weights_are_cut_ends_all(tmp_path, folder):
    def train(rank):
        trainer = make_trainer(
            folder, tmp_path, make_accelerator(), fails_where_it_is_called_last, parallel={"tensor": 2}
        )
        with pytest.raises(RewardError, match="only one process sees this prompt"):
            trainer.train()

    in_processes(2, train)


def accelerator(count=4, sharded=False, **launched):
    """What an arrangement asks accelerate for."""
    config = (
        SimpleNamespace(tp_size=1, cp_size=1, **launched) if not launched else SimpleNamespace(**launched)
    )
    return SimpleNamespace(
        num_processes=count, process_index=0, is_fsdp2=sharded, parallelism_config=config,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sections", "message"),
    [
        ({}, {"parallel": {"tensor": 4, "context": 2}}, "parallel.context must be 1: sequences are whole"),
        ({}, {"parallel": {"tensor": 2}}, r"parallel.tensor must be 1, or the number of processes \(4\)"),
        ({"sharded": True}, {"parallel": {"tensor": 4}}, "FSDP must be off"),
        ({}, {"parallel": {"tensor": 4}, "lora": {"rank": 2}}, "lora.rank must be 0"),
        ({}, {"parallel": {"context": 3}}, r"a divisor of the number of processes \(4\)"),
        ({}, {"parallel": {"context": 2}, "update": {"layout": "padded"}}, "update.layout must be 'packed'"),
        (
            {},
            {"parallel": {"context": 2}, "update": {"batch_invariant": True}},
            "batch_invariant must be off",
        ),
        ({"tp_size": 4, "cp_size": 1}, {"parallel": {"tensor": 1}}, "parallel.tensor must be 4 or none"),
        ({"tp_size": 2, "cp_size": 1}, {}, r"the number of processes \(4\).*; got parallel.tensor 2"),
    ],
)
def test_what_cannot_be_had_together_is_refused(tmp_path, given, sections, message):
    with pytest.raises(ConfigError, match=message):
        Arrangement.of(accelerator(**given), small_config(tmp_path, **sections))


def test_sizes_come_from_accelerate_where_the_configuration_has_none(tmp_path):
    found = Arrangement.of(accelerator(tp_size=4, cp_size=1), small_config(tmp_path))
    assert (found.tensor, found.parts, found.averaged) == (4, 1, 1)
    assert Arrangement.of(accelerator(), small_config(tmp_path)) == Arrangement(1, None, 4, 0, 4)


def test_a_model_that_is_there_already_is_not_cut(tmp_path, tokenizer):
    def train(rank):
        config = small_config(tmp_path, parallel={"tensor": 2})
        with pytest.raises(ModelError, match=r"parallel\.tensor is for a model that is loaded here"):
            GSPOTrainer(
                tiny_qwen3(tokenizer),
                tokenizer,
                odd_share,
                ROWS,
                ROWS,
                config,
                accelerator=make_accelerator(),
            )

    in_processes(2, train)
