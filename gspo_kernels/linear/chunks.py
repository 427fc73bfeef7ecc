"""One call over hidden states, and the chunks of rows that it is projected in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import load
from gspo_kernels.ops.logprobs import check_rows
from gspo_kernels.ops.memory import chunk_rows
from gspo_kernels.types import LogitTransform, RowOptions, stats_dtype


@dataclass(frozen=True)
class Chunk:
    """Rows that are projected together.

    Attributes:
        where: their positions among the flattened rows of the call.
        hidden: [n, H].
        labels: [1, n].
        transform: of these rows, [1, n].
    """

    where: slice | Tensor
    hidden: Tensor
    labels: Tensor
    transform: LogitTransform

    def __len__(self) -> int:
        return self.labels.shape[1]

    def select(self, keep: Tensor) -> Chunk:
        """Some of the rows, by index."""
        where = self.where
        if isinstance(where, slice):
            where = torch.arange(where.start, where.stop, device=keep.device)
        transform = self.transform.rows(lambda rows: rows[:, keep])
        return Chunk(where[keep], self.hidden[keep], self.labels[:, keep], transform)


class Chunking(NamedTuple):
    """How a call over hidden states makes its logits.

    Attributes:
        logits_dtype: "float32", or "input": 16-bit products are rounded to the inputs' dtype.
        max_chunk_bytes: of logits at once; 0: the default.
        compact: leave masked rows out of every product, which looks at the device.
    """

    logits_dtype: str
    max_chunk_bytes: int
    compact: bool


class LinearOperands(NamedTuple):
    """What every operator over hidden states takes: hidden [B, T, H] (packed: [1, N, H]), weight [V, H], bias
    [V] or None, labels [B, T], and how their logits are made.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    options: RowOptions
    chunking: Chunking


@dataclass(frozen=True)
class Call:
    """One call over hidden states, as operators work on it."""

    hidden: Tensor
    head: Head
    labels: Tensor
    options: RowOptions
    chunk_rows: int
    compact: bool

    @staticmethod
    def of(operands: LinearOperands) -> Call:
        """From an operator's arguments."""
        hidden, weight, bias, labels, options, chunking = operands
        head = Head(weight, bias, chunking.logits_dtype)
        rows = chunk_rows(head.row_bytes, chunking.max_chunk_bytes, weight.device)
        return Call(hidden, head, labels, options, rows, chunking.compact)

    def check(self) -> Call:
        """The call, after looking at its labels and temperatures as ``ops.values`` says."""
        check_rows(self.labels, self.head.vocabulary, self.options)
        return self

    @property
    def projected(self) -> slice | Tensor:
        """Positions of the rows that have logits: the counted ones, or without compaction all."""
        return self.index(self.counted if self.compact else None)

    @property
    def counted(self) -> Tensor:
        """Tokens that have a log-prob."""
        return self.labels != self.options.ignore_index

    def index(self, keep: Tensor | None, count: int | None = None) -> slice | Tensor:
        """Positions of the rows where ``keep`` holds; None: all.

        Looks once at the device, and not at all where ``count``, how many there are, is known.
        """
        if keep is None:
            return slice(0, self.labels.numel())
        count = int(keep.sum()) if count is None else count
        if count == keep.numel():
            return slice(0, count)
        return keep.flatten().nonzero_static(size=count).squeeze(1)

    def chunks(self, where: slice | Tensor) -> Iterator[Chunk]:
        """The rows at some positions in chunks of about the same size."""
        first, count = (
            (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        )
        pieces = -(-count // self.chunk_rows)
        for piece in range(pieces):
            at = slice(first + count * piece // pieces, first + count * (piece + 1) // pieces)
            yield self.chunk(at if isinstance(where, slice) else where[at])

    def chunk(self, where: slice | Tensor) -> Chunk:
        """The rows at some positions."""
        labels = self.labels.flatten()[where]
        transform = self.options.transform.rows(lambda rows: rows.flatten(0, 1)[where].unsqueeze(0))
        if self.hidden.is_contiguous():
            hidden = self.hidden.flatten(0, 1)[where]
        else:
            if isinstance(where, slice):
                where = torch.arange(where.start, where.stop, device=self.labels.device)
            length = self.labels.shape[1]
            hidden = self.hidden[where // length, where % length]
        return Chunk(where, hidden, labels.unsqueeze(0), transform)

    def one_pass(self, entropy: bool) -> bool:
        """Whether the backend writes rows along with statistics."""
        return not entropy and hasattr(load(self.options.backend), "logprobs_and_rows")

    def rows_memory(self, logits: Tensor, out: Tensor | None) -> Tensor:
        """Memory for the rows that come from logits [n, V]: ``out``, or that of the logits where they fit."""
        dtype = self.head.rows_dtype
        if out is not None:
            return out
        if logits.dtype == dtype:
            return logits
        if logits.element_size() > dtype.itemsize:
            return logits.view(dtype)[:, : logits.shape[1]]
        return torch.empty(logits.shape, dtype=dtype, device=logits.device)

    def new_rows(self, fill: float = 0.0) -> Tensor:
        """[B, T] in the statistics' dtype."""
        return torch.full(
            self.labels.shape, fill, dtype=stats_dtype(self.hidden.dtype), device=self.labels.device
        )
