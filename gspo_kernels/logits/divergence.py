"""Operators over logits for divergences of a student's rows from a teacher's and their gradient.

Divergences are over the whole vocabulary, or over log-probs of K ids and the remaining mass (``selected``) in
fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.values import check_temperature
from gspo_kernels.core import bits, divergences
from gspo_kernels.core.exact import exact, exact_dtype, exact_sum
from gspo_kernels.core.memory import reused_memory
from gspo_kernels.core.operators import inplace_operator, operator
from gspo_kernels.core.types import LogitTransform, PairStats, RowOptions, RowPair, pair_dtypes, stats_dtype
from gspo_kernels.distributed.shards import leading_of_all, row_backend, vocabulary_of
from gspo_kernels.logits.logprobs import check_rows, overwritten, save_rows, saved_rows, scale_
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
        return row_backend(options).divergence(rows, known, grad, out)


def _of_teacher(pair: Pair, ids: Tensor, compared: Tensor, options: RowOptions) -> tuple[Tensor, Tensor]:
    """Return the teacher's log-probs of the ids and the log of the remaining mass, in fp64."""
    teacher, within = pair.teacher, not pair.spec.tail
    if teacher.logprobs is None:
        assert teacher.logits is not None
        rows = selected_rows(teacher.logits, ids, options._replace(transform=teacher.transform), within)
        return torch.where(compared, exact(rows.logprobs), -torch.inf), exact(rows.tail)
    log_q = torch.where(compared, exact(teacher.logprobs), -torch.inf)
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
    compared = first_places(ids, None if options.shard.group else pair.logits.shape[-1])
    log_q, left = _of_teacher(pair, ids, compared, options)
    within = not spec.tail
    student = selected_rows(pair.logits, ids, options, within)
    log_p = torch.where(compared, exact(student.logprobs), -torch.inf)
    if spec.tail:
        log_p = torch.cat([log_p, exact(student.tail).unsqueeze(-1)], -1)
        log_q = torch.cat([log_q, left.unsqueeze(-1)], -1)
        some_left = compared.any(-1, keepdim=True)
        if pair.teacher.logprobs is not None:  # rounding leaves mass even if these are all ids
            vocabulary = vocabulary_of(options.shard, pair.logits.shape[-1], ids.device)
            some_left = some_left & (compared.sum(-1, keepdim=True) < vocabulary)
        compared = torch.cat([compared, some_left], -1)
        log_p, log_q = (torch.where(compared, each, -torch.inf) for each in (log_p, log_q))
    value, slope = divergences.of_columns(log_p, log_q, spec.beta)
    broken = torch.stack([(each.isnan() & compared).any(-1) for each in (log_p, log_q)]).any(0)
    total = torch.where(compared, value, 0.0).sum(-1).masked_fill(broken, torch.nan)
    if out is not None and grad is not None:
        coefficients = exact(grad)
        inactive = (coefficients == 0).unsqueeze(-1)
        weighted = torch.where(inactive | ~compared, 0.0, slope * coefficients.unsqueeze(-1))
        lost = broken if spec.beta == 0 else ~total.isfinite()
        weighted = torch.where(lost.unsqueeze(-1) & compared & ~inactive, torch.nan, weighted)
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


