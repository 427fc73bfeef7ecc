"""Rows whose gradient sums are taken in segments of fixed size, however they come in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SEGMENT = 128
"""Tokens that count in a segment: no more than a product sums up in one piece (``cpp.products.PIECE``)."""


class Segmented(NamedTuple):
    """Rows of whole segments.

    Attributes:
        parts: [n, ...] each.
        ends: int64 [segments], on the CPU: where each segment ends among the rows.
    """

    parts: tuple[Tensor, ...]
    ends: Tensor


class Segments:
    """Cuts rows that come in ascending ranks into segments, and holds back the last until it is whole.

    Rows of a segment may be missing: they have no gradient. Products that sum a few rows in one step get
    zeros in their place, so that the same rows share a step.

    Args:
        step: how many rows; a divisor of ``SEGMENT``.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._held: tuple[Tensor, ...] | None = None

    def cut(self, parts: tuple[Tensor, ...], ranks: Tensor) -> Iterator[Segmented]:
        """The segments that become whole with ``parts``, [n, ...] of rows with ``ranks`` [n]."""
        if not ranks.numel():
            return
        rows = (*parts, ranks.cpu())
        start, count = 0, ranks.numel()
        segments = rows[-1] // SEGMENT
        ends = _ends(segments)
        whole = bool(rows[-1][-1] % SEGMENT == SEGMENT - 1)
        held, self._held = self._held, None
        if held is not None:
            if bool(segments[0] == held[-1][0] // SEGMENT):
                start = int(ends[0])
                held = tuple(torch.cat([old, new[:start]]) for old, new in zip(held, rows, strict=True))
            if start == count and not whole:
                self._held = held
                return
            yield self._segmented(held)
        stop = count
        if not whole:
            stop = max(start, int(ends[-2]) if ends.numel() > 1 else 0)
            # copied, as the rows' memory is the next chunk's
            self._held = tuple(row[stop:].clone() for row in rows)
        if stop > start:
            yield self._segmented(tuple(row[start:stop] for row in rows))

    def rest(self) -> Iterator[Segmented]:
        """What is held back, if anything."""
        held, self._held = self._held, None
        if held is not None:
            yield self._segmented(held)

    def _segmented(self, rows: tuple[Tensor, ...]) -> Segmented:
        *parts, ranks = rows
        groups, place, sizes = torch.unique_consecutive(
            ranks // self._step, return_inverse=True, return_counts=True
        )
        # whatever is missing behind the last row is zeros for products anyway
        sizes[-1] += self._step - 1 - ranks[-1] % self._step
        if bool((sizes == self._step).all()):
            return Segmented(tuple(parts), _ends(ranks // SEGMENT))
        place = (place * self._step + ranks % self._step).to(parts[0].device)
        count = groups.numel() * self._step
        filled = tuple(part.new_zeros(count, *part.shape[1:]).index_copy_(0, place, part) for part in parts)
        return Segmented(filled, _ends(groups * self._step // SEGMENT) * self._step)


def _ends(segments: Tensor) -> Tensor:
    """Where each run of equal numbers ends."""
    inner = (segments[1:] != segments[:-1]).nonzero().squeeze(1) + 1
    return torch.cat([inner, inner.new_tensor([len(segments)])])
