"""What a call decides by its arguments' types, dtypes, devices and shapes alone: decided once, and kept.

A small loss takes less time than the checks of its arguments, and a training run passes the same ones at
every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.core.checks import validates
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.objectives.base import Objective

Signature = tuple[Any, ...]
Decision = TypeVar("Decision")

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OPTIONS = frozenset((type(None), bool, int, float, str))
_MAX_DECISIONS = 1024

_DECISIONS: dict[Signature, Any] = {}


def signature(
    function: str,
    tokens: Any,
    objective: Any,
    parallel: Any,
    arguments: Iterable[Any],
    options: Iterable[Any] = (),
) -> Signature | None:
    """Return everything that the checks and decisions of a call read, or None where they read more than this.

    The number of tokens is no part of it, because packed calls seldom have the same one twice. A size is
    compared with it, which is all that checks do. Two kinds of sizes make it a part of the signature: one
    that differs from it by 1, as B + 1 offsets of B tokens do, and one that is the number of sequences, too.

    Args:
        function: the public function's name.
        tokens: labels or log-probs, whose last size is the number of tokens, of a sequence or of all.
        objective: of the call, or None if the function has none.
        parallel: of the call.
        arguments: tensors, and numbers that may be tensors, in a fixed order.
        options: all others, in a fixed order; a tensor among them has no signature.
    """
    if is_compiling() or validates() or type(parallel) is not Parallel or not parallel._is_default:
        return None
    if type(tokens) not in _TENSORS or tokens.is_nested or tokens.ndim == 0:
        return None
    if objective is not None and Objective not in type(objective).__mro__:
        return None
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
            return None
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
            return None
        parts += kind, option
    return tuple(parts)


def recall(key: Signature | None) -> Any:
    """Return what an earlier call with this signature decided, or None."""
    return None if key is None else _DECISIONS.get(key)


def keep(key: Signature | None, decision: Decision) -> Decision:
    """Keep what a call with this signature decided, unless that is None; return it."""
    if key is not None:
        if len(_DECISIONS) >= _MAX_DECISIONS:
            _DECISIONS.clear()
        _DECISIONS[key] = decision
    return decision
