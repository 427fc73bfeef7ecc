"""Ready-made rewards on cases written by hand."""

import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples import rewards as examples
from gspo_kernels import rewards
from gspo_kernels.rewards import exact_match, last_number, math_answer, regex_format
from gspo_kernels.trainer import load_config
from gspo_kernels.trainer.data import column_names, load_prompts
from gspo_kernels.trainer.rewards import RewardSet, load_reward

ROOT = Path(__file__).parents[1]
NONE = [None] * 4


def test_exact_match_and_regex_format():
    completions = ["42", " 42\n", "it is 42", [{"role": "assistant", "content": "42"}]]
    answers = {"answer": [42, "42", "42", "42"]}
    assert exact_match(NONE, completions, NONE, **answers) == [1.0, 1.0, 0.0, 1.0]
    assert exact_match(NONE[:2], ["a", "b"], NONE[:2], answer=["A", None]) == [0.0, None]
    function = functools.partial(exact_match, column="solution", ignore_case=True)
    columns = {"answer": ["?", "?"], "solution": ["STRASSE", "c"]}
    assert function(NONE[:2], ["Straße", "b"], NONE[:2], **columns) == [1, 0]
    with pytest.raises(KeyError, match=r"no column 'solution'; there are answer"):
        function(NONE[:1], ["a"], NONE[:1], answer=["a"])
    # A column of a dataset may have the name of an option, and is passed in its place.
    for function, option in (
        (exact_match, "column"),
        (exact_match, "ignore_case"),
        (regex_format, "pattern"),
    ):
        columns = {"answer": ["a"], option: ["x"]}
        with pytest.raises(ValueError, match=f"{option}: is both an option and a column"):
            function(NONE[:1], ["a"], NONE[:1], **columns)
    pattern = r"<think>.*</think>\s*\d+"
    completions = ["<think>a\nb</think> 3", "so: <think>a</think> 3", "<think></think>3.", "3"]
    assert regex_format(NONE, completions, NONE, pattern=pattern, answer=NONE) == [1.0, 0.0, 0.0, 0.0]


def test_the_examples():
    """``right_number`` reads the last number, ``brief`` counts tokens, ``per_digit`` wants the right length.
    The configuration files are valid.
    """
    texts, answers = ["5", "2 + 3 is 5", "5 or 6", "five", "5"], [5, "5", 5, 5, None]
    assert examples.right_number([], texts, [], answer=answers) == [1, 1, 0, 0, None]
    ids = [[0] * length for length in (0, 64, 256, 1000)]
    assert examples.brief([], [""] * 4, ids) == pytest.approx([1.0, 0.75, 0.0, 0.0])
    digits = ["1234", "12345", "21345", ""]
    assert examples.per_digit([], digits, [], answer=["12345"] * 4) == [0, 1, 0.6, 0]
    for path in (ROOT / "examples").glob("*.yaml"):
        config = load_config(path)
        if not (ROOT / config.dataset).exists():  # gsm8k.yaml: tests/trainer/test_cli.py runs it
            continue
        rows = load_prompts(ROOT / config.dataset)
        RewardSet([load_reward(f"{ROOT}/{spec}") for spec in config.reward]).check(column_names(rows))


def test_last_number():
    cases = (
        ("16 - 3 = <<16-3=13>>13\n#### 13", "first 16, then 13.", 1),
        ("#### 1,072", "$1072.00 in all", 1),
        ("#### 1072", "1,072 (or 1 072)", 0),
        ("#### -5", "10 - 15 = -5", 1),
        ("#### -5", "it is \u22125", 1),
        ("#### 5", "10-5", 1),
        (7, r"\boxed{7}", 1),
        ("0.5", "0.50", 1),
        *(("0.5", text, 1) for text in (".5", "$.50", r"\boxed{.5}", "5e-1", "5.0E-01 m")),
        ("-.5", "it is -0.5", 1),
        ("5", "so...5", 1),
        ("5", "1.2.5", 1),
        ("5", "see it.5", 1),
        ("1000", "about 1e3.", 1),
        ("1000", "+1E+3", 1),
        ("3", "(1e3f)", 1),
        ("3", "it is 3.", 1),
        ("12", "1,2", 0),
        ("3", "three", 0),
        ("12345678901234567890", "12345678901234567891", 0),
        ("none", "3", None),
        (None, "3", None),
    )
    answers, completions, expected = map(list, zip(*cases, strict=True))
    assert last_number([None], completions, [None], answer=answers) == expected
    completion = [[{"role": "assistant", "content": "3"}]]
    assert last_number([None], completion, [None], column="right", right=[3], answer=["4"]) == [1.0]


def test_math_answer():
    pytest.importorskip("math_verify")
    cases = (
        ("42", "The answer is 42.", 1),
        (42, "so $x = 42$", 1),
        ("42", "I think 41", 0),
        ("42", "", 0),
        ("2", "first 2, then 3", 0),
        ("1/2", r"thus \boxed{0.5}", 1),
        (r"\frac{1}{2}", "it is 1/2", 1),
        (r"\frac{a}{2}", "$a/2$", 1),
        (r"\frac{a}{2}", "2", 0),
        ("(1,2)", "$(1, 2)$", 1),
        ("The answer is $5$", "5", 1),
        ("1234", "1,234", 1),
        ("1 + 1 = 2\n#### 1,234", "it is 1234", 1),
        ("42", "$9^{9^{9^{9}}}$", 0),  # cannot be computed
        (None, "3", None),
        ("", "3", None),
    )
    answers, completions, expected = map(list, zip(*cases, strict=True))
    assert math_answer([None], completions, [None], answer=answers, seconds=1) == expected


def test_math_answer_works_in_any_thread():
    pytest.importorskip("math_verify")
    both = RewardSet([functools.partial(math_answer, seconds=1)])
    with ThreadPoolExecutor(1) as pool:
        of_thread = pool.submit(both, NONE[:2], ["0.5", "41"], [[], []], {"answer": ["1/2", "42"]})
        assert of_thread.result().total.tolist() == [1.0, 0.0]


def test_a_comparison_that_ignores_signals(monkeypatch):
    """The stopped process is killed, and a new one does later comparisons, also if the process has died."""
    pytest.importorskip("math_verify")
    assert math_answer(NONE[:1], ["3"], NONE[:1], answer=["3"]) == [1.0]
    first = rewards._verifier.process
    os.kill(first.pid, signal.SIGSTOP)
    assert math_answer(NONE[:1], ["3"], NONE[:1], answer=["3"], seconds=0.2) == [0.0]
    assert first.poll() is not None
    assert math_answer(NONE[:2], ["3", "4"], NONE[:2], answer=["3", "3"]) == [1.0, 0.0]
    rewards._verifier.process.kill()
    rewards._verifier.process.wait()
    assert math_answer(NONE[:1], ["3"], NONE[:1], answer=["3"]) == [1.0]