def summed(divergences: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of divergences times shares; divergences with a share of 0 may be NaN."""
    counted = torch.where(shares != 0, exact(divergences), 0.0).mul(shares)
    return exact_sum(counted.flatten()).to(divergences.dtype)


def _checked(pair: Pair, options: RowOptions) -> None:
    check_rows(pair.labels, pair.logits.shape[-1], options)
    of_teacher = pair.teacher.transform.row_temperature
    if of_teacher is not None:
        check_temperature(of_teacher, pair.labels, options.ignore_index, "teacher_temperature")


@operator
def divergence_forward(pair: Pair, options: RowOptions) -> PairStats:
    """Return the divergences of logits [B, T, V]; see ``RowBackend.divergence``."""
    _checked(pair, options)
    return pair.evaluate(options)


def _fake_pair(labels: Tensor, dtype: torch.dtype) -> PairStats:
    """Return empty statistics for logits of ``dtype``."""
    kinds = pair_dtypes(stats_dtype(dtype), exact_dtype(labels.device))
    return PairStats(*(labels.new_empty(labels.shape, dtype=kind) for kind in kinds))


@divergence_forward.register_fake
def _(pair: Pair, options: RowOptions) -> PairStats:
    return _fake_pair(pair.labels, pair.logits.dtype)


@operator
def divergence_backward(pair: Pair, options: RowOptions, known: PairStats, grad: Tensor) -> Tensor:
    """Return the student's gradient in the dtype of its logits, contiguous."""
    out = reused_memory(pair.logits.shape, pair.logits.dtype, pair.logits.device)
    pair.evaluate(options, known, grad, out)
    return out


@divergence_backward.register_fake
def _(pair: Pair, options: RowOptions, known: PairStats, grad: Tensor) -> Tensor:
    return pair.logits.new_empty(pair.logits.shape)


@inplace_operator
def divergence_backward_(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    spec: DivergenceSpec,
    options: RowOptions,
    known: PairStats,
    grad: Tensor,
) -> None:
    """Write the student's gradient over its logits."""
    Pair(logits, teacher, labels, spec).evaluate(options, known, grad, logits)


class PairWithGradient(NamedTuple):
    """The fields of ``PairStats``, and the gradient of the student's logits, in their dtype."""

    lse: Tensor
    teacher_lse: Tensor
    divergences: Tensor
    centers: Tensor
    grad_logits: Tensor


@operator
def divergence_and_grad(pair: Pair, options: RowOptions, grad: Tensor) -> PairWithGradient:
    """Return divergences and the gradient of logits for a known upstream gradient."""
    _checked(pair, options)
    out = reused_memory(pair.logits.shape, pair.logits.dtype, pair.logits.device)
    return PairWithGradient(*pair.evaluate(options, None, grad, out), out)


@divergence_and_grad.register_fake
def _(pair: Pair, options: RowOptions, grad: Tensor) -> PairWithGradient:
    logits = pair.logits
    return PairWithGradient(*_fake_pair(pair.labels, logits.dtype), logits.new_empty(logits.shape))


def _save(ctx: Any, pair: Pair, options: RowOptions, *tensors: Tensor, inplace: bool = False) -> None:
    *of_teacher, transform = pair.teacher
    row_temperature = transform.row_temperature
    known = (*of_teacher, row_temperature, *tensors)
    save_rows(ctx, options, pair.logits, pair.labels, *known, inplace=inplace)
    ctx.teacher_transform, ctx.spec = transform._replace(row_temperature=None), pair.spec


def _saved(ctx: Any) -> tuple[Pair, RowOptions, tuple[Tensor, ...]]:
    (logits, labels, teacher_logits, ids, logprobs, row_temperature, *others), options = saved_rows(ctx)
    transform = ctx.teacher_transform._replace(row_temperature=row_temperature)
    teacher = TeacherRows(teacher_logits, ids, logprobs, transform)
    return Pair(logits, teacher, labels, ctx.spec), options, tuple(others)


class DivergenceFunction(torch.autograd.Function):
    """Differentiable divergences of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: TeacherRows,
        labels: Tensor,
        spec: DivergenceSpec,
        options: RowOptions,
        inplace: bool,
    ) -> Tensor:
        pair = Pair(logits, teacher, labels, spec)
        result = divergence_forward(pair, options)
        _save(ctx, pair, options, *result, inplace=inplace)
        return result.divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 6
        nothing = (None,) * 5
        pair, options, known = _saved(ctx)
        if not overwritten(ctx, pair.logits):
            return (divergence_backward(pair, options, PairStats(*known), grad), *nothing)
        divergence_backward_(*pair, options, PairStats(*known), grad)
        return (pair.logits, *nothing)


class KnownDivergenceFunction(torch.autograd.Function):
    """The sum of shares times divergences, and the divergences.

    The forward also computes the gradient for an upstream gradient of 1. The first backward returns it; later
    ones (``retain_graph``) recompute it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: TeacherRows,
        labels: Tensor,
        spec: DivergenceSpec,
        options: RowOptions,
        shares: Tensor,
    ) -> tuple[Tensor, Tensor]:
        pair = Pair(logits, teacher, labels, spec)
        result = divergence_and_grad(pair, options, shares)
        ctx.grad_logits = result.grad_logits
        _save(ctx, pair, options, shares)
        ctx.mark_non_differentiable(result.divergences)
        return summed(result.divergences, shares), result.divergences

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 6
        pair, options, (shares,) = _saved(ctx)
        ready, ctx.grad_logits = ctx.grad_logits, None
        if ready is None:
            # the same operator, for bitwise identical results
            ready = divergence_and_grad(pair, options, shares).grad_logits
        scale_(ready, grad, options.backend)
        return (ready, *(None,) * 5)
