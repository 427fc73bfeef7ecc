"""Reward functions: how they are found and called, and which returned values are refused."""

import asyncio
import copy
import functools
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gspo_kernels import advantages
from gspo_kernels.trainer.config import InputError, Method
from gspo_kernels.trainer.rewards import Rewards, RewardSet, advantages_of, differing, load_reward

ARGUMENTS = (["p", "q"], ["x", "yy"], [[1], [2, 2]], {"answer": ["x", "z"]})


def test_a_reward_gets_what_its_signature_takes():
    def right(completions, answer, scale=2.0):
        return [scale * (a == b) for a, b in zip(completions, answer, strict=True)]

    def length(prompts, completions, completion_ids, **columns):
        return [None, len(completion_ids[1])]

    async def later(prompts):
        return [0.25] * len(prompts)

    class Callable:
        def __call__(self, completions, missing=None):
            return [float(missing is None)] * len(completions)

    def as_in_trl(completions, **kwargs):
        return [float(sorted(kwargs) == ["answer", "completion_ids", "prompts"])] * len(completions)

    functions = [right, length, later, Callable(), as_in_trl]
    found = RewardSet(functions, [2.0, 0.5, 1.0, 1.0, 1.0])(*ARGUMENTS)
    values = {name: column.nan_to_num(-1.0).tolist() for name, column in found.by_name.items()}
    assert values == {
        "right": [2.0, 0.0],
        "length": [-1.0, 2.0],
        "later": [0.25, 0.25],
        "Callable": [1.0, 1.0],
        "as_in_trl": [1.0, 1.0],
    }
    assert found.total.tolist() == [6.25, 3.25]
    scalars = [torch.tensor(1.0, dtype=torch.bfloat16), np.bool_(False)]
    for values in ([1, 0], [True, False], np.array([1.0, 0.0]), (1.0, 0.0), torch.tensor([1, 0]), scalars):
        assert RewardSet([lambda *a, v=values, **k: v])(*ARGUMENTS).total.tolist() == [1.0, 0.0]


WRONG = [
    ([1.0], ["1 values for 2 completions"]),
    ("ab", ["must return a list", "str"]),
    (["a", 1.0], ["'a'", "completion 'x' of prompt 'p'"]),
    ([1.0, math.nan], ["nan", "completion 'yy' of prompt 'q'"]),
    ([1.0, [2.0]], ["[2.0]", "completion 'yy'"]),
    ([1.0, torch.tensor(math.nan)], ["nan", "completion 'yy' of prompt 'q'"]),
    ([10**400, 1.0], ["completion 'x'", "finite fp32 number"]),
    ([0.0, 1e39], ["1e+39", "completion 'yy'", "finite fp32 number"]),
]


@pytest.mark.parametrize(("returned", "words"), WRONG)
def test_wrong_returns_name_the_function(returned, words):
    def my_reward(completions):
        return returned

    with pytest.raises(InputError) as caught:
        RewardSet([my_reward])(*ARGUMENTS)
    assert all(word in str(caught.value) for word in ["my_reward", *words]), caught.value


def test_a_reward_that_raises_or_exits_is_named():
    def my_reward(completions):
        raise error

    async def my_async_reward(completions):
        await asyncio.sleep(0)
        raise error

    for function in (my_reward, my_async_reward):
        for error in (LookupError("later"), SystemExit(0)):
            words = re.escape(f"{function.__name__} raised {error!r} (") + ".*test_rewards.py, line"
            with pytest.raises(InputError, match=words):
                RewardSet([function])(*ARGUMENTS)
        with pytest.raises(InputError, match=rf"{function.__name__} raised TypeError.*cannot pickle"):
            RewardSet([function])(["p"], [threading.Lock()], [[1]], {})


def test_what_cannot_be_summed_or_called_is_refused():
    def f(completions, returned):
        return returned

    def my_reward(completions, *, solution):
        return [0.0, 0.0]

    exceeds = "rewards f, f_2: the weighted sum of completion 1 exceeds fp32"
    expected = r"reward_weights: got \[{}1.0\], expected a finite number for each of 2 rewards"
    for values, weights, words in (
        ([0.0, 3e38], [1.0, 1.0], exceeds),
        ([0.0, 0.0], [math.inf, 1.0], expected.format("inf, ")),
        ([0.0, 0.0], [1.0], expected.format("")),
    ):
        with pytest.raises(InputError, match=words):
            RewardSet([functools.partial(f, returned=values)] * 2, weights)(*ARGUMENTS)
    for function, columns, words in (
        (my_reward, ["answer"], r"my_reward cannot be called with .*\(answer\).*'solution'"),
        (functools.partial(my_reward, solution=3), ["solution"], "solution is an option and a column"),
        (math.sqrt, ["x"], "sqrt cannot be called with .*'x'"),  # sqrt does not take x by name
    ):
        with pytest.raises(InputError, match=words):
            RewardSet([function]).check(columns)
    with pytest.raises(InputError, match="my_reward cannot be called"):
        RewardSet([my_reward])(*ARGUMENTS)
    RewardSet([my_reward]).check(["solution"])
    with pytest.raises(InputError, match=r"max cannot be called with .* no signature"):
        RewardSet([max]).check([])


