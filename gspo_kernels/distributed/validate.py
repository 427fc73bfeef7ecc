"""Comparison of a call's arguments across ranks with GSPO_KERNELS_VALIDATE=1."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gspo_kernels.core.checks import validates
from gspo_kernels.distributed.groups import BEFORE_COLLECTIVE, gathered, group_name, side_channel
from gspo_kernels.distributed.placements import VOCABULARY, mesh_groups

P = ParamSpec("P")
R = TypeVar("R")
_MESSAGE_BYTES = 2**15
_GROUPS = {"parallel.tp_group": "vocabulary", "parallel.cp_group": "tokens", "group": ""}
"""Arguments that are groups, and the dimension that they shard."""
# the second-to-last dimension is that of tokens
_ROWS = ("logits", "teacher_logits", "hidden", "teacher_hidden")
# the dimension of the vocabulary
_COLUMNS = {**VOCABULARY, "weight.weight": 0, "weight.B": 0}
# values are not compared
_HEAD = (*_COLUMNS, "weight.A")


class RanksDisagreeError(RuntimeError):
    """Another rank raised an error, or was called with different arguments."""


def agree_across_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Compare the arguments of each call of ``function`` across ranks, with GSPO_KERNELS_VALIDATE=1.

    Before its first collective each rank sends its arguments, or its error, in one all-gather per process
    group. All ranks raise if one of them has an error or different arguments.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not validates():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {"call": function.__name__, "torch.is_grad_enabled()": torch.is_grad_enabled()}
        pending = [arguments | dict(field for each in bound.arguments.items() for field in _fields(*each))]

        def compare(error: Exception | None = None) -> None:
            if pending:
                _compare(pending.pop(), error)

        token = BEFORE_COLLECTIVE.set(compare)
        try:
            result = function(*args, **kwargs)
            compare()
            return result
        except Exception as error:
            compare(error)
            raise
        finally:
            BEFORE_COLLECTIVE.reset(token)

    return wrapper


def _fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument and, if it is a dataclass or a named tuple, its fields as "name.field"."""
    yield name, value
    fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
    for field in getattr(value, "_fields", fields):
        yield from _fields(f"{name}.{field}", getattr(value, field))


def _compare(arguments: Mapping[str, Any], refused: Exception | None) -> None:
    """Exchange arguments or an error in each group; an error is forwarded to the next group."""
    device = next((x.device for x in arguments.values() if isinstance(x, Tensor)), torch.device("cpu"))
    error = refused
    for group, (argument, sharded) in _groups(arguments).items():
        message = {"error": f"{type(error).__name__}: {error}" if error else "none"}
        message |= {} if error else _texts(arguments, sharded)
        data = json.dumps({name: text[:400] for name, text in message.items()}).encode()
        local = torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
        first: dict[str, tuple[int, str]] = {}
        for rank, row in enumerate(gathered(group, local.to(side_channel(group, device))).cpu()):
            for name, text in json.loads(row.numpy().tobytes()).items():
                other, expected = first.setdefault(name, (rank, text))
                if text != expected:
                    found = f"rank {rank} of {argument} has {text}, rank {other} has {expected}"
                    error = error or RanksDisagreeError(f"{name}: differs: {found}")
    if error is not None and error is not refused:
        raise error


def _groups(arguments: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return by group name the argument with the group and the dimension that it shards."""
    given = {name: arguments[name] for name in _GROUPS if arguments.get(name) is not None}
    groups = {group_name(name, group): (name, _GROUPS[name]) for name, group in given.items()}
    for each in mesh_groups({name: x for name, x in arguments.items() if hasattr(x, "device_mesh")}):
        if each.group.size() > 1:
            groups.setdefault(each.group.group_name, (each.argument, each.sharded))
    return dict(sorted(groups.items(), key=lambda item: [*_GROUPS.values()].index(item[1][1])))


def _texts(arguments: Mapping[str, Any], sharded: str) -> dict[str, str]:
    """Describe the arguments that must be equal on ranks whose group shards this dimension."""
    texts, tokens, by_token = {}, torch.Size(), sharded == "tokens"
    for name in ("ids", "loss_mask", "logprobs", "labels"):
        if isinstance(value := arguments.get(name), Tensor):
            tokens = value.shape[:-1] if name == "ids" else value.shape
    for name, value in arguments.items():
        always = name.startswith(("call", "objective")) or hasattr(value, "device_mesh")
        if not always and (sharded == "" or (by_token and name == "loss_mask")):
            continue  # data-parallel ranks share only the objective; a rank may have no mask
        value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if not isinstance(value, Tensor):
            plain = isinstance(value, bool | int | float | str | None) or name.startswith("objective.")
            texts[name] = repr(value) if plain else type(value).__name__
            continue
        sizes: list[Any] = [*value.shape]
        shape_only = name in _HEAD or (by_token and name == "cu_seqlens")
        if name in _ROWS:
            sizes[-2] = "..."
        if name in _COLUMNS and not by_token:
            sizes[_COLUMNS[name]] = "..."
        if by_token and not shape_only and value.shape[: len(tokens)] == tokens:
            offsets = arguments.get("cu_seqlens")
            if value.shape == tokens and tokens[-1] in (1, 0 if offsets is None else len(offsets) - 1):
                continue  # a tensor per token and one per sequence have the same shape
            sizes[len(tokens) - 1] = "..."
        texts[name] = f"{value.dtype} {sizes} {getattr(value, 'placements', '')} grad={value.requires_grad}"
        if not shape_only and "..." not in sizes:
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            texts[name] += f" with checksum {zlib.crc32(data.numpy().tobytes()):08x}"
    return texts
