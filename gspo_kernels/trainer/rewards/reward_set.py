"""Reward functions: called with lists, within time limits, and checked strictly.

A reward function has the signature ::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

where all arguments are lists with one entry per completion, given by keyword: prompts as the dataset has them
(text or messages), completions as text, completions as token ids, and the dataset's other columns. None means
that the reward does not apply to that completion. The function may be ``async``.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.trainer.data import RESERVED
from gspo_kernels.trainer.rewards.calls import OutOfTimeError, RewardLoop, call_within, is_async
from gspo_kernels.trainer.rewards.loading import (
    RewardFunction,
    find_reward,
    name_of,
    place_of,
    wants_own_process,
)
from gspo_kernels.trainer.rewards.process import ProcessReward
from gspo_kernels.trainer.run.input_errors import ConfigError, RewardError

__all__ = [
    "ADVANTAGES",
    "ProcessReward",
    "RewardFunction",
    "RewardSet",
    "Rewards",
    "advantages_of",
    "load_reward",
]

ADVANTAGES = (
    "group_normalized",
    "leave_one_out",
    "optimal_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
)
"""What `advantages_of` can do, by name."""


def load_reward(spec: str, *, own_process: bool = False) -> RewardFunction:
    """Return the function behind ``"module:function"`` or ``"path/to/file.py:function"``.

    ``(name=value, ...)`` after it binds keyword arguments to literal values. With ``own_process``, or where
    the function has a true attribute of that name, it is called in a process of its own.
    """
    function = find_reward(spec)
    return ProcessReward(spec) if own_process or wants_own_process(function) else function


@dataclass(frozen=True)
class Rewards:
    """Rewards of some completions.

    Attributes:
        total: [B] fp32, the weighted sum of the rewards that apply; NaN where none does.
        by_name: [B] fp32 for each reward function, NaN where it does not apply.
        weights: the weight of each reward function; 1 where it is not given.
    """

    total: Tensor
    by_name: dict[str, Tensor]
    weights: Mapping[str, float] = field(default_factory=dict)


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
        method: one of `ADVANTAGES`. All but "gdpo" take the weighted sum of the rewards; "gdpo" normalizes
            each reward on its own and sums then. "reinforce_plus_plus_baseline" subtracts the group's mean
            before it whitens over the batch, "reinforce_plus_plus" only whitens.
        scale: "group", "batch" or "none": what "group_normalized" divides by; no other method has one.
        lengths: [B], counted tokens, for "optimal_baseline".
    """
    if method not in ADVANTAGES:
        raise ConfigError(f"advantages must be one of {', '.join(ADVANTAGES)}, got {method!r}")
    if method == "group_normalized":
        return gk.advantages.group_normalized(rewards.total, group_size=group_size, scale=scale)
    if scale != "group":
        raise ConfigError(f"advantage_scale {scale!r} is for group_normalized; {method} has no such choice")
    if method == "gdpo":
        table_BK = torch.stack(list(rewards.by_name.values()), 1)
        weights = table_BK.new_tensor([rewards.weights.get(name, 1.0) for name in rewards.by_name])
        return gk.advantages.gdpo(table_BK, group_size=group_size, weights=weights)
    if method == "optimal_baseline":
        if lengths is None:
            raise ConfigError("optimal_baseline needs lengths")
        return gk.advantages.optimal_baseline(rewards.total, lengths, group_size=group_size)
    if method == "leave_one_out":
        return gk.advantages.leave_one_out(rewards.total, group_size=group_size)
    groups = group_size if method == "reinforce_plus_plus_baseline" else None
    return gk.advantages.reinforce_plus_plus(rewards.total, group_size=groups)


