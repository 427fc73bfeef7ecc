r"""Ready-made reward functions for the bundled trainer and TRL's trainers.

Each is a plain function of lists with one entry per completion and returns one reward per completion. Options
are keyword arguments: bind them with `functools.partial` or, where a configuration names the function, write
them in parentheses: ``gspo_kernels.rewards:regex_format(pattern=r'.*\d')``. A completion is text, or a list
of messages, of which the last one counts.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]


def exact_match(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    column: str = "answer",
    ignore_case: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 if the completion equals the answer, ignoring white space at both ends, otherwise 0.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion.
        column: the column of answers; the reward is None (not applicable) if the answer is.
        ignore_case: ignore case.
    """
    _refuse_columns(column=column, ignore_case=ignore_case)

    def normal(value: object) -> str:
        text = str(value).strip()
        return text.casefold() if ignore_case else text

    return [
        None if answer is None else float(normal(_text(completion)) == normal(answer))
        for completion, answer in zip(completions, _column(columns, column), strict=True)
    ]


def regex_format(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    pattern: str,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 if the whole completion matches a regular expression, otherwise 0.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion; only completions are used.
        pattern: a regular expression for `re.fullmatch`; ``.`` also matches the end of a line. Nested
            repetitions (``(a+)+``) can take forever on generated text.
    """
    _refuse_columns(pattern=pattern)
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(_text(completion)) is not None) for completion in completions]


def last_number(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    column: str = "answer",
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 if the last number of the completion equals the last number of the answer, otherwise 0.

    The number of GSM8K's answer ``"48 / 2 = 24 [...] #### 1,072"`` is 1072. Numbers are decimal, with or
    without commas between thousands; "72." and "72.0" are 72, ".5" is 0.5, and "1.5e3" is 1500. Products such
    as "2 * 10^3" are not evaluated. A minus directly after a word is a hyphen.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion.
        column: the column of answers; the reward is None (not applicable) for an answer without a number.
    """
    _refuse_columns(column=column)
    answers = [None if answer is None else _last_number(str(answer)) for answer in _column(columns, column)]
    return [
        None if right is None else float(_last_number(_text(completion)) == right)
        for completion, right in zip(completions, answers, strict=True)
    ]


_NUMBER = re.compile(
    r"""(?:(?<![\w)])[-\u2212])?  # a minus, not a hyphen
    (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)
    (?:[eE][-+]?\d{1,4}(?!\w))?""",
    re.VERBOSE,
)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def math_answer(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    column: str = "answer",
    seconds: int = 5,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""Return 1 if math-verify finds the completion's final answer equal to the correct answer, otherwise 0.

    math-verify extracts the final answer: ``\boxed{}`` first, then LaTeX in ``$``, then the last expression.
    It runs in a separate process, as it interrupts expressions that never finish (9^9^9^9) by a signal, which
    needs a main thread. A process that is not interrupted is killed and restarted.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion.
        column: the column of correct answers, LaTeX or numbers, alone or after GSM8K's "####"; the reward is
            None (not applicable) if the answer is None or math-verify cannot parse it.
        seconds: time limit of parsing and of comparing; a completion that exceeds it gets 0.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        RuntimeError: the process that compares answers cannot be started.
    """
    _refuse_columns(column=column, seconds=seconds)
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "math_answer needs math-verify: pip install math-verify", name="math_verify"
        )
    pairs = zip(completions, _column(columns, column), strict=True)
    return [
        None
        if answer is None
        else _verifier.ask(_text(text), str(answer).rpartition("####")[2].strip(), seconds)
        for text, answer in pairs
    ]


class _Verifier:
    """The process that compares answers, with one line of JSON per question and per reward."""

    def __init__(self) -> None:
        self.process: Any = None
        self.owner, self.lock = 0, threading.Lock()

    def ask(self, completion: str, answer: str, seconds: int) -> float | None:
        """Return the reward; if the process does not answer in time, kill it and return 0."""
        with self.lock:
            if self.process is None or self.process.poll() is not None or self.owner != os.getpid():
                self._start()  # a forked process starts a new one
            self.process.stdin.write(json.dumps([completion, answer, seconds]).encode() + b"\n")
            # Two texts are parsed and their values compared, each within its seconds.
            reward: float | None = self._answer(4 * seconds)
            return reward

    def _start(self) -> None:
        command = [sys.executable, "-c", "from gspo_kernels.rewards import _verify; _verify()"]
        self.process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.owner = os.getpid()
        if self._answer(None) != "ready":
            raise RuntimeError("math_answer: the process that compares answers cannot be started")

    def _answer(self, seconds: int | None) -> Any:
        process = self.process
        if select.select([process.stdout], [], [], seconds)[0] and (line := process.stdout.readline()):
            return json.loads(line)
        process.kill()
        process.wait()
        return 0.0


_verifier = _Verifier()


def _verify() -> None:
    """Answer the questions of a `_Verifier` until it closes the pipe."""
    from math_verify import parse, verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # math-verify warns about each timeout and about missing time limits
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first call reads math-verify's grammars, outside the time limit of completions.
    verify(
        parse(r"$\frac{1}{2}$", parsing_timeout=None),
        parse("0.5", parsing_timeout=None),
        timeout_seconds=None,
    )
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        completion, answer, seconds = json.loads(line)
        # Without "$" math-verify would take "\frac{a}{2}" for the number 2.
        right = parse(answer if "$" in answer else f"${answer}$", parsing_timeout=seconds)
        parsed = parse(completion, parsing_timeout=seconds) if right else []
        reward = float(verify(right, parsed, timeout_seconds=seconds)) if right else None
        print(json.dumps(reward), file=answers)


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _refuse_columns(**options: object) -> None:
    """Raise a `ValueError` for an option that is shadowed by a dataset column of the same name."""
    for name, value in options.items():
        if isinstance(value, list | tuple):
            raise ValueError(f"{name}: is both an option and a column of the dataset; rename the column")


def _column(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    if name not in columns:
        raise KeyError(f"the dataset has no column {name!r}; there are {', '.join(columns) or 'none'}")
    return columns[name]