def test_async_rewards_run_at_the_same_time():
    loops, meet = [], []

    def make(name):
        async def reward(completions):
            loops.append((name, asyncio.get_running_loop()))
            meet.append(name)
            for _ in range(5000):  # each waits for all others, for at most some seconds
                if len(meet) < 3:
                    await asyncio.sleep(0.001)
            return [float(name) * (len(meet) == 3), None]

        return reward

    def plain(completions):
        meet.append(0)
        return [0.5, 0.25]

    rewards = RewardSet([make(1), plain, make(2)], [1.0, 1.0, 10.0])
    for _ in range(2):
        meet.clear()
        assert rewards(*ARGUMENTS).total.tolist() == [21.5, 0.25]
    assert len(set(loops)) == 2, "a loop, and the clients made in it, outlive a call"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("in_main", [False, True])
def test_grad_mode_and_interrupts_pass_through(is_async, in_main):
    """Coroutines run in a thread of the reward set; a caller may be any thread."""

    def grad_mode(completions):
        return [float(torch.is_grad_enabled())] * len(completions)

    def interrupted(completions):
        raise KeyboardInterrupt

    def call(function, enabled):
        async def coroutine(completions):
            return function(completions)

        with torch.set_grad_enabled(enabled):
            return RewardSet([coroutine if is_async else function])(*ARGUMENTS).total.tolist()

    with ThreadPoolExecutor(1) as pool:
        run = call if in_main else lambda *args: pool.submit(call, *args).result()
        for enabled in (True, False):
            assert run(grad_mode, enabled) == [enabled] * 2
        with pytest.raises(KeyboardInterrupt):
            run(interrupted, True)


def test_each_call_gets_its_own_copies():
    """Completions of one prompt share the dataset's row, and functions share their arguments."""
    seen = []

    def spoils(prompts, completions, completion_ids, answer):
        for prompt, text, ids, right in zip(prompts, completions, completion_ids, answer, strict=True):
            seen.append((len(prompt), text, len(ids), right["values"].tolist()))
            prompt.append({"role": "assistant", "content": text})
            prompt[0]["content"] = ids.clear()
            right["values"][:] = 0.0
        completions.sort(reverse=True)
        return [0.0] * len(prompts)

    async def spoils_later(prompts, completions, completion_ids, answer):
        return spoils(prompts, completions, completion_ids, answer)

    prompt, right = [{"role": "user", "content": "p"}], {"values": np.ones(2)}
    given = ([prompt] * 2, ["x", "yy"], [[1], [2, 2]], {"answer": [right] * 2})
    before = copy.deepcopy(given)
    RewardSet([spoils_later, spoils, spoils])(*given)
    assert sorted(seen) == [(1, "x", 1, [1.0, 1.0])] * 3 + [(1, "yy", 2, [1.0, 1.0])] * 3
    assert given[:3] == before[:3] and right["values"].tolist() == [1.0, 1.0]


KEPT = []
CHANGES = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "inference mode": (
        lambda: (KEPT.append(torch.inference_mode()), KEPT[-1].__enter__()),
        torch.is_inference_mode_enabled,
    ),
    "seed": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist()),
    "stdout": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "a sandbox": (
        lambda: [setattr(os, n, None) for n in ("renames", "removedirs")],
        lambda: (os.renames, os.removedirs),
    ),
    "signals": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_run_depends_on_is_restored(what):
    change, state = CHANGES[what]

    def changes(completions):
        change()
        raise LookupError

    before = state()
    with pytest.raises(InputError, match="changes raised LookupError"):
        RewardSet([changes])(*ARGUMENTS)
    assert state() == before


POOLED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from neighbour import length

def one(text):
    from later import half
    return half(length(text))

def pooled(completions):
    values = []
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
            values.append(list(pool.map(one, completions)))
    return [a if a == b else None for a, b in zip(*values)]
