"""Divergences between a student's rows and a teacher's.

They are over the whole vocabulary, or over log-probs of K ids and the remaining mass (``selected``) in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.core import bits, divergences
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.types import LogitTransform, PairStats, RowOptions, RowPair, pair_dtypes, stats_dtype
from gspo_kernels.distributed.shards import leading_of_all, rows_of, vocabulary_of
from gspo_kernels.logits.selected import SelectedGradients, first_places, selected_rows, write_gradient

LEAST_LOG_MASS = -(2.0**-24)
"""Bound on the log of the ids' mass, as an engine's rounded log-probs may sum to 1 or more."""


class DivergenceSpec(NamedTuple):
    """The divergence to compute.

    Attributes:
        beta: see ``divergences``.
        top_k: the number of ids to compare, or 0 for all.
        top_k_of_student: whether these are the student's most likely ids instead of the teacher's.
        tail: whether the remaining mass is one more column; otherwise both sides are normalized over the ids.
    """

    beta: float
    top_k: int
    top_k_of_student: bool
    tail: bool


class TeacherRows(NamedTuple):
    """A teacher's rows: logits, or the log-probs of some ids.

    Attributes:
        logits: [B, T, V], or None.
        ids: int64 [B, T, K], padded with ``bits.NO_ID``, or None.
        logprobs: of the ids, the same shape, normalized over the whole vocabulary, or None.
        transform: from the teacher's raw logits to z, without a mask.
    """

    logits: Tensor | None
    ids: Tensor | None
    logprobs: Tensor | None
    transform: LogitTransform

    def at(self, index: slice | Tensor, logits: Tensor | None) -> TeacherRows:
        """Return some of the rows as [1, n], with their logits [n, V] or None."""

        def select(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[index].unsqueeze(0)

        return TeacherRows(
            None if logits is None else logits.unsqueeze(0),
            None if self.ids is None else select(self.ids),
            None if self.logprobs is None else select(self.logprobs),
            self.transform.rows(select),
        )


class Pair(NamedTuple):
    """Rows [B, T] of a student and a teacher, and a divergence; labels only mark ignored rows."""

    logits: Tensor
    teacher: TeacherRows
    labels: Tensor
    spec: DivergenceSpec

    def evaluate(
        self,
        options: RowOptions,
        known: PairStats | None = None,
        grad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> PairStats:
        """See ``RowBackend.divergence``; the options are the student's."""
        if self.teacher.ids is not None or self.spec.top_k:
            return _over_ids(self, options, grad, out)
        assert self.teacher.logits is not None
        sides = (self.logits, self.teacher.logits, self.labels, options.transform, self.teacher.transform)
        rows = RowPair(*sides, self.spec.beta, options.ignore_index)
        return rows_of(options).divergence(rows, known, grad, out)


def _of_teacher(pair: Pair, ids: Tensor, counts: Tensor, options: RowOptions) -> tuple[Tensor, Tensor]:
    """Return the teacher's log-probs of the ids and the log of the remaining mass, in fp64."""
    teacher, within = pair.teacher, not pair.spec.tail
    if teacher.logprobs is None:
        assert teacher.logits is not None
        rows = selected_rows(teacher.logits, ids, options._replace(transform=teacher.transform), within)
        return torch.where(counts, exact(rows.logprobs), -torch.inf), exact(rows.tail)
    log_q = torch.where(counts, exact(teacher.logprobs), -torch.inf)
    mass = log_q.logsumexp(-1)
    left = torch.log(-torch.expm1(mass.clamp(max=LEAST_LOG_MASS)))
    return (log_q - mass.unsqueeze(-1) if within else log_q), left


def _over_ids(pair: Pair, options: RowOptions, grad: Tensor | None, out: Tensor | None) -> PairStats:
    spec, ids = pair.spec, pair.teacher.ids
    if ids is None:
        assert pair.teacher.logits is not None
        sides = (pair.teacher.logits, pair.teacher.transform), (pair.logits, options.transform)
        leading, transform = sides[spec.top_k_of_student]
        ids = _leading_ids(leading, spec.top_k, transform.logit_scale >= 0, options)
    ids = ids.masked_fill((pair.labels == options.ignore_index).unsqueeze(-1), bits.NO_ID)
    counts = first_places(ids, None if options.shard.group else pair.logits.shape[-1])
    log_q, left = _of_teacher(pair, ids, counts, options)
    within = not spec.tail
    student = selected_rows(pair.logits, ids, options, within)
    log_p = torch.where(counts, exact(student.logprobs), -torch.inf)
    if spec.tail:
        log_p = torch.cat([log_p, exact(student.tail).unsqueeze(-1)], -1)
        log_q = torch.cat([log_q, left.unsqueeze(-1)], -1)
        some_left = counts.any(-1, keepdim=True)
        if pair.teacher.logprobs is not None:  # rounding leaves mass even if these are all ids
            total = vocabulary_of(options.shard, pair.logits.shape[-1], ids.device)
            some_left = some_left & (counts.sum(-1, keepdim=True) < total)
        counts = torch.cat([counts, some_left], -1)
        log_p, log_q = (torch.where(counts, each, -torch.inf) for each in (log_p, log_q))
    value, slope = divergences.of_columns(log_p, log_q, spec.beta)
    broken = torch.stack([(each.isnan() & counts).any(-1) for each in (log_p, log_q)]).any(0)
    total = torch.where(counts, value, 0.0).sum(-1).masked_fill(broken, torch.nan)
    if out is not None and grad is not None:
        coefficients = exact(grad)
        inactive = (coefficients == 0).unsqueeze(-1)
        weighted = torch.where(inactive | ~counts, 0.0, slope * coefficients.unsqueeze(-1))
        lost = broken if spec.beta == 0 else ~total.isfinite()
        weighted = torch.where(lost.unsqueeze(-1) & counts & ~inactive, torch.nan, weighted)
        K = ids.shape[-1]
        grads = SelectedGradients(weighted[..., :K], weighted[..., K] if spec.tail else None)
        write_gradient(out, pair.logits, ids, student, grads, options, within)
    # outputs of an operator must not alias
    nothing = torch.zeros(3, *total.shape, dtype=total.dtype, device=total.device)
    kinds = pair_dtypes(stats_dtype(pair.logits.dtype), exact_dtype(pair.logits.device))
    outputs = (nothing[0], nothing[1], total, nothing[2])
    return PairStats(*(each.to(kind, copy=True) for each, kind in zip(outputs, kinds, strict=True)))


def _leading_ids(logits: Tensor, k: int, largest: bool, options: RowOptions) -> Tensor:
    """Return the ids of the k largest, or smallest, logits of each whole row."""
    width = logits.shape[-1]
    leading = logits.topk(min(k, width), largest=largest, sorted=False)
    if not options.shard.group:
        return leading.indices
    signed = leading.values if largest else -leading.values
    return leading_of_all(options.shard, width, signed, leading.indices, k)
