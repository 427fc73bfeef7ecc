"""Several reward functions, called together and summed with weights.

A reward function has the signature ::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

where all arguments are lists with one entry per completion, given by keyword: prompts as the dataset has them
(text or messages), completions as text, completions as token ids, and the dataset's other columns. None means
that the reward does not apply to that completion. The function may be ``async``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.trainer.input_errors import RewardError
from gspo_kernels.trainer.rewards.calls import NUMBERS, ListFunction
from gspo_kernels.trainer.rewards.loading import (
    RESERVED,
    RewardFunction,
    find_reward,
    name_of,
    wants_own_process,
)
from gspo_kernels.trainer.rewards.process import ProcessReward


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

    @classmethod
    def joined(cls, parts: Sequence[Rewards]) -> Rewards:
        """Put the rewards of several parts of a batch one after the other; at least one part."""
        by_name = {name: torch.cat([each.by_name[name] for each in parts]) for name in parts[0].by_name}
        return cls(torch.cat([each.total for each in parts]), by_name, parts[0].weights)


class RewardSet:
    """Several reward functions, called together and summed with weights.

    ``async`` functions run at the same time, while the others run one after the other. What exceeds its time
    limit raises, and is stopped as far as that is possible: a coroutine is cancelled, a process is killed; a
    plain function runs in a thread, which nobody can stop, so it is left behind and ends with the program. A
    thread that holds Python's lock all the time stops everything: such a function belongs in a process.

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
        if weights is not None and not all(map(math.isfinite, weights)):
            raise RewardError(f"reward weights must be finite numbers, got {list(weights)}")
        limits = list(timeouts) if isinstance(timeouts, Sequence) else [timeouts] * len(functions)
        if len(limits) != len(functions):
            raise RewardError(f"got {len(limits)} timeouts for {len(functions)} reward functions")
        for limit in limits:
            if limit is not None and not 0.0 < limit < math.inf:
                raise RewardError(f"timeouts must be above 0 seconds, or None for no limit; got {limit}")
        self.functions: dict[str, ListFunction] = {}
        for function in functions:
            base = name_of(function)
            names = (base if n == 1 else f"{base}_{n}" for n in itertools.count(1))
            name = next(name for name in names if name not in self.functions)
            if (own_process or wants_own_process(function)) and not isinstance(function, ProcessReward):
                function = ProcessReward(function)
            self.functions[name] = ListFunction(f"reward function {name}", function, NUMBERS)
        self.names = list(self.functions)
        self.weights = dict(zip(self.functions, weights or [1.0] * len(functions), strict=True))
        self.timeouts = dict(zip(self.functions, limits, strict=True))

    def check(self, columns: Iterable[str]) -> None:
        """Raise a `RewardError` if a function cannot be called with these columns of the dataset."""
        for function in self.functions.values():
            function.check(RESERVED, columns)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
    ) -> Rewards:
        """Score every completion with every function; see `ListFunction.begin` for what can go wrong."""
        self.check(columns)
        given = dict(zip(RESERVED, (prompts, completions, completion_ids), strict=True))
        # Coroutines begin here, and go on while the plain functions are called.
        waiting = {
            name: function.begin({**given, **columns}, self.timeouts[name])
            for name, function in self.functions.items()
        }
        found = {name: waiting[name]() for name in sorted(waiting, key=lambda n: self.functions[n].is_async)}
        by_name = {
            name: torch.tensor(
                [math.nan if v is None else float(v) for v in found[name]], dtype=torch.float32
            )
            for name in self.functions
        }
        weighted = torch.stack([self.weights[name] * values for name, values in by_name.items()])
        sums = {f"reward function {name}": values for name, values in zip(by_name, weighted, strict=True)}
        for what, values in {**sums, f"the sum of {', '.join(by_name)}": weighted.nansum(0)}.items():
            if values.isinf().any():
                place = int(values.isinf().nonzero()[0])
                raise RewardError(
                    f"{what} gives completion {place} with its weight a reward beyond the range of fp32 "
                    f"(prompt {prompts[place]!r:.200}, completion {completions[place]!r:.200})"
                )
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name, self.weights)
