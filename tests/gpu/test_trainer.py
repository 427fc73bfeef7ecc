"""The trainer on a GPU: a random Qwen3 of 0.6B's shape, two steps in each setting.

``python -m benchmarks campaign`` keeps the measurements of each setting, as ``--results DIR`` does here.
Without a GPU the model is tiny.
"""

import gc
import json

import pytest
import torch

from tests.draws import shifted_seed

loop = pytest.importorskip("gspo_kernels.trainer.loop")
demo = pytest.importorskip("gspo_kernels.demo")
report = pytest.importorskip("gspo_kernels.trainer.report")
helpers = pytest.importorskip("tests.trainer.conftest")
one_thread = helpers.one_thread

LARGE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Qwen3-0.6B."""
SMALL = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
ROWS = [{"prompt": prompt} for prompt in ("ab", "bcd", "c", "dabc", "ea", "fgh", "bb", "ce")]


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def odd_share(completion_ids):
    """Return each completion's share of odd token ids, which varies in a random model."""
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def make_model(device, dtype=torch.float32, **changes):
    """Return a model with random weights, those of ``LARGE`` on a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(shifted_seed(0))
    sizes = (LARGE if device.type == "cuda" else SMALL) | changes
    with device:
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).to(dtype)


def make_trainer(device, output, model, reward=odd_share, steps=100, **sections):
    """Return a trainer of 64 completions, which evaluates and saves nothing before its last step."""
    on_gpu = device.type == "cuda"
    values = {
        "output": str(output),
        "rollout": {
            "prompts_per_rollout": 8 if on_gpu else 2, "group_size": 8 if on_gpu else 4,
            "max_new_tokens": 64 if on_gpu else 5,
        },
        "update": {
            "steps": steps, "minibatches": 2, "micro_batch_tokens": 8192 if on_gpu else 24,
            "precision": "bf16",
        },
        "evaluation": {"every": 100}, "checkpoint": {"every": 100},
    }  # fmt: skip
    config = helpers.merged_config(values, sections)
    accelerator = helpers.make_accelerator(config.update.precision)
    tokenizer = demo.make_tokenizer()
    return loop.GSPOTrainer(model, tokenizer, reward, ROWS, config=config, accelerator=accelerator)


def norm_of(parameter):
    """Return the norm in fp64. A copy of all weights would be part of the measured memory."""
    return float(parameter.detach().double().norm())


SETTINGS = {
    "bf16": {},
    "LoRA": {"lora": {"rank": 16}},
    "gradient checkpointing": {"update": {"gradient_checkpointing": True}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps(name, device, tmp_path, request):
    """Ratios of the first minibatch are 1, sampling agrees with training, the weights move, and the second
    step is measured.
    """
    model = make_model(device, torch.bfloat16 if name == "LoRA" else torch.float32)
    trainer = make_trainer(device, tmp_path, model, **SETTINGS[name])
    trainer.directory.path.mkdir(exist_ok=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [norm_of(parameter) for parameter in trained]
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.take_step()
    first, second = report.read_metrics(trainer.directory.metrics)
    for record in (first, second):
        assert abs(record["minibatch_1/ratio/max"] - 1) < 1e-6, record
        assert record["mismatch/mean"] < 0.1, record  # as far as rounding to bf16 goes
    assert all(norm_of(parameter) != norm for parameter, norm in zip(trained, before, strict=True))
    keep(request, name, {
        "s per step": second["seconds"], "s of rollout": second["seconds/rollout"],
        "s of update": second["seconds/update"], "s of the first step": first["seconds"],
        "tokens per s": second["tokens_per_second"],
        "GiB": second["memory/peak_gib"],
    })  # fmt: skip


def keep(request, name, record):
    """Add a record to DIR/trainer.json, where ``--results DIR`` was passed."""
    if (folder := request.config.getoption("results")) is not None:
        path = folder / "trainer.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(kept | {name: record}, indent=1) + "\n")
