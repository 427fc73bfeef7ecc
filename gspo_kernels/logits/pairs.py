"""A student's rows and a teacher's, and how they are compared.

Over the whole vocabulary both rows are read side by side. Over K ids each side has the ids' log-probs and the
mass that they leave (``selected``); these numbers are compared in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.core import bits, divergences
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.types import LogitTransform, PairStats, RowOptions, RowPair, pair_dtypes, stats_dtype
from gspo_kernels.distributed.shards import leading_of_all, rows_of, vocabulary_of
from gspo_kernels.logits.selected import SelectedGradients, first_places, score, write_gradient

LEAST_LOG_MASS = -(2.0**-24)
"""The bound on the log of the ids' mass: an engine's rounded log-probs may add up to 1 and leave nothing."""


class DivergenceSpec(NamedTuple):
    """Which divergence to compute.

    Attributes:
        beta: see ``divergences``.
        top_k: how many ids to compare; 0: all.
        top_k_of_student: whether these are the student's most likely ids, or else the teacher's.
        tail: whether the mass that the ids leave is one more column; otherwise both sides are normalised
            over the ids.
    """

    beta: float
    top_k: int
    top_k_of_student: bool
    tail: bool


class TeacherRows(NamedTuple):
    """A teacher's rows: logits, or the log-probs of some ids.

    Attributes:
        logits: [B, T, V], or None.
        ids: int64 [B, T, K], ``bits.NO_ID`` where a row has fewer, or None.
        logprobs: of the ids, the same shape, normalised over the whole vocabulary; or None.
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
    """Rows [B, T] of a student and of a teacher, and which divergence. Labels only say which rows
    are ignored.
    """

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
    """Return the teacher's log-probs of the ids, and the log of the mass that they leave; in fp64."""
    teacher, within = pair.teacher, not pair.spec.tail
    if teacher.logprobs is None:
        assert teacher.logits is not None
        rows = score(teacher.logits, ids, options._replace(transform=teacher.transform), within)
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
    student = score(pair.logits, ids, options, within)
    log_p = torch.where(counts, exact(student.logprobs), -torch.inf)
    if spec.tail:
        log_p = torch.cat([log_p, exact(student.tail).unsqueeze(-1)], -1)
        log_q = torch.cat([log_q, left.unsqueeze(-1)], -1)
        some_left = counts.any(-1, keepdim=True)
        if (
            pair.teacher.logprobs is not None
        ):  # whose rounding seems to leave mass, even if they are all there are
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
    # an operator's outputs may not be the same tensor
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
