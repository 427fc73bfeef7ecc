"""Divergence of a student's rows of logits from a teacher's, and its gradient. One program owns one row of
each.

Both rows are read to fold their log-sum-exps, and again, from the cache, for the divergence; reverse KL and
Jensen-Shannon take one more reading for the gradient, which needs the whole row's sum. What is known already
is not read for: a backward reads once. ``divergences`` has the formulas.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import load_columns, row_pointer
from gspo_kernels.kernels.kept import is_kept, kept_row
from gspo_kernels.kernels.launch import (
    DIVERGENCE,
    RowArguments,
    Slopes,
    access,
    launch,
    narrows_in_place,
    row_kernel,
    without_spills,
)
from gspo_kernels.kernels.rows import (
    combine_lanes,
    element,
    exp_flushed,
    joined,
    log1p_unit,
    lowest,
    narrowed,
    parted,
    row_slopes,
    transformed,
)
from gspo_kernels.types import LogitTransform, Normalizers, PairStats, pair_dtypes, stats_dtype


@triton.jit
def _load(
    row,
    start,
    lanes,
    width,
    stride_v,
    slopes,
    kept,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCESS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Transformed logits of a block, -inf beyond the width and where the mask cuts; the softcap's bend."""
    raw = load_columns(row, start, lanes, width, stride_v, ACCESS, True, "evict_last")
    z, bend = transformed(raw, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
    inside = start + lanes < width
    if kept is not None:
        inside = inside & is_kept(kept, start + lanes, width)
    return tl.where(inside, z, -float("inf")), bend


@triton.jit
def _cut(gradient, columns, width, kept):
    """A gradient, 0 for columns that are cut, whatever their logits and the row's coefficients hold."""
    if kept is not None:
        gradient = tl.where(is_kept(kept, columns, width), gradient, tl.zeros_like(gradient))
    return gradient


@triton.jit
def _fold(peak, total, z, PLATFORM: tl.constexpr):
    """The running maximum and sum of exponentials of each lane, with one more block."""
    top = tl.maximum(peak, z)
    return top, total * exp_flushed(peak - top, PLATFORM) + exp_flushed(z - top, PLATFORM)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _relative_entropy(q, log_q, p, log_p):
    return tl.where(q == 0, p, q * (log_q - log_p) + (p - q))


@triton.jit
def _to_mixture(log_p, log_q, mixture, PLATFORM: tl.constexpr):
    """log(p / m) and log(q / m), by x = log(beta q) - log((1 - beta) p)."""
    log_odds, log_teacher, log_student = mixture
    x = (log_q - log_p) + log_odds
    above = tl.where(x > 0, x, 0.0)
    below = tl.where(x > 0, 0.0, x)
    log_sum = log1p_unit(exp_flushed(below - above, PLATFORM))
    return (-log_student - above) - log_sum, (below - log_teacher) - log_sum


@row_kernel
def divergence_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
    teacher_logits_ptr,
    teacher_temperature_ptr,
    grad_ptr,
    lse_ptr,
    teacher_lse_ptr,
    divergences_ptr,
    centres_ptr,
    out_ptr,
    T: tl.int32,
    V: tl.int32,
    ignore_index: tl.int64,
    slope: tl.float64,
    inner: tl.float64,
    outer: tl.float64,
    logits_stride_b: tl.int64,
    logits_stride_t: tl.int64,
    logits_stride_v: tl.int64,
    labels_stride_b: tl.int64,
    labels_stride_t: tl.int64,
    temperature_stride_b: tl.int64,
    temperature_stride_t: tl.int64,
    kept_stride_b: tl.int64,
    kept_stride_t: tl.int64,
    teacher_slope: tl.float64,
    teacher_inner: tl.float64,
    teacher_outer: tl.float64,
    teacher_logits_stride_b: tl.int64,
    teacher_logits_stride_t: tl.int64,
    teacher_logits_stride_v: tl.int64,
    teacher_temperature_stride_b: tl.int64,
    teacher_temperature_stride_t: tl.int64,
    grad_stride_b: tl.int64,
    grad_stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    beta: tl.float64,
    log_odds: tl.float64,
    log_teacher: tl.float64,
    log_student: tl.float64,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCESS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    KNOWN: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
):
    """One row's divergence, and where there is an ``out`` its gradient. KNOWN says what the statistics hold
    already: "nothing", "normalizers", or "all".
    """
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    kept = kept_ptr
    if kept_ptr is not None:
        kept = kept_row(kept_ptr, b, t, kept_stride_b, kept_stride_t)
    slopes = row_slopes(
        (slope, inner, outer), row_temperature_ptr, b, t, temperature_stride_b, temperature_stride_t, STATS
    )
    teacher_slopes = row_slopes(
        (teacher_slope, teacher_inner, teacher_outer),
        teacher_temperature_ptr,
        b,
        t,
        teacher_temperature_stride_b,
        teacher_temperature_stride_t,
        STATS,
    )
    row = row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ACCESS)
    other = row_pointer(teacher_logits_ptr, b, t, teacher_logits_stride_b, teacher_logits_stride_t, ACCESS)
    lanes = tl.arange(0, BLOCK)
    width = V
    if ACCESS == "aligned":
        # the same number, by an operation that tells the compiler what divides it
        width = width // 16 * 16
    width = tl.where(counted, width, 0)
    if KNOWN == "nothing":
        peak = tl.zeros([BLOCK], STATS) + lowest(STATS)
        total = tl.zeros([BLOCK], STATS)
        other_peak = peak
        other_total = total
        for start in range(0, width, BLOCK):
            z, _ = _load(
                row, start, lanes, width, logits_stride_v, slopes, kept, STATS, SCALED, SOFTCAP, ACCESS,
                PLATFORM,
            )  # fmt: skip
            peak, total = _fold(peak, total, z, PLATFORM)
            z, _ = _load(
                other, start, lanes, width, teacher_logits_stride_v, teacher_slopes, kept, STATS,
                TEACHER_SCALED, TEACHER_SOFTCAP, ACCESS, PLATFORM,
            )  # fmt: skip
            other_peak, other_total = _fold(other_peak, other_total, z, PLATFORM)
        nowhere = tl.zeros([], STATS)
        _logp, base, rest, _entropy = combine_lanes(
            peak, total, total, nowhere, counted & False, STATS, False
        )
        _logp, other_base, other_rest, _entropy = combine_lanes(
            other_peak, other_total, other_total, nowhere, counted & False, STATS, False
        )
        tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, tl.float64), 0.0))
        tl.store(teacher_lse_ptr + n, tl.where(counted, joined(other_base, other_rest, tl.float64), 0.0))
    else:
        base, rest = parted(tl.load(lse_ptr + n), STATS)
        other_base, other_rest = parted(tl.load(teacher_lse_ptr + n), STATS)
    finite = _is_finite(base + rest) & _is_finite(other_base + other_rest)

    OUT: tl.constexpr = STATS if out_ptr is None else out_ptr.dtype.element_ty
    mixture = (
        tl.full([], log_odds, tl.float64).to(STATS),
        tl.full([], log_teacher, tl.float64).to(STATS),
        tl.full([], log_student, tl.float64).to(STATS),
    )
    share = tl.full([], beta, tl.float64).to(STATS)
    coefficient = tl.full([], 0.0, STATS)
    out_row = row
    if out_ptr is not None:
        out_row = row_pointer(out_ptr, b, t, out_stride_b, out_stride_t, ACCESS)
        coefficient = tl.load(element(grad_ptr, b, t, grad_stride_b, grad_stride_t)).to(STATS)
        coefficient = tl.where(counted, coefficient, 0.0)
    written = tl.where(coefficient != 0, width, 0)
    if SCALED or SOFTCAP:
        coefficient = coefficient * (slopes[0][0] + slopes[0][1])
    # A row without a softmax has no gradient.
    coefficient = tl.where(finite | (coefficient == 0), coefficient, float("nan"))
    WRITES_AT_ONCE: tl.constexpr = (KIND == "forward") and (out_ptr is not None)
    value = tl.zeros([BLOCK], STATS)
    to_mixture = tl.zeros([BLOCK], STATS)
    if WRITES_AT_ONCE:
        # no thread may overwrite what another still folds
        tl.debug_barrier()
    if WRITES_AT_ONCE or KNOWN != "all":
        for start in range(0, written if KNOWN == "all" else width, BLOCK):
            z, bend = _load(
                row, start, lanes, width, logits_stride_v, slopes, kept, STATS, SCALED, SOFTCAP, ACCESS,
                PLATFORM,
            )  # fmt: skip
            log_p = (z - base) - rest
            z, _ = _load(
                other, start, lanes, width, teacher_logits_stride_v, teacher_slopes, kept, STATS,
                TEACHER_SCALED, TEACHER_SOFTCAP, ACCESS, PLATFORM,
            )  # fmt: skip
            log_q = (z - other_base) - other_rest
            p = exp_flushed(log_p, PLATFORM)
            q = exp_flushed(log_q, PLATFORM)
            if KIND == "forward":
                value += _relative_entropy(q, log_q, p, log_p)
            elif KIND == "reverse":
                value += _relative_entropy(p, log_p, q, log_q)
            else:
                of_student, of_teacher = _to_mixture(log_p, log_q, mixture, PLATFORM)
                of_student = tl.where(p == 0, 0.0, p * of_student)
                of_teacher = tl.where(q == 0, 0.0, q * of_teacher)
                to_mixture += of_student
                value += (1.0 - share) * of_student + share * of_teacher
            if WRITES_AT_ONCE:
                grad = coefficient * (p - q)
                if SOFTCAP:
                    grad = grad * bend
                grad = _cut(narrowed(grad, OUT, PLATFORM), start + lanes, width, kept)
                if NARROWS_IN_PLACE:
                    # Block k of the gradient covers logits of blocks up to k, which others may not have read
                    # yet.
                    tl.debug_barrier()
                tl.store(out_row + (start + lanes), grad, mask=start + lanes < written)
    if KNOWN == "all":
        found = tl.load(divergences_ptr + n)
        centre = tl.load(centres_ptr + n)
    else:
        found = tl.sum(value, axis=0)
        found = tl.where(finite | (width == 0), found, float("nan"))
        centre = found
        if KIND == "forward":
            centre = tl.zeros_like(found)
        elif KIND == "mixture":
            centre = tl.where(finite | (width == 0), tl.sum(to_mixture, axis=0), float("nan"))
        tl.store(divergences_ptr + n, found)
        tl.store(centres_ptr + n, centre)
    if out_ptr is not None:
        if KIND != "forward":
            tl.debug_barrier()
            whole = centre if KIND == "reverse" else (1.0 - share) * centre
            # A row that has infinitely far to go has no direction.
            coefficient = tl.where(_is_finite(found) | (coefficient == 0), coefficient, float("nan"))
            for start in range(0, written, BLOCK):
                z, bend = _load(
                    row, start, lanes, width, logits_stride_v, slopes, kept, STATS, SCALED, SOFTCAP, ACCESS,
                    PLATFORM,
                )  # fmt: skip
                log_p = (z - base) - rest
                z, _ = _load(
                    other, start, lanes, width, teacher_logits_stride_v, teacher_slopes, kept, STATS,
                    TEACHER_SCALED, TEACHER_SOFTCAP, ACCESS, PLATFORM,
                )  # fmt: skip
                log_q = (z - other_base) - other_rest
                p = exp_flushed(log_p, PLATFORM)
                if KIND == "reverse":
                    far = log_p - log_q
                else:
                    far, _ = _to_mixture(log_p, log_q, mixture, PLATFORM)
                    far = (1.0 - share) * far
                grad = coefficient * tl.where(p == 0, 0.0, p * (far - whole))
                if SOFTCAP:
                    grad = grad * bend
                grad = _cut(narrowed(grad, OUT, PLATFORM), start + lanes, width, kept)
                if NARROWS_IN_PLACE:
                    tl.debug_barrier()
                tl.store(out_row + (start + lanes), grad, mask=start + lanes < written)
        zeros = tl.zeros([BLOCK], OUT)
        for start in range(0, tl.where(written != 0, 0, V), BLOCK):
            tl.store(out_row + (start + lanes), zeros, mask=start + lanes < V)


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    beta: float,
    *,
    ignore_index: int,
    known: Normalizers | PairStats | None,
    grad: Tensor | None,
    out: Tensor | None,
) -> PairStats:
    """See ``ops.backends.RowBackend.divergence``; raises as ``logprobs_backward``."""
    B, T, V = logits.shape
    dtypes = pair_dtypes(stats_dtype(logits.dtype))
    given = () if known is None else known
    found = PairStats(
        *(each.to(dtype).contiguous() for each, dtype in zip(given, dtypes, strict=False)),
        *(torch.empty(B, T, dtype=dtype, device=logits.device) for dtype in dtypes[len(given) :]),
    )
    beside = () if out is None else (out,)
    mixed = 0 < beta < 1
    tile = DIVERGENCE[max(each.element_size() for each in (logits, teacher_logits, *beside))]
    tile = without_spills(tile, mixed)
    rows = RowArguments.of(logits, labels, transform, tile, *beside)
    teacher = Slopes.of(teacher_transform)
    logs = (math.log(beta) - math.log1p(-beta), math.log(beta), math.log1p(-beta)) if mixed else (0.0,) * 3
    # whole vectors or single elements: what begins elsewhere is read in smaller pieces
    every = access(logits, teacher_logits, *beside)
    constants = {**rows.constants, "ACCESS": "aligned" if every == "aligned" else "single"}
    launch(
        divergence_kernel,
        B * T,
        logits.device,
        tile,
        *rows.tensors,
        teacher_logits,
        teacher.row_temperature,
        grad,
        *found,
        out,
        T,
        V,
        ignore_index,
        *rows.slopes,
        *rows.strides,
        teacher.slope,
        teacher.inner,
        teacher.outer,
        *teacher_logits.stride(),
        teacher.stride_b,
        teacher.stride_t,
        *((0, 0) if grad is None else grad.stride()),
        *((0, 0) if out is None else out.stride()[:2]),
        beta,
        *logs,
        **constants,
        TEACHER_SCALED=teacher.scaled,
        TEACHER_SOFTCAP=teacher.softcap,
        KIND="mixture" if mixed else "reverse" if beta else "forward",
        KNOWN=("nothing", "normalizers", "all")[(known is not None) + isinstance(known, PairStats)],
        NARROWS_IN_PLACE=out is not None and narrows_in_place(logits, out),
    )
    return found
