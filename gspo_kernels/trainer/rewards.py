"""Reward functions: load them, call them, and turn their values into advantages.

A reward function takes some or all of ``(prompts, completions, completion_ids, **columns)`` by name. Each is
a list with one entry per completion: the dataset's prompt, the text, the token ids, the values of the other
columns; each call gets its own copies. It returns a list of numbers, with None where it does not apply, and
may be ``async``.
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
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import advantages
from gspo_kernels.trainer.config import InputError
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
    if folder not in sys.path:  # stays there: processes started by a reward import the module by its name
        sys.path.append(folder)
    name = location
    if is_file:  # by its stem every process can import it, unless that name is taken
        try:
            importable = importlib.util.find_spec(path.stem)
        except (ImportError, ValueError):  # a name with dots, or the running program
            importable = None
        found = None if importable is None else Path(importable.origin or "").resolve()
        unique = f"{path.stem.replace('.', '_')}_{zlib.crc32(bytes(path)):08x}"
        name = path.stem if found == path else unique
    sys.path.insert(0, folder)  # while the module loads, as for a script
    try:
        if not is_file:
            return importlib.import_module(name)
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module  # where pickle and dataclasses look it up
        module_spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


@dataclass(frozen=True)
class Rewards:
    """Rewards of B completions."""

    total: Tensor  # [B] fp32, the weighted sum of the rewards that apply; NaN where none does
    by_name: dict[str, Tensor]  # [B] fp32 per reward function, NaN where it does not apply
    weights: Mapping[str, float] = field(default_factory=dict)  # by name; 1 if missing

    @classmethod
    def concatenate(cls, parts: Sequence[Rewards]) -> Rewards:
        """Concatenate the rewards of one or more parts of a batch."""
        by_name = {name: torch.cat([each.by_name[name] for each in parts]) for name in parts[0].by_name}
        return cls(torch.cat([each.total for each in parts]), by_name, parts[0].weights)


class RewardSet:
    """Reward functions that are called together and summed with weights, all 1 by default.

    ``async`` functions run concurrently, in the event loop of one thread; plain ones run one after the other
    in the calling thread.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise InputError("no reward function was given")
        weights = [1.0] * len(functions) if weights is None else weights
        if len(weights) != len(functions) or not all(map(math.isfinite, weights)):
            expected = f"a finite number for each of {len(functions)} rewards"
            raise InputError(f"reward_weights: got {list(weights)}, expected {expected}")
        self.functions: dict[str, RewardFunction] = {}
        for function in functions:
            inner = function.func if isinstance(function, partial) else function
            base = getattr(inner, "__name__", type(inner).__name__)
            names = [base, *(f"{base}_{n}" for n in range(2, len(functions) + 1))]
            self.functions[next(name for name in names if name not in self.functions)] = function
        self.names = list(self.functions)
        self.weights = dict(zip(self.names, weights, strict=True))
        # The event loop outlives a call, and so do a function's clients and connections.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def check(self, columns: Iterable[str], dataset: str = "the dataset") -> None:
        """Raise an `InputError` if a function cannot be called with these columns of a dataset."""
        columns = list(columns)
        for name, function in self.functions.items():
            bound = function.keywords if isinstance(function, partial) else {}
            if twice := [each for each in (*RESERVED, *columns) if each in bound]:
                raise InputError(f"reward function {name}: {', '.join(twice)} is an option and a column")
            try:
                arguments = _accepted(function, dict.fromkeys((*RESERVED, *columns)))
                inspect.signature(function).bind(**arguments)
            except (TypeError, ValueError) as error:  # some builtin functions have no signature
                names = f"{', '.join(RESERVED)} and columns of {dataset} ({', '.join(columns) or 'none'})"
                cannot = f"reward function {name} cannot be called with {names}, all by name"
                raise InputError(f"{cannot}: {error}") from error

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Rewards:
        """Score every completion with every function; an `InputError` names a function that fails."""
        self.check(columns)
        arguments = {**dict(zip(RESERVED, (prompts, completions, completion_ids), strict=True)), **columns}
        with restored_globals():
            calls = {name: self._call(function, arguments) for name, function in self.functions.items()}
            values = {
                name: _values(name, function, calls[name], prompts, completions)
                for name, function in sorted(self.functions.items(), key=lambda each: _is_async(each[1]))
            }
        by_name = {n: torch.tensor(values[n], dtype=torch.float32, device="cpu") for n in self.names}
        weighted = torch.stack([self.weights[name] * by_name[name] for name in self.names])
        if (infinite := weighted.nansum(0).isinf()).any():
            place = f"the weighted sum of completion {int(infinite.nonzero()[0])}"
            raise InputError(f"rewards {', '.join(self.names)}: {place} exceeds fp32")
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name, self.weights)

    def _call(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Return a call of a function; an ``async`` one starts now, with this thread's torch state."""
        if not _is_async(function):
            return lambda: function(**own_copies(_accepted(function, arguments)))
        if self._loop is None or self._thread is None or not self._thread.is_alive():  # as after a fork
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        async def outcome() -> Any:
            torch.set_grad_enabled(grad)
            if device is not None:
                torch.cuda.set_device(device)
            try:
                return await function(**own_copies(_accepted(function, arguments)))
            except BaseException as error:  # SystemExit would end the event loop
                return error

        future = asyncio.run_coroutine_threadsafe(outcome(), self._loop)

        def result() -> Any:
            if isinstance(value := future.result(), BaseException):
                raise value
            return value

        return result


def _is_async(function: RewardFunction) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _accepted(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _values(
    name: str,
    function: RewardFunction,
    call: Callable[[], Any],
    prompts: Sequence[Any],
    completions: Sequence[str],
) -> list[float]:
    """Return what a call of a reward function returns; an `InputError` says what is wrong with it."""
    what = f"reward function {name}"
    try:
        values = call()
    except (Exception, SystemExit) as error:
        inner = function.func if isinstance(function, partial) else function
        raise InputError(f"{what} raised {error!r}{_place_of(error, inner)}") from error
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or a NumPy array
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(f"{what} must return a list of numbers, got {type(values).__name__}")
    if len(values) != len(completions):
        raise InputError(f"{what} returned {len(values)} values for {len(completions)} completions")
    for value, prompt, completion in zip(values, prompts, completions, strict=True):
        try:
            fits = value is None or abs(float(value)) < 3.4e38
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            place = f"completion {completion!r:.200} of prompt {prompt!r:.200}"
            raise InputError(f"{what} returned {value!r}, expected a finite fp32 number or None ({place})")
    return [math.nan if value is None else float(value) for value in values]


def _place_of(error: BaseException, function: Any) -> str:
    """Return `` (file, line n)``, the last frame of a traceback in the function's file, or ``""``."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore the state of the process that a run depends on, if reward functions change it.

    This is torch's grad mode and generators, the output streams, the handlers of signals that end a run, and
    functions that a sandbox sets to None. Other changes remain, such as the working directory.
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
    """Return copies of a function's arguments, one per value, to confine what the function changes."""
    ids = "completion_ids"  # list() is ten times as fast as deepcopy
    return {n: [list(x) if n == ids else copy.deepcopy(x) for x in each] for n, each in arguments.items()}


def advantages_of(rewards: Rewards, *, group_size: int, method: str, lengths: Tensor) -> Tensor:
    """Return [B] fp32 advantages by a function of `gk.advantages`; 0 where no reward applies.

    ``method`` is one of config's ``Method``, and ``lengths``, [B], are the numbers of counted tokens. "gdpo"
    takes each reward separately, the other methods their weighted sum.
    """
    total = rewards.total
    if method == "group_normalized":
        return advantages.group_normalized(total, group_size=group_size)
    if method == "leave_one_out":
        return advantages.leave_one_out(total, group_size=group_size)
    if method == "optimal_baseline":
        return advantages.optimal_baseline(total, lengths, group_size=group_size)
    if method == "gdpo":
        table_BK = total.new_tensor([values.tolist() for values in rewards.by_name.values()]).T
        weights = total.new_tensor([rewards.weights.get(name, 1.0) for name in rewards.by_name])
        return advantages.gdpo(table_BK, group_size=group_size, weights=weights)
    if method in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        size = group_size if method.endswith("baseline") else None
        return advantages.reinforce_plus_plus(total, group_size=size)
    raise InputError(f"advantages: unknown method {method!r}")


def levels(total: Tensor, group_size: int) -> Tensor:
    """Return each reward's rank in its group, [B], from 1 for the highest; equal rewards share a rank."""
    groups = [torch.unique(-group, return_inverse=True)[1] + 1 for group in total.split(group_size)]
    return torch.cat(groups).to(total.dtype)


def differing(total: Tensor, group_size: int) -> Tensor:
    """Return for each group whether its rewards differ, [groups] bool; NaN (no reward) does not count."""
    groups = total.view(-1, group_size)
    return groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)
