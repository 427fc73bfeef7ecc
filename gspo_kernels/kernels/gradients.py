"""Gradients of logit rows, from their statistics.

One program owns a part of a row, or the whole row where the gradient narrows the row in place. Statistics are
contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import (
    decode,
    decode_wide,
    edge_columns,
    element,
    load_columns,
    row_pointer,
    whole_vectors,
)
from gspo_kernels.kernels.launch import (
    BACKWARD,
    RowConstants,
    RowNumbers,
    Tile,
    launch,
    row_kernel,
    without_spills,
)
from gspo_kernels.kernels.rows import (
    HUGE,
    exp_flushed,
    narrowed,
    one_minus_exp,
    row_label,
    row_slopes,
    split_hi_lo,
    transformed,
)
from gspo_kernels.kernels.sampling_mask import in_row, is_kept, mask_gradient
from gspo_kernels.types import LogitRows, RowGradients, RowStats

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
    stride_v,
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
        stride_v: the stride from one logit to the next.
        label: int32, -1 if it is no column of the row.
        width: the number of columns.
        mask: the row's sampling mask or None.
        slopes: from ``row_slopes``.
        active: whether the gradient is other than 0.
        stats: (log-prob, log-sum-exp as two numbers, entropy).
        grads: upstream gradients (of the log-prob, of the entropy); without ENTROPY only the first is used.
        begin, SPAN: the part's first column, counted from the row's first whole vector, and the number of its
            columns; None for the whole row.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    logp, lse_hi, lse_lo, entropy = stats
    grad_logp, grad_entropy = grads
    ACCESS: tl.constexpr = ROW.ACCESS
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
    inner_row, first, inner_width = whole_vectors(row, width, VECTOR, ACCESS)
    inner_out = out_row
    end = inner_width
    if SPAN is not None:
        end = tl.minimum(begin + SPAN, inner_width)
    if ACCESS == "shifted":
        inner_out = tl.multiple_of(out_row + first, 16)
        # The edges are read before any store, because out may be the logits.
        columns, inside = edge_columns(tl.arange(0, 2 * VECTOR), first, inner_width, width, VECTOR)
        if SPAN is not None:  # they belong to the first part
            inside = inside & (columns < tl.where(begin == 0, width, 0))
        reads = inside & (columns < tl.where(active, width, 0))
        shown = reads
        if mask is not None:
            shown = reads & is_kept(mask, columns, width)
        edge = tl.load(row + columns, mask=reads, other=-float("inf"))
        edge = _gradient(edge, columns == label, of_row, slopes, ENTROPY, OUT, ROW)
        edge = tl.where(shown, edge, 0.0).to(OUT)
        if not ROW.NARROWS_IN_PLACE:
            tl.store(out_row + columns, edge, mask=inside)
    UNIT: tl.constexpr = 1 if ACCESS == "single" else VECTOR
    read = tl.multiple_of(tl.where(active, end, 0), UNIT)
    zeroed = tl.multiple_of(tl.where(active, 0, end), UNIT)
    if SPAN is None:
        ahead = load_columns(inner_row, 0, lanes, read, stride_v, ACCESS, True, "evict_first")
    for start in range(begin, read, BLOCK):
        if SPAN is None:
            raw = ahead
            # This load stands before the store: out may be the logits, so the compiler can't move it across.
            ahead = load_columns(inner_row, start + BLOCK, lanes, read, stride_v, ACCESS, True, "evict_first")
        else:
            raw = load_columns(inner_row, start, lanes, read, stride_v, ACCESS, True, "evict_first")
        is_label = start + lanes == label - first
        grad = _gradient(raw, is_label, of_row, slopes, ENTROPY, OUT, ROW)
        grad = mask_gradient(grad, first + start, first + read, mask, VECTOR, ACCESS)
        if ROW.NARROWS_IN_PLACE:
            # Block k of the gradient overwrites logits of blocks up to k, which other threads may still read.
            tl.debug_barrier()
        tl.store(inner_out + (start + lanes), grad, mask=start + lanes < read, eviction_policy="evict_first")
    zeros = tl.zeros([BLOCK], OUT)
    for start in range(begin, zeroed, BLOCK):
        tl.store(
            inner_out + (start + lanes), zeros, mask=start + lanes < zeroed, eviction_policy="evict_first"
        )
    if ACCESS == "shifted" and ROW.NARROWS_IN_PLACE:
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
    out_ptr,
    rows,
    SHARDED: tl.constexpr,
    SPAN: tl.constexpr,
    ROW: tl.constexpr,
):
    """Write the gradient of a row, or of SPAN of its columns. ``rows`` is a ``RowNumbers``, ROW a
    ``RowConstants``.
    """
    ACCESS: tl.constexpr = ROW.ACCESS
    STATS: tl.constexpr = ROW.STATS
    n = tl.program_id(0)
    V = decode(rows.V)
    begin = 0
    if SPAN is not None:
        parts = tl.cdiv(V, SPAN)
        begin = n % parts * SPAN
        n = n // parts
    b, t, label, counted = row_label(n, labels_ptr, rows)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, rows.kept)
    labelled = in_row(label, V, mask)
    scale = tl.full([], 1.0, STATS)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(STATS)
    grad_logp = tl.load(element(grad_logprobs_ptr, b, t, rows.grad)).to(STATS) * scale
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
        grad_entropy = tl.load(element(grad_entropy_ptr, b, t, rows.grad_entropy)).to(STATS) * scale
        active = counted & ((grad_logp != 0) | (grad_entropy != 0))
    row = row_pointer(logits_ptr, b, t, rows.logits, ACCESS)
    out_row = row_pointer(out_ptr, b, t, rows.out, ACCESS)
    stride_v = decode_wide(rows.logits[2])
    column = tl.where(labelled, label, -1).to(tl.int32)
    slopes = row_slopes(rows, row_temperature_ptr, b, t, STATS)
    stats = (logp, lse_hi, lse_lo, entropy)
    grads = (grad_logp, grad_entropy)
    ENTROPY: tl.constexpr = grad_entropy_ptr is not None
    write_gradient(
        row, out_row, stride_v, column, V, mask, slopes, active, stats, grads, begin, SPAN, ENTROPY, ROW
    )


def logprobs_backward(
    rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
) -> None:
    """See ``ops.backends.RowBackend.logprobs_backward``.

    Raises:
        ValueError: ``out`` overlaps the logits in a way that the protocol doesn't allow.
    """
    (logits, labels, transform, _), (grad, grad_entropy, _) = rows, grads
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
        *grads, out, RowNumbers.of(*rows, out=out, grad=grad, grad_entropy=grad_entropy),
        SHARDED=sharded,
        SPAN=span,
        ROW=constants,
    )  # fmt: skip
