"""Reward functions: finding them, calling them within a time limit, and what their values become.

A reward function has the signature ::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

or takes only some of these arguments, all of them lists with one entry per completion: prompts as the dataset
has them (text or messages), completions as text, completions as token ids, and the dataset's other columns.
None means that the reward does not apply to that completion. The function may be ``async``.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import numbers
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.data import RESERVED

if TYPE_CHECKING:
    from torch import Tensor

RewardFunction = Callable[..., Any]


def load_reward(spec: str) -> RewardFunction:
    """Return the function behind ``"module:function"`` or ``"path/to/file.py:function"``.

    ``(name=value, ...)`` after it binds keyword arguments to literal values. An `InputError` says what is
    wrong with the specification, the file or the module.
    """
    place, opening, options = spec.partition("(")
    location, _, name = place.rpartition(":")
    if not location or not name:
        raise InputError(f"reward {spec!r}: expected 'module:function' or 'file.py:function'")
    if location.endswith(".py") and not Path(location).is_file():
        raise InputError(f"reward {spec!r}: there is no file {location}")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else _import_module(location)
    except Exception as error:
        raise InputError(f"reward {spec!r}: {location} failed to load: {error!r}") from error
    function = getattr(module, name, None)
    if function is None:
        raise InputError(f"reward {spec!r}: {location} has no {name!r}")
    if not callable(function):
        raise InputError(f"reward {spec!r}: {name} is not a function but {type(function).__name__}")
    return functools.partial(function, **_options(opening + options, spec)) if opening else function


def _import_file(path: Path) -> Any:
    name = str(path.resolve())  # so that files of the same name in two folders are two modules
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses look their module up there
    module_spec.loader.exec_module(module)
    return module


def _import_module(location: str) -> Any:
    # A console script does not look into the current directory, where a user's reward module is.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(location)
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _options(text: str, spec: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(k.arg for k in call.keywords):
            return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise InputError(f"reward {spec!r}: expected (name=value, ...) with plain values after the function")


@dataclass(frozen=True)
class Rewards:
    """Rewards of some completions.

    Attributes:
        total: [B] fp32, the weighted sum of the rewards that apply; NaN where none does.
        by_name: [B] fp32 for each reward function, NaN where it does not apply.
        weights: the weight of each reward function; 1 where it is missing.
    """

    total: Tensor
    by_name: dict[str, Tensor]
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Rewards]) -> Rewards:
        """Put the rewards of several parts of a batch one after the other; at least one part."""
        import torch

        by_name = {name: torch.cat([each.by_name[name] for each in parts]) for name in parts[0].by_name}
        return cls(torch.cat([each.total for each in parts]), by_name, parts[0].weights)


class RewardSet:
    """Several reward functions, called together and summed with weights.

    ``async`` functions run at the same time, while the others run one after the other. A function that
    exceeds the time limit is an error: a coroutine is cancelled; a plain function runs in a daemon thread,
    which nobody can stop, so it is left behind and ends with the program. A thread that never releases
    Python's lock stops everything: such a function must start a process itself.

    Args:
        functions: the reward functions.
        weights: one for each; all 1 if not given.
        timeout: seconds that a call may take; None: no limit, and plain functions run in the calling thread.

    Raises:
        InputError: no function, a weight that is not finite, or a wrong number of weights.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        if not functions:
            raise InputError("no reward function was given")
        if weights is not None and len(weights) != len(functions):
            raise InputError(
                f"reward_weights: got {len(weights)}, expected one for each of {len(functions)} rewards"
            )
        if weights is not None and not all(map(math.isfinite, weights)):
            raise InputError(f"reward_weights must be finite numbers, got {list(weights)}")
        if timeout is not None and not 0.0 < timeout < math.inf:
            raise InputError(f"reward_timeout must be above 0 seconds, or None for no limit; got {timeout}")
        self._calls: dict[str, _Call] = {}
        for function in functions:
            base = _name_of(function)
            names = (base if n == 1 else f"{base}_{n}" for n in itertools.count(1))
            name = next(name for name in names if name not in self._calls)
            self._calls[name] = _Call(name, function, timeout)
        self.names = list(self._calls)
        self.weights = dict(zip(self.names, weights or [1.0] * len(functions), strict=True))

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
        """Score every completion with every function.

        An `InputError` names the function, and the completion where it is known: the function raised, took
        too long, or did not return a finite number or None for each completion.
        """
        import torch

        self.check(columns)
        arguments = {**dict(zip(RESERVED, (prompts, completions, completion_ids), strict=True)), **columns}
        # Coroutines begin here, and go on while the plain functions are called.
        waiting = {name: call.begin(arguments) for name, call in self._calls.items()}
        values = {name: waiting[name]() for name in sorted(waiting, key=lambda n: self._calls[n].is_async)}
        by_name = {
            name: torch.tensor([math.nan if v is None else float(v) for v in values[name]])
            for name in self.names
        }
        weighted = torch.stack([self.weights[name] * by_name[name] for name in self.names])
        sums = {f"reward function {name}": row for name, row in zip(self.names, weighted, strict=True)}
        for what, row in {**sums, f"the sum of {', '.join(self.names)}": weighted.nansum(0)}.items():
            if row.isinf().any():
                i = int(row.isinf().nonzero()[0])
                raise InputError(
                    f"{what} gives completion {i} with its weight a reward beyond the range of fp32 "
                    f"(prompt {prompts[i]!r:.200}, completion {completions[i]!r:.200})"
                )
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name, self.weights)


