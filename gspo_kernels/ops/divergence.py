"""Operators over logits: divergences of a student's rows from a teacher's, and the gradient of their weighted
sum.

Over the whole vocabulary both rows are read side by side. Over K ids each side has their log-probs and what
they leave (``ops.selected``), and what is done with these K + 1 numbers is done in fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import bits, divergences
from gspo_kernels.ops.backends import load
from gspo_kernels.ops.library import inplace_operator, operator
from gspo_kernels.ops.logprobs import save_rows, saved_rows, scale_
from gspo_kernels.ops.memory import new_memory
from gspo_kernels.ops.selected import SelectedGradients, first_places, score, write_gradient
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import LogitTransform, RowOptions, Shard, stats_dtype

LEAST_LOG_MASS = -(2.0**-24)
"""The log of the most that log-probs which an engine has rounded may be said to leave nothing of."""
_WHOLE = Shard()
"""All columns are here."""


class DivergenceForm(NamedTuple):
    """Which divergence.

    Attributes:
        beta: as ``divergences`` has it.
        top_k: of how many ids, 0: all.
        top_k_of_student: which side's most likely ids these are.
        tail: whether what the ids leave is a column beside them; otherwise both sides are normalised over the
            ids.
    """

    beta: float
    top_k: int
    top_k_of_student: bool
    tail: bool


class TeacherRows(NamedTuple):
    """What there is of a teacher: logits, or the log-probs of some ids.

    Attributes:
        logits: [B, T, V], or None.
        ids: int64 [B, T, K], ``bits.NO_ID`` where there are fewer, or None.
        logprobs: like the ids, over the whole vocabulary.
        logit_scale, softcap, temperature, row_temperature: of its ``LogitTransform``.
    """

    logits: Tensor | None
    ids: Tensor | None
    logprobs: Tensor | None
    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    row_temperature: Tensor | None = None

    def at(self, where: slice | Tensor, logits: Tensor | None) -> TeacherRows:
        """What there is of some of the rows, [1, n], beside their logits [n, V]."""

        def here(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.flatten(0, 1)[where].unsqueeze(0)

        return self._replace(
            logits=None if logits is None else logits.unsqueeze(0),
            ids=here(self.ids),
            logprobs=here(self.logprobs),
            row_temperature=here(self.row_temperature),
        )

    @property
    def transform(self) -> LogitTransform:
        """From its raw logits to z."""
        return LogitTransform(self.logit_scale, self.softcap, self.temperature, self.row_temperature)


def evaluate(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    transform: LogitTransform,
    backend: str,
    form: DivergenceForm,
    coefficients: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """See ``RowBackend.divergence``; rows whose label is negative are ignored."""
    labels = torch.where(labels < 0, bits.NO_ID, 0)
    if teacher.ids is None and not form.top_k:
        assert teacher.logits is not None
        return load(backend).divergence(
            logits,
            teacher.logits,
            labels,
            transform,
            teacher.transform,
            form.beta,
            ignore_index=bits.NO_ID,
            coefficients=coefficients,
            out=out,
        )
    return _over_ids(logits, teacher, labels == bits.NO_ID, transform, backend, form, coefficients, out)


def _over_ids(
    logits: Tensor,
    teacher: TeacherRows,
    ignored: Tensor,
    transform: LogitTransform,
    backend: str,
    form: DivergenceForm,
    coefficients: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    within = not form.tail
    ids, log_q = teacher.ids, teacher.logprobs
    if ids is None:
        assert teacher.logits is not None
        leading, scale = (
            (logits, transform.logit_scale)
            if form.top_k_of_student
            else (teacher.logits, teacher.logit_scale)
        )
        ids = leading.topk(form.top_k, largest=scale >= 0, sorted=False).indices
    ids = ids.masked_fill(ignored.unsqueeze(-1), bits.NO_ID)
    counts = first_places(ids, logits.shape[-1])
    if log_q is None:
        assert teacher.logits is not None
        of_teacher = score(teacher.logits, ids, backend, teacher.transform, within, _WHOLE)
        log_q = of_teacher.logprobs.to(torch.float64)
        left = of_teacher.tail.to(torch.float64)
    else:
        log_q = torch.where(counts, log_q.to(torch.float64), -torch.inf)
        mass = log_q.logsumexp(-1)
        left = torch.log(-torch.expm1(mass.clamp(max=LEAST_LOG_MASS)))
        if within:
            log_q = log_q - mass.unsqueeze(-1)
    rows = score(logits, ids, backend, transform, within, _WHOLE)
    log_p = rows.logprobs.to(torch.float64)
    if form.tail:
        log_p = torch.cat([log_p, rows.tail.to(torch.float64).unsqueeze(-1)], -1)
        log_q = torch.cat([log_q, left.unsqueeze(-1)], -1)
        counts = torch.cat([counts, counts.any(-1, keepdim=True)], -1)
    both = (log_p, log_q)
    log_p, log_q = (torch.where(counts, each, -torch.inf) for each in both)
    value, slope = divergences.of_columns(log_p, log_q, form.beta)
    broken = torch.stack([(each.isnan() & counts).any(-1) for each in both]).any(0)
    found = torch.where(counts, value, 0.0).sum(-1).masked_fill(broken, torch.nan)
    if out is not None and coefficients is not None:
        idle = (coefficients == 0).unsqueeze(-1)
        weighted = torch.where(idle | ~counts, 0.0, slope * coefficients.to(torch.float64).unsqueeze(-1))
        lost = broken if form.beta == 0 else ~found.isfinite()
        weighted = torch.where(lost.unsqueeze(-1) & counts & ~idle, torch.nan, weighted)
        K = ids.shape[-1]
        grads = SelectedGradients(weighted[..., :K], weighted[..., K] if form.tail else None)
        write_gradient(out, logits, ids, rows, grads, backend, transform, within, _WHOLE)
    return found.to(stats_dtype(logits.dtype))


class Distilled(NamedTuple):
    """The sum of shares times divergences, 0-d, and the divergences [B, T], in the statistics' dtype."""

    loss: Tensor
    divergences: Tensor


