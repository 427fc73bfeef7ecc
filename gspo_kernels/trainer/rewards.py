"""Reward functions: load them, call them within a time limit, and turn their values into advantages.

A reward function takes some or all of ``(prompts, completions, completion_ids, **columns)`` by name. Each is
a list with one entry per completion: the prompt as the dataset has it, the text, the token ids, the values of
the dataset's other columns; each call gets its own copies. It returns a list of numbers, None where it does
not apply, and may be ``async``.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import copy
import importlib
import importlib.util
import inspect
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import advantages
from gspo_kernels.trainer.config import InputError, place_of
from gspo_kernels.trainer.data import RESERVED

RewardFunction = Callable[..., Any]


def load_reward(spec: str) -> RewardFunction:
    """Load the function of "module:function" or "file.py:function"; "(name=value, ...)" binds arguments."""
    place, opening, options = spec.partition("(")
    location, _, name = place.rpartition(":")
    if not location or not name:
        raise InputError(f"reward {spec!r}: expected 'module:function' or 'file.py:function'")
    if location.endswith(".py") and not Path(location).is_file():
        raise InputError(f"reward {spec!r}: there is no file {location}")
    try:
        module = _import(location)
    except Exception as error:
        raise InputError(f"reward {spec!r}: {location} failed to load: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        kind = "there is no such name" if function is None else f"it is {type(function).__name__}"
        raise InputError(f"reward {spec!r}: {name!r} is not a function of {location}: {kind}")
    if not opening:
        return function
    try:
        call = ast.parse(f"f({options}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(k.arg for k in call.keywords):
            raise ValueError(options)
        bound = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise InputError(f"reward {spec!r}: expected (name=value, ...) with plain values") from error
    return partial(function, **bound)


def _import(location: str) -> Any:
    path, is_file = Path(location).resolve(), location.endswith(".py")
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:  # it stays there: processes that a reward starts import the module by its name
        sys.path.append(folder)
    name = _module_name(path) if is_file else location
    sys.path.insert(0, folder)  # first while the module loads, as for a script
    try:
        if not is_file:
            return importlib.import_module(name)
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module  # pickle and dataclasses look their module up there
        module_spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


def _module_name(path: Path) -> str:
    """Return the name under which every process can import a file, or one of its own where that is taken."""
    try:
        importable = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):  # a name with dots, or the running program's
        importable = None
    if importable is not None and Path(importable.origin or "").resolve() == path:
        return path.stem
    return f"{path.stem.replace('.', '_')}_{zlib.crc32(bytes(path)):08x}"


@dataclass(frozen=True)
class Rewards:
    """Rewards of B completions."""

    total: Tensor  # [B] fp32, the weighted sum of the rewards that apply; NaN where none does
    by_name: dict[str, Tensor]  # [B] fp32 for each reward function, NaN where it does not apply
    weights: Mapping[str, float] = field(default_factory=dict)  # by name; 1 where it is missing

    @classmethod
    def concatenate(cls, parts: Sequence[Rewards]) -> Rewards:
        """Put the rewards of several parts of a batch one after the other; at least one part."""
        by_name = {name: torch.cat([each.by_name[name] for each in parts]) for name in parts[0].by_name}
        return cls(torch.cat([each.total for each in parts]), by_name, parts[0].weights)


class RewardSet:
    """Several reward functions, called together and summed with weights.

    ``async`` functions run at the same time, in threads; plain ones one after the other, in the calling
    thread. ``weights`` are all 1 by default; ``timeout`` is in seconds.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        if not functions:
            raise InputError("no reward function was given")
        weights = [1.0] * len(functions) if weights is None else weights
        if len(weights) != len(functions) or not all(map(math.isfinite, weights)):
            expected = f"a finite number for each of {len(functions)} rewards"
            raise InputError(f"reward_weights: got {list(weights)}, expected {expected}")
        if timeout is not None and not 0.0 < timeout < math.inf:
            raise InputError(f"reward_timeout must be above 0 seconds, or None for no limit; got {timeout}")
        self._calls: dict[str, _Call] = {}
        for function in functions:
            inner = function.func if isinstance(function, partial) else function
            base = getattr(inner, "__name__", type(inner).__name__)
            names = [base, *(f"{base}_{n}" for n in range(2, len(functions) + 1))]
            name = next(name for name in names if name not in self._calls)
            self._calls[name] = _Call(name, function, timeout)
        self.names = list(self._calls)
        self.weights = dict(zip(self.names, weights, strict=True))

    def check(self, columns: Iterable[str]) -> None:
        """Raise an `InputError` if a function cannot be called with these columns of the dataset."""
        for call in self._calls.values():
            call.check(list(columns))

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Rewards:
        """Score every completion with every function; an `InputError` names the one that fails."""
        self.check(columns)
        arguments = {**dict(zip(RESERVED, (prompts, completions, completion_ids), strict=True)), **columns}
        calls = list(self._calls.values())
        # Coroutines run while the plain functions are called, one after the other.
        with restored_globals():
            started = {call: call.start(arguments) for call in calls if call.is_async}
            plain = [call for call in calls if not call.is_async]
            values = {call.name: call.values(arguments, partial(call.run, arguments)) for call in plain}
            values |= {c.name: c.values(arguments, partial(c.wait, future)) for c, future in started.items()}
        by_name = {n: torch.tensor(values[n], dtype=torch.float32, device="cpu") for n in self.names}
        weighted = torch.stack([self.weights[name] * by_name[name] for name in self.names])
        if (infinite := weighted.nansum(0).isinf()).any():
            place = f"the weighted sum of completion {int(infinite.nonzero()[0])}"
            raise InputError(f"rewards {', '.join(self.names)}: {place} exceeds fp32")
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name, self.weights)


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore what reward functions change of the process, where a run depends on it.

    This is torch's grad mode and generators, output streams, handlers of the signals that end a run, and the
    functions that a sandbox sets to None. Other state stays as it is left, such as the working directory.
    """
    modules = [(vars(module), {**vars(module)}) for module in (builtins, os, shutil, subprocess)]
    streams, ends = (sys.stdout, sys.stderr), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ends if is_main}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    with torch.random.fork_rng(devices), torch.inference_mode(inference), torch.set_grad_enabled(grad):
        try:
            yield
        finally:
            for names, before in modules:
                names.update({name: value for name, value in before.items() if names.get(name) is None})
            sys.stdout, sys.stderr = streams
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)


def own_copies(arguments: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return copies of a function's arguments, each value apart, so that its changes reach nothing else."""
    ids = "completion_ids"  # copied by list(), which is ten times as fast
    return {n: [list(x) if n == ids else copy.deepcopy(x) for x in each] for n, each in arguments.items()}


