"""Calling somebody's function with lists: within a time limit, and its answer checked strictly.

Plain functions run in a thread that is left behind when their time is up, or right here without a limit;
coroutines run in an event loop that lives as long as its function, so that clients and connections outlive a
call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch

from gspo_kernels.trainer.input_errors import RewardError
from gspo_kernels.trainer.rewards.loading import place_of
from gspo_kernels.trainer.rewards.process import ProcessReward


class Answer(NamedTuple):
    """What a function is to return: a list of ``many``, each of which ``fits``."""

    many: str
    one: str
    fits: Callable[[Any], bool]


# bool and numpy scalars are Numbers as well
NUMBERS = Answer(
    "numbers",
    "a finite number, or None where it does not apply",
    lambda value: value is None or (isinstance(value, numbers.Real) and math.isfinite(value)),
)
TEXTS = Answer("texts", "a text", lambda value: isinstance(value, str))


class ListFunction:
    """A reward or feedback function as the trainer calls it: plain, async or a `ProcessReward`."""

    def __init__(self, what: str, function: Any, answer: Answer) -> None:
        self.what = what
        self.function = function
        self.inner = function.function if isinstance(function, ProcessReward) else function
        self.answer = answer
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, given: Iterable[str], columns: Iterable[str]) -> None:
        """Raise a `RewardError` if it cannot be called with what is given and the dataset's columns."""
        arguments = dict.fromkeys([*given, *columns])
        bound = self.inner.keywords if isinstance(self.inner, functools.partial) else {}
        if twice := arguments.keys() & bound.keys():
            raise RewardError(f"{self.what}: {', '.join(twice)} is an option and a column")
        try:
            inspect.signature(self.inner).bind(**arguments)
        except ValueError:  # some builtin functions have no signature
            pass
        except TypeError as error:
            names = ", ".join(columns) or "none"
            raise RewardError(
                f"{self.what} cannot be called with the dataset's columns ({names}): {error}"
            ) from error

    def begin(self, arguments: Mapping[str, Any], seconds: float | None) -> Callable[[], list[Any]]:
        """Start a coroutine; return what waits for its answer, or calls a plain function and waits.

        That raises a `RewardError` that names the function, and the completion where it is known: it raised,
        took more than ``seconds``, or did not return one value that fits for each completion.
        """
        started = self._start(arguments, seconds) if self.is_async else None

        def finish() -> list[Any]:
            try:
                if started is None and seconds is None:
                    values = self.function(**arguments)
                else:
                    values = (started or self._start(arguments, seconds))()
            except RewardError:
                raise
            except (Exception, SystemExit) as error:
                raise RewardError(f"{self.what} raised {error!r}{place_of(error, self.inner)}") from error
            return self._checked(values, arguments["prompts"], arguments["completions"])

        return finish

    def _checked(self, values: Any, prompts: Sequence[Any], completions: Sequence[str]) -> list[Any]:
        if hasattr(values, "tolist"):  # a tensor, or an array of numpy
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise RewardError(
                f"{self.what} must return a list of {self.answer.many}, got {type(values).__name__}"
            )
        if len(values) != len(completions):
            unit = "values" if self.answer is NUMBERS else self.answer.many
            raise RewardError(f"{self.what} returned {len(values)} {unit} for {len(completions)} completions")
        for index, value in enumerate(values):
            if not self.answer.fits(value):
                raise RewardError(
                    f"{self.what} returned {value!r} for completion {index}; expected {self.answer.one} "
                    f"(prompt {prompts[index]!r:.200}, completion {completions[index]!r:.200})"
                )
        return list(values)

    def _start(self, arguments: Mapping[str, Any], seconds: float | None) -> Callable[[], Any]:
        """Call in a daemon thread, which keeps no program from ending, with the torch state of this one.

        Return what waits for the answer, and gives the call up once its seconds are over.
        """
        future: Future[Any] = Future()
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        if self.is_async and self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop

        def run() -> None:
            torch.set_grad_enabled(grad)
            if device is not None:
                torch.cuda.set_device(device)
            try:
                values = self.function(**arguments)
                future.set_result(values if loop is None else loop.run_until_complete(values))
            except BaseException as error:
                future.set_exception(error)

        began = time.monotonic()
        threading.Thread(target=run, name="gspo reward", daemon=True).start()

        def result() -> Any:
            if wait([future], None if seconds is None else began + seconds - time.monotonic()).done:
                return future.result()
            if isinstance(self.function, ProcessReward):
                self.function.kill()
            if loop is not None:  # it may be blocked for good: the next call gets another one
                self._loop = None
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
            count = len(arguments["completions"])
            raise RewardError(f"{self.what} took more than {seconds:g} seconds for {count} completions")

        return result
