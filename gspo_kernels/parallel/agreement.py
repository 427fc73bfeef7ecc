"""One small gather at the beginning of a call: all ranks go on, or all of them raise.

A rank that refused its arguments takes part with the reason. So nobody waits for it in a collective that it
will never reach, and everybody can say what was wrong. What goes wrong later, such as a lack of memory, ends
the waiting of the others by the group's own timeout, or sooner where the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from gspo_kernels.parallel.groups import gathered, group_name, side_channel

NUMBERS = 24
"""How many numbers a rank says, most of them 0."""
TEXT = 40
"""How many more numbers hold the reason of a refusal, 8 bytes of text each."""
AGREEMENT_BYTES = 8 * (NUMBERS + TEXT)
"""What each rank sends to each other at the beginning of a call."""

_REFUSED, _AGREES = 1, 2
_rounds: collections.Counter[str] = collections.Counter()


class RanksDisagreeError(RuntimeError):
    """Another rank refused the call, or was called with something else."""


def digest(*values: object) -> int:
    """A number that stands for values which ``repr`` tells apart."""
    said = hashlib.blake2b(repr(values).encode(), digest_size=7)
    return int.from_bytes(said.digest(), "big")


def agree(
    group: str, device: torch.device, same: Mapping[str, int], own: Sequence[int]
) -> list[tuple[int, ...]]:
    """Every rank's ``own`` numbers, after making sure that ``same`` are.

    Args:
        group: name.
        device: of the call's tensors.
        same: what must be equal on all ranks, by a name that says what it is.
        own: what may differ; as many on each rank.

    Raises:
        RanksDisagreeError: on all ranks.
    """
    every = _exchange(group, device, [_AGREES, *same.values(), *own], "")
    for number, (said, text) in enumerate(every):
        if said[0] == _REFUSED:
            raise RanksDisagreeError(f"rank {number} of the process group refused the call: {text}")
    for place, name in enumerate(same, start=1):
        values = [said[place] for said, _ in every]
        if len({*values}) > 1:
            raise RanksDisagreeError(f"{name}: differs between the ranks of the process group: {values}")
    first = 1 + len(same)
    return [said[first : first + len(own)] for said, _ in every]


def refuse(group: str, device: torch.device, error: Exception) -> None:
    """Tell the other ranks, which wait in ``agree``, that this one has raised."""
    _exchange(group, device, [_REFUSED], f"{type(error).__name__}: {error}")


def _exchange(
    group: str, device: torch.device, numbers: Sequence[int], text: str
) -> list[tuple[tuple[int, ...], str]]:
    """Every rank's numbers and text."""
    _rounds[group] += 1
    assert len(numbers) <= NUMBERS
    encoded = text.encode()[: 8 * TEXT].ljust(8 * TEXT, b"\0")
    own = torch.zeros(NUMBERS + TEXT, dtype=torch.int64)
    own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    own[NUMBERS:] = torch.frombuffer(bytearray(encoded), dtype=torch.int64)
    every = gathered(group, own.to(side_channel(group, device))).cpu()
    texts = [bytes(row[NUMBERS:].view(torch.uint8).tolist()) for row in every]
    said = [tuple(int(x) for x in row[:NUMBERS].tolist()) for row in every]
    return [
        (row, words.rstrip(b"\0").decode(errors="replace")) for row, words in zip(said, texts, strict=True)
    ]


@contextlib.contextmanager
def together(group: str, device: torch.device) -> Iterator[None]:
    """What is raised inside, before the ranks have agreed on the call, is raised on all of them."""
    rounds = _rounds[group]
    try:
        yield
    except Exception as error:
        if _rounds[group] == rounds:
            with contextlib.suppress(Exception):  # such as a time limit: this rank's own reason says more
                refuse(group, device, error)
        raise


@contextlib.contextmanager
def all_or_none(device: torch.device, **groups: object) -> Iterator[None]:
    """``together`` for each of the groups that are given, by the names of the arguments."""
    with contextlib.ExitStack() as stack:
        for argument, group in groups.items():
            if group is not None:
                stack.enter_context(together(group_name(argument, group), device))
        yield
