"""Gradients of logit rows, given their statistics.

One program owns one row. Statistics are contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import edge_columns, load_columns, row_pointer, whole_vectors
from gspo_kernels.kernels.kept import cut_block, in_row, is_kept, kept_row
from gspo_kernels.kernels.launch import (
    BACKWARD,
    RowArguments,
    launch,
    narrows_in_place,
    row_kernel,
    without_spills,
)
from gspo_kernels.kernels.rows import (
    HUGE,
    element,
    exp_flushed,
    narrowed,
    one_minus_exp,
    parted,
    row_slopes,
    transformed,
    without_payload,
)
from gspo_kernels.types import LogitTransform, RowStats


@triton.jit
def _without_payloads(factor):
    """The same for a factor of two parts."""
    return without_payload(factor[0]), without_payload(factor[1])


@triton.jit
def _gradient(
    raw,
    is_label,
    of_row,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    OUT: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """The gradient of some logits of a row; ``write_gradient`` says which."""
    at_label, base, rest, grad_logp, entropy, grad_entropy, slopes = of_row
    z, bend = transformed(raw, slopes, STATS, SCALED, SOFTCAP, PLATFORM)
    log_p = (z - base) - rest
    weight = -grad_logp
    if ENTROPY:
        weight -= grad_entropy * (tl.maximum(log_p, -HUGE) + entropy)
    grad = tl.where(is_label, at_label, exp_flushed(log_p, PLATFORM) * weight)
    if SOFTCAP:
        grad = grad * bend
    return narrowed(grad, OUT, PLATFORM, raw.dtype == tl.bfloat16 and PLATFORM == "hip")


@triton.jit
def write_gradient(
    row,
    out_row,
    label,
    width,
    active,
    stride_v,
    logp,
    base,
    rest,
    grad_logp,
    entropy,
    grad_entropy,
    slopes,
    kept,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ACCESS: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Read a row and write its gradient; write zeros, and read nothing, where it isn't active.

    dlogp/dz_v = onehot_v - p_v and dH/dz_v = -p_v (log p_v + H). At the label both start from its own
    log-prob, because 1 - p(label) taken from exp(z - lse) would be all rounding where p(label) is close to 1.
    """
    OUT: tl.constexpr = out_row.dtype.element_ty
    BITS: tl.constexpr = row.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // (OUT.primitive_bitwidth if OUT.primitive_bitwidth < BITS else BITS)
    lanes = tl.arange(0, BLOCK)
    if SCALED or SOFTCAP:
        slope = slopes[0][0] + slopes[0][1]
        grad_logp *= slope
        grad_entropy *= slope
    at_label = grad_logp * one_minus_exp(logp, STATS, PLATFORM)
    if ENTROPY:
        at_label -= grad_entropy * tl.exp(logp) * (tl.maximum(logp, -HUGE) + entropy)
    # A row with +inf has NaN for log-probs, also where exp(z - inf) is 0.
    rest = tl.where(base == float("inf"), float("nan"), rest)
    if PLATFORM == "hip":
        # Then a NaN has no longer payload than one among the logits, see ``rows.narrowed``.
        at_label = without_payload(at_label)
        base = without_payload(base)
        rest = without_payload(rest)
        grad_logp = without_payload(grad_logp)
        entropy = without_payload(entropy)
        grad_entropy = without_payload(grad_entropy)
        slopes = (_without_payloads(slopes[0]), _without_payloads(slopes[1]), _without_payloads(slopes[2]))
    of_row = (at_label, base, rest, grad_logp, entropy, grad_entropy, slopes)
    whole_row, first, whole = whole_vectors(row, width, VECTOR, ACCESS)
    whole_out = out_row
    if ACCESS == "shifted":
        whole_out = tl.multiple_of(out_row + first, 16)
        # Before any other store: out may be the logits.
        columns, inside = edge_columns(tl.arange(0, 2 * VECTOR), first, whole, width, VECTOR)
        reads = inside & (columns < tl.where(active, width, 0))
        shown = reads
        if kept is not None:
            shown = reads & is_kept(kept, columns, width)
        edge = tl.load(row + columns, mask=reads, other=-float("inf"))
        edge = _gradient(edge, columns == label, of_row, STATS, SCALED, SOFTCAP, ENTROPY, OUT, PLATFORM)
        edge = tl.where(shown, edge, 0.0).to(OUT)
        if not NARROWS_IN_PLACE:
            tl.store(out_row + columns, edge, mask=inside)
    UNIT: tl.constexpr = 1 if ACCESS == "single" else VECTOR
    read = tl.multiple_of(tl.where(active, whole, 0), UNIT)
    idle = tl.multiple_of(tl.where(active, 0, whole), UNIT)
    ahead = load_columns(whole_row, 0, lanes, read, stride_v, ACCESS, True, "evict_first")
    for start in range(0, read, BLOCK):
        raw = ahead
        # This load stands before the store, across which the compiler can't move it: out may be the logits.
        ahead = load_columns(whole_row, start + BLOCK, lanes, read, stride_v, ACCESS, True, "evict_first")
        is_label = start + lanes == label - first
        grad = _gradient(raw, is_label, of_row, STATS, SCALED, SOFTCAP, ENTROPY, OUT, PLATFORM)
        grad = cut_block(grad, first + start, first + read, kept, VECTOR, ACCESS)
        if NARROWS_IN_PLACE:
            # Block k of the gradient covers logits of blocks up to k, which others may not have read yet.
            tl.debug_barrier()
        tl.store(whole_out + (start + lanes), grad, mask=start + lanes < read, eviction_policy="evict_first")
    zeros = tl.zeros([BLOCK], OUT)
    for start in range(0, idle, BLOCK):
        tl.store(whole_out + (start + lanes), zeros, mask=start + lanes < idle, eviction_policy="evict_first")
    if ACCESS == "shifted" and NARROWS_IN_PLACE:
        tl.debug_barrier()
        tl.store(out_row + columns, edge, mask=inside)