class _Call:
    """One reward function: which arguments it takes, and a call with a time limit."""

    def __init__(self, name: str, function: RewardFunction, timeout: float | None) -> None:
        self.what, self.function, self.timeout = f"reward function {name}", function, timeout
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        # An event loop lives as long as its function, so that clients and connections outlive a call.
        self.loop: asyncio.AbstractEventLoop | None = None
        try:
            self.parameters = inspect.signature(function).parameters
        except ValueError:  # some builtin functions have no signature
            self.parameters = inspect.signature(lambda **_: None).parameters

    def check(self, columns: Sequence[str]) -> None:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        if twice := [name for name in (*RESERVED, *columns) if name in bound]:
            raise InputError(f"{self.what}: {', '.join(twice)} is an option and a column")
        for name, p in self.parameters.items():
            required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if required and (p.kind is p.POSITIONAL_ONLY or name not in (*RESERVED, *columns)):
                available = ", ".join(columns) or "none"
                raise InputError(
                    f"{self.what} cannot be called: it takes {name!r} and gets {', '.join(RESERVED)} and the "
                    f"dataset's columns ({available}), all by name"
                )

    def begin(self, arguments: Mapping[str, Any]) -> Callable[[], Sequence[float | None]]:
        """Start a coroutine; return what waits for its values, or calls a plain function and waits."""
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        taken = {name: v for name, v in arguments.items() if takes_all or name in self.parameters}
        started = self._start(taken) if self.is_async else None

        def finish() -> Sequence[float | None]:
            try:
                if started is None and self.timeout is None:
                    values = self.function(**taken)
                else:
                    values = self._wait(*(started or self._start(taken)), len(arguments["completions"]))
            except InputError:
                raise
            except (Exception, SystemExit) as error:
                raise InputError(f"{self.what} raised {error!r}{_place_of(error, self.function)}") from error
            return self._checked(values, arguments["prompts"], arguments["completions"])

        return finish

    def _start(self, arguments: Mapping[str, Any]) -> tuple[Future[Any], float]:
        """Call in a daemon thread, which keeps no program from ending, with the torch state of this one."""
        import torch

        future: Future[Any] = Future()
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        if self.is_async and self.loop is None:
            self.loop = asyncio.new_event_loop()
        loop = self.loop

        def run() -> None:
            torch.set_grad_enabled(grad)
            if device is not None:
                torch.cuda.set_device(device)
            try:
                values = self.function(**arguments)
                future.set_result(values if loop is None else loop.run_until_complete(values))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="gspo reward", daemon=True).start()
        return future, time.monotonic()

    def _wait(self, future: Future[Any], began: float, count: int) -> Any:
        seconds = None if self.timeout is None else began + self.timeout - time.monotonic()
        if wait([future], seconds).done:
            return future.result()
        if self.loop is not None:  # it may be blocked for good: the next call gets another one
            loop, self.loop = self.loop, None
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        raise InputError(f"{self.what} took more than {self.timeout:g} seconds for {count} completions")

    def _checked(
        self, values: Any, prompts: Sequence[Any], completions: Sequence[str]
    ) -> Sequence[float | None]:
        if hasattr(values, "tolist"):  # a tensor, or an array of numpy
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise InputError(f"{self.what} must return a list of numbers, got {type(values).__name__}")
        if len(values) != len(completions):
            raise InputError(f"{self.what} returned {len(values)} values for {len(completions)} completions")
        for i, value in enumerate(values):
            # bool and numpy scalars are Numbers as well
            is_finite = isinstance(value, numbers.Real) and bool(abs(value) <= sys.float_info.max)  # type: ignore[operator]
            if value is not None and not is_finite:
                raise InputError(
                    f"{self.what} returned {value!r} for completion {i}; expected a finite number, or None "
                    f"if it does not apply (prompt {prompts[i]!r:.200}, completion {completions[i]!r:.200})"
                )
        return values


