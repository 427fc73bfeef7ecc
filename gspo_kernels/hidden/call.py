"""One call over hidden states, checked and immutable, and its chunks of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from gspo_kernels.arguments.head import LEAST_BYTES, Chunking, LinearOperands
from gspo_kernels.backends.dispatch import hidden_kernels, refuse_backend
from gspo_kernels.backends.protocol import HiddenKernels
from gspo_kernels.core.types import NO_RATIO, RatioClip, RowOptions
from gspo_kernels.distributed.groups import gathered_numbers
from gspo_kernels.distributed.tokens import ScatteredTokens
from gspo_kernels.hidden.chunk import Chunk, as_index, chunk_rows, cut, indices, rows_at
from gspo_kernels.hidden.matmul import HeadMatmul, select_matmul
from gspo_kernels.logits.logprobs import check_ranges, check_rows, range_of


class RequiresGrad(NamedTuple):
    """Whether hidden, weight and bias require a gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    def select(self, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Replace the gradients of hidden, weight and bias that are not required by None."""
        return tuple(grad if needed else None for grad, needed in zip(gradients, self, strict=True))


class Decisions(NamedTuple):
    """Decisions of a loss that depend only on shapes, dtypes and options: strings, numbers and flags.

    Attributes:
        depends_on: the scope of dLoss/dlogprob of one token, besides masks, lengths, weights and advantages:
            "nothing" (the coefficient is known beforehand), "token", "turn", "sequence", "group" or "batch".
        ratio_clip: the clipped ratio that the backend evaluates in one launch, or ``NO_RATIO`` if PyTorch
            evaluates the objective.
        requires_grad: the inputs that require a gradient.
        skips: whether gradient matmuls skip rows without a gradient.
        entropy: whether to compute the entropy.
        schedule: a name of ``plan.SCHEDULE_NAMES``, or "auto" for "aligned" groups that fit in a chunk and
            "deferred" or "two_pass" for longer ones.
        can_defer: whether "deferred" is exact, for groups that don't fit in a chunk.
    """

    depends_on: str
    ratio_clip: RatioClip = NO_RATIO
    requires_grad: RequiresGrad = RequiresGrad()
    skips: bool = False
    entropy: bool = False
    schedule: str = ""
    can_defer: bool = False


@dataclass(frozen=True)
class Call:
    """One call over hidden states in the operators' form; see ``call_of``.

    Attributes:
        hidden, labels, options, chunking: as in ``LinearOperands``.
        matmul: the matmuls with this rank's part of the weight, and the row operations between them.
        hidden_kernels: the operations on hidden states before and after the gradient matmuls.
        chunk_rows: the most rows of logits at a time, the same on all ranks.
        least_rows: the same if all rows are projected twice.
        tokens: the distribution of hidden states over ranks, or None if not scattered.
    """

    hidden: Tensor
    labels: Tensor
    options: RowOptions
    chunking: Chunking
    matmul: HeadMatmul
    hidden_kernels: HiddenKernels
    chunk_rows: int
    least_rows: int
    tokens: ScatteredTokens | None = None

    @cached_property
    def counted(self) -> Tensor:
        """Tokens that have a log-prob, bool [B, T]."""
        return self.labels != self.options.ignore_index

    @cached_property
    def projected(self) -> slice | Tensor:
        """The positions of the rows to project; syncs unless the host knows their number."""
        lengths = self.chunking.lengths
        return self.positions(None if lengths is None else int(lengths[0].sum()))

    def positions(self, count: int | None) -> slice | Tensor:
        """Return the positions of the rows to project, ``count`` if the host knows their number: the counted
        rows, or without compaction all rows or those of the mask on the host.
        """
        if not self.chunking.compact or count == self.labels.numel():
            return slice(0, self.labels.numel()) if self.chunking.where is None else self.chunking.where
        return indices(self.counted, count)

    @property
    def row_count(self) -> int:
        """The number of rows to project."""
        where = self.projected
        return where.stop if isinstance(where, slice) else len(where)

    def cut(self, row_count: int, max_rows: int = 0) -> tuple[int, ...]:
        """Return the ends of chunks of at most ``max_rows`` (default ``chunk_rows``); see ``chunk.cut``."""
        return cut(row_count, max_rows or self.chunk_rows, self.matmul.multiple)

    def chunks(self, where: slice | Tensor, ends: Sequence[int]) -> Iterator[Chunk]:
        """Yield the rows at some positions in chunks that end at ``ends``.

        The all-gather of scattered hidden states overlaps with the matmuls of the previous chunk.
        """
        first = where.start if isinstance(where, slice) else 0
        labels = rows_at(self.labels, where)
        started: list[tuple[slice | Tensor, Tensor, Callable[[], Tensor]]] = []
        for start, end in itertools.pairwise((0, *ends)):
            span = slice(first + start, first + end)
            positions = span if isinstance(where, slice) else where[span]
            if self.tokens is None:
                yield self.chunk(positions, labels[start:end])
                continue
            started.append((positions, labels[start:end], self.tokens.begin_gather(self.hidden, positions)))
            if len(started) > 1:
                positions, chunk_labels, gather = started.pop(0)
                yield self.chunk(positions, chunk_labels, gather())
        for positions, chunk_labels, gather in started:
            yield self.chunk(positions, chunk_labels, gather())

    def chunk(
        self, where: slice | Tensor, labels: Tensor | None = None, hidden: Tensor | None = None
    ) -> Chunk:
        """Return the chunk of the rows at some positions; labels [n] and hidden [n, H] may be passed."""
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


def call_of(
    operands: LinearOperands,
    decisions: Decisions | None = None,
    *,
    checked: bool = True,
    whole_logits: bool = False,
) -> Call:
    """Check values, select the matmul and set the chunk size.

    Ranks that share the vocabulary exchange their sizes, to use the same chunks.

    Args:
        operands: the operator's operands.
        decisions: the decisions of a loss, whose rows may share one chunk, see ``chunk.ALL_ROWS_BYTES``.
        checked: False skips the checks and the exchange between ranks.
        whole_logits: whether the operator reads logits; see ``select_matmul``.
    """
    hidden, weight, bias, labels, options, chunking, base = operands
    refuse_backend(options.backend, chunking.batch_invariant)
    matmul = select_matmul(
        weight, bias, base, chunking.logits_dtype, chunking.batch_invariant, options, whole_logits
    )
    budget, all_rows = chunking.max_chunk_bytes, 0
    if decisions is not None and decisions.requires_grad.weight and matmul.rounds_early:
        all_rows = labels.numel() if decisions.schedule in ("auto", "aligned", "known") else 0
    most = chunk_rows(matmul.row_bytes, budget, weight.device, all_rows, 2 * weight.numel())
    least = min(most, chunk_rows(matmul.row_bytes, budget or LEAST_BYTES, weight.device))
    multiple = matmul.multiple
    most, least = (n - n % multiple if n > multiple else n for n in (most, least))
    tokens: ScatteredTokens | None = None
    if checked and options.shard.group:
        ranges = range_of(labels, matmul.vocabulary, options)
        numbers = (*ranges, least, most, hidden.shape[1])
        every = gathered_numbers(options.shard.group, labels.device, numbers)
        check_ranges([each[: len(ranges)] for each in every], options)
        least, most = (min(each[i] for each in every) for i in (-3, -2))
        if chunking.scattered:
            lengths = [each[-1] for each in every]
            tokens = ScatteredTokens.of(options.shard.group, lengths, labels.shape[1])
    elif checked:
        check_rows(labels, matmul.vocabulary, options)
    kernels = hidden_kernels(options.backend)
    return Call(hidden, labels, options, chunking, matmul, kernels, most, least, tokens)
