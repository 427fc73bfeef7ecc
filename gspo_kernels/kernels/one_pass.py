"""Log-probs and the gradient of logit rows in one launch, for coefficients that are known beforehand.

Rows that fit stay on the chip in between, and each logit is read once: one program owns one row and keeps an
exponential of each of its logits in registers. Where a row is more than one block of threads holds, a program
is a cluster of up to 16 blocks on neighbouring multiprocessors of an NVIDIA GPU, which tell each other their
maxima and sums through shared memory. The source is the same: of how many blocks a program consists is an
option of its launch. Other rows are read twice, the second time from the cache where that holds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import row_pointer
from gspo_kernels.kernels.gradients import write_gradient
from gspo_kernels.kernels.kept import in_row, kept_row
from gspo_kernels.kernels.launch import (
    ALIGNED_COLUMNS,
    FOLD_AND_GRAD,
    RowArguments,
    Tile,
    access,
    launch,
    narrows_in_place,
    platform,
    row_kernel,
    triton_version,
)
from gspo_kernels.kernels.rows import (
    combine_lanes,
    element,
    exp_flushed,
    fold_row,
    joined,
    lowest,
    narrowed,
    one_minus_exp,
    open_row,
    row_slopes,
    transformed,
)
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

_CLUSTERS_FROM = (3, 8)
"""The first Triton that compiles reductions over the blocks of a cluster."""
_BLOCKS_BY_CAPABILITY = {9: 16, 10: 16, 12: 8}
_NUMBERS = 40
"""Exponentials that a thread keeps at most: with what else it needs they take 64 to 80 registers."""


def most_blocks(device: torch.device) -> int:
    """Of how many blocks a program may consist."""
    if platform() == "interpreter":
        return 16
    if platform() == "hip" or triton_version() < _CLUSTERS_FROM:
        return 1
    return _BLOCKS_BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0], 1)


def held_tile(logits: Tensor, out: Tensor, transform: LogitTransform) -> Tile | None:
    """The smallest program that holds a row of these logits, None where they are to be read twice.

    That is where a row has too many of them, doesn't come in 16-byte pieces, is of fp64, or is bent by a
    softcap or cut by a sampling mask.
    """
    if access(logits, out) != "aligned":
        return None
    return _tile(logits.shape[2], logits.element_size(), transform, logits.device)


def _tile(V: int, size: int, transform: LogitTransform, device: torch.device) -> Tile | None:
    """``held_tile`` of rows in 16-byte pieces."""
    if V == 0 or size == 8 or transform.softcap or transform.kept is not None:
        return None
    threads, blocks = 64 if platform() == "hip" else 32, most_blocks(device)
    # With eight warps four programs' blocks share an NVIDIA multiprocessor, each at another stage of its row.
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
    """A row's coefficient: 1 where none are given, 0 without a label in range, as no logit matters then."""
    coefficient = tl.full([], 1.0, STATS)
    if coefficients_ptr is not None:
        coefficient = tl.load(element(coefficients_ptr, b, t, stride_b, stride_t)).to(STATS)
    return tl.where(labelled, coefficient, 0.0)