"""


@pytest.mark.parametrize("spec", ["{folder}/pooled.py:pooled", "pooled:pooled"])
def test_a_reward_may_start_processes(tmp_path, spec):
    """A process finds the function by its module's name, which it must be able to import."""
    (tmp_path / "pooled.py").write_text(POOLED)
    (tmp_path / "neighbour.py").write_text("length = len\n")
    (tmp_path / "later.py").write_text("def half(value):\n    return value / 2\n")
    run = "if __name__ == '__main__':\n    from gspo_kernels.trainer.rewards import load_reward\n"
    run += f"    print(load_reward({spec.format(folder=tmp_path)!r})(['a', 'bcd']))\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.py").write_text(run)
    command = [sys.executable, "elsewhere/run.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout == "[0.5, 1.5]\n", done.stderr


def test_loading_from_a_module_and_from_a_file(tmp_path, monkeypatch):
    assert load_reward("math:sqrt") is math.sqrt
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Level:\n    value: int = 3\n\n"
    text += "def level(*a, **k):\n    return [Level().value] * 2\n"
    (tmp_path / "levels.py").write_text(text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "levels.py").write_text(text.replace("3", "4"))
    one, two = (load_reward(f"{tmp_path}/{folder}levels.py:level") for folder in ("", "other/"))
    assert (one(), two()) == ([3, 3], [4, 4])  # two files of one name are two modules
    assert [sys.modules[each.__module__].Level().value for each in (one, two)] == [3, 4]
    for name in ("json.py", "a.b.py"):  # the name is taken, or is none
        (tmp_path / name).write_text(text)
        function = load_reward(f"{tmp_path}/{name}:level")
        assert function() == [3, 3] and pickle.loads(pickle.dumps(function)) is function
    monkeypatch.chdir(tmp_path)
    assert load_reward("levels:level")() == [3, 3]
    bound = load_reward(r"gspo_kernels.rewards:regex_format(pattern=r'a:\d(\)|b)')")
    assert RewardSet([bound]).names == ["regex_format"]
    assert bound([], ["a:1)", "a:1b", "a:1"], []) == [1.0, 1.0, 0.0]
    (tmp_path / "broken.py").write_text("def f(:\n")
    for spec, words in (
        *((spec, "expected 'module:function'") for spec in ("math.sqrt", ":sqrt", "math:")),
        ("math:sqroot", "'sqroot' is not a function of math: there is no such name"),
        ("math:pi", "'pi' is not a function of math: it is float"),
        ("no_such_module:f", "no_such_module"),
        ("no_such_file.py:f", "there is no file"),
        (f"{tmp_path}/broken.py:f", "SyntaxError"),
        *((f"math:pow({end}", "(name=value, ...)") for end in ("1)", "a=b)", "a=1", "**{'a': 1})")),
    ):
        with pytest.raises(InputError) as caught:
            load_reward(spec)
        assert spec in str(caught.value) and words in str(caught.value)


def test_advantages_are_those_of_their_name():
    """The trainer's method calls the function of its name; tests/test_advantages.py checks the formulas."""
    nan = math.nan  # two rewards of two groups of four
    table = torch.tensor([[1.0, 2.0, 4.0, 0.0, 0.0, 0.0, 3.0, 1.0], [0.5, nan, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]])
    lengths, weights = torch.arange(1.0, 9.0), torch.tensor([1.0, 0.5])
    total = table[0] + 0.5 * table[1].nan_to_num(0.0)
    rewards = Rewards(total, {"a": table[0], "b": table[1]}, {"b": 0.5})
    expected = {
        "group_normalized": advantages.group_normalized(total, group_size=4),
        "leave_one_out": advantages.leave_one_out(total, group_size=4),
        "optimal_baseline": advantages.optimal_baseline(total, lengths, group_size=4),
        "reinforce_plus_plus": advantages.reinforce_plus_plus(total),
        "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus(total, group_size=4),
        "gdpo": advantages.gdpo(table.T, group_size=4, weights=weights),
    }
    assert expected.keys() == set(typing.get_args(Method))
    for method, values in expected.items():
        found = advantages_of(rewards, group_size=4, method=method, lengths=lengths)
        assert found.dtype == torch.float32 and torch.equal(found, values), method


def test_completions_without_reward_change_no_group():
    total = torch.tensor([3.0, 1.0, 3.0, 2.0, math.nan, 1.0, math.nan, 1.0])
    assert differing(total, 4).tolist() == [True, False]
