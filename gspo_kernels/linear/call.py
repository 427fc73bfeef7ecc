"""One call over hidden states, and the chunks of rows that it is projected in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.invariance import refuse_backend
from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import launches_of, rows_of
from gspo_kernels.ops.logprobs import check_ranges, check_rows, range_of
from gspo_kernels.ops.memory import chunk_rows
from gspo_kernels.ops.products import SEGMENT
from gspo_kernels.parallel.groups import gathered_numbers
from gspo_kernels.parallel.tokens import ScatteredTokens
from gspo_kernels.types import LogitRows, RowOptions

FOLDED_ROWS = 4096
"""How many rows are projected at a time where their logits are never written: enough that reading the weight
costs nothing compared with its product, and few enough that copies of hidden states stay small."""


class Chunking(NamedTuple):
    """How a call over hidden states makes its logits.

    Attributes:
        logits_dtype: "float32", or "input": 16-bit products are rounded to the inputs' dtype.
        max_chunk_bytes: the most bytes of logits at once; 0: the default.
        compact: leave masked rows out of every product; counting the other rows reads from the device.
        reduce_hidden_grad: sum dHidden over the ranks that share the vocabulary.
        scattered: each of these ranks has the hidden states of some tokens.
        batch_invariant: no result depends on what is computed along with it, see ``invariance``.
    """

    logits_dtype: str
    max_chunk_bytes: int
    compact: bool
    reduce_hidden_grad: bool = True
    scattered: bool = False
    batch_invariant: bool = False


class LinearOperands(NamedTuple):
    """The arguments of every operator over hidden states: hidden [B, T, H] (packed: [1, N, H]), weight
    [V, H], bias [V] or None, labels [B, T], and how logits are made. Scattered hidden has this rank's T.

    With a low-rank adapter ``base`` is the frozen weight [V, H], and ``weight`` is the adapter's B [V, r].
    Hidden states then have r more columns after the first H, and B multiplies these.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    options: RowOptions
    chunking: Chunking
    base: Tensor | None = None

    @property
    def scattered(self) -> int | None:
        """How many tokens of each row have their hidden states on this rank; None if not scattered."""
        return self.hidden.shape[1] if self.chunking.scattered else None


class Chunk(NamedTuple):
    """Rows that are projected together.

    Attributes:
        where: the rows' positions among the flattened rows of the call.
        hidden: [n, H].
        labels: [1, n].
        options: the call's options, with the transform of these rows, [1, n].
        size: n.
    """

    where: slice | Tensor
    hidden: Tensor
    labels: Tensor
    options: RowOptions
    size: int

    def rows(self, logits: Tensor) -> LogitRows:
        """Return logits [n, V] of the chunk as backends take them."""
        options = self.options
        return LogitRows(logits.unsqueeze(0), self.labels, options.transform, options.ignore_index)

    def select(self, keep: Tensor) -> Chunk:
        """Return a chunk of the rows with these indices."""
        transform = self.options.transform.rows(lambda rows: rows[:, keep])
        options = self.options._replace(transform=transform)
        where = as_index(self.where, keep.device)[keep]
        return Chunk(where, self.hidden[keep], self.labels[:, keep], options, keep.numel())