@row_kernel
def held_row_kernel(
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
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row, of PIECES blocks of columns: all but the last of them are full."""
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    THREADS: tl.constexpr = BLOCK // VECTOR
    lanes = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Rows are aligned: the same number, by an operation that tells the compiler what divides it.
    rest_of_row = V // VECTOR * VECTOR - (PIECES - 1) * BLOCK
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    labelled = counted & in_row(label, V, None)
    coefficient = _coefficient(
        coefficients_ptr, b, t, coefficients_stride_b, coefficients_stride_t, labelled, STATS
    )
    row = row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, "aligned")
    out_row = row_pointer(out_ptr, b, t, out_stride_b, out_stride_t, "aligned")
    place = tl.where(labelled, label, 0).to(tl.int32)
    home = tl.where(labelled, place // BLOCK, -1)
    if counted:
        raws = ()
        for piece in tl.static_range(PIECES - 1):
            raws += (tl.load(row + piece * BLOCK + lanes, eviction_policy="evict_first"),)  # type: ignore[assignment]
        last = row + (PIECES - 1) * BLOCK + lanes
        raws += (tl.load(last, mask=lanes < rest_of_row, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        slopes = row_slopes(
            (slope, inner, outer),
            row_temperature_ptr,
            b,
            t,
            temperature_stride_b,
            temperature_stride_t,
            STATS,
        )
        z_label, _ = transformed(tl.load(row + place), slopes, STATS, SCALED, False, PLATFORM)

        # As in a row's fold each thread has a maximum and a sum of its own.
        peak = tl.zeros([THREADS], STATS) + lowest(STATS)
        heights = ()
        for piece in tl.static_range(PIECES):
            z, _ = transformed(raws[piece], slopes, STATS, SCALED, False, PLATFORM)
            if piece == PIECES - 1:
                z = tl.where(lanes < rest_of_row, z, -float("inf"))
            if home == piece:
                # The barrier keeps this a branch: else every piece would pay for what one of them needs.
                tl.debug_barrier()
                z = tl.where(lanes == place - piece * BLOCK, -float("inf"), z)
            peak = tl.maximum(peak, tl.max(z, axis=1))
            heights += (z,)  # type: ignore[assignment]
        total = tl.zeros([THREADS], STATS)
        exponentials = ()
        for piece in tl.static_range(PIECES):
            e = exp_flushed(heights[piece] - peak[:, None], PLATFORM)
            total += tl.sum(e, axis=1)
            exponentials += (e,)  # type: ignore[assignment]
        logp, base, rest, _ = combine_lanes(peak, total, peak, z_label, labelled, STATS, False)
        tl.store(logprobs_ptr + n, logp)
        tl.store(lse_ptr + n, joined(base, rest, lse_ptr.dtype.element_ty))
        if coefficient != 0:
            if SCALED:
                coefficient *= slopes[0][0] + slopes[0][1]
            at_label = coefficient * one_minus_exp(logp, STATS, PLATFORM)
            # A row with +inf has NaN for log-probs.
            rest = tl.where(base == float("inf"), float("nan"), rest)
            weight = -coefficient * exp_flushed((peak - base) - rest, PLATFORM)
            # Where out lies in the memory of the logits, nobody may overwrite what others have still to read.
            # The blocks of a cluster have met in the reductions.
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
    idle = tl.where(coefficient == 0, V // VECTOR * VECTOR, 0)
    zeros = tl.zeros([THREADS, VECTOR], OUT)
    for start in range(0, idle, BLOCK):
        tl.store(out_row + start + lanes, zeros, mask=lanes < idle - start, eviction_policy="evict_first")


@row_kernel
def logprobs_and_grad_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
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
    kept_stride_b: tl.int64,
    kept_stride_t: tl.int64,
    coefficients_stride_b: tl.int64,
    coefficients_stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCESS: tl.constexpr,
    NARROWS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row's statistics, then its gradient, for which the row is read again."""
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    kept = kept_ptr
    if kept_ptr is not None:
        kept = kept_row(kept_ptr, b, t, kept_stride_b, kept_stride_t)
    labelled = counted & in_row(label, V, kept)
    coefficient = _coefficient(
        coefficients_ptr, b, t, coefficients_stride_b, coefficients_stride_t, labelled, STATS
    )
    slopes = row_slopes(
        (slope, inner, outer), row_temperature_ptr, b, t, temperature_stride_b, temperature_stride_t, STATS
    )
    row = row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ACCESS)
    opened = open_row(
        row,
        label,
        labelled,
        tl.where(counted, V, 0),
        logits_stride_v,
        ACCESS,
        BLOCK,
        WARPS,
        "evict_last",
        PLATFORM,
    )
    logp, base, rest, _ = fold_row(
        opened,
        kept,
        logits_stride_v,
        slopes,
        STATS,
        SCALED,
        SOFTCAP,
        False,
        ACCESS,
        BLOCK,
        "evict_last",
        PLATFORM,
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, lse_ptr.dtype.element_ty), 0.0))
    # Where out is the logits, no thread may overwrite what another still folds.
    tl.debug_barrier()
    write_gradient(
        row,
        row_pointer(out_ptr, b, t, out_stride_b, out_stride_t, ACCESS),
        tl.where(labelled, label, -1).to(tl.int32),
        V,
        coefficient != 0,
        logits_stride_v,
        logp,
        base,
        rest,
        coefficient,
        logp,
        coefficient,
        slopes,
        kept,
        STATS,
        SCALED,
        SOFTCAP,
        False,
        ACCESS,
        NARROWS_IN_PLACE,
        BLOCK,
        PLATFORM,
    )


