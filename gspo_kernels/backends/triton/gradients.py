"""Gradients of logit rows, from their statistics.

One program owns a part of a row, or the whole row where the gradient narrows the row in place. Statistics are
contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element, load_columns, row_pointer
from gspo_kernels.backends.triton.launch import (
    BACKWARD,
    RowConstants,
    Tile,
    launch,
    row_numbers,
    strides,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.rows import (
    HUGE,
    exp_flushed,
    narrowed,
    one_minus_exp,
    row_label,
    row_slopes,
    split_hi_lo,
    transformed,
)
from gspo_kernels.backends.triton.sampling_mask import in_row, mask_gradient
from gspo_kernels.core.types import LogitRows, RowGradients, RowStats

_PARTS = {2: Tile(4096, 4), 4: Tile(2048, 4), 8: Tile(1024, 4)}
_BLOCKS = 4
"""Blocks of columns in a part of a row. Many small programs leave no multiprocessor idle at the end, and
those that run at a time read and write neighbouring memory."""


@triton.jit
def _gradient(raw, is_label, of_row, slopes, ENTROPY: tl.constexpr, OUT: tl.constexpr, ROW: tl.constexpr):
    """Return the gradient of some logits of a row; ``write_gradient`` has the formula."""
    PLATFORM: tl.constexpr = ROW.PLATFORM
    at_label, lse_hi, lse_lo, grad_logp, entropy, grad_entropy = of_row
    z, tanh_slope = transformed(raw, slopes, ROW)
    log_p = (z - lse_hi) - lse_lo
    weight = -grad_logp
    if ENTROPY:
        weight -= grad_entropy * (tl.maximum(log_p, -HUGE) + entropy)
    grad = tl.where(is_label, at_label, exp_flushed(log_p, PLATFORM) * weight)
    if ROW.SOFTCAP:
        grad = grad * tanh_slope
    return narrowed(grad, OUT, PLATFORM)


@triton.jit
def write_gradient(
    row,
    out_row,
    label,
    width,
    mask,
    slopes,
    active,
    stats,
    grads,
    begin,
    SPAN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROW: tl.constexpr,
):
    """Read a row, or a part of it, and write the gradient; of a row that isn't active read nothing and write
    zeros.

    dlogp/dz_v = onehot_v - p_v and dH/dz_v = -p_v (log p_v + H). At the label both are computed from its
    log-prob, because 1 - exp(z - lse) would be all rounding where p(label) is close to 1.

    Args:
        row, out_row: the addresses of the row's first logit and of that logit's gradient.
        label: int32, -1 if it is no column of the row.
        width: the number of columns.
        mask: the row's sampling mask or None.
        slopes: from ``row_slopes``.
        active: whether the gradient is other than 0.
        stats: (log-prob, log-sum-exp as two numbers, entropy).
        grads: upstream gradients (of the log-prob, of the entropy); without ENTROPY only the first is used.
        begin, SPAN: the part's first column and the number of its columns; None for the whole row.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    logp, lse_hi, lse_lo, entropy = stats
    grad_logp, grad_entropy = grads
    ALIGNED: tl.constexpr = ROW.ALIGNED
    BLOCK: tl.constexpr = ROW.BLOCK
    OUT: tl.constexpr = out_row.dtype.element_ty
    BITS: tl.constexpr = row.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // (OUT.primitive_bitwidth if OUT.primitive_bitwidth < BITS else BITS)
    lanes = tl.arange(0, BLOCK)
    if ROW.SCALED != 0 or ROW.SOFTCAP:
        slope = slopes[0][0] + slopes[0][1]
        grad_logp *= slope
        grad_entropy *= slope
    at_label = grad_logp * one_minus_exp(logp, ROW.STATS, PLATFORM)
    if ENTROPY:
        at_label -= grad_entropy * tl.exp(logp) * (tl.maximum(logp, -HUGE) + entropy)
    # A row with +inf has NaN for log-probs, also where exp(z - inf) is 0.
    lse_lo = tl.where(lse_hi == float("inf"), float("nan"), lse_lo)
    of_row = (at_label, lse_hi, lse_lo, grad_logp, entropy, grad_entropy)
    UNIT: tl.constexpr = VECTOR if ALIGNED else 1
    # For aligned rows the same number, but now the compiler knows that VECTOR divides it.
    end = width // UNIT * UNIT
    if SPAN is not None:
        end = tl.minimum(begin + SPAN, end)
    read = tl.multiple_of(tl.where(active, end, 0), UNIT)
    zeroed = tl.multiple_of(tl.where(active, 0, end), UNIT)
    if SPAN is None:
        ahead = load_columns(row, 0, lanes, read, True, "evict_first")
    for start in range(begin, read, BLOCK):
        if SPAN is None:
            raw = ahead
            # This load stands before the store: out may be the logits, so the compiler can't move it across.
            ahead = load_columns(row, start + BLOCK, lanes, read, True, "evict_first")
        else:
            raw = load_columns(row, start, lanes, read, True, "evict_first")
        grad = _gradient(raw, start + lanes == label, of_row, slopes, ENTROPY, OUT, ROW)
        grad = mask_gradient(grad, start, read, mask, VECTOR, ALIGNED)
        if ROW.NARROWS_IN_PLACE:
            # Block k of the gradient overwrites logits of blocks up to k, which other threads may still read.
            tl.debug_barrier()
        tl.store(out_row + (start + lanes), grad, mask=start + lanes < read, eviction_policy="evict_first")
    zeros = tl.zeros([BLOCK], OUT)
    for start in range(begin, zeroed, BLOCK):
        tl.store(out_row + (start + lanes), zeros, mask=start + lanes < zeroed, eviction_policy="evict_first")


