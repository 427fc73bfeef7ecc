"""Divergence of a student's rows of logits from a teacher's and its gradient, with one program per row. For
the formulas see ``core.divergences``.

Both rows are read for their log-sum-exps, and again, from the cache, for the divergence. Reverse KL and
Jensen-Shannon read them once more for the gradient, which needs the sum over the whole row. With known
statistics a backward reads once.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import (
    aligned_width,
    element,
    is_kept,
    load_columns,
    row_pointer,
    store_zeros,
)
from gspo_kernels.backends.triton.launch import (
    RowConstants,
    Tile,
    is_aligned,
    launch,
    row_numbers,
    slopes_of,
    strides,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.rows import (
    add_hi_lo,
    combine_threads,
    exp_flushed,
    log1p_unit,
    lowest,
    row_label,
    row_slopes,
    split_hi_lo,
    store_gradient,
    transformed,
)
from gspo_kernels.core.types import Normalizers, PairStats, RowPair, allocate_pair_stats

# With four numbers per lane and eight lanes a thread takes 62 to 72 registers: seven programs share an NVIDIA
# multiprocessor.
_TILES = {2: Tile(1024, 4), 4: Tile(1024, 4), 8: Tile(512, 4)}


@triton.jit
def _load(row, start, lanes, width, slopes, mask, ROW: tl.constexpr):
    """Load a block's transformed logits, -inf beyond the width and where masked, and the softcap's slope."""
    raw = load_columns(row, start, lanes, width, True, "evict_last")
    z, tanh_slope = transformed(raw, slopes, ROW)
    inside = start + lanes < width
    if mask is not None:
        inside = inside & is_kept(mask, start + lanes, width)
    return tl.where(inside, z, -float("inf")), tanh_slope


@triton.jit
def _add_block(peak, total, z, PLATFORM: tl.constexpr):
    """Add a block to each lane's running maximum and sum of exponentials."""
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
    """Return log(p / m) and log(q / m) from x = log(beta q) - log((1 - beta) p)."""
    log_odds, log_teacher, log_student = mixture
    x = (log_q - log_p) + log_odds
    above = tl.where(x > 0, x, 0.0)
    below = tl.where(x > 0, 0.0, x)
    log_sum = log1p_unit(exp_flushed(below - above, PLATFORM))
    return (-log_student - above) - log_sum, (below - log_teacher) - log_sum


