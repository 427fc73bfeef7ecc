"""Log-prob, log-sum-exp and entropy of logit rows, and their gradients.

Statistics are contiguous [B, T]; everything else comes with its strides. In the forward one program owns one
row. In the backward it owns a part of a row, or the whole row where the gradient narrows the row in place.

If coefficients are known beforehand, one launch computes both. Rows that fit stay on the chip and are read
once: one program owns one row and keeps an exponential of each logit in registers. For larger rows a program
is a cluster of up to 16 thread blocks on an NVIDIA GPU, which reduce maxima and sums through shared memory.
Other rows are read twice, the second time from the L2 cache if it holds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import (
    aligned_width,
    element,
    in_row,
    load_columns,
    row_pointer,
    store_zeros,
)
from gspo_kernels.backends.triton.launch import (
    FORWARD,
    RowConstants,
    Tile,
    empty_stats,
    is_aligned,
    launch,
    platform,
    row_numbers,
    strides,
    triton_version,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.rows import (
    HUGE,
    add_hi_lo,
    combine_threads,
    exp_flushed,
    lowest,
    narrowed,
    one_minus_exp,
    online_logsumexp,
    row_label,
    row_slopes,
    split_hi_lo,
    store_gradient,
    transformed,
)
from gspo_kernels.core.types import LogitRows, LogitTransform, RowGradients, RowStats, stats_dtype

# Tiles by the bytes of one logit, for whole rows and for parts of rows: 64 bytes per thread.
_WHOLE = {2: Tile(8192, 8), 4: Tile(4096, 8), 8: Tile(2048, 8)}
_PARTS = {2: Tile(4096, 4), 4: Tile(2048, 4), 8: Tile(1024, 4)}
_BLOCKS = 4
"""Blocks of columns in a part of a row. Many small programs balance the load at the end, and concurrent ones
access adjacent memory."""
_CLUSTERS_FROM = (3, 8)
"""The first Triton that compiles reductions over the blocks of a cluster."""
_BLOCKS_BY_CAPABILITY = {9: 16, 10: 16, 12: 8}
_NUMBERS = 40
"""Most exponentials that a thread keeps, which takes 64 to 80 registers in all."""


# --- forward


@triton.jit
def load_coefficient(coefficients_ptr, b, t, stride_b, stride_t, labeled, STATS: tl.constexpr):
    """Load a row's coefficient: 1 without coefficients, 0 without a label in range: no logit matters then."""
    coefficient = tl.full([], 1.0, STATS)
    if coefficients_ptr is not None:
        coefficient = tl.load(element(coefficients_ptr, b, t, stride_b, stride_t)).to(STATS)
    return tl.where(labeled, coefficient, 0.0)


@typed_kernel
def logprobs_forward_kernel(
    logits_ptr, labels_ptr, temperature_ptr, kept_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
    coefficients_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    coefficients_b: tl.int64, coefficients_t: tl.int64, out_b: tl.int64, out_t: tl.int64,
    ROW: tl.constexpr,
):  # fmt: skip
    """Compute one row's statistics and, if there is an ``out``, its gradient, for which the row is read
    again. ROW is a ``RowConstants``.
    """
    WITH_GRAD: tl.constexpr = out_ptr is not None
    EVICT: tl.constexpr = "evict_last" if WITH_GRAD else "evict_first"
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
    labeled = counted & in_row(label, V, mask)
    if WITH_GRAD:
        coefficient = load_coefficient(
            coefficients_ptr, b, t, coefficients_b, coefficients_t, labeled, ROW.STATS
        )
    width = tl.where(counted, V, 0)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS)
    logp, lse_hi, lse_lo, entropy = online_logsumexp(
        row, label, labeled, width, mask, slopes, entropy_ptr is not None, EVICT, ROW
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + n, tl.where(counted, entropy, 0.0))
    if WITH_GRAD:
        # Where out is the logits, no thread may overwrite what another still reads.
        tl.debug_barrier()
        out_row = row_pointer(out_ptr, b, t, out_b, out_t, ROW.ALIGNED)
        column = tl.where(labeled, label, -1).to(tl.int32)
        stats = (logp, lse_hi, lse_lo, logp)
        terms = gradient_terms(stats, (coefficient, coefficient), slopes, False, ROW)
        end = aligned_width(V, ROW.ALIGNED)
        active = coefficient != 0
        write_gradient(row, out_row, column, 0, end, mask, slopes, active, terms, True, False, ROW)


