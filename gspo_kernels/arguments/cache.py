"""Cache of the decisions of a call that depend only on its arguments' types, dtypes, devices and shapes.

Checking the arguments of a small loss takes longer than the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.core.checks import validates
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.objectives.base import Objective

CacheKey = tuple[Any, ...]

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OPTIONS = frozenset((type(None), bool, int, float, str))
_MAX_DECISIONS = 1024

_DECISIONS: dict[CacheKey, Any] = {}


def look_up(
    function: str,
    tokens: Any,
    objective: Any,
    parallel: Any,
    arguments: Iterable[Any],
    options: Iterable[Any] = (),
) -> tuple[CacheKey | None, Any]:
    """Return the cache key of a call, or None if its checks depend on more than the key can hold, and the
    cached decision for this key, or None.

    The key omits the number of tokens, which varies between packed calls, and records only which sizes equal
    it. It is included if another size differs from it by 1, such as B + 1 offsets for B tokens, or if it
    equals the number of sequences.

    Args:
        function: the public function's name.
        tokens: labels or log-probs, [..., T] or [N].
        objective: the objective, or None if the function has none.
        parallel: the ranks of the call.
        arguments: tensors, and numbers that may be tensors, in a fixed order.
        options: all other arguments, in a fixed order; the key is None if one is a tensor.
    """
    if is_compiling() or validates() or type(parallel) is not Parallel or not parallel._is_default:
        return None, None
    if type(tokens) not in _TENSORS or tokens.is_nested or tokens.ndim == 0:
        return None, None
    if objective is not None and Objective not in type(objective).__mro__:
        return None, None
    *leading, length = shape = tokens.shape
    spec = None if objective is None else objective.spec
    parts = [function, spec, torch.is_grad_enabled(), min(length, 2)]
    parts += leading
    for value in arguments:
        kind = type(value)
        if kind in _OPTIONS:
            parts += kind, value
            continue
        if kind not in _TENSORS or value.is_nested:
            return None, None
        parts += value.dtype, value.device, value.layout, value.requires_grad
        if value.shape == shape:
            parts.append("tokens")
            continue
        for size in value.shape:
            if size == length and size not in leading:
                parts.append(-1)
            elif length - 2 < size < length + 2:
                parts.append((size, length))
            else:
                parts.append(size)
    for option in options:
        kind = type(option)
        if kind not in _OPTIONS:
            return None, None
        parts += kind, option
    key = tuple(parts)
    return key, _DECISIONS.get(key)


def store(key: CacheKey | None, decision: Any) -> None:
    """Cache a decision unless the key is None."""
    if key is not None:
        if len(_DECISIONS) >= _MAX_DECISIONS:
            _DECISIONS.clear()
        _DECISIONS[key] = decision
