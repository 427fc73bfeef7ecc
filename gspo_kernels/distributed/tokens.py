"""Hidden states whose tokens are sharded over ranks (Megatron's sequence parallelism)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo_kernels.distributed.groups import begin_broadcast, begin_reduce, rank_and_size

if TYPE_CHECKING:  # not in every build of PyTorch
    from torch.distributed import Work


@dataclass(frozen=True)
class ScatteredTokens:
    """The distribution of the columns of tokens [B, T] over ranks.

    Attributes:
        group: the process group's name.
        ends: the end of each rank's columns; those of the first rank start at 0, the last ends at T.
    """

    group: str
    ends: tuple[int, ...]

    @classmethod
    def of(cls, group: str, lengths: Sequence[int], tokens: int) -> ScatteredTokens:
        """Create from the number of columns of each rank.

        Raises:
            ValueError: these numbers don't add up to ``tokens``.
        """
        if sum(lengths) != tokens:
            raise ValueError(
                f"hidden: the ranks have {', '.join(map(str, lengths))} tokens, expected {tokens} in all, "
                "like labels"
            )
        return cls(group, tuple(itertools.accumulate(lengths)))

    def begin_gather(self, local: Tensor, index: slice | Tensor) -> Callable[[], Tensor]:
        """Start gathering rows [n, H] at flattened positions of [B, T] from the ranks' ``local`` [B, T_r, H].

        Returns:
            A function that waits for the rows and returns them.
        """
        own_rank, _ = rank_and_size(self.group)
        pieces = self._pieces(index, local.device)
        parts = [local.new_empty(chosen.numel(), local.shape[-1]) for chosen, _, _ in pieces]
        works = []
        for rank, ((_, b, t), part) in enumerate(zip(pieces, parts, strict=True)):
            if rank == own_rank:
                part.copy_(local[b, t])
            if part.numel():
                works.append(begin_broadcast(self.group, part, rank))

        def finish() -> Tensor:
            for work in works:
                work.wait()
            rows = local.new_empty(sum(map(len, parts)), local.shape[-1])
            for (chosen, _, _), part in zip(pieces, parts, strict=True):
                rows[chosen] = part
            return rows

        return finish

    def reduce(self, values: Tensor, index: slice | Tensor) -> tuple[Tensor, list[Work]]:
        """Start a reduce-scatter of ``values`` [n, H].

        Returns:
            This rank's rows of the sum, in the order of ``own_rows``, and the ``Work`` handles to wait for.
        """
        parts = [values[chosen] for chosen, _, _ in self._pieces(index, values.device)]
        works = [begin_reduce(self.group, part, rank) for rank, part in enumerate(parts) if part.numel()]
        return parts[rank_and_size(self.group)[0]], works

    def own_rows(self, index: slice | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices of this rank's rows among some positions, and their places in [B * T_r]."""
        rank, _ = rank_and_size(self.group)
        chosen, b, t = self._pieces(index, device)[rank]
        first, last = (0, *self.ends)[rank : rank + 2]
        return chosen, b * (last - first) + t

    def _pieces(self, index: slice | Tensor, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each rank the indices of its rows, and their b and t among its tokens."""
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop, device=device)
        length = self.ends[-1]
        b, t = index // length, index % length
        pieces = []
        for first, last in itertools.pairwise((0, *self.ends)):
            chosen = ((t >= first) & (t < last)).nonzero().squeeze(1)
            pieces.append((chosen, b[chosen], t[chosen] - first))
        return pieces