class Call:
    """One call over hidden states, as operators work on it.

    Ranks that share the vocabulary gather each other's sizes here, so that all cut the same chunks.

    Attributes:
        hidden, labels, options, chunking: as in ``LinearOperands``.
        head: this rank's head.
        backend: the row operations.
        launches: the backend's launches for the work around the gradient products; None where PyTorch does
            this work. They read no columns of logits, so they also serve ranks that share the vocabulary.
        chunk_rows: the most rows of logits at once, the same on all ranks.
        folds: whether logits are never written where only their statistics are needed. The bits are the same.
        tokens: which rank has which hidden states; None where they are not scattered.
    """

    def __init__(self, operands: LinearOperands, checked: bool = True):
        hidden, weight, bias, labels, options, chunking, base = operands
        if chunking.batch_invariant:
            refuse_backend(options.backend)
        self.hidden, self.labels, self.options, self.chunking = hidden, labels, options, chunking
        self.head = Head(weight, bias, chunking.logits_dtype, chunking.batch_invariant, base)
        self.backend, self.launches = rows_of(options), launches_of(options.backend)
        self.chunk_rows = chunk_rows(self.head.row_bytes, chunking.max_chunk_bytes, weight.device)
        if self.head.fixed and self.chunk_rows > SEGMENT:
            self.chunk_rows -= self.chunk_rows % SEGMENT
        wide = self.head.dtype in (torch.float32, torch.float64)
        self.folds = wide and base is None and hasattr(self.backend, "folds")
        self.tokens: ScatteredTokens | None = None
        if not checked:
            return
        if not options.shard.group:
            check_rows(labels, self.head.vocabulary, options)
            return
        ranges = range_of(labels, self.head.vocabulary, options)
        numbers = (*ranges, self.chunk_rows, hidden.shape[1])
        every = gathered_numbers(options.shard.group, labels.device, numbers)
        check_ranges([each[: len(ranges)] for each in every], options)
        self.chunk_rows = min(each[-2] for each in every)
        if chunking.scattered:
            lengths = [each[-1] for each in every]
            self.tokens = ScatteredTokens.of(options.shard.group, lengths, labels.shape[1])

    @cached_property
    def counted(self) -> Tensor:
        """[B, T], bool: tokens that have a log-prob."""
        return self.labels != self.options.ignore_index

    @cached_property
    def projected(self) -> slice | Tensor:
        """The positions of the rows that get logits: counted rows, or all rows without compaction."""
        return self.index(self.counted if self.chunking.compact else None)

    @cached_property
    def ranks(self) -> Tensor:
        """For each of the flattened rows, the number of counted rows before it."""
        counted = self.counted.flatten()
        return counted.cumsum(0) - counted.to(torch.int64)

    def index(self, keep: Tensor | None, count: int | None = None) -> slice | Tensor:
        """Return the positions of the rows where ``keep`` holds; None: of all rows.

        This reads one number from the device, or nothing if ``count``, the number of these rows, is passed.
        """
        if keep is None:
            return slice(0, self.labels.numel())
        count = int(keep.sum()) if count is None else count
        if count == keep.numel():
            return slice(0, count)
        return keep.flatten().nonzero_static(size=count).squeeze(1)

    def chunks(self, where: slice | Tensor, forward_only: bool = False) -> Iterator[Chunk]:
        """Yield the rows at some positions in chunks of about the same size.

        ``forward_only``: only their statistics are needed. Scattered hidden states are gathered one chunk
        ahead, while the chunk before is multiplied.
        """
        most = self.chunk_rows
        if forward_only and self.folds and self.head.in_blocks:
            # a row's bits don't depend on other rows, and no logits take memory
            most = max(most, FOLDED_ROWS)
        first, count = (
            (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        )
        labels = self.labels.flatten()[where]
        pieces = -(-count // most)
        ends = [count * piece // pieces for piece in range(1, pieces + 1)]
        if self.head.fixed and most % SEGMENT == 0:
            # sizes are whole segments, so that chunks split few of them
            size = -(-count // max(pieces * SEGMENT, 1)) * SEGMENT
            ends = [min(count, end) for end in range(size, count + size, size)] if count else []
        begun: list[tuple[slice | Tensor, Tensor, Callable[[], Tensor]]] = []
        for start, end in itertools.pairwise((0, *ends)):
            span = slice(first + start, first + end)
            rows = span if isinstance(where, slice) else where[span]
            if self.tokens is None:
                yield self.chunk(rows, labels[start:end])
                continue
            begun.append((rows, labels[start:end], self.tokens.begin_gather(self.hidden, rows)))
            if len(begun) > 1:
                rows, chunk_labels, gather = begun.pop(0)
                yield self.chunk(rows, chunk_labels, gather())
        for rows, chunk_labels, gather in begun:
            yield self.chunk(rows, chunk_labels, gather())

    def chunk(
        self, where: slice | Tensor, labels: Tensor | None = None, hidden: Tensor | None = None
    ) -> Chunk:
        """Return the rows at some positions; labels [n] and hidden [n, H] are looked up unless passed."""
        labels = self.labels.flatten()[where] if labels is None else labels
        if hidden is None and self.tokens is not None:
            hidden = self.tokens.begin_gather(self.hidden, where)()
        elif hidden is None and self.hidden.is_contiguous():
            hidden = self.hidden.flatten(0, 1)[where]
        elif hidden is None:
            index = as_index(where, self.labels.device)
            hidden = self.hidden[index // self.labels.shape[1], index % self.labels.shape[1]]
        transform = self.options.transform.rows(lambda rows: rows.flatten(0, 1)[where].unsqueeze(0))
        options = self.options._replace(transform=transform)
        return Chunk(where, hidden, labels.unsqueeze(0), options, labels.numel())

    def rows_memory(self, logits: Tensor) -> Tensor:
        """Return memory for the gradient rows of logits [n, V]: the logits' own memory if the rows fit."""
        dtype = self.head.rows_dtype
        if logits.dtype == dtype:
            return logits
        if logits.element_size() > dtype.itemsize:
            return logits.view(dtype)[:, : logits.shape[1]]
        return torch.empty(logits.shape, dtype=dtype, device=logits.device)


def as_index(where: slice | Tensor, device: torch.device) -> Tensor:
    """Return the positions as int64 [n]."""
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
