"""Processes that share weight matrices or sequences take the steps of one process."""

import dataclasses
import functools
import hashlib
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils import ParallelismConfig, gather_object
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import ConfigError, ModelError, RewardError
from gspo_kernels.trainer.run.arrangement import Arrangement
from gspo_kernels.trainer.run.metrics import read_metrics
from gspo_kernels.trainer.run.models import load_model, make_policies
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

TAUGHT = {"objective": {"name": "GRPO"}, "distillation": {"teacher": "TEACHER", "reward_coef": 1.0}}
KEPT = {"top_p": 0.9, "keep_sampling_mask": True}


class Case(NamedTuple):
    """A run of two steps, and one more for each further way of sharing, which goes on from its checkpoint."""

    count: int  # processes
    shared: list[dict[str, int]]  # one way after the other; with "fsdp" under FSDP2
    sections: dict[str, Any]


CASES = {
    "tensor": Case(
        2,
        [{"tensor": 2}],
        {
            "update": {"layout": "shared_prefix", "micro_batch_tokens": 60, "gradient_checkpointing": True},
            "rollout": KEPT,
            "kl": {"beta": 0.1},
            **TAUGHT,
        },
    ),
    "tensor in each of two parts": Case(
        4,
        [{"tensor": 2}, {"tensor": 2, "context": 2}, {"tensor": 2, "fsdp": 2}],
        {"update": {"minibatches": 1, "micro_batch_tokens": 20}},
    ),
    "context": Case(
        2,
        [{"context": 2}],
        {
            "update": {"minibatches": 4},  # one short completion each
            "rollout": {"prompts_per_rollout": 1},
            "kl": {"beta": 0.1},
            **TAUGHT,
        },
    ),
    "context in each of two parts": Case(
        4,
        [{"context": 2}],
        {
            "update": {"gradient_checkpointing": True, "entropy_coef": 0.01},
            "rollout": KEPT,
            "objective": {"name": "TLGRPO"},
        },
    ),
    "context, fsdp2": Case(
        2,
        [{"context": 2, "fsdp": 2}],
        {
            "update": {"minibatches": 1, "micro_batch_tokens": 20},
            "lora": {"rank": 2},
            "objective": {"name": "DPO"},
        },
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model whose heads and vocabulary can be cut; the vocabulary into uneven parts."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("tiny", "teacher")):
        sizes = {"num_key_value_heads": 2, "num_hidden_layers": 1}
        tiny_qwen3(tokenizer, seed, **sizes).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "tiny"


def make_trainer(folder, output, accelerator, case, steps, reward=odd_share, **sections):
    sections = json.loads(
        json.dumps({**case.sections, **sections}).replace("TEACHER", str(folder.with_name("teacher")))
    )
    update = sections.pop("update", {}) | {"steps": steps}
    often = {"checkpoint": {"every": 9}, "evaluation": {"every": 1}}
    config = small_config(output, update=update, **often, **sections)
    trainer = GSPOTrainer(str(folder), None, reward, ROWS, ROWS[:1], config, accelerator=accelerator)
    trainer.engine.end_ids = ENDS
    return trainer


def accelerator_of(shared):
    """Accelerate's, with what it sets up on GPUs only."""
    if "fsdp" not in shared:
        return make_accelerator()
    accelerator = fsdp2(make_accelerator())
    if "tensor" in shared:
        state, sizes = accelerator.state, {"dp_shard_size": shared["fsdp"], "tp_size": shared["tensor"]}
        state.parallelism_config = ParallelismConfig(**sizes)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
    return accelerator


def train_together(folder, output, case):
    """What each process does."""
    for steps, shared in enumerate(case.shared, start=2):
        parallel = {name: size for name, size in shared.items() if name != "fsdp"}
        trainer = make_trainer(folder, output, accelerator_of(shared), case, steps, parallel=parallel)
        head = trainer.model.get_output_embeddings().weight
        assert getattr(getattr(head, "device_mesh", None), "ndim", 0) == len(shared.keys() - {"context"})
        trainer.train(resume=steps > 2)
        digest = hashlib.sha256()
        for value in trainer.updater.tensors().values():  # weights, and sums of gradients for Adam
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(whole.numpy().tobytes())
        assert len(set(gather_object([digest.hexdigest()]))) == 1  # all have the same, bit for bit


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, folder):
    """Return where the runs of several processes lie; those of equally many follow each other in them."""

    @functools.cache
    def of(count):
        outputs = tmp_path_factory.mktemp("together")

        def train(rank):
            for name, case in CASES.items():
                if case.count == count:
                    train_together(folder, outputs / name, case)
            if count == 4:
                arguments = folder, outputs / "failing", make_accelerator(), Case(4, [], {}), 2
                failing = make_trainer(*arguments, fails_where_it_is_called_last, parallel={"tensor": 2})
                with pytest.raises(RewardError, match="only one process sees this prompt"):
                    failing.train()

        in_processes(count, train)
        return outputs

    return of


@pytest.mark.parametrize("name", CASES)
def test_processes_that_share_take_the_steps_of_one(tmp_path, folder, outputs, name):
    case = CASES[name]
    alone = make_trainer(folder, tmp_path, make_accelerator(), case, 1 + len(case.shared))
    alone.train()
    together = outputs(case.count) / name  # after what all processes would have to import
    before, one, two = (
        vector(AutoModelForCausalLM.from_pretrained(path))
        for path in (folder, tmp_path / "model", together / "model")
    )
    records = [read_metrics(path / "metrics.jsonl") for path in (tmp_path, together)]
    for a, b in zip(*records, strict=True):
        assert a.keys() == b.keys()
        # 40 times what rounding makes of them here, by way of Adam
        for key in a.keys() - {key for key in a if key.startswith(("seconds", "tokens_per_", "memory/"))}:
            assert b[key] == pytest.approx(a[key], rel=1e-2, abs=1e-5), key
    moved = (one - before).norm()
    # Adam divides by the size of gradients, so rounding shows where these are next to nothing.
    assert moved > 0 and (two - one).norm() < 5e-3 * moved


def test_a_model_that_is_there_already_is_not_cut(tmp_path, tokenizer):
    config = small_config(tmp_path)
    with pytest.raises(ModelError, match=r"parallel\.tensor is for a model that is loaded here"):
        make_policies(tiny_qwen3(tokenizer), tokenizer, config, make_accelerator(), Arrangement(tensor=2))


def test_copies_of_a_model_need_a_transformers_that_makes_them(monkeypatch):
    @dataclasses.dataclass
    class Older:
        tp_size: int

    monkeypatch.setattr("transformers.distributed.DistributedConfig", Older)
    four = SimpleNamespace(num_processes=4)
    with pytest.raises(ModelError, match=r"parallel\.tensor 2 of 4 processes needs transformers 5\.23"):
        load_model("any", accelerator=four, tensor=2)
    with pytest.raises(ModelError, match="there is no such directory"):
        load_model("any", accelerator=four, tensor=4)


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
        (
            {},
            {"parallel": {"tensor": 4, "context": 2}},
            r"parallel.tensor times parallel.context must be a divisor of the number of processes \(4\); got "
            "parallel.tensor 4, parallel.context 2",
        ),
        ({"sharded": True}, {"parallel": {"tensor": 4}}, "FSDP must be off, or launched with a tp_size of 4"),
        ({}, {"parallel": {"context": 3}}, r"a divisor of the number of processes \(4\)"),
        ({}, {"parallel": {"context": 2}, "update": {"layout": "padded"}}, "update.layout must be 'packed'"),
        (
            {},
            {"parallel": {"context": 2}, "update": {"batch_invariant": True}},
            "batch_invariant must be off",
        ),
        ({"tp_size": 4, "cp_size": 1}, {"parallel": {"tensor": 1}}, "parallel.tensor must be 4 or none"),
        ({"tp_size": 3, "cp_size": 1}, {}, r"the number of processes \(4\); got parallel.tensor 3"),
    ],
)
def test_what_cannot_be_had_together_is_refused(tmp_path, given, sections, message):
    with pytest.raises(ConfigError, match=message):
        Arrangement.of(accelerator(**given), small_config(tmp_path, **sections))


def test_sizes_come_from_accelerate_where_the_configuration_has_none(tmp_path):
    found = Arrangement.of(accelerator(tp_size=4, cp_size=1), small_config(tmp_path))
    assert (found.tensor, found.parts, found.averaged) == (4, 1, 1)
    assert Arrangement.of(accelerator(), small_config(tmp_path)) == Arrangement(1, None, 4, 0, 4)