def _hold(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor | None,
    transform: LogitTransform,
    tile: Tile,
    stats: RowStats,
    *,
    ignore_index: int,
    out: Tensor,
) -> None:
    """``_in_one_pass`` by a ``held_tile``, into ``stats`` and ``out``."""
    B, T, V = logits.shape
    rows = RowArguments.of(logits, labels, transform, tile, out)
    launch(
        held_row_kernel,
        B * T,
        logits.device,
        tile,
        *rows.tensors[:3],
        coefficients,
        stats.logprobs,
        stats.lse,
        out,
        T,
        V,
        ignore_index,
        *rows.slopes,
        *rows.strides[:2],
        *rows.strides[3:7],
        *((0, 0) if coefficients is None else coefficients.stride()),
        *out.stride()[:2],
        STATS=rows.constants["STATS"],
        SCALED=rows.constants["SCALED"],
        VECTOR=16 // logits.element_size(),
        BLOCK=tile.block,
        PIECES=triton.cdiv(V, tile.block),
        PLATFORM=rows.constants["PLATFORM"],
    )


def _in_one_pass(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor | None,
    transform: LogitTransform,
    *,
    ignore_index: int,
    out: Tensor,
) -> RowStats:
    """``logprobs_and_grad``; without coefficients they are 1."""
    B, T, V = logits.shape
    logprobs = torch.empty(B, T, dtype=stats_dtype(logits.dtype), device=logits.device)
    stats = RowStats(logprobs, torch.empty_like(logprobs, dtype=torch.float64), None)
    in_place = narrows_in_place(logits, out)
    if (held := held_tile(logits, out, transform)) is not None:
        given = (logits, labels, coefficients, transform, held, stats)
        _hold(*given, ignore_index=ignore_index, out=out)
        return stats
    tile = FOLD_AND_GRAD[max(logits.element_size(), out.element_size())]
    if transform.softcap and platform() == "cuda":
        # threads of 16 warps have no more registers, too few for what a softcap keeps of a whole block
        tile = tile._replace(block=tile.block // 2, registers=128)
    rows = RowArguments.of(logits, labels, transform, tile, out)
    launch(
        logprobs_and_grad_kernel,
        B * T,
        logits.device,
        tile,
        *rows.tensors,
        coefficients,
        stats.logprobs,
        stats.lse,
        out,
        T,
        V,
        ignore_index,
        *rows.slopes,
        *rows.strides,
        *((0, 0) if coefficients is None else coefficients.stride()),
        *out.stride()[:2],
        **rows.constants,
        NARROWS_IN_PLACE=in_place,
        WARPS=tile.warps,
    )
    return stats


def logprobs_and_grad(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    transform: LogitTransform,
    *,
    ignore_index: int,
    out: Tensor,
) -> RowStats:
    """See ``ops.backends.RowBackend.logprobs_and_grad``; raises as ``logprobs_backward``."""
    return _in_one_pass(logits, labels, coefficients, transform, ignore_index=ignore_index, out=out)


def logprobs_and_rows(
    logits: Tensor, labels: Tensor, transform: LogitTransform, *, ignore_index: int, out: Tensor
) -> tuple[RowStats, None]:
    """See ``ops.backends.OnePassBackend.logprobs_and_rows``; raises as ``logprobs_backward``."""
    return _in_one_pass(logits, labels, None, transform, ignore_index=ignore_index, out=out), None


def one_pass_pays(
    vocabulary: int, dtype: torch.dtype, transform: LogitTransform, device: torch.device, settled: bool
) -> bool:
    """See ``ops.backends.OnePassBackend.one_pass_pays``: where rows stay on the chip. Their sums have another
    order than the fold's, and a row that nothing multiplies need not be written.
    """
    aligned = vocabulary % ALIGNED_COLUMNS == 0
    return settled and aligned and _tile(vocabulary, dtype.itemsize, transform, device) is not None