@typed_kernel
def divergence_kernel(
    logits_ptr, labels_ptr, temperature_ptr, kept_ptr, teacher_logits_ptr, teacher_temperature_ptr,
    lse_ptr, teacher_lse_ptr, divergences_ptr, centers_ptr, grad_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    teacher_slope: tl.float64, teacher_inner: tl.float64, teacher_outer: tl.float64,
    teacher_b: tl.int64, teacher_t: tl.int64,
    teacher_temperature_b: tl.int64, teacher_temperature_t: tl.int64,
    grad_b: tl.int64, grad_t: tl.int64, out_b: tl.int64, out_t: tl.int64,
    beta: tl.float64, log_odds: tl.float64, log_beta: tl.float64, log_rest: tl.float64,
    ROW: tl.constexpr, TEACHER: tl.constexpr, KIND: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Compute one row's divergence and, if there is an ``out``, its gradient.

    Args:
        log_odds, log_beta, log_rest: of ``beta``; the last is log(1 - beta).
        ROW, TEACHER: ``RowConstants`` of both sides.
        KIND: "forward", "reverse" or "mixture".
        KNOWN: which statistics are known already: "nothing", "normalizers" or "all".
    """
    STATS: tl.constexpr = ROW.STATS
    LOGITS: tl.constexpr = logits_ptr.dtype.element_ty
    n = tl.program_id(0)
    b, t, _label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, STATS)
    teacher_slopes = row_slopes(
        teacher_slope, teacher_inner, teacher_outer, teacher_temperature_ptr, b, t,
        teacher_temperature_b, teacher_temperature_t, STATS,
    )  # fmt: skip
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
    other = row_pointer(teacher_logits_ptr, b, t, teacher_b, teacher_t, ROW.ALIGNED)
    lanes = tl.arange(0, ROW.BLOCK)
    width = tl.where(counted, aligned_width(V, ROW.ALIGNED), 0)
    if KNOWN == "nothing":
        peak = tl.zeros([ROW.BLOCK], STATS) + lowest(STATS)
        total = tl.zeros([ROW.BLOCK], STATS)
        other_peak = peak
        other_total = total
        for start in range(0, width, ROW.BLOCK):
            z, _slope = _load(row, start, lanes, width, slopes, mask, ROW)
            peak, total = _add_block(peak, total, z, ROW.PLATFORM)
            z, _slope = _load(other, start, lanes, width, teacher_slopes, mask, TEACHER)
            other_peak, other_total = _add_block(other_peak, other_total, z, ROW.PLATFORM)
        zero = tl.zeros([], STATS)
        no_label = counted & False
        _logp, lse_hi, lse_lo, _ = combine_threads(peak, total, total, zero, no_label, False, STATS)
        _logp, other_hi, other_lo, _ = combine_threads(
            other_peak, other_total, other_total, zero, no_label, False, STATS
        )
        tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
        lse = add_hi_lo(other_hi, other_lo, tl.float64)
        tl.store(teacher_lse_ptr + n, tl.where(counted, lse, 0.0))
    else:
        lse_hi, lse_lo = split_hi_lo(tl.load(lse_ptr + n), STATS)
        other_hi, other_lo = split_hi_lo(tl.load(teacher_lse_ptr + n), STATS)
    finite = _is_finite(lse_hi + lse_lo) & _is_finite(other_hi + other_lo)

    share = tl.full([], beta, STATS)
    logs = (tl.full([], log_odds, STATS), tl.full([], log_beta, STATS), tl.full([], log_rest, STATS))
    coefficient = tl.full([], 0.0, STATS)
    out_row = row
    if out_ptr is not None:
        out_row = row_pointer(out_ptr, b, t, out_b, out_t, ROW.ALIGNED)
        coefficient = tl.load(element(grad_ptr, b, t, grad_b, grad_t)).to(STATS)
        coefficient = tl.where(counted, coefficient, 0.0)
    written = tl.where(coefficient != 0, width, 0)
    if ROW.SCALED != 0 or ROW.SOFTCAP:
        coefficient = coefficient * (slopes[0][0] + slopes[0][1])
    # The gradient of a row without a softmax is NaN, unless its coefficient is 0.
    coefficient = tl.where(finite | (coefficient == 0), coefficient, float("nan"))
    WRITES_AT_ONCE: tl.constexpr = (KIND == "forward") and (out_ptr is not None)
    value = tl.zeros([ROW.BLOCK], STATS)
    to_mixture = tl.zeros([ROW.BLOCK], STATS)
    if WRITES_AT_ONCE:
        # no thread may overwrite what another still reads for the log-sum-exps
        tl.debug_barrier()
    if WRITES_AT_ONCE or KNOWN != "all":
        for start in range(0, written if KNOWN == "all" else width, ROW.BLOCK):
            z, tanh_slope = _load(row, start, lanes, width, slopes, mask, ROW)
            log_p = (z - lse_hi) - lse_lo
            z, _slope = _load(other, start, lanes, width, teacher_slopes, mask, TEACHER)
            log_q = (z - other_hi) - other_lo
            p = exp_flushed(log_p, ROW.PLATFORM)
            q = exp_flushed(log_q, ROW.PLATFORM)
            if KIND == "forward":
                value += _relative_entropy(q, log_q, p, log_p)
            elif KIND == "reverse":
                value += _relative_entropy(p, log_p, q, log_q)
            else:
                student_part, teacher_part = _to_mixture(log_p, log_q, logs, ROW.PLATFORM)
                student_part = tl.where(p == 0, 0.0, p * student_part)
                teacher_part = tl.where(q == 0, 0.0, q * teacher_part)
                to_mixture += student_part
                value += (1.0 - share) * student_part + share * teacher_part
            if WRITES_AT_ONCE:
                grad = coefficient * (p - q) * tanh_slope
                store_gradient(grad, out_row, start, lanes, written, mask, LOGITS, "", ROW)
    if KNOWN == "all":
        divergence = tl.load(divergences_ptr + n)
        center = tl.load(centers_ptr + n)
    else:
        divergence = tl.sum(value, axis=0)
        divergence = tl.where(finite | (width == 0), divergence, float("nan"))
        center = divergence
        if KIND == "forward":
            center = tl.zeros_like(divergence)
        elif KIND == "mixture":
            center = tl.where(finite | (width == 0), tl.sum(to_mixture, axis=0), float("nan"))
        tl.store(divergences_ptr + n, divergence)
        tl.store(centers_ptr + n, center)
    if out_ptr is not None:
        if KIND != "forward":
            tl.debug_barrier()
            mean_slope = center if KIND == "reverse" else (1.0 - share) * center
            # The gradient of an infinite divergence is undefined.
            coefficient = tl.where(_is_finite(divergence) | (coefficient == 0), coefficient, float("nan"))
            for start in range(0, written, ROW.BLOCK):
                z, tanh_slope = _load(row, start, lanes, width, slopes, mask, ROW)
                log_p = (z - lse_hi) - lse_lo
                z, _slope = _load(other, start, lanes, width, teacher_slopes, mask, TEACHER)
                log_q = (z - other_hi) - other_lo
                p = exp_flushed(log_p, ROW.PLATFORM)
                if KIND == "reverse":
                    to_row = log_p - log_q
                else:
                    to_row, _to_teacher = _to_mixture(log_p, log_q, logs, ROW.PLATFORM)
                    to_row = (1.0 - share) * to_row
                grad = coefficient * tl.where(p == 0, 0.0, p * (to_row - mean_slope)) * tanh_slope
                store_gradient(grad, out_row, start, lanes, written, mask, LOGITS, "", ROW)
        store_zeros(out_row, 0, lanes, tl.where(written != 0, 0, V), "")


def divergence(
    rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
) -> PairStats:
    """See ``protocol.RowBackend.divergence``; raises as ``logprobs_backward``."""
    logits, teacher_logits, labels, transform, teacher_transform, beta, ignore_index = rows
    logits, teacher_logits = with_contiguous_rows(logits), with_contiguous_rows(teacher_logits)
    B, T, _ = logits.shape
    stats = allocate_pair_stats(logits, known)
    tensors = (logits, teacher_logits) if out is None else (logits, teacher_logits, out)
    mixed = 0 < beta < 1
    tile = without_spills(_TILES[max(each.element_size() for each in tensors)], mixed)
    logs = (math.log(beta) - math.log1p(-beta), math.log(beta), math.log1p(-beta)) if mixed else (0.0,) * 3
    aligned = is_aligned(*tensors)
    student = RowConstants.of(logits, transform, tile, out)
    teacher = RowConstants.of(teacher_logits, teacher_transform, tile)
    launch(
        divergence_kernel, B * T, logits.device, tile,
        logits, labels, transform.row_temperature, transform.kept,
        teacher_logits, teacher_transform.row_temperature, *stats, grad, out,
        *row_numbers(logits, labels, transform, ignore_index), *slopes_of(teacher_transform),
        *strides(teacher_logits, teacher_transform.row_temperature, grad, out), beta, *logs,
        ROW=student._replace(ALIGNED=aligned),
        TEACHER=teacher._replace(STATS=student.STATS, ALIGNED=aligned),
        KIND="mixture" if mixed else "reverse" if beta else "forward",
        KNOWN=("nothing", "normalizers", "all")[(known is not None) + isinstance(known, PairStats)],
    )  # fmt: skip
    return stats