class RewardSet:
    """Several reward functions, called together and summed with weights.

    ``async`` functions run at the same time, each in an event loop that lives as long as this object, while
    the others run one after the other. What exceeds its time limit raises, and is stopped as far as that is
    possible: a coroutine is cancelled, a process (`ProcessReward`) is killed; a plain function runs in a
    thread, which nobody can stop, so it is left behind and ends with the program. A thread that holds
    Python's lock all the time (a regular expression without end, a power of large integers) stops everything
    and cannot even be noticed: such a function belongs in a process. Without a limit a plain function runs in
    the calling thread.

    Args:
        functions: the reward functions.
        weights: one for each; all 1 if not given.
        timeouts: seconds that a call may take, for all or one for each; None: no limit.
        own_process: call every function in a process of its own, not only those that ask for one.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeouts: float | Sequence[float | None] | None = None,
        *,
        own_process: bool = False,
    ) -> None:
        if not functions:
            raise RewardError("no reward function was given")
        if weights is not None and len(weights) != len(functions):
            raise RewardError(f"got {len(weights)} reward weights for {len(functions)} reward functions")
        limits = list(timeouts) if isinstance(timeouts, Sequence) else [timeouts] * len(functions)
        if len(limits) != len(functions):
            raise RewardError(f"got {len(limits)} timeouts for {len(functions)} reward functions")
        for limit in limits:
            if limit is not None and not 0.0 < limit < math.inf:
                raise RewardError(f"timeouts must be above 0 seconds, or None for no limit; got {limit}")
        self.functions: dict[str, RewardFunction] = {}
        for function in functions:
            name = base = name_of(function)
            count = 1
            while name in self.functions:
                count += 1
                name = f"{base}_{count}"
            process = own_process or wants_own_process(function)
            started = isinstance(function, ProcessReward)
            self.functions[name] = ProcessReward(function) if process and not started else function
        self.weights = dict(zip(self.functions, weights or [1.0] * len(functions), strict=True))
        self.timeouts = dict(zip(self.functions, limits, strict=True))
        # One each, so that a coroutine that blocks its loop is the one that runs out of time.
        self._loops = {name: RewardLoop() for name, function in self.functions.items() if is_async(function)}

    @property
    def names(self) -> list[str]:
        """Names of the reward functions, in order."""
        return list(self.functions)

    def check(self, columns: Iterable[str]) -> None:
        """Raise a `RewardError` if a function cannot be called with these columns of the dataset."""
        for name, function in self.functions.items():
            check_call(f"reward function {name}", function, RESERVED, columns)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
    ) -> Rewards:
        """Score every completion with every function.

        Raises:
            RewardError: a function raised, took too long, or did not return one finite number or None for
                each completion; names the function and, where it is known, the completion.
        """
        self.check(columns)
        arguments = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        waiting = {
            name: loop.begin(self.functions[name], arguments, self.timeouts[name])
            for name, loop in self._loops.items()
        }
        by_name = {}
        try:
            for name in [name for name in self.functions if name not in waiting] + list(waiting):
                try:
                    if name in waiting:
                        values = self._loops[name].finish(waiting[name], self.timeouts[name])
                    else:
                        values = call_within(self.functions[name], arguments, self.timeouts[name])
                except OutOfTimeError as error:
                    raise RewardError(
                        f"reward function {name} took more than {self.timeouts[name]:g} seconds for "
                        f"{len(completions)} completions"
                    ) from error
                except RewardError:
                    raise
                except Exception as error:
                    raise RewardError(f"reward function {name} raised {error!r}{place_of(error)}") from error
                by_name[name] = _checked(name, values, prompts, completions)
        finally:
            for future in waiting.values():
                future.cancel()
        by_name = {name: by_name[name] for name in self.functions}
        weighted = torch.stack([self.weights[name] * values for name, values in by_name.items()])
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name, self.weights)


def check_call(what: str, function: RewardFunction, given: Iterable[str], columns: Iterable[str]) -> None:
    """Raise a `RewardError` if a function cannot be called with what is given and the dataset's columns."""
    inner = function.function if isinstance(function, ProcessReward) else function
    arguments = dict.fromkeys([*given, *columns])
    if isinstance(inner, functools.partial) and (twice := arguments.keys() & inner.keywords.keys()):
        raise RewardError(f"{what}: {', '.join(twice)} is an option and a column")
    try:
        signature = inspect.signature(inner)
    except ValueError:  # some builtin functions have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RewardError(
            f"{what} cannot be called with the dataset's columns ({', '.join(columns) or 'none'}): {error}"
        ) from error


def _checked(name: str, values: Any, prompts: Sequence[Any], completions: Sequence[str]) -> Tensor:
    if hasattr(values, "tolist"):  # a tensor, or an array of numpy
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(
            f"reward function {name} must return a list of numbers, got {type(values).__name__}"
        )
    count = len(completions)
    if len(values) != count:
        raise RewardError(f"reward function {name} returned {len(values)} values for {count} completions")
    for index, value in enumerate(values):
        if value is None:
            continue
        # bool and numpy scalars are Numbers as well
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(
                f"reward function {name} returned {value!r} for completion {index}; expected a finite "
                "number, or None where it does not apply "
                f"(prompt {prompts[index]!r:.200}, completion {completions[index]!r:.200})"
            )
    return torch.tensor(
        [math.nan if value is None else float(value) for value in values], dtype=torch.float32
    )
