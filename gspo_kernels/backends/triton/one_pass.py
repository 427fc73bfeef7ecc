"""Log-probs and the gradient of logit rows in one launch, for coefficients that are known beforehand.

Rows that fit stay on the chip, and each logit is read once: one program owns one row and keeps an exponential
of each logit in registers. If a row is larger than one block of threads holds, a program is a cluster of up
to 16 blocks on neighbouring multiprocessors of an NVIDIA GPU, which exchange their maxima and sums through
shared memory. The source is the same: the number of blocks is an option of the launch. Other rows are read
twice, the second time from the cache if it holds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element, row_pointer
from gspo_kernels.backends.triton.gradients import write_gradient
from gspo_kernels.backends.triton.launch import (
    ALIGNED_COLUMNS,
    FORWARD_BACKWARD,
    RowConstants,
    Tile,
    is_aligned,
    launch,
    platform,
    row_numbers,
    strides,
    triton_version,
    typed_kernel,
    with_contiguous_rows,
)
from gspo_kernels.backends.triton.rows import (
    add_hi_lo,
    combine_threads,
    exp_flushed,
    lowest,
    narrowed,
    one_minus_exp,
    online_logsumexp,
    row_label,
    row_slopes,
    transformed,
)
from gspo_kernels.backends.triton.sampling_mask import in_row
from gspo_kernels.core.types import LogitRows, LogitTransform, RowStats, stats_dtype

_CLUSTERS_FROM = (3, 8)
"""The first Triton that compiles reductions over the blocks of a cluster."""
_BLOCKS_BY_CAPABILITY = {9: 16, 10: 16, 12: 8}
_NUMBERS = 40
"""How many exponentials a thread keeps at most; with everything else they take 64 to 80 registers."""


def max_blocks(device: torch.device) -> int:
    """Return how many blocks of threads a program may have."""
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
    if not is_aligned(logits, out):
        return None
    return _tile(logits.shape[2], logits.element_size(), transform, logits.device)


def _tile(V: int, size: int, transform: LogitTransform, device: torch.device) -> Tile | None:
    """Return ``on_chip_tile`` of rows that come in 16-byte pieces."""
    if V == 0 or size == 8 or transform.softcap or transform.kept is not None:
        return None
    threads, blocks = 64 if platform() == "hip" else 32, max_blocks(device)
    # With eight warps, blocks of four programs share an NVIDIA multiprocessor, each at another stage.
    for warps in (8, 16):
        count = 1
        while count <= blocks:
            tile = Tile(count * warps * threads * (16 // size), warps, blocks=count)
            if triton.cdiv(V, tile.block) * (16 // size) <= _NUMBERS:
                return tile
            count *= 2
    return None


@triton.jit
def _coefficient(coefficients_ptr, b, t, stride_b, stride_t, labelled, STATS: tl.constexpr):
    """Load a row's coefficient: 1 without coefficients, 0 without a label in range: no logit matters then."""
    coefficient = tl.full([], 1.0, STATS)
    if coefficients_ptr is not None:
        coefficient = tl.load(element(coefficients_ptr, b, t, stride_b, stride_t)).to(STATS)
    return tl.where(labelled, coefficient, 0.0)