@typed_kernel
def logprobs_backward_kernel(
    logits_ptr, labels_ptr, row_temperature_ptr, kept_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
    grad_logprobs_ptr, grad_entropy_ptr, grad_scale_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    grad_b: tl.int64, grad_t: tl.int64, grad_entropy_b: tl.int64, grad_entropy_t: tl.int64,
    out_b: tl.int64, out_t: tl.int64,
    SHARDED: tl.constexpr, SPAN: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row, or of SPAN of its columns. ROW is a ``RowConstants``."""
    STATS: tl.constexpr = ROW.STATS
    n = tl.program_id(0)
    begin = 0
    if SPAN is not None:
        parts = tl.cdiv(V, SPAN)
        begin = n % parts * SPAN
        n = n // parts
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
    labelled = in_row(label, V, mask)
    scale = tl.full([], 1.0, STATS)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(STATS)
    grad_logp = tl.load(element(grad_logprobs_ptr, b, t, grad_b, grad_t)).to(STATS) * scale
    if not SHARDED:
        # Without a label in range the log-prob is NaN and depends on no logit.
        grad_logp = tl.where(labelled, grad_logp, 0.0)
    logp = tl.load(logprobs_ptr + n)
    lse_hi, lse_lo = split_hi_lo(tl.load(lse_ptr + n), STATS)
    active = counted & (grad_logp != 0)
    entropy = logp
    grad_entropy = grad_logp
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + n)
        place = element(grad_entropy_ptr, b, t, grad_entropy_b, grad_entropy_t)
        grad_entropy = tl.load(place).to(STATS) * scale
        active = counted & ((grad_logp != 0) | (grad_entropy != 0))
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
    out_row = row_pointer(out_ptr, b, t, out_b, out_t, ROW.ALIGNED)
    column = tl.where(labelled, label, -1).to(tl.int32)
    slopes = row_slopes(slope, inner, outer, row_temperature_ptr, b, t, temperature_b, temperature_t, STATS)
    stats = (logp, lse_hi, lse_lo, entropy)
    grads = (grad_logp, grad_entropy)
    ENTROPY: tl.constexpr = grad_entropy_ptr is not None
    write_gradient(row, out_row, column, V, mask, slopes, active, stats, grads, begin, SPAN, ENTROPY, ROW)


def logprobs_backward(
    rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
) -> None:
    """See ``protocol.RowBackend.logprobs_backward``.

    Raises:
        ValueError: ``out`` overlaps the logits in a way that the protocol doesn't allow.
    """
    (logits, labels, transform, ignore_index), (grad, grad_entropy, _) = rows, grads
    logits = with_contiguous_rows(logits)
    B, T, V = logits.shape
    if V == 0:
        return
    size = max(logits.element_size(), out.element_size())
    tile, span, parts = BACKWARD[size], None, 1
    constants = RowConstants.of(logits, transform, tile, out)
    if not constants.NARROWS_IN_PLACE:
        tile = _PARTS[size]
        constants = constants._replace(BLOCK=tile.block, WARPS=tile.warps)
        span = _BLOCKS * tile.block
        parts = triton.cdiv(V, span)
    launch(
        logprobs_backward_kernel, B * T * parts, logits.device, without_spills(tile, transform.softcap > 0),
        logits, labels, transform.row_temperature, transform.kept,
        stats.logprobs.contiguous(), stats.lse.contiguous(),
        None if grad_entropy is None or stats.entropy is None else stats.entropy.contiguous(),
        *grads, out,
        *row_numbers(logits, labels, transform, ignore_index), *strides(grad, grad_entropy, out),
        SHARDED=sharded,
        SPAN=span,
        ROW=constants,
    )  # fmt: skip