def summed(found: Tensor, shares: Tensor) -> Tensor:
    """The loss, in fp64; what has no share may be anything."""
    return torch.where(shares != 0, found.to(torch.float64), 0.0).mul(shares).sum().to(found.dtype)


@operator
def divergence_forward(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
) -> Distilled:
    """Of logits [B, T, V], with shares [B, T] in fp64."""
    check_temperature(options.row_temperature)
    check_temperature(teacher.row_temperature)
    found = evaluate(logits, teacher, labels, options.transform, options.backend, form, None, None)
    return Distilled(summed(found, shares), found)


@divergence_forward.register_fake
def _(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
) -> Distilled:
    kind = stats_dtype(logits.dtype)
    return Distilled(labels.new_empty((), dtype=kind), labels.new_empty(labels.shape, dtype=kind))


class DistilledRows(NamedTuple):
    """``Distilled``, and the gradient of the loss by the student's logits, in their dtype."""

    loss: Tensor
    divergences: Tensor
    grad_logits: Tensor


@operator
def divergence_and_grad(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
    upstream: Tensor | None,
) -> DistilledRows:
    """Both in one pass, the gradient times ``upstream``, 0-d."""
    check_temperature(options.row_temperature)
    check_temperature(teacher.row_temperature)
    out = new_memory(logits.shape, logits.dtype, logits.device)
    scaled = shares if upstream is None else shares * upstream
    found = evaluate(logits, teacher, labels, options.transform, options.backend, form, scaled, out)
    return DistilledRows(summed(found, shares), found, out)


@divergence_and_grad.register_fake
def _(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
    upstream: Tensor | None,
) -> DistilledRows:
    kind = stats_dtype(logits.dtype)
    values = labels.new_empty((), dtype=kind), labels.new_empty(labels.shape, dtype=kind)
    return DistilledRows(*values, logits.new_empty(logits.shape))


@inplace_operator
def divergence_backward_(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
    upstream: Tensor,
) -> None:
    """The gradient alone, written over the logits."""
    scaled = shares * upstream
    evaluate(logits, teacher, labels, options.transform, options.backend, form, scaled, logits)


@divergence_backward_.register_fake
def _(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor,
    options: RowOptions,
    form: DivergenceForm,
    shares: Tensor,
    upstream: Tensor,
) -> None:
    return None


class DivergenceFunction(torch.autograd.Function):
    """Loss and divergences of logits.

    Where ``known``, the forward has the gradient of upstream 1 already, and the first backward gives it away;
    later ones (``retain_graph``) compute it anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: TeacherRows,
        labels: Tensor,
        options: RowOptions,
        form: DivergenceForm,
        shares: Tensor,
        inplace: bool,
        known: bool,
    ) -> tuple[Tensor, Tensor]:
        arguments = (logits, teacher, labels, options, form, shares)
        ctx.grad_logits = None
        if known:
            loss, found, ctx.grad_logits = divergence_and_grad(*arguments, None)
        else:
            loss, found = divergence_forward(*arguments)
        tensors = (teacher.logits, teacher.ids, teacher.logprobs, teacher.row_temperature)
        save_rows(ctx, options, logits, labels, shares, *tensors)
        ctx.form, ctx.inplace = form, inplace
        ctx.teacher = teacher._replace(logits=None, ids=None, logprobs=None, row_temperature=None)
        ctx.mark_non_differentiable(found)
        return loss, found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        (logits, labels, shares, *tensors), options = saved_rows(ctx)
        ready, ctx.grad_logits = ctx.grad_logits, None
        if ready is not None:
            scale_(ready, grad, options.backend)
            return (ready, *(None,) * 7)
        named = dict(zip(("logits", "ids", "logprobs", "row_temperature"), tensors, strict=True))
        arguments = (logits, ctx.teacher._replace(**named), labels, options, ctx.form, shares, grad)
        if not ctx.inplace:
            return (divergence_and_grad(*arguments).grad_logits, *(None,) * 7)
        divergence_backward_(*arguments)
        return (logits, *(None,) * 7)