def logprobs_forward(rows: LogitRows, entropy: bool) -> RowStats:
    """See ``protocol.RowBackend.logprobs_forward``."""
    logits, labels, transform, ignore_index = rows
    logits = with_contiguous_rows(logits)
    stats = empty_stats(labels, stats_dtype(logits.dtype), entropy)
    tile = without_spills(FORWARD[logits.element_size()], transform.softcap > 0)
    launch(
        logprobs_forward_kernel, labels.numel(), logits.device, tile,
        logits, labels, transform.row_temperature, transform.kept,
        *stats, None, None, *row_numbers(logits, labels, transform, ignore_index), *strides(None, None),
        ROW=RowConstants.of(logits, transform, tile),
    )  # fmt: skip
    return stats


# --- backward


@triton.jit
def gradient_terms(stats, grads, slopes, ENTROPY: tl.constexpr, ROW: tl.constexpr):
    """Return the terms that the gradients of a row's logits share.

    dlogp/dz_v = onehot_v - p_v and dH/dz_v = -p_v (log p_v + H). At the label both are computed from its
    log-prob, because 1 - exp(z - lse) would be all rounding where p(label) is close to 1.

    Args:
        stats: (log-prob, log-sum-exp as two numbers, entropy).
        grads: upstream gradients (of the log-prob, of the entropy); without ENTROPY only the first is used.
        slopes: from ``row_slopes``.
    """
    logp, lse_hi, lse_lo, entropy = stats
    grad_logp, grad_entropy = grads
    if ROW.SCALED != 0 or ROW.SOFTCAP:
        slope = slopes[0][0] + slopes[0][1]
        grad_logp *= slope
        grad_entropy *= slope
    at_label = grad_logp * one_minus_exp(logp, ROW.STATS, ROW.PLATFORM)
    if ENTROPY:
        at_label -= grad_entropy * tl.exp(logp) * (tl.maximum(logp, -HUGE) + entropy)
    # A row with +inf has NaN for log-probs, also where exp(z - inf) is 0.
    lse_lo = tl.where(lse_hi == float("inf"), float("nan"), lse_lo)
    return at_label, lse_hi, lse_lo, grad_logp, entropy, grad_entropy


@triton.jit
def _gradient(raw, is_label, terms, slopes, ENTROPY: tl.constexpr, ROW: tl.constexpr):
    """Return the gradient of some logits of a row."""
    at_label, lse_hi, lse_lo, grad_logp, entropy, grad_entropy = terms
    z, tanh_slope = transformed(raw, slopes, ROW)
    log_p = (z - lse_hi) - lse_lo
    weight = -grad_logp
    if ENTROPY:
        weight -= grad_entropy * (tl.maximum(log_p, -HUGE) + entropy)
    return tl.where(is_label, at_label, exp_flushed(log_p, ROW.PLATFORM) * weight) * tanh_slope


@triton.jit
def write_gradient(
    row,
    out_row,
    label,
    begin,
    end,
    mask,
    slopes,
    active,
    terms,
    AHEAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROW: tl.constexpr,
):
    """Write the gradient of some columns; of a row that isn't active read nothing and write zeros.

    Args:
        row, out_row: the addresses of the row's first logit and of that logit's gradient.
        label: int32, -1 if it is not a column of the row.
        begin, end: the columns, from ``aligned_width``.
        mask: the row's sampling mask or None.
        slopes: from ``row_slopes``.
        active: whether the gradient is other than 0.
        terms: from ``gradient_terms``.
        AHEAD: whether a block is loaded before the gradient of the one before is stored. ``out`` may be the
            logits, so the compiler can't move a load across a store.
    """
    lanes = tl.arange(0, ROW.BLOCK)
    UNIT: tl.constexpr = 16 if ROW.ALIGNED else 1
    read = tl.multiple_of(tl.where(active, end, 0), UNIT)
    zeroed = tl.multiple_of(tl.where(active, 0, end), UNIT)
    if AHEAD:
        raw = load_columns(row, begin, lanes, read, True, "evict_first")
        for start in range(begin, read, ROW.BLOCK):
            ahead = load_columns(row, start + ROW.BLOCK, lanes, read, True, "evict_first")
            grad = _gradient(raw, start + lanes == label, terms, slopes, ENTROPY, ROW)
            store_gradient(grad, out_row, start, lanes, read, mask, raw.dtype, "evict_first", ROW)
            raw = ahead
    else:
        for start in range(begin, read, ROW.BLOCK):
            raw = load_columns(row, start, lanes, read, True, "evict_first")
            grad = _gradient(raw, start + lanes == label, terms, slopes, ENTROPY, ROW)
            store_gradient(grad, out_row, start, lanes, read, mask, raw.dtype, "evict_first", ROW)
    store_zeros(out_row, begin, lanes, zeroed, "evict_first")


