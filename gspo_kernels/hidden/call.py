"""One call over hidden states, and the chunks of rows that it is projected in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import hidden_kernels
from gspo_kernels.core.batch_invariance import refuse_backend
from gspo_kernels.core.memory import LEAST_BYTES, chunk_rows
from gspo_kernels.core.types import RowOptions
from gspo_kernels.distributed.groups import gathered_numbers
from gspo_kernels.distributed.tokens import ScatteredTokens
from gspo_kernels.hidden.chunk import Chunk, as_index, rows_at
from gspo_kernels.hidden.matmul import products_of
from gspo_kernels.logits.logprobs import check_ranges, check_rows, range_of
from gspo_kernels.logits.plan import Plan


class Chunking(NamedTuple):
    """How a call over hidden states makes its logits.

    Attributes:
        logits_dtype: "float32", or "input": 16-bit products are rounded to the inputs' dtype.
        max_chunk_bytes: the most bytes of logits at once; 0: the default.
        compact: leave masked rows out of every product; counting the other rows reads from the device.
        reduce_hidden_grad: sum dHidden over the ranks that share the vocabulary.
        scattered: each of these ranks has the hidden states of some tokens.
        batch_invariant: no result depends on what is computed along with it, see ``invariance``.
        lengths: int64 [2, B] on the CPU, see ``lengths.take_prefetched``; None: they lie on the device.
        where: int64 [n], the rows that get logits, if a mask on the CPU says so; see ``arguments.from_host``.
    """

    logits_dtype: str
    max_chunk_bytes: int
    compact: bool
    reduce_hidden_grad: bool = True
    scattered: bool = False
    batch_invariant: bool = False
    lengths: Tensor | None = None
    where: Tensor | None = None


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

    def with_count(self) -> LinearOperands:
        """Return the operands with the number of rows that count: one look serves forward and backward."""
        chunking = self.chunking
        if not chunking.compact or chunking.lengths is not None or torch.compiler.is_compiling():
            return self
        count = int((self.labels != self.options.ignore_index).sum())
        lengths = torch.tensor([[count], [0]], dtype=torch.int64, device="cpu")
        return self._replace(chunking=chunking._replace(lengths=lengths))


class Call:
    """One call over hidden states, as operators work on it.

    Ranks that share the vocabulary gather each other's sizes here, so that all cut the same chunks.

    Attributes:
        hidden, labels, options, chunking: as in ``LinearOperands``.
        products: the products with this rank's part of the weight, and the row operations between them.
        hidden_kernels: the steps around the gradient products.
        chunk_rows: the most rows of logits at once, the same on all ranks.
        least_rows: the same where all rows are projected twice.
        tokens: which rank has which hidden states; None where they are not scattered.
    """

    def __init__(
        self,
        operands: LinearOperands,
        checked: bool = True,
        whole_logits: bool = True,
        plan: Plan | None = None,
    ):
        """``plan``: of a loss, whose rows may all share a chunk by default, see ``memory.ALL_ROWS_BYTES``."""
        hidden, weight, bias, labels, options, chunking, base = operands
        refuse_backend(options.backend, chunking.batch_invariant)
        self.hidden, self.labels, self.options, self.chunking = hidden, labels, options, chunking
        self.products = products_of(
            weight, bias, base, chunking.logits_dtype, chunking.batch_invariant, options, whole_logits
        )
        self.hidden_kernels = hidden_kernels(options.backend)
        row_bytes, multiple = self.products.row_bytes, self.products.multiple
        budget = chunking.max_chunk_bytes
        all_rows = 0
        if plan is not None and plan.requires_grad.weight and self.products.rounds_early:
            all_rows = labels.numel() if plan.schedule in ("auto", "aligned", "known") else 0
        row_count = chunk_rows(row_bytes, budget, weight.device, all_rows, 2 * weight.numel())
        least = min(row_count, chunk_rows(row_bytes, budget or LEAST_BYTES, weight.device))
        self.chunk_rows, self.least_rows = (
            n - n % multiple if n > multiple else n for n in (row_count, least)
        )
        self.tokens: ScatteredTokens | None = None
        if checked and options.shard.group:
            ranges = range_of(labels, self.products.vocabulary, options)
            numbers = (*ranges, self.least_rows, self.chunk_rows, hidden.shape[1])
            every = gathered_numbers(options.shard.group, labels.device, numbers)
            check_ranges([each[: len(ranges)] for each in every], options)
            self.least_rows, self.chunk_rows = (min(each[i] for each in every) for i in (-3, -2))
            if chunking.scattered:
                lengths = [each[-1] for each in every]
                self.tokens = ScatteredTokens.of(options.shard.group, lengths, labels.shape[1])
        elif checked:
            check_rows(labels, self.products.vocabulary, options)
        self.make_room(labels.numel())

    def make_room(self, *row_counts: int) -> None:
        """Set the size of chunks for parts of so many rows, which is often less than ``chunk_rows``: chunks
        of a part have about the same size, and so has the memory that they share.
        """
        ends = [(0, *self.products.cut(count, self.chunk_rows)) for count in row_counts]
        sizes = [end - start for each in ends for start, end in itertools.pairwise(each)]
        self.products.max_rows = max(sizes, default=1)

    @cached_property
    def counted(self) -> Tensor:
        """[B, T], bool: tokens that have a log-prob."""
        return self.labels != self.options.ignore_index

    @cached_property
    def projected(self) -> slice | Tensor:
        """The positions of the rows that get logits: counted rows, or all rows without compaction."""
        lengths = self.chunking.lengths
        count = None if lengths is None else int(lengths[0].sum())
        all_rows = not self.chunking.compact or count == self.labels.numel()
        return self.index(None if all_rows else self.counted, count)

    @property
    def row_count(self) -> int:
        """How many rows get logits."""
        where = self.projected
        return where.stop if isinstance(where, slice) else len(where)

    def index(self, keep: Tensor | None, count: int | None = None) -> slice | Tensor:
        """Return the positions of the rows where ``keep`` holds; None: of all rows, or of ``chunking.where``.

        This reads one number from the device, or nothing if ``count``, the number of these rows, is passed.
        """
        if keep is None:
            return slice(0, self.labels.numel()) if self.chunking.where is None else self.chunking.where
        count = int(keep.sum()) if count is None else count
        if count == keep.numel():
            return slice(0, count)
        return keep.flatten().nonzero_static(size=count).squeeze(1)

    def chunks(self, where: slice | Tensor, max_rows: int | None = None) -> Iterator[Chunk]:
        """Yield the rows at some positions in chunks of about the same size, for which there is room.

        Scattered hidden states are gathered one chunk ahead, while the chunk before is multiplied.
        """
        first, count = (
            (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        )
        labels = rows_at(self.labels, where)
        ends = self.products.cut(count, max_rows or self.products.max_rows)
        begun: list[tuple[slice | Tensor, Tensor, Callable[[], Tensor]]] = []
        for start, end in itertools.pairwise((0, *ends)):
            span = slice(first + start, first + end)
            positions = span if isinstance(where, slice) else where[span]
            if self.tokens is None:
                yield self.chunk(positions, labels[start:end])
                continue
            begun.append((positions, labels[start:end], self.tokens.begin_gather(self.hidden, positions)))
            if len(begun) > 1:
                positions, chunk_labels, gather = begun.pop(0)
                yield self.chunk(positions, chunk_labels, gather())
        for positions, chunk_labels, gather in begun:
            yield self.chunk(positions, chunk_labels, gather())

    def chunk(
        self, where: slice | Tensor, labels: Tensor | None = None, hidden: Tensor | None = None
    ) -> Chunk:
        """Return the rows at some positions; labels [n] and hidden [n, H] are looked up unless passed."""
        labels = rows_at(self.labels, where) if labels is None else labels
        if hidden is None and self.tokens is not None:
            hidden = self.tokens.begin_gather(self.hidden, where)()
        elif hidden is None and self.hidden.is_contiguous():
            hidden = self.hidden.view(self.labels.numel(), self.hidden.shape[2])
            if isinstance(where, Tensor) or labels.numel() < hidden.shape[0]:
                hidden = hidden[where]
        elif hidden is None:
            index = as_index(where, self.labels.device)
            hidden = self.hidden[index // self.labels.shape[1], index % self.labels.shape[1]]
        options = self.options
        if options.transform.row_temperature is not None or options.transform.kept is not None:
            transform = options.transform.rows(lambda rows: rows.flatten(0, 1)[where].unsqueeze(0))
            options = options._replace(transform=transform)
        return Chunk(where, hidden, labels.unsqueeze(0), options, labels.numel())
