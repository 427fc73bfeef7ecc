"""One call over hidden states, and the chunks of rows that it is projected in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.invariance import refuse_backend
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.segments import SEGMENT
from gspo_kernels.ops.backends import HiddenBackend, OnePassBackend, RowBackend, launches_of, rows_of
from gspo_kernels.ops.logprobs import check_ranges, check_rows, range_of
from gspo_kernels.ops.memory import chunk_rows
from gspo_kernels.parallel.groups import begin_sum_, gathered_numbers
from gspo_kernels.parallel.tokens import ScatteredTokens
from gspo_kernels.types import LogitTransform, RowOptions, stats_dtype

if TYPE_CHECKING:  # not every build of PyTorch has it
    from torch.distributed import Work


SIZES_BYTES = 56
"""What a rank of a ``tp_group`` sends to each other rank before it plans."""
FOLDED_ROWS = 4096
"""Rows whose logits are never written are projected at a time: enough that reading the weight costs nothing
beside its product, and few enough that copies of hidden states stay small."""


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
        reduce_hidden_grad: sum dHidden over the ranks that have the vocabulary's shards.
        scattered: each of those ranks has the hidden states of some tokens.
        batch_invariant: no result depends on what is computed along with it, see ``invariance``.
    """

    logits_dtype: str
    max_chunk_bytes: int
    compact: bool
    reduce_hidden_grad: bool = True
    scattered: bool = False
    batch_invariant: bool = False


