"""Reward functions: found by import path, called with lists, checked strictly.

A reward function has the signature ::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

where all arguments are lists with one entry per completion: texts, texts, lists of token ids, and the
dataset's other columns. None means that the reward does not apply to that completion.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.trainer.errors import RewardError

RewardFunction = Callable[..., Sequence[float | None]]


def load_reward(spec: str) -> RewardFunction:
    """Return the function behind ``"module:function"`` or ``"path/to/file.py:function"``."""
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise RewardError(f"reward {spec!r}: expected 'module:function' or 'file.py:function'")
    module = _load_file(location, spec) if location.endswith(".py") else _load_module(location, spec)
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(f"reward {spec!r}: {location} has no {name!r}")
    if not callable(function):
        raise RewardError(f"reward {spec!r}: {name} is not a function but {type(function).__name__}")
    return function


def _load_file(location: str, spec: str) -> Any:
    path = Path(location)
    if not path.is_file():
        raise RewardError(f"reward {spec!r}: there is no file {location}")
    module_spec = importlib.util.spec_from_file_location(f"gspo_reward_file_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward {spec!r}: {location} failed to load: {error!r}") from error
    return module


def _load_module(location: str, spec: str) -> Any:
    # A console script does not look into the current directory; a user's reward module lies there.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(location)
    except Exception as error:
        raise RewardError(f"reward {spec!r}: module {location} failed to load: {error!r}") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


@dataclass(frozen=True)
class Rewards:
    """Rewards of some completions.

    Attributes:
        total: [B] fp32, the weighted sum of the rewards that apply; NaN where none does.
        by_name: [B] fp32 for each reward function, NaN where it does not apply.
    """

    total: Tensor
    by_name: dict[str, Tensor]


class RewardSet:
    """Several reward functions, called together and summed with weights."""

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        """Name the functions (``f``, then ``f_2`` for a second ``f``) and check the weights."""
        if not functions:
            raise RewardError("no reward function was given")
        if weights is not None and len(weights) != len(functions):
            raise RewardError(f"got {len(weights)} reward weights for {len(functions)} reward functions")
        self.functions: dict[str, RewardFunction] = {}
        for function in functions:
            name = base = getattr(function, "__name__", type(function).__name__)
            count = 1
            while name in self.functions:
                count += 1
                name = f"{base}_{count}"
            self.functions[name] = function
        self.weights = dict(zip(self.functions, weights or [1.0] * len(functions), strict=True))

    @property
    def names(self) -> list[str]:
        """Names of the reward functions, in order."""
        return list(self.functions)

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
    ) -> Rewards:
        """Score every completion with every function."""
        by_name = {}
        for name, function in self.functions.items():
            try:
                values = function(prompts, completions, completion_ids, **columns)
            except Exception as error:
                raise RewardError(f"reward function {name} raised {error!r}") from error
            by_name[name] = _checked(name, values, len(completions))
        weighted = torch.stack([self.weights[name] * values for name, values in by_name.items()])
        total = torch.where(weighted.isnan().all(0), torch.nan, weighted.nansum(0))
        return Rewards(total, by_name)


def _checked(name: str, values: Any, count: int) -> Tensor:
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(
            f"reward function {name} must return a list of numbers, got {type(values).__name__}"
        )
    if len(values) != count:
        raise RewardError(f"reward function {name} returned {len(values)} values for {count} completions")
    for index, value in enumerate(values):
        if value is None:
            continue
        # bool and numpy scalars are Numbers as well
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(
                f"reward function {name} returned {value!r} for completion {index}; expected a finite "
                "number, or None where it does not apply"
            )
    return torch.tensor(
        [math.nan if value is None else float(value) for value in values], dtype=torch.float32
    )
