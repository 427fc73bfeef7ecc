"""One gather in each process group of a call: all ranks go on, or all of them raise.

Each rank looks at its arguments alone first. Then it sends what must be equal on all ranks, or the sentence
with which it refuses the call. Groups come one after the other, and what the ranks of one have learnt goes
along into the next: in a grid of ranks all learn of an error, whichever rank has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.parallel.groups import gathered, side_channel

MESSAGE_BYTES = 2**15
"""What a rank sends to each other rank of a group."""
_LONGEST = 160  # characters of a fact; a hundred facts fit into a message


class RanksDisagreeError(RuntimeError):
    """Another rank refused the call, or was called with something else."""


@dataclass(frozen=True)
class Member:
    """What this rank has to say in one group.

    Attributes:
        argument: what messages call the group.
        group: its name.
        same: what must be equal on all ranks, by the name of an argument; None: equal to anything.
        varying: numbers that may differ.
        judge: raises where all ranks' ``varying`` together are wrong.
    """

    argument: str
    group: str
    same: Mapping[str, str | None]
    varying: tuple[int, ...] = ()
    judge: Callable[[list[tuple[int, ...]]], None] | None = None


def digest(values: Tensor) -> str:
    """What stands for the elements of a tensor, in their order."""
    raw = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def compare(members: Sequence[Member], device: torch.device, refused: Exception | None = None) -> None:
    """Meet the other ranks of each group, in the same order on all of them.

    Args:
        members: the groups.
        device: of the call's tensors.
        refused: why this rank refuses the call; it is not raised here.

    Raises:
        RanksDisagreeError, or what ``judge`` raises: on all ranks, but those that have ``refused``.
    """
    verdict = refused
    for member in members:
        every = _exchange(member, device, verdict)
        if verdict is None:
            try:
                _judge(member, every)
            except Exception as error:
                verdict = error
    if verdict is not None and verdict is not refused:
        raise verdict


def _judge(member: Member, every: list[dict[str, Any]]) -> None:
    for rank, theirs in enumerate(every):
        if "refused" in theirs:
            raise RanksDisagreeError(
                f"rank {rank} of {member.argument} refused the call: {theirs['refused']}"
            )
    for name in every[0]["same"]:
        if all(name in theirs["same"] for theirs in every):
            _compare_values(member.argument, name, [theirs["same"][name] for theirs in every])
    if member.judge is not None:
        member.judge([tuple(theirs["varying"]) for theirs in every])


def _compare_values(argument: str, name: str, values: list[str | None]) -> None:
    known = [(rank, value) for rank, value in enumerate(values) if value is not None]
    for rank, value in known:
        first, expected = known[0]
        if value != expected:
            raise RanksDisagreeError(
                f"{name}: differs between the ranks of {argument}: rank {first} has {expected}, rank {rank} "
                f"has {value}"
            )


def _exchange(member: Member, device: torch.device, refused: Exception | None) -> list[dict[str, Any]]:
    """Every rank's message."""
    message: dict[str, Any]
    if refused is None:
        same = {name: _short(value) for name, value in member.same.items()}
        message = {"same": same, "varying": member.varying}
    else:
        named = "" if isinstance(refused, RanksDisagreeError) else f"{type(refused).__name__}: "
        message = {"refused": f"{named}{refused}"[: MESSAGE_BYTES // 16]}
    encoded = json.dumps(message).encode().ljust(MESSAGE_BYTES)
    assert len(encoded) == MESSAGE_BYTES
    sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    every = gathered(member.group, sent.to(side_channel(member.group, device))).cpu()
    return [json.loads(row.numpy().tobytes()) for row in every]


def _short(value: str | None) -> str | None:
    if value is None or len(value) <= _LONGEST:
        return value
    whole = hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
    return f"{value[: _LONGEST - 20]}... ({whole})"