class _TimeIsUp(BaseException):
    """The end of a time limit; not an ``Exception``, which a reward function may handle."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `_TimeIsUp` in the main thread after some time. A function that sets SIGALRM ends the limit."""
    if seconds is None:
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        try:  # the signal may still arrive here
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:
            signal.signal(signal.SIGALRM, before)


class _Call:
    """One reward function: which arguments it takes, and a call with a time limit."""

    def __init__(self, name: str, function: RewardFunction, timeout: float | None) -> None:
        self.name, self.function, self.timeout = name, function, timeout
        self.what = f"reward function {name}"
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        # An event loop lives as long as its function, so that clients and connections outlive a call.
        self.loop: asyncio.AbstractEventLoop | None = None

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the arguments that the function takes."""
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: v for name, v in arguments.items() if takes_all or name in parameters}

    def check(self, columns: Sequence[str]) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self.timeout is not None and not (self.is_async or is_main):
            limit = "only the main thread can have a limit, or coroutines"
            raise InputError(f"reward_timeout: got {self.timeout:g} for {self.what} in a thread; {limit}")
        bound = self.function.keywords if isinstance(self.function, partial) else {}
        if twice := [name for name in (*RESERVED, *columns) if name in bound]:
            raise InputError(f"{self.what}: {', '.join(twice)} is an option and a column")
        try:
            accepted = self.accepted(dict.fromkeys((*RESERVED, *columns)))
            inspect.signature(self.function).bind(**accepted)
        except (TypeError, ValueError) as error:  # some builtin functions have no signature
            names = f"{', '.join(RESERVED)} and the dataset's columns ({', '.join(columns) or 'none'})"
            raise InputError(f"{self.what} cannot be called with {names}, all by name: {error}") from error

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call a plain function in this thread: only the main thread can set and interrupt by signals."""
        with _time_limit(self.timeout):
            return self.function(**own_copies(self.accepted(arguments)))

    def start(self, arguments: Mapping[str, Any]) -> Future[Any]:
        """Start a coroutine in a daemon thread, with this thread's torch state."""
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        future: Future[Any] = Future()
        loop = self.loop = self.loop or asyncio.new_event_loop()
        self.ends = None if self.timeout is None else time.monotonic() + self.timeout

        def run() -> None:
            torch.set_grad_enabled(grad)
            if device is not None:
                torch.cuda.set_device(device)
            try:
                values = self.function(**own_copies(self.accepted(arguments)))
                future.set_result(loop.run_until_complete(values))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=self.what, daemon=True).start()
        return future

    def wait(self, future: Future[Any]) -> Any:
        """Return what a coroutine returns."""
        if not wait([future], self.ends and max(self.ends - time.monotonic(), 0.0)).done:
            self.loop = None  # it may be blocked for good: the next call gets another one
            raise _TimeIsUp
        return future.result()

    def values(self, arguments: Mapping[str, Any], call: Callable[[], Any]) -> list[float]:
        """Return the values of a call, checked; an `InputError` says what is wrong with them."""
        prompts, completions = arguments["prompts"], arguments["completions"]
        try:
            values = call()
        except _TimeIsUp as error:
            limit = f"{self.timeout:g} seconds for {len(completions)} completions"
            raise InputError(f"{self.what} took more than {limit}") from error
        except (Exception, SystemExit) as error:
            inner = self.function.func if isinstance(self.function, partial) else self.function
            raise InputError(f"{self.what} raised {error!r}{place_of(error, inner)}") from error
        values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or a NumPy array
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise InputError(f"{self.what} must return a list of numbers, got {type(values).__name__}")
        if len(values) != len(completions):
            raise InputError(f"{self.what} returned {len(values)} values for {len(completions)} completions")
        for value, prompt, completion in zip(values, prompts, completions, strict=True):
            try:
                fits = value is None or abs(float(value)) < 3.4e38
            except (TypeError, ValueError, OverflowError):
                fits = False
            if not fits:
                raise InputError(
                    f"{self.what} returned {value!r}, expected a finite fp32 number or None (completion "
                    f"{completion!r:.200} of prompt {prompt!r:.200})"
                )
        return [math.nan if value is None else float(value) for value in values]


