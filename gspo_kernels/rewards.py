r"""Ready-made reward functions, in the form that the bundled trainer and TRL's trainers call them.

Each is a plain function of lists with one entry per completion and returns as many rewards. Options are
keyword arguments: bind them with `functools.partial`, or where a configuration names the function, in
parentheses: ``gspo_kernels.rewards:regex_format(pattern=r'.*\d')``. A completion is text, or a list of
messages of which the last counts.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Mapping, Sequence
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
    """1 where the completion is the answer, white space at both ends aside, otherwise 0.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion.
        column: the column that holds the answer; None in it: the reward does not apply.
        ignore_case: compare without regard to case.
    """

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
    """1 where the whole completion has the form of a regular expression, otherwise 0.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion; only completions are used.
        pattern: what `re.fullmatch` takes; ``.`` also stands for the end of a line. Nested repetitions
            (``(a+)+``) can take forever on a text that a model makes up.
    """
    form = re.compile(pattern, re.DOTALL)
    return [float(form.fullmatch(_text(completion)) is not None) for completion in completions]


def math_answer(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    column: str = "answer",
    seconds: int = 5,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""1 where the completion's final answer has the value of the right one, by math-verify; otherwise 0.

    The final answer is what math-verify extracts: ``\boxed{}`` first, then LaTeX in ``$``, then the last
    expression. Models write expressions that take forever to compute (9^9^9^9). math-verify stops them by a
    signal, which only a main thread gets; so the trainer runs this function in a process of its own.

    Args:
        prompts, completions, completion_ids, columns: one entry per completion.
        column: the column that holds the right answer, LaTeX or a number; the reward does not apply where it
            is None or nothing that math-verify can read.
        seconds: what parsing or comparing may take; a completion that takes longer gets 0.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        RuntimeError: called outside the main thread of a process.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "math_answer needs math-verify: pip install math-verify", name="math_verify"
        ) from error
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_answer needs the main thread of a process: its time limit is a signal")

    _load_grammars()

    def reward(completion: Completion, answer: object) -> float | None:
        # Without a sign of LaTeX math-verify would take "\frac{a}{2}" for the number 2.
        text = str(answer)
        right = [] if answer is None else parse(text if "$" in text else f"${text}$", parsing_timeout=seconds)
        if not right:
            return None
        found = parse(_text(completion), parsing_timeout=seconds)
        return float(verify(right, found, timeout_seconds=seconds))

    return [reward(*pair) for pair in zip(completions, _column(columns, column), strict=True)]


math_answer.own_process = True  # type: ignore[attr-defined]


@functools.cache
def _load_grammars() -> None:
    """Let math-verify read what it needs in a process, on no completion's time."""
    from math_verify import parse, verify

    # it warns at every completion that it gives up, and wherever there is no limit
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    one, other = (parse(text, parsing_timeout=None) for text in (r"$\frac{1}{2}$", "0.5"))
    verify(one, other, timeout_seconds=None)


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _column(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    if name not in columns:
        raise KeyError(f"the dataset has no column {name!r}; there are {', '.join(columns) or 'none'}")
    return columns[name]