@typed_kernel
def on_chip_row_kernel(
    logits_ptr, labels_ptr, row_temperature_ptr, coefficients_ptr, logprobs_ptr, lse_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    coefficients_b: tl.int64, coefficients_t: tl.int64, out_b: tl.int64, out_t: tl.int64,
    PIECES: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Compute one row of PIECES blocks of columns, of which all but the last are full. ROW is a
    ``RowConstants``.
    """
    PLATFORM: tl.constexpr = ROW.PLATFORM
    BLOCK: tl.constexpr = ROW.BLOCK
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    THREADS: tl.constexpr = BLOCK // VECTOR
    lanes = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Rows are aligned: V // VECTOR * VECTOR is V, but now the compiler knows that VECTOR divides it.
    rest_of_row = V // VECTOR * VECTOR - (PIECES - 1) * BLOCK
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    labelled = counted & in_row(label, V, None)
    coefficient = _coefficient(coefficients_ptr, b, t, coefficients_b, coefficients_t, labelled, ROW.STATS)
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, True)
    out_row = row_pointer(out_ptr, b, t, out_b, out_t, True)
    place = tl.where(labelled, label, 0).to(tl.int32)
    home = tl.where(labelled, place // BLOCK, -1)
    if counted:
        raws = ()
        for piece in tl.static_range(PIECES - 1):
            raws += (tl.load(row + piece * BLOCK + lanes, eviction_policy="evict_first"),)  # type: ignore[assignment]
        last = row + (PIECES - 1) * BLOCK + lanes
        raws += (tl.load(last, mask=lanes < rest_of_row, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        slopes = row_slopes(
            slope, inner, outer, row_temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
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
            e = exp_flushed(transformed_logits[piece] - peak[:, None], PLATFORM)
            total += tl.sum(e, axis=1)
            exponentials += (e,)  # type: ignore[assignment]
        logp, lse_hi, lse_lo, _ = combine_threads(peak, total, peak, z_label, labelled, False, ROW.STATS)
        tl.store(logprobs_ptr + n, logp)
        tl.store(lse_ptr + n, add_hi_lo(lse_hi, lse_lo, tl.float64))
        if coefficient != 0:
            if ROW.SCALED != 0:
                coefficient *= slopes[0][0] + slopes[0][1]
            at_label = coefficient * one_minus_exp(logp, ROW.STATS, PLATFORM)
            # A row with +inf has NaN for log-probs.
            lse_lo = tl.where(lse_hi == float("inf"), float("nan"), lse_lo)
            weight = -coefficient * exp_flushed((peak - lse_hi) - lse_lo, PLATFORM)
            # If out lies in the memory of the logits, no thread may overwrite what others have yet to read.
            # The blocks of a cluster have waited for each other in the reductions.
            tl.debug_barrier()
            for piece in tl.static_range(PIECES):
                grad = exponentials[piece] * weight[:, None]
                if home == piece:
                    tl.debug_barrier()
                    grad = tl.where(lanes == place - piece * BLOCK, at_label, grad)
                pointers = out_row + piece * BLOCK + lanes
                grad = narrowed(grad, OUT, PLATFORM)
                if piece < PIECES - 1:
                    tl.store(pointers, grad, eviction_policy="evict_first")
                else:
                    tl.store(pointers, grad, mask=lanes < rest_of_row, eviction_policy="evict_first")
    else:
        tl.store(logprobs_ptr + n, 0.0)
        tl.store(lse_ptr + n, 0.0)
    zeroed = tl.where(coefficient == 0, V // VECTOR * VECTOR, 0)
    zeros = tl.zeros([THREADS, VECTOR], OUT)
    for start in range(0, zeroed, BLOCK):
        tl.store(out_row + start + lanes, zeros, mask=lanes < zeroed - start, eviction_policy="evict_first")


@typed_kernel
def logprobs_and_grad_kernel(
    logits_ptr, labels_ptr, row_temperature_ptr, kept_ptr, coefficients_ptr, logprobs_ptr, lse_ptr, out_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    coefficients_b: tl.int64, coefficients_t: tl.int64, out_b: tl.int64, out_t: tl.int64,
    ROW: tl.constexpr,
):  # fmt: skip
    """Compute one row's statistics, then its gradient, for which the row is read again. ROW is a
    ``RowConstants``.
    """
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
    labelled = counted & in_row(label, V, mask)
    coefficient = _coefficient(coefficients_ptr, b, t, coefficients_b, coefficients_t, labelled, ROW.STATS)
    slopes = row_slopes(
        slope, inner, outer, row_temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
    )
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
    logp, lse_hi, lse_lo, _ = online_logsumexp(
        row, label, labelled, tl.where(counted, V, 0), mask, slopes, False, "evict_last", ROW
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
    # Where out is the logits, no thread may overwrite what another still reads.
    tl.debug_barrier()
    out_row = row_pointer(out_ptr, b, t, out_b, out_t, ROW.ALIGNED)
    column = tl.where(labelled, label, -1).to(tl.int32)
    stats = (logp, lse_hi, lse_lo, logp)
    grads = (coefficient, coefficient)
    active = coefficient != 0
    write_gradient(row, out_row, column, V, mask, slopes, active, stats, grads, 0, None, False, ROW)


def logprobs_and_grad(rows: LogitRows, coefficients: Tensor | None, out: Tensor) -> RowStats:
    """See ``protocol.RowBackend.logprobs_and_grad``; raises as ``logprobs_backward``. ``coefficients`` of
    None stand for 1.
    """
    logits, labels, transform, ignore_index = rows
    logits = with_contiguous_rows(logits)
    B, T, V = logits.shape
    logprobs = torch.empty(B, T, dtype=stats_dtype(logits.dtype), device=logits.device)
    stats = RowStats(logprobs, torch.empty_like(logprobs, dtype=torch.float64), None)
    results = (stats.logprobs, stats.lse, out)
    numbers = [*row_numbers(logits, labels, transform, ignore_index), *strides(coefficients, out)]
    if (tile := on_chip_tile(logits, out, transform)) is not None:
        launch(
            on_chip_row_kernel, B * T, logits.device, tile,
            logits, labels, transform.row_temperature, coefficients, *results, *numbers,
            PIECES=triton.cdiv(V, tile.block),
            ROW=RowConstants.of(logits, transform, tile, out),
        )  # fmt: skip
        return stats
    tile = FORWARD_BACKWARD[max(logits.element_size(), out.element_size())]
    if transform.softcap and platform() == "cuda":
        # threads of 16 warps have no more registers, too few for what a softcap keeps of a whole block
        tile = tile._replace(block=tile.block // 2, registers=128)
    launch(
        logprobs_and_grad_kernel, B * T, logits.device, tile,
        logits, labels, transform.row_temperature, transform.kept, coefficients, *results, *numbers,
        ROW=RowConstants.of(logits, transform, tile, out),
    )  # fmt: skip
    return stats


def logprobs_and_rows(rows: LogitRows, out: Tensor) -> tuple[RowStats, None]:
    """See ``protocol.OnePassBackend.logprobs_and_rows``; raises as ``logprobs_backward``."""
    return logprobs_and_grad(rows, None, out), None


def one_pass_pays(rows: LogitRows, *, all_rows_active: bool, logprobs_compared: bool) -> bool:
    """See ``protocol.OnePassBackend.one_pass_pays``. It pays if rows stay on the chip and all are active:
    inactive rows would be written for nothing. Sums have another order than in ``logprobs_forward``.
    """
    logits, vocabulary = rows.logits, rows.logits.shape[2]
    if logprobs_compared or not all_rows_active or vocabulary % ALIGNED_COLUMNS:
        return False
    return _tile(vocabulary, logits.element_size(), rows.transform, logits.device) is not None
