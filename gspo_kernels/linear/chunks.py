"""One call over hidden states, and the chunks of rows that it is projected in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import load
from gspo_kernels.ops.logprobs import OPTIONS, check_labels
from gspo_kernels.ops.memory import chunk_rows
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import LogitTransform, stats_dtype


@dataclass(frozen=True)
class Chunk:
    """Rows that are projected together.

    Attributes:
        where: their positions among the flattened rows of the call.
        hidden: [n, H].
        labels: [1, n].
        transform: with a ``row_temperature`` of [1, n] or None.
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
        temperature = self.transform.row_temperature
        transform = self.transform
        if temperature is not None:
            transform = transform._replace(row_temperature=temperature[:, keep])
        return Chunk(where[keep], self.hidden[keep], self.labels[:, keep], transform)


LINEAR = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {OPTIONS}, "
    "str logits_dtype, int max_chunk_bytes, bool compact"
)
"""The operands of ``Call.of``."""


@dataclass(frozen=True)
class Call:
    """One call of a linear operator."""

    hidden: Tensor
    head: Head
    labels: Tensor
    transform: LogitTransform
    ignore_index: int
    backend: str
    chunk_rows: int
    compact: bool

    @classmethod
    def split(cls, args: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...]]:
        """The operands of ``LINEAR`` that lead an operator's arguments, checked, and the rest."""
        count = LINEAR.count(",") + 1
        call = cls.of(*args[:count])
        check_labels(call.labels, call.head.vocabulary, call.ignore_index)
        check_temperature(call.transform.row_temperature)
        return call, args[count:]

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        logit_scale: float,
        softcap: float,
        temperature: float,
        row_temperature: Tensor | None,
        ignore_index: int,
        backend: str,
        logits_dtype: str,
        max_chunk_bytes: int,
        compact: bool,
    ) -> Call:
        head = Head(weight, bias, logits_dtype)
        transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
        rows = chunk_rows(head.row_bytes, max_chunk_bytes, weight.device)
        return Call(hidden, head, labels, transform, ignore_index, backend, rows, compact)

    @property
    def counted(self) -> Tensor:
        """Tokens that have a log-prob."""
        return self.labels != self.ignore_index

    def index(self, keep: Tensor | None) -> slice | Tensor:
        """Positions of the rows where ``keep`` holds; None: all. Looks at the device."""
        if keep is None or bool(keep.all()):
            return slice(0, self.labels.numel())
        return keep.flatten().nonzero().squeeze(1)

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
        transform, labels = self.transform, self.labels.flatten()[where]
        if transform.row_temperature is not None:
            rows = transform.row_temperature.flatten()[where]
            transform = transform._replace(row_temperature=rows.unsqueeze(0))
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
        return not entropy and hasattr(load(self.backend), "logprobs_and_rows")

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
