"""Reward functions: finding them, calling them, and refusing what they must not return."""

import math

import numpy as np
import pytest
import torch

from gspo_kernels.trainer.errors import RewardError
from gspo_kernels.trainer.rewards import RewardSet, load_reward

ARGUMENTS = (["p", "q"], ["x", "yy"], [[1], [2, 2]], {"answer": ["x", "z"]})


def test_total_is_the_weighted_sum_of_what_applies():
    def right(prompts, completions, completion_ids, *, answer):
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    def length(prompts, completions, completion_ids, **columns):
        return [None, len(completion_ids[1])]

    rewards = RewardSet([right, length], [2.0, 0.5])(*ARGUMENTS)
    assert rewards.total.tolist() == [2.0, 1.0]
    assert rewards.by_name["right"].tolist() == [1.0, 0.0]
    assert math.isnan(rewards.by_name["length"][0])


def test_total_is_nan_where_nothing_applies():
    rewards = RewardSet([lambda *a, **k: [None, 1.0], lambda *a, **k: [None, None]])(*ARGUMENTS)
    assert rewards.total.isnan().tolist() == [True, False]
    assert rewards.total[1] == 1.0


def test_equal_names_are_told_apart():
    rewards = RewardSet([lambda *a, **k: [0, 0], lambda *a, **k: [1, 1]])
    assert rewards.names == ["<lambda>", "<lambda>_2"]


@pytest.mark.parametrize(
    "values", [[1, 0], [True, False], np.array([1.0, 0.0]), (1.0, 0.0), torch.tensor([1, 0])]
)
def test_what_counts_as_numbers(values):
    if isinstance(values, np.ndarray):
        values = list(values)
    assert RewardSet([lambda *a, **k: values])(*ARGUMENTS).total.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], ["1 values for 2 completions"]),
        ([1.0, 2.0, 3.0], ["3 values for 2 completions"]),
        (1.0, ["must return a list", "float"]),
        (None, ["must return a list", "NoneType"]),
        ("ab", ["must return a list", "str"]),
        (["a", 1.0], ["'a'", "completion 0"]),
        ([1.0, math.nan], ["nan", "completion 1"]),
        ([1.0, math.inf], ["inf", "completion 1"]),
        ([1.0, [2.0]], ["[2.0]", "completion 1"]),
    ],
)
def test_wrong_returns_name_the_function(returned, words):
    def my_reward(prompts, completions, completion_ids, **columns):
        return returned

    with pytest.raises(RewardError) as caught:
        RewardSet([my_reward])(*ARGUMENTS)
    for word in ["my_reward", *words]:
        assert word in str(caught.value)


def test_a_reward_that_raises_is_named():
    def my_reward(prompts, completions, completion_ids, *, solution):
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=r"my_reward raised TypeError.*'answer'"):
        RewardSet([my_reward])(*ARGUMENTS)


def test_loading_from_a_module_and_from_a_file(tmp_path, monkeypatch):
    assert load_reward("math:sqrt") is math.sqrt
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Level:\n    value: int = 3\n\n"
    text += "def level(*a, **k):\n    return [Level().value] * 2\n"
    (tmp_path / "levels.py").write_text(text)
    assert load_reward(f"{tmp_path}/levels.py:level")() == [3, 3]
    monkeypatch.chdir(tmp_path)
    assert load_reward("levels:level")() == [3, 3]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("math.sqrt", "expected 'module:function'"),
        (":sqrt", "expected 'module:function'"),
        ("math:", "expected 'module:function'"),
        ("math:sqroot", "has no 'sqroot'"),
        ("math:pi", "not a function"),
        ("no_such_module:f", "no_such_module"),
        ("no_such_file.py:f", "there is no file"),
        ("{tmp}/broken.py:f", "SyntaxError"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, spec, words):
    (tmp_path / "broken.py").write_text("def f(:\n")
    spec = spec.replace("{tmp}", str(tmp_path))
    with pytest.raises(RewardError) as caught:
        load_reward(spec)
    assert spec in str(caught.value)
    assert words in str(caught.value)