def _name_of(function: RewardFunction) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _place_of(error: BaseException, function: Any) -> str:
    """Return `` (file, line n)``: the function's own last line, and where it called others the one below."""
    inner = function.func if isinstance(function, functools.partial) else function
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    places = [f"{frame.filename}, line {frame.lineno}" for frame in (*own[-1:], *frames[-1:])]
    return f" ({', below it '.join(dict.fromkeys(places))})" if places else ""


def advantages_of(
    rewards: Rewards,
    *,
    group_size: int,
    method: str = "group_normalized",
    scale: str = "group",
    lengths: Tensor | None = None,
) -> Tensor:
    """Return [B] fp32 advantages by a formula of `gk.advantages`; 0 where no reward applies.

    Args:
        rewards: of B completions, the rows of a group consecutive.
        group_size: completions of one prompt.
        method: a name of config's ``Method``. All but "gdpo" take the weighted sum of the rewards; "gdpo"
            normalizes each reward alone and sums then. "reinforce_plus_plus_baseline" subtracts the group's
            mean before it whitens over the batch, "reinforce_plus_plus" only whitens.
        scale: "group", "batch" or "none": what "group_normalized" divides by; no other method has one.
        lengths: [B], counted tokens, for "optimal_baseline".
    """
    from gspo_kernels import advantages

    total = rewards.total
    if method == "group_normalized":
        return advantages.group_normalized(total, group_size=group_size, scale=scale)
    if scale != "group":
        raise InputError(f"advantage_scale {scale!r} is for group_normalized; {method} has no such choice")
    if method == "gdpo":
        import torch

        table_BK = torch.stack(list(rewards.by_name.values()), 1)
        weights = table_BK.new_tensor([rewards.weights.get(name, 1.0) for name in rewards.by_name])
        return advantages.gdpo(table_BK, group_size=group_size, weights=weights)
    if method == "optimal_baseline":
        if lengths is None:
            raise InputError("lengths: got None, expected [B] token counts for optimal_baseline")
        return advantages.optimal_baseline(total, lengths, group_size=group_size)
    if method == "leave_one_out":
        return advantages.leave_one_out(total, group_size=group_size)
    if method in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        groups = group_size if method == "reinforce_plus_plus_baseline" else None
        return advantages.reinforce_plus_plus(total, group_size=groups)
    raise InputError(f"advantages: unknown method {method!r}")


def levels(total: Tensor, group_size: int) -> Tensor:
    """Return ranks within groups of this size, 1 for the highest reward and equal for equal ones, [B]."""
    import torch

    groups = [torch.unique(-group, return_inverse=True)[1] + 1 for group in total.split(group_size)]
    return torch.cat(groups).to(total.dtype)


def differing(total: Tensor, group_size: int) -> Tensor:
    """Return for each group whether its rewards differ, [groups] bool; NaN, no reward, doesn't count."""
    import torch

    groups = total.view(-1, group_size)
    return groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)
