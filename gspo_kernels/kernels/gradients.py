"""Gradients of logit rows, given their statistics, or along with them for known coefficients.

One program owns one row. Statistics are contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import (
    BACKWARD,
    FOLD_AND_GRAD,
    Slopes,
    is_aligned,
    launch,
    narrows_in_place,
    platform,
    row_kernel,
    stats_type,
)
from gspo_kernels.kernels.rows import (
    element,
    exp_flushed,
    fold_row,
    joined,
    load_columns,
    narrowed,
    one_minus_exp,
    parted,
    readable_width,
    row_pointer,
    row_slopes,
    transformed,
)
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

_LOG_FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""Stands in for log 0, so that 0 log 0 is 0."""


@triton.jit
def _write_gradient(
    row,
    out_row,
    label,
    width,
    idle_width,
    stride_v,
    logp,
    base,
    rest,
    grad_logp,
    entropy,
    grad_entropy,
    slopes,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Read ``width`` columns of a row and write their gradient; write zeros to ``idle_width`` columns.

    dlogp/dz_v = onehot_v - p_v and dH/dz_v = -p_v (log p_v + H). At the label both start from its own
    log-prob, because 1 - p(label) taken from exp(z - lse) would be all rounding where p(label) is close to 1.
    """
    lanes = tl.arange(0, BLOCK)
    if SCALED or SOFTCAP:
        slope = slopes[0][0] + slopes[0][1]
        grad_logp *= slope
        grad_entropy *= slope
    at_label = grad_logp * one_minus_exp(logp, STATS, PLATFORM)
    if ENTROPY:
        at_label -= grad_entropy * tl.exp(logp) * (tl.maximum(logp, _LOG_FLOOR) + entropy)
    ahead = load_columns(row, 0, lanes, width, stride_v, UNIT_STRIDE, True, "evict_first")
    for start in range(0, width, BLOCK):
        raw = ahead
        columns = start + lanes
        # This load stands before the store, across which the compiler can't move it: out may be the logits.
        ahead = load_columns(row, start + BLOCK, lanes, width, stride_v, UNIT_STRIDE, True, "evict_first")
        z, bend = transformed(raw, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
        log_p = (z - base) - rest
        weight = -grad_logp
        if ENTROPY:
            weight -= grad_entropy * (tl.maximum(log_p, _LOG_FLOOR) + entropy)
        grad = tl.where(columns == label, at_label, exp_flushed(log_p, PLATFORM) * weight)
        if SOFTCAP:
            grad = grad * bend
        grad = narrowed(grad, out_row.dtype.element_ty, PLATFORM)
        if NARROWS_IN_PLACE:
            # Block k of the gradient covers logits of block 0 or of blocks before k. Another thread may not
            # have read them yet.
            tl.debug_barrier()
        tl.store(out_row + columns, grad, mask=columns < width, eviction_policy="evict_first")
    for start in range(0, idle_width, BLOCK):
        columns = start + lanes
        zeros = tl.zeros([BLOCK], out_row.dtype.element_ty)
        tl.store(out_row + columns, zeros, mask=columns < idle_width, eviction_policy="evict_first")


@row_kernel
def logprobs_backward_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    grad_scale_ptr,
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
    grad_logprobs_stride_b: tl.int64,
    grad_logprobs_stride_t: tl.int64,
    grad_entropy_stride_b: tl.int64,
    grad_entropy_stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row's gradient."""
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    labelled = (label >= 0) & (label < V)
    scale = tl.full([], 1.0, STATS)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(STATS)
    grad_logp = tl.load(element(grad_logprobs_ptr, b, t, grad_logprobs_stride_b, grad_logprobs_stride_t))
    # Without a label in range the log-prob is NaN and depends on no logit.
    grad_logp = tl.where(labelled, grad_logp.to(STATS) * scale, 0.0)
    logp = tl.load(logprobs_ptr + n)
    base, rest = parted(tl.load(lse_ptr + n), STATS)
    active = counted & (grad_logp != 0)
    entropy = logp
    grad_entropy = grad_logp
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + n)
        grad_entropy = tl.load(element(grad_entropy_ptr, b, t, grad_entropy_stride_b, grad_entropy_stride_t))
        grad_entropy = grad_entropy.to(STATS) * scale
        active = counted & ((grad_logp != 0) | (grad_entropy != 0))
    slopes = row_slopes(
        (slope, inner, outer), row_temperature_ptr, b, t, temperature_stride_b, temperature_stride_t, STATS
    )
    _write_gradient(
        row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ALIGNED),
        row_pointer(out_ptr, b, t, out_stride_b, out_stride_t, ALIGNED),
        tl.where(labelled, label, -1).to(tl.int32),
        readable_width(active, V, ALIGNED),
        readable_width(active == 0, V, ALIGNED),
        logits_stride_v,
        logp,
        base,
        rest,
        grad_logp,
        entropy,
        grad_entropy,
        slopes,
        STATS,
        SCALED,
        SOFTCAP,
        grad_entropy_ptr is not None,
        UNIT_STRIDE,
        NARROWS_IN_PLACE,
        BLOCK,
        PLATFORM,
    )


def logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    stats: RowStats,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_scale: Tensor | None,
    transform: LogitTransform,
    *,
    ignore_index: int,
    out: Tensor,
) -> None:
    """See ``ops.backends.RowBackend.logprobs_backward``.

    ``out`` may also be narrower values in the memory of the logits, each row where its logits begin.

    Raises:
        ValueError: ``out`` overlaps the logits in any other way.
    """
    B, T, V = logits.shape
    if V == 0:
        return
    slopes = Slopes.of(transform)
    tile = BACKWARD[max(logits.element_size(), out.element_size())]
    launch(
        logprobs_backward_kernel,
        B * T,
        logits.device,
        tile,
        logits,
        labels,
        slopes.row_temperature,
        stats.logprobs.contiguous(),
        stats.lse.contiguous(),
        None if grad_entropy is None or stats.entropy is None else stats.entropy.contiguous(),
        grad_logprobs,
        grad_entropy,
        grad_scale,
        out,
        T,
        V,
        ignore_index,
        slopes.slope,
        slopes.inner,
        slopes.outer,
        *logits.stride(),
        *labels.stride(),
        slopes.stride_b,
        slopes.stride_t,
        *grad_logprobs.stride(),
        *((0, 0) if grad_entropy is None else grad_entropy.stride()),
        *out.stride()[:2],
        STATS=stats_type(logits.dtype),
        SCALED=slopes.scaled,
        SOFTCAP=slopes.softcap,
        UNIT_STRIDE=logits.stride(2) == 1,
        ALIGNED=is_aligned(logits) and is_aligned(out),
        NARROWS_IN_PLACE=narrows_in_place(logits, out),
        BLOCK=tile.block,
        PLATFORM=platform(),
    )


@row_kernel
def logprobs_and_grad_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    coefficients_ptr,
    logprobs_ptr,
    lse_ptr,
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
    coefficients_stride_b: tl.int64,
    coefficients_stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row's statistics, then its gradient, for which the row is still in the cache."""
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    labelled = counted & (label >= 0) & (label < V)
    coefficient = tl.load(element(coefficients_ptr, b, t, coefficients_stride_b, coefficients_stride_t))
    coefficient = tl.where(labelled, coefficient.to(STATS), 0.0)
    slopes = row_slopes(
        (slope, inner, outer), row_temperature_ptr, b, t, temperature_stride_b, temperature_stride_t, STATS
    )
    row = row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ALIGNED)
    logp, base, rest, _ = fold_row(
        row,
        label,
        labelled,
        readable_width(counted, V, ALIGNED),
        logits_stride_v,
        slopes,
        STATS,
        SCALED,
        SOFTCAP,
        False,
        UNIT_STRIDE,
        BLOCK,
        WARPS,
        "evict_last",
        PLATFORM,
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, lse_ptr.dtype.element_ty), 0.0))
    # Where out is the logits, no thread may overwrite what another still folds.
    tl.debug_barrier()
    _write_gradient(
        row,
        row_pointer(out_ptr, b, t, out_stride_b, out_stride_t, ALIGNED),
        tl.where(labelled, label, -1).to(tl.int32),
        readable_width(coefficient != 0, V, ALIGNED),
        readable_width(coefficient == 0, V, ALIGNED),
        logits_stride_v,
        logp,
        base,
        rest,
        coefficient,
        logp,
        coefficient,
        slopes,
        STATS,
        SCALED,
        SOFTCAP,
        False,
        UNIT_STRIDE,
        NARROWS_IN_PLACE,
        BLOCK,
        PLATFORM,
    )


def logprobs_and_grad(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    transform: LogitTransform,
    *,
    ignore_index: int,
    out: Tensor,
) -> RowStats:
    """See ``ops.backends.RowBackend.logprobs_and_grad``.

    ``out`` may also be narrower values in the memory of the logits, each row where its logits begin.

    Raises:
        ValueError: ``out`` overlaps the logits in any other way.
    """
    B, T, V = logits.shape
    logprobs = torch.empty(B, T, dtype=stats_dtype(logits.dtype), device=logits.device)
    stats = RowStats(logprobs, torch.empty_like(logprobs, dtype=torch.float64), None)
    slopes = Slopes.of(transform)
    tile = FOLD_AND_GRAD[max(logits.element_size(), out.element_size())]
    launch(
        logprobs_and_grad_kernel,
        B * T,
        logits.device,
        tile,
        logits,
        labels,
        slopes.row_temperature,
        coefficients,
        stats.logprobs,
        stats.lse,
        out,
        T,
        V,
        ignore_index,
        slopes.slope,
        slopes.inner,
        slopes.outer,
        *logits.stride(),
        *labels.stride(),
        slopes.stride_b,
        slopes.stride_t,
        *coefficients.stride(),
        *out.stride()[:2],
        STATS=stats_type(logits.dtype),
        SCALED=slopes.scaled,
        SOFTCAP=slopes.softcap,
        UNIT_STRIDE=logits.stride(2) == 1,
        ALIGNED=is_aligned(logits) and is_aligned(out),
        NARROWS_IN_PLACE=narrows_in_place(logits, out),
        BLOCK=tile.block,
        WARPS=tile.warps,
        PLATFORM=platform(),
    )
    return stats