class LinearOperands(NamedTuple):
    """What every operator over hidden states takes: hidden [B, T, H] (packed: [1, N, H]), weight [V, H], bias
    [V] or None, labels [B, T], and how their logits are made. Scattered hidden states have this rank's T.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    options: RowOptions
    chunking: Chunking

    @property
    def scattered(self) -> int | None:
        """How many tokens of a row this rank has hidden states of, where ranks share them."""
        return self.hidden.shape[1] if self.chunking.scattered else None


@dataclass(frozen=True)
class Call:
    """One call over hidden states, as operators work on it.

    Attributes:
        hidden, labels, options: as in ``LinearOperands``.
        head: this rank's.
        chunk_rows: the most rows of logits at once, alike on all ranks.
        vocabulary, rows_itemsize: what is planned with, alike on all ranks: the head's, or the most of any.
        chunking: how logits are made.
        tokens: where hidden states are scattered, which rank has which.
    """

    hidden: Tensor
    head: Head
    labels: Tensor
    options: RowOptions
    chunk_rows: int
    vocabulary: int
    rows_itemsize: int
    chunking: Chunking
    tokens: ScatteredTokens | None = None

    @staticmethod
    def of(operands: LinearOperands) -> Call:
        """From an operator's arguments."""
        hidden, weight, bias, labels, options, chunking = operands
        refuse_backend(chunking.batch_invariant, options.backend)
        head = Head(weight, bias, chunking.logits_dtype, chunking.batch_invariant)
        rows = chunk_rows(head.row_bytes, chunking.max_chunk_bytes, weight.device)
        if head.fixed and rows > SEGMENT:
            rows -= rows % SEGMENT
        itemsize = head.rows_dtype.itemsize
        return Call(hidden, head, labels, options, rows, head.vocabulary, itemsize, chunking)

    def check(self) -> Call:
        """The call, after looking at its labels and temperatures as ``ops.values`` says.

        Ranks of a process group gather their sizes, to plan alike.
        """
        head, group = self.head, self.options.shard.group
        if not group:
            check_rows(self.labels, head.vocabulary, self.options)
            return self
        ranges = range_of(self.labels, head.vocabulary, self.options)
        sizes = (self.chunk_rows, self.rows_itemsize, self.hidden.shape[1])
        every = gathered_numbers(group, self.labels.device, (*ranges, *sizes))
        check_ranges([numbers[: len(ranges)] for numbers in every], self.options)
        _, vocabularies, _, _, rows, itemsizes, lengths = zip(*every, strict=True)
        tokens = None
        if self.chunking.scattered:
            tokens = ScatteredTokens.of(group, lengths, self.labels.shape[1])
        return replace(
            self,
            chunk_rows=min(rows),
            vocabulary=max(vocabularies),
            rows_itemsize=max(itemsizes),
            tokens=tokens,
        )

    @property
    def backend(self) -> RowBackend:
        """What serves the rows."""
        return rows_of(self.options)

    @property
    def launches(self) -> HiddenBackend | None:
        """The backend's launches for what is done around the gradient products; None where PyTorch does it.

        They see no columns of logits, and so work alike where ranks share these.
        """
        return launches_of(self.options.backend)

    @property
    def selects_rows(self) -> bool:
        """Whether rows without gradient are left out while gradients are written, instead of beforehand."""
        return self.launches is not None and not (self.options.shard.group or self.head.fixed)

    @property
    def compact(self) -> bool:
        """Whether masked rows are left out of every product."""
        return self.chunking.compact

    def summed(self, values: Tensor, where: slice | Tensor) -> tuple[Tensor, list[Work]]:
        """Begin to make dHidden [n, H] of the rows at some positions that of the whole vocabulary.

        Returns:
            That of ``own_rows``, once the works are done.
        """
        if self.tokens is not None:
            return self.tokens.reduce(values, where)
        group = self.options.shard.group
        return values, [begin_sum_(group, values)] if group and self.chunking.reduce_hidden_grad else []

    def own_rows(self, where: slice | Tensor) -> tuple[slice | Tensor, slice | Tensor]:
        """Which of the rows at some positions have their hidden states here, and where among those."""
        if self.tokens is None:
            return slice(None), where
        return self.tokens.own_rows(where, self.labels.device)

    @property
    def projected(self) -> slice | Tensor:
        """Positions of the rows that have logits: the counted ones, or without compaction all."""
        return self.index(self.counted if self.compact else None)

    @cached_property
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
        """The rows at some positions in chunks of about the same size.

        Hidden states that ranks have are gathered one chunk ahead, while a chunk is multiplied.
        """
        first, count = (
            (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        )
        labels = self.labels.flatten()[where]
        pieces = -(-count // self.chunk_rows)
        ends = [count * piece // pieces for piece in range(1, pieces + 1)]
        if self.head.fixed and self.chunk_rows % SEGMENT == 0:
            # so that few segments are parted
            size = -(-count // max(pieces * SEGMENT, 1)) * SEGMENT
            ends = [min(count, end) for end in range(size, count + size, size)] if count else []
        begun: list[tuple[slice | Tensor, Tensor, Callable[[], Tensor]]] = []
        for start, end in itertools.pairwise((0, *ends)):
            at = slice(first + start, first + end)
            rows = at if isinstance(where, slice) else where[at]
            begun.append((rows, labels[start:end], self._begin_hidden(rows)))
            if len(begun) > 1:
                yield self._chunk(*begun.pop(0))
        for last in begun:
            yield self._chunk(*last)

    @property
    def folds(self) -> bool:
        """Whether logits whose statistics alone are wanted are never written: bits are the same."""
        wide = self.head.dtype in (torch.float32, torch.float64)
        return wide and hasattr(self.backend, "folds")

    def forward_chunks(self, where: slice | Tensor) -> Iterator[Chunk]:
        """``chunks`` of which statistics alone are wanted."""
        if self.folds and self.head.in_blocks:
            # their bits don't depend on rows beside them, and there are no logits to be bounded
            return replace(self, chunk_rows=max(self.chunk_rows, FOLDED_ROWS)).chunks(where)
        return self.chunks(where)

    def chunk(self, where: slice | Tensor, labels: Tensor | None = None) -> Chunk:
        """The rows at some positions, whose labels [n] may have been looked up."""
        labels = self.labels.flatten()[where] if labels is None else labels
        return self._chunk(where, labels, self._begin_hidden(where))

    def _chunk(self, where: slice | Tensor, labels: Tensor, fetch: Callable[[], Tensor]) -> Chunk:
        transform = self.options.transform.rows(lambda rows: rows.flatten(0, 1)[where].unsqueeze(0))
        return Chunk(where, fetch(), labels.unsqueeze(0), transform)

    def _begin_hidden(self, where: slice | Tensor) -> Callable[[], Tensor]:
        """Begin to fetch the hidden states [n, H] of the rows at some positions; the result waits for it."""
        if self.tokens is not None:
            return self.tokens.begin_gather(self.hidden, where)
        if self.hidden.is_contiguous():
            return lambda: self.hidden.flatten(0, 1)[where]
        if isinstance(where, slice):
            where = torch.arange(where.start, where.stop, device=self.labels.device)
        b, t = where // self.labels.shape[1], where % self.labels.shape[1]
        return lambda: self.hidden[b, t]

    @cached_property
    def ranks(self) -> Tensor:
        """Of each of the flattened rows, how many that count come before it."""
        counted = self.counted.flatten()
        return counted.cumsum(0) - counted.to(torch.int64)

    def one_pass(self, entropy: bool, settled: bool) -> bool:
        """Whether the backend writes rows along with statistics; ``settled`` as in
        ``OnePassBackend.one_pass_pays``. Never in batch-invariant calls: statistics that come alone, as in
        scoring, sum in another order.
        """
        if entropy or self.head.fixed or not hasattr(self.backend, "logprobs_and_rows"):
            return False
        given = (self.head.vocabulary, self.head.dtype, self.options.transform, self.head.weight.device)
        return cast(OnePassBackend, self.backend).one_pass_pays(*given, settled)

    def rows_memory(self, logits: Tensor) -> Tensor:
        """Memory for the rows that come from logits [n, V]: that of the logits where they fit."""
        dtype = self.head.rows_dtype
        if logits.dtype == dtype:
            return logits
        if logits.element_size() > dtype.itemsize:
            return logits.view(dtype)[:, : logits.shape[1]]
        return torch.empty(logits.shape, dtype=dtype, device=logits.device)

    def new_rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros [B, T], in the statistics' dtype unless one is given."""
        dtype = stats_dtype(self.hidden.dtype) if dtype is None else dtype
        return torch.zeros(self.labels.shape, dtype=dtype, device=self.labels.device)
