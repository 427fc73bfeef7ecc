"""Operators over logits for divergences of a student's rows from a teacher's and their gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.values import check_temperature
from gspo_kernels.core.exact import exact, exact_dtype, exact_sum
from gspo_kernels.core.memory import used_memory
from gspo_kernels.core.operators import inplace_operator, operator
from gspo_kernels.core.types import PairStats, RowOptions, pair_dtypes, stats_dtype
from gspo_kernels.logits.logprobs import check_rows, overwritten, save_rows, saved_rows, scale_
from gspo_kernels.logits.pairs import DivergenceSpec, Pair, TeacherRows


def summed(divergences: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of divergences times shares; divergences with a share of 0 may be NaN."""
    counted = torch.where(shares != 0, exact(divergences), 0.0).mul(shares)
    return exact_sum(counted.flatten()).to(divergences.dtype)


def _checked(pair: Pair, options: RowOptions) -> None:
    check_rows(pair.labels, pair.logits.shape[-1], options)
    of_teacher = pair.teacher.transform.row_temperature
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
    out = used_memory(pair.logits.shape, pair.logits.dtype, pair.logits.device)
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
    out = used_memory(pair.logits.shape, pair.logits.dtype, pair.logits.device)
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