def advantages_of(rewards: Rewards, *, group_size: int, method: str, lengths: Tensor | None = None) -> Tensor:
    """Return [B] fp32 advantages by a formula of `gk.advantages`; 0 where no reward applies.

    ``method`` is a name of config's ``Method``. "gdpo" normalizes each reward alone, then sums them; the
    others take the weighted sum. "reinforce_plus_plus_baseline" subtracts the group's mean before it whitens
    over the batch, "reinforce_plus_plus" only whitens. "optimal_baseline" needs ``lengths``, [B], the numbers
    of counted tokens.
    """
    total = rewards.total
    if method == "group_normalized":
        return advantages.group_normalized(total, group_size=group_size)
    if method == "leave_one_out":
        return advantages.leave_one_out(total, group_size=group_size)
    if method == "optimal_baseline" and lengths is not None:
        return advantages.optimal_baseline(total, lengths, group_size=group_size)
    if method in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        size = group_size if method.endswith("baseline") else None
        return advantages.reinforce_plus_plus(total, group_size=size)
    if method == "gdpo":
        table_BK = total.new_tensor([values.tolist() for values in rewards.by_name.values()]).T
        weights = total.new_tensor([rewards.weights.get(name, 1.0) for name in rewards.by_name])
        return advantages.gdpo(table_BK, group_size=group_size, weights=weights)
    raise InputError(f"advantages: unknown method {method!r}, or lengths are missing")


def levels(total: Tensor, group_size: int) -> Tensor:
    """Return each reward's rank in its group, [B]: 1 for the highest; equal rewards have equal ranks."""
    groups = [torch.unique(-group, return_inverse=True)[1] + 1 for group in total.split(group_size)]
    return torch.cat(groups).to(total.dtype)


def differing(total: Tensor, group_size: int) -> Tensor:
    """Return for each group whether its rewards differ, [groups] bool; NaN (no reward) does not count."""
    groups = total.view(-1, group_size)
    return groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)