@typed_kernel
def logprobs_backward_kernel(
    logits_ptr, labels_ptr, temperature_ptr, kept_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
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
    labeled = in_row(label, V, mask)
    scale = tl.full([], 1.0, STATS)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(STATS)
    grad_logp = tl.load(element(grad_logprobs_ptr, b, t, grad_b, grad_t)).to(STATS) * scale
    if not SHARDED:
        # Without a label in range the log-prob is NaN and depends on no logit.
        grad_logp = tl.where(labeled, grad_logp, 0.0)
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
    column = tl.where(labeled, label, -1).to(tl.int32)
    slopes = row_slopes(slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, STATS)
    ENTROPY: tl.constexpr = grad_entropy_ptr is not None
    stats = (logp, lse_hi, lse_lo, entropy)
    terms = gradient_terms(stats, (grad_logp, grad_entropy), slopes, ENTROPY, ROW)
    end = aligned_width(V, ROW.ALIGNED)
    if SPAN is not None:
        end = tl.minimum(begin + SPAN, end)
    AHEAD: tl.constexpr = SPAN is None
    write_gradient(row, out_row, column, begin, end, mask, slopes, active, terms, AHEAD, ENTROPY, ROW)


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
    tile, span, parts = _WHOLE[size], None, 1
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


# --- both in one launch

# For rows that are read twice, the second time from the L2 cache: few may be in flight. With 16 warps, the
# most of an AMD workgroup, and more than 64 registers per thread an NVIDIA multiprocessor has one program.
_REREAD = {2: Tile(16384, 16), 4: Tile(8192, 16), 8: Tile(2048, 16)}


def max_blocks(device: torch.device) -> int:
    """Return the maximum number of thread blocks per program."""
    if platform() == "interpreter":
        return 16
    if platform() == "hip" or triton_version() < _CLUSTERS_FROM:
        return 1
    return _BLOCKS_BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0], 1)


