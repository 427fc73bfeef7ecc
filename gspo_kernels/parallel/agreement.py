"""Messages that the ranks of a process group exchange before a call, to see whether they agree.

Each rank sends the values that must be equal on all ranks, or the error with which it refuses the call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.parallel.groups import gathered, side_channel

MESSAGE_BYTES = 2**15
"""The size of the message that a rank sends to each other rank of a group."""
_LONGEST = 160  # characters of a value; a hundred values fit into a message


class RanksDisagreeError(RuntimeError):
    """Another rank refused the call, or was called with something else."""


def digest(values: Tensor) -> str:
    """Return a hash of a tensor's elements, in their order."""
    raw = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def exchange(
    group: str,
    device: torch.device,
    same: Mapping[str, str | None],
    numbers: Sequence[int],
    refused: Exception | None,
) -> list[dict[str, Any]]:
    """Send this rank's message and return every rank's, in one gather.

    Args:
        group: the group's name.
        device: the device of the call's tensors.
        same: values that must be equal on all ranks, by the name of an argument; None equals anything.
        numbers: numbers that may differ.
        refused: the error with which this rank refuses the call; sent instead of ``same`` and ``numbers``.
    """
    message: dict[str, Any]
    if refused is None:
        message = {"same": {name: _short(value) for name, value in same.items()}, "numbers": [*numbers]}
    else:
        named = "" if isinstance(refused, RanksDisagreeError) else f"{type(refused).__name__}: "
        message = {"refused": f"{named}{refused}"[: MESSAGE_BYTES // 16]}
    encoded = json.dumps(message).encode().ljust(MESSAGE_BYTES)
    assert len(encoded) == MESSAGE_BYTES
    tensor = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    every = gathered(group, tensor.to(side_channel(group, device))).cpu()
    return [json.loads(row.numpy().tobytes()) for row in every]


def check_agreement(argument: str, every: Sequence[Mapping[str, Any]]) -> None:
    """Raise RanksDisagreeError if one of a group's messages refuses the call, or differs from the others.

    Args:
        argument: the group's name in error messages.
        every: the ranks' messages.
    """
    for rank, message in enumerate(every):
        if "refused" in message:
            raise RanksDisagreeError(f"rank {rank} of {argument} refused the call: {message['refused']}")
    for name in every[0]["same"]:
        values = [(rank, message["same"].get(name)) for rank, message in enumerate(every)]
        known = [(rank, value) for rank, value in values if value is not None]
        for rank, value in known:
            first, expected = known[0]
            if value != expected:
                raise RanksDisagreeError(
                    f"{name}: differs between the ranks of {argument}: rank {first} has {expected}, rank "
                    f"{rank} has {value}"
                )


def _short(value: str | None) -> str | None:
    if value is None or len(value) <= _LONGEST:
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
    return f"{value[: _LONGEST - 20]}... ({digest})"