@row_kernel
def logprobs_backward_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    grad_scale_ptr,
    rows_ptr,
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
    grad_logprobs_stride_b: tl.int64,
    grad_logprobs_stride_t: tl.int64,
    grad_entropy_stride_b: tl.int64,
    grad_entropy_stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SHARDED: tl.constexpr,
    ACCESS: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row's gradient, or that of the one that ``rows`` names."""
    n = tl.program_id(0)
    out_b = n // T
    out_t = n - out_b * T
    if rows_ptr is not None:
        n = tl.load(rows_ptr + n)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    kept = kept_ptr
    if kept_ptr is not None:
        kept = kept_row(kept_ptr, b, t, kept_stride_b, kept_stride_t)
    labelled = in_row(label, V, kept)
    scale = tl.full([], 1.0, STATS)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(STATS)
    grad_logp = tl.load(element(grad_logprobs_ptr, b, t, grad_logprobs_stride_b, grad_logprobs_stride_t))
    grad_logp = grad_logp.to(STATS) * scale
    if not SHARDED:
        # Without a label in range the log-prob is NaN and depends on no logit.
        grad_logp = tl.where(labelled, grad_logp, 0.0)
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
    write_gradient(
        row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ACCESS),
        row_pointer(out_ptr, out_b, out_t, out_stride_b, out_stride_t, ACCESS),
        tl.where(labelled, label, -1).to(tl.int32),
        V,
        active,
        logits_stride_v,
        logp,
        base,
        rest,
        grad_logp,
        entropy,
        grad_entropy,
        slopes,
        kept,
        STATS,
        SCALED,
        SOFTCAP,
        grad_entropy_ptr is not None,
        ACCESS,
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
    sharded: bool = False,
    rows: Tensor | None = None,
) -> None:
    """See ``ops.backends.RowBackend.logprobs_backward``, and for ``rows`` ``HiddenBackend.gradient_of_rows``.

    Raises:
        ValueError: ``out`` overlaps the logits in any other way.
    """
    B, T, V = logits.shape
    if V == 0:
        return
    tile = BACKWARD[max(logits.element_size(), out.element_size())]
    tile = without_spills(tile, transform.softcap > 0)
    arguments = RowArguments.of(logits, labels, transform, tile, out)
    launch(
        logprobs_backward_kernel,
        B * T if rows is None else len(rows),
        logits.device,
        tile,
        *arguments.tensors,
        stats.logprobs.contiguous(),
        stats.lse.contiguous(),
        None if grad_entropy is None or stats.entropy is None else stats.entropy.contiguous(),
        grad_logprobs,
        grad_entropy,
        grad_scale,
        rows,
        out,
        T,
        V,
        ignore_index,
        *arguments.slopes,
        *arguments.strides,
        *grad_logprobs.stride(),
        *((0, 0) if grad_entropy is None else grad_entropy.stride()),
        *out.stride()[:2],
        SHARDED=sharded,
        **arguments.constants,
        NARROWS_IN_PLACE=narrows_in_place(logits, out),
    )


def gradient_of_rows(
    logits: Tensor,
    labels: Tensor,
    stats: RowStats,
    grads: tuple[Tensor, Tensor | None],
    transform: LogitTransform,
    rows: Tensor,
    *,
    ignore_index: int,
    out: Tensor,
) -> None:
    """See ``ops.backends.HiddenBackend.gradient_of_rows``; raises as ``logprobs_backward``."""
    logprobs_backward(
        logits, labels, stats, *grads, None, transform, ignore_index=ignore_index, out=out, rows=rows
    )