def on_chip_tile(logits: Tensor, out: Tensor, transform: LogitTransform) -> Tile | None:
    """Return the smallest program that holds a row of these logits, or None if rows are to be read twice.

    They are read twice if they have too many logits, don't come in 16-byte pieces, or have fp64, a softcap or
    a sampling mask.
    """
    V, size = logits.shape[2], logits.element_size()
    if V == 0 or size == 8 or transform.softcap or transform.kept is not None or not is_aligned(logits, out):
        return None
    threads, blocks = 64 if platform() == "hip" else 32, max_blocks(logits.device)
    # With eight warps, blocks of four programs share an NVIDIA multiprocessor, each at another stage.
    for warps in (8, 16):
        count = 1
        while count <= blocks:
            tile = Tile(count * warps * threads * (16 // size), warps, blocks=count)
            if triton.cdiv(V, tile.block) * (16 // size) <= _NUMBERS:
                return tile
            count *= 2
    return None


@typed_kernel
def on_chip_row_kernel(
    logits_ptr, labels_ptr, temperature_ptr, coefficients_ptr, logprobs_ptr, lse_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    coefficients_b: tl.int64, coefficients_t: tl.int64, out_b: tl.int64, out_t: tl.int64,
    PIECES: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Compute one row of PIECES blocks of columns, of which all but the last are full. ROW is a
    ``RowConstants``.
    """
    BLOCK: tl.constexpr = ROW.BLOCK
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    THREADS: tl.constexpr = BLOCK // VECTOR
    lanes = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    rest_of_row = aligned_width(V, True) - (PIECES - 1) * BLOCK
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    labeled = counted & in_row(label, V, None)
    coefficient = load_coefficient(coefficients_ptr, b, t, coefficients_b, coefficients_t, labeled, ROW.STATS)
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, True)
    out_row = row_pointer(out_ptr, b, t, out_b, out_t, True)
    place = tl.where(labeled, label, 0).to(tl.int32)
    home = tl.where(labeled, place // BLOCK, -1)
    if counted:
        raws = ()
        for piece in tl.static_range(PIECES - 1):
            raws += (tl.load(row + piece * BLOCK + lanes, eviction_policy="evict_first"),)  # type: ignore[assignment]
        last = row + (PIECES - 1) * BLOCK + lanes
        raws += (tl.load(last, mask=lanes < rest_of_row, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        slopes = row_slopes(
            slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
        )
        z_label, _ = transformed(tl.load(row + place), slopes, ROW)

        # As in ``online_logsumexp`` each thread has its maximum and its sum.
        peak = tl.zeros([THREADS], ROW.STATS) + lowest(ROW.STATS)
        transformed_logits = ()
        for piece in tl.static_range(PIECES):
            z, _ = transformed(raws[piece], slopes, ROW)
            if piece == PIECES - 1:
                z = tl.where(lanes < rest_of_row, z, -float("inf"))
            if home == piece:
                # The barrier keeps this a branch; without it every piece would pay for what one needs.
                tl.debug_barrier()
                z = tl.where(lanes == place - piece * BLOCK, -float("inf"), z)
            peak = tl.maximum(peak, tl.max(z, axis=1))
            transformed_logits += (z,)  # type: ignore[assignment]
        total = tl.zeros([THREADS], ROW.STATS)
        exponentials = ()
        for piece in tl.static_range(PIECES):
            e = exp_flushed(transformed_logits[piece] - peak[:, None], ROW.PLATFORM)
            total += tl.sum(e, axis=1)
            exponentials += (e,)  # type: ignore[assignment]
        logp, lse_hi, lse_lo, _ = combine_threads(peak, total, peak, z_label, labeled, False, ROW.STATS)
        tl.store(logprobs_ptr + n, logp)
        tl.store(lse_ptr + n, add_hi_lo(lse_hi, lse_lo, tl.float64))
        if coefficient != 0:
            stats = (logp, lse_hi, lse_lo, logp)
            terms = gradient_terms(stats, (coefficient, coefficient), slopes, False, ROW)
            weight = -terms[3] * exp_flushed((peak - terms[1]) - terms[2], ROW.PLATFORM)
            # If out is in the memory of the logits, all threads must have read them. The blocks of a cluster
            # are synchronized by the reductions.
            tl.debug_barrier()
            for piece in tl.static_range(PIECES):
                grad = exponentials[piece] * weight[:, None]
                if home == piece:
                    tl.debug_barrier()
                    grad = tl.where(lanes == place - piece * BLOCK, terms[0], grad)
                pointers = out_row + piece * BLOCK + lanes
                grad = narrowed(grad, OUT, ROW.PLATFORM)
                if piece < PIECES - 1:
                    tl.store(pointers, grad, eviction_policy="evict_first")
                else:
                    tl.store(pointers, grad, mask=lanes < rest_of_row, eviction_policy="evict_first")
    else:
        tl.store(logprobs_ptr + n, 0.0)
        tl.store(lse_ptr + n, 0.0)
    store_zeros(out_row, 0, lanes, tl.where(coefficient == 0, aligned_width(V, True), 0), "evict_first")


def logprobs_and_grad(rows: LogitRows, coefficients: Tensor | None, out: Tensor) -> RowStats:
    """See ``protocol.RowBackend.logprobs_and_grad``; raises as ``logprobs_backward``. ``coefficients`` of
    None stand for 1.
    """
    logits, labels, transform, ignore_index = rows
    logits = with_contiguous_rows(logits)
    B, T, V = logits.shape
    stats = empty_stats(labels, stats_dtype(logits.dtype), entropy=False)
    numbers = [*row_numbers(logits, labels, transform, ignore_index), *strides(coefficients, out)]
    if (tile := on_chip_tile(logits, out, transform)) is not None:
        launch(
            on_chip_row_kernel, B * T, logits.device, tile,
            logits, labels, transform.row_temperature, coefficients, *stats[:2], out, *numbers,
            PIECES=triton.cdiv(V, tile.block),
            ROW=RowConstants.of(logits, transform, tile, out),
        )  # fmt: skip
        return stats
    tile = _REREAD[max(logits.element_size(), out.element_size())]
    if transform.softcap and platform() == "cuda":
        # threads of 16 warps have no more registers, too few for what a softcap keeps of a whole block
        tile = tile._replace(block=tile.block // 2, registers=128)
    launch(
        logprobs_forward_kernel, B * T, logits.device, tile,
        logits, labels, transform.row_temperature, transform.kept, *stats, coefficients, out, *numbers,
        ROW=RowConstants.of(logits, transform, tile, out),
    )  # fmt: skip
    return stats


def logprobs_and_rows(rows: LogitRows, out: Tensor) -> tuple[RowStats, None]:
    """See ``protocol.OnePassBackend.logprobs_and_rows``; raises as ``logprobs_backward``."""
    return logprobs_and_grad(rows, None, out), None


def one_pass_pays(rows: LogitRows, *, all_rows_active: bool, has_ratio: bool) -> bool:
    """Return whether rows stay on the chip and all are active; the order of sums differs from
    ``logprobs_forward``.
    """
    if has_ratio or not all_rows_active:
        return False
    return on_chip_tile(rows.logits, rows.logits, rows.transform) is not None
