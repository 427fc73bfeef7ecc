"""The example of a real model: its sums and its settings."""

import pytest

from examples.smollm2 import __main__ as example
from examples.smollm2.__main__ import BASE, CONFIG
from gspo_kernels.rewards import last_number
from gspo_kernels.trainer.config import load_config


def test_sums_and_settings():
    """Each sum occurs once, no held-out sum is trained on, and the reward finds the answer in a sentence."""
    rows, config = example.sums(), load_config(CONFIG)
    assert len({row["prompt"] for row in rows}) == len(rows) == 90**2
    assert all(eval(row["prompt"]) == int(row["answer"]) for row in rows)
    assert config.model == str(BASE) and config.update.steps <= 24
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
