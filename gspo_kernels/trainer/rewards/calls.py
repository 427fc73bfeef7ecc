"""Calling reward functions within a time limit: plain ones in a thread, coroutines in an event loop."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch

from gspo_kernels.trainer.rewards.loading import RewardFunction
from gspo_kernels.trainer.rewards.process import ProcessReward


class OutOfTimeError(Exception):
    """A call took longer than it may."""


def is_async(function: RewardFunction) -> bool:
    """Whether calling the function, or object, makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_within(function: RewardFunction, arguments: Mapping[str, Any], seconds: float | None) -> Any:
    """Call a plain function: in a thread that is left behind after ``seconds``, or here if there is no limit.

    Raises:
        OutOfTimeError: it took too long.
        BaseException: whatever the function raises.
    """
    if seconds is None:
        return function(**arguments)
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(**arguments), None))
        except BaseException as error:
            outcome.put((None, error))

    _start_thread(run)
    try:
        values, error = outcome.get(timeout=seconds)
    except queue.Empty:
        if isinstance(function, ProcessReward):
            function.kill()
        raise OutOfTimeError from None
    if error is not None:
        raise error
    return values


class RewardLoop:
    """An event loop for the whole run, so that clients and connections outlive a call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(
        self, function: RewardFunction, arguments: Mapping[str, Any], seconds: float | None
    ) -> Future[Any]:
        """Start a coroutine function."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            _start_thread(self._loop.run_forever)
        coroutine: Any = function(**arguments)
        return asyncio.run_coroutine_threadsafe(_within(coroutine, seconds), self._loop)

    def finish(self, future: Future[Any], seconds: float | None) -> Any:
        """Wait for the result.

        The loop keeps the time limit, unless a coroutine blocks it; then the loop is left behind as well.

        Raises:
            OutOfTimeError: it took too long.
            Exception: whatever the coroutine raises.
        """
        try:
            return future.result(None if seconds is None else seconds + 1.0)
        except FutureTimeoutError as error:
            if future.done() and future.exception() is error:
                raise
            self._loop = None
            raise OutOfTimeError from error


async def _within(coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
    # Not asyncio.wait_for: that waits for what does not let itself be cancelled.
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        raise OutOfTimeError
    return task.result()


def _start_thread(target: Callable[[], object]) -> None:
    """Run in a daemon thread, which does not keep the program from ending, with this thread's torch state."""
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_grad_enabled(grad)
        if device is not None:
            torch.cuda.set_device(device)
        target()

    threading.Thread(target=run, name="gspo reward", daemon=True).start()
