"""A clipped sequence ratio in one launch: ratios, clip decisions, loss and metrics, from logits or from
log-probs.

From logits there are N + B programs. Program n < N folds one row and arrives at its sequence's counter;
program N + i only arrives, for sequence i, so that (rows of i) + 1 arrivals complete a sequence, an empty one
too. Whoever completes a sequence reduces its log-ratios; whoever completes the last sequence reduces the loss
and the metrics. From log-probs there is one program per sequence, whose rows are complete beforehand. Nobody
waits for anybody, and every reduction runs over memory in a fixed order, so the order of programs leaves no
trace in the result.
"""

# ruff: noqa: SIM108 - in Triton, branches choose code.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import (
    FOLD,
    Slopes,
    Tile,
    is_aligned,
    launch,
    platform,
    row_kernel,
    stats_type,
)
from gspo_kernels.kernels.rows import element, fold_row, joined, readable_width, row_pointer, row_slopes
from gspo_kernels.types import (
    METRICS,
    ClippedSequenceRatio,
    LogitTransform,
    SequenceRatioStats,
    SequenceRatioStep,
    stats_dtype,
)

_TOKENS_PER_BLOCK = 1024
_SEQUENCES_PER_BLOCK = 256
_STEP = Tile(_TOKENS_PER_BLOCK, 8)

# Rows of the [8, sequences] fp64 scratch through which sequences reach the final reduction.
_RATIO: tl.constexpr = tl.constexpr(0)
_LOSS: tl.constexpr = tl.constexpr(1)
_LENGTH: tl.constexpr = tl.constexpr(2)
_COUNT: tl.constexpr = tl.constexpr(3)
_LOG_RATIO: tl.constexpr = tl.constexpr(4)
_LOW: tl.constexpr = tl.constexpr(5)
_HIGH: tl.constexpr = tl.constexpr(6)
_ACTIVE: tl.constexpr = tl.constexpr(7)
_SCRATCH_ROWS = 8


@triton.jit
def _sequence_of(n, cu_seqlens_ptr, sequences):
    """The sequence that holds row n: the last one that starts at or before it, which is never an empty
    one.
    """
    low = sequences * 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        after = tl.load(cu_seqlens_ptr + middle) <= n
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    return low


@triton.jit
def _arrive(counter_ptr):
    """Publish what this program has written and count it; what programs counted before have written can then
    be read.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def _reduce_sequence(
    sequence,
    first,
    last,
    T,
    labels_ptr,
    old_ptr,
    logprobs_ptr,
    advantages_ptr,
    weights_ptr,
    lengths_ptr,
    coefficients_ptr,
    scratch_ptr,
    sequences,
    ignore_index,
    log_low,
    log_high,
    log_dual,
    labels_stride_b,
    labels_stride_t,
    old_stride_b,
    old_stride_t,
    advantages_stride,
    weights_stride,
    lengths_stride,
    PACKED: tl.constexpr,
    COUNT_TOKENS: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ratio, loss, coefficient and clip flags of one sequence, from its rows' log-probs.

    Sums and products are fp64, so that no intermediate overflows where the result doesn't; the clip decision
    is taken on log s in the statistics' dtype, as everywhere else.
    """
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    log_ratios = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        rows = start + lanes
        if PACKED:
            b = rows * 0
            t = rows
        else:
            b = rows * 0 + sequence
            t = rows - sequence * T
        inside = rows < last
        labels = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t), mask=inside, other=0)
        counted = inside & (labels.to(tl.int64) != ignore_index)
        old = tl.load(element(old_ptr, b, t, old_stride_b, old_stride_t), mask=counted, other=0.0)
        # Volatile, because other programs have written them during this launch.
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0, volatile=True)
        log_ratios += tl.where(counted, new - old.to(STATS), 0.0).to(tl.float64)
        counts += tl.where(counted, 1, 0)
    count = tl.sum(counts, axis=0)
    log_ratio = tl.sum(log_ratios, axis=0)

    advantage = tl.load(advantages_ptr + sequence.to(tl.int64) * advantages_stride).to(STATS)
    weight = tl.full([], 1.0, STATS)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + sequence.to(tl.int64) * weights_stride).to(STATS)
    length = count.to(tl.float64)
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + sequence.to(tl.int64) * lengths_stride).to(tl.float64)

    counts_at_all = count > 0
    log_s = (log_ratio / tl.where(counts_at_all, length, 1.0)).to(STATS)
    low = counts_at_all & (advantage < 0) & (log_s < log_low)
    high = counts_at_all & (((advantage > 0) & (log_s > log_high)) | ((advantage < 0) & (log_s > log_dual)))
    # The bound is selected before the exponential is taken, so that nothing is 0 * inf and NaN stays NaN.
    bound = tl.where(low, log_low, tl.where(advantage > 0, log_high, log_dual))
    bounded = tl.where(low | high, bound, log_s)
    ratio = tl.exp(log_s.to(tl.float64))
    scale = weight.to(tl.float64) * advantage.to(tl.float64)
    idle = (counts_at_all == 0) | (advantage == 0) | (weight == 0)
    loss = tl.where(idle, 0.0, -scale * tl.exp(bounded.to(tl.float64)))
    coefficient = -scale * ratio
    if COUNT_TOKENS:
        loss = tl.where(idle, 0.0, loss * length)
    else:
        coefficient = coefficient / length
    coefficient = tl.where(idle | low | high, 0.0, coefficient).to(STATS)

    tl.store(coefficients_ptr + sequence, coefficient)
    cell = scratch_ptr + sequence
    stride = sequences.to(tl.int64)
    tl.store(cell + _RATIO * stride, ratio)
    tl.store(cell + _LOSS * stride, loss)
    tl.store(cell + _LENGTH * stride, tl.where(counts_at_all, length, 0.0))
    tl.store(cell + _COUNT * stride, count.to(tl.float64))
    tl.store(cell + _LOG_RATIO * stride, log_ratio)
    tl.store(cell + _LOW * stride, low.to(tl.float64))
    tl.store(cell + _HIGH * stride, high.to(tl.float64))
    tl.store(cell + _ACTIVE * stride, (coefficient != 0).to(tl.float64))


@triton.jit
def _column(scratch_ptr, row: tl.constexpr, indices, sequences):
    """One row of the scratch for some sequences, 0 beyond the last."""
    pointers = scratch_ptr + row * sequences.to(tl.int64) + indices
    return tl.load(pointers, mask=indices < sequences, other=0.0, volatile=True)


@triton.jit
def _share(part, whole):
    return part / tl.where(whole > 0, whole, 1.0)


@triton.jit
def _reduce_batch(
    scratch_ptr,
    sequences,
    normalizer_ptr,
    divisor_scale,
    loss_ptr,
    divisor_ptr,
    metrics_ptr,
    DIVISOR: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss, divisor and metrics, from the sequences' scratch."""
    lanes = tl.arange(0, BLOCK)
    ratios = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), STATS)
    most = tl.full([BLOCK], -float("inf"), STATS)
    losses = tl.zeros([BLOCK], tl.float64)
    lengths = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.float64)
    log_ratios = tl.zeros([BLOCK], tl.float64)
    lows = tl.zeros([BLOCK], tl.int32)
    highs = tl.zeros([BLOCK], tl.int32)
    clipped_counts = tl.zeros([BLOCK], tl.float64)
    actives = tl.zeros([BLOCK], tl.int32)
    filled = tl.zeros([BLOCK], tl.int32)
    for start in range(0, sequences, BLOCK):
        indices = start + lanes
        count = _column(scratch_ptr, _COUNT, indices, sequences)
        some = count > 0
        ratio = _column(scratch_ptr, _RATIO, indices, sequences)
        low = _column(scratch_ptr, _LOW, indices, sequences)
        high = _column(scratch_ptr, _HIGH, indices, sequences)
        ratios += tl.where(some, ratio, 0.0)
        least = tl.minimum(least, tl.where(some, ratio, float("inf")).to(STATS))
        most = tl.maximum(most, tl.where(some, ratio, -float("inf")).to(STATS))
        losses += _column(scratch_ptr, _LOSS, indices, sequences)
        lengths += _column(scratch_ptr, _LENGTH, indices, sequences)
        counts += count
        log_ratios += _column(scratch_ptr, _LOG_RATIO, indices, sequences)
        lows += low.to(tl.int32)
        highs += high.to(tl.int32)
        clipped_counts += count * (low + high)
        actives += _column(scratch_ptr, _ACTIVE, indices, sequences).to(tl.int32)
        filled += tl.where(some, 1, 0)

    number = tl.sum(filled, axis=0).to(tl.float64)
    length = tl.sum(lengths, axis=0)
    tokens = tl.sum(counts, axis=0)
    if normalizer_ptr is not None:
        divisor = tl.load(normalizer_ptr).to(tl.float64)
    elif DIVISOR == "sequences":
        divisor = number
    elif DIVISOR == "tokens":
        divisor = length
    else:
        divisor = tl.full([], 1.0, tl.float64)
    divisor = tl.where(divisor == 0, 1.0, divisor) * divisor_scale
    tl.store(divisor_ptr, divisor.to(STATS))
    tl.store(loss_ptr, (tl.sum(losses, axis=0) / divisor).to(STATS))

    # In the order of types.METRICS.
    mean = tl.sum(ratios, axis=0) / tl.where(number > 0, number, 1.0)
    undefined = mean != mean
    low_ratio = tl.where(undefined, mean, tl.min(least, axis=0))
    high_ratio = tl.where(undefined, mean, tl.max(most, axis=0))
    tl.store(metrics_ptr + 0, tl.where(number > 0, mean, 1.0).to(STATS))
    tl.store(metrics_ptr + 1, tl.where(number > 0, low_ratio, 1.0).to(STATS))
    tl.store(metrics_ptr + 2, tl.where(number > 0, high_ratio, 1.0).to(STATS))
    tl.store(metrics_ptr + 3, _share(tl.sum(lows, axis=0), number).to(STATS))
    tl.store(metrics_ptr + 4, _share(tl.sum(highs, axis=0), number).to(STATS))
    tl.store(metrics_ptr + 5, _share(tl.sum(clipped_counts, axis=0), tokens).to(STATS))
    tl.store(metrics_ptr + 6, _share(0.0 - tl.sum(log_ratios, axis=0), tokens).to(STATS))
    tl.store(metrics_ptr + 7, _share(tl.sum(actives, axis=0), number).to(STATS))


@triton.jit
def _rows_of(sequence, cu_seqlens_ptr, N, T):
    """The first row of a sequence, and the one after its last."""
    if cu_seqlens_ptr is not None:
        # Clamped: cu_seqlens whose values nobody has checked may give nonsense, but no address outside the
        # rows.
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), N)
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1), first), N)
    else:
        first = sequence * T
        last = first + T
    return first, last


@row_kernel
def sequence_ratio_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    old_ptr,
    advantages_ptr,
    weights_ptr,
    lengths_ptr,
    normalizer_ptr,
    cu_seqlens_ptr,
    logprobs_ptr,
    lse_ptr,
    coefficients_ptr,
    loss_ptr,
    divisor_ptr,
    metrics_ptr,
    scratch_ptr,
    counters_ptr,
    N: tl.int32,
    T: tl.int32,
    V: tl.int32,
    sequences: tl.int32,
    ignore_index: tl.int64,
    slope: tl.float64,
    inner: tl.float64,
    outer: tl.float64,
    log_low: tl.float64,
    log_high: tl.float64,
    log_dual: tl.float64,
    divisor_scale: tl.float64,
    logits_stride_b: tl.int64,
    logits_stride_t: tl.int64,
    logits_stride_v: tl.int64,
    labels_stride_b: tl.int64,
    labels_stride_t: tl.int64,
    temperature_stride_b: tl.int64,
    temperature_stride_t: tl.int64,
    old_stride_b: tl.int64,
    old_stride_t: tl.int64,
    advantages_stride: tl.int64,
    weights_stride: tl.int64,
    lengths_stride: tl.int64,
    COUNT_TOKENS: tl.constexpr,
    DIVISOR: tl.constexpr,
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SEQUENCES_PER_BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Fold one row and arrive, or only arrive; the module's docstring says how."""
    n = tl.program_id(0)
    sequence = n - N
    if n < N:
        b = n // T
        t = n - b * T
        if cu_seqlens_ptr is not None:
            sequence = _sequence_of(n, cu_seqlens_ptr, sequences)
        else:
            sequence = b
        label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
        counted = label != ignore_index
        slopes = row_slopes(
            (slope, inner, outer),
            row_temperature_ptr,
            b,
            t,
            temperature_stride_b,
            temperature_stride_t,
            STATS,
        )
        logp, base, rest, _ = fold_row(
            row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ALIGNED),
            label,
            counted & (label >= 0) & (label < V),
            readable_width(counted, V, ALIGNED),
            logits_stride_v,
            slopes,
            STATS,
            SCALED,
            SOFTCAP,
            False,
            UNIT_STRIDE,
            BLOCK,
            "evict_first",
            PLATFORM,
        )
        tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
        tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, lse_ptr.dtype.element_ty), 0.0))

    first, last = _rows_of(sequence, cu_seqlens_ptr, N, T)
    if _arrive(counters_ptr + sequence) == last - first:
        _reduce_sequence(
            sequence,
            first,
            last,
            T,
            labels_ptr,
            old_ptr,
            logprobs_ptr,
            advantages_ptr,
            weights_ptr,
            lengths_ptr,
            coefficients_ptr,
            scratch_ptr,
            sequences,
            ignore_index,
            tl.full([], log_low, STATS),
            tl.full([], log_high, STATS),
            tl.full([], log_dual, STATS),
            labels_stride_b,
            labels_stride_t,
            old_stride_b,
            old_stride_t,
            advantages_stride,
            weights_stride,
            lengths_stride,
            cu_seqlens_ptr is not None,
            COUNT_TOKENS,
            STATS,
            TOKENS_PER_BLOCK,
        )
        if _arrive(counters_ptr + sequences) == sequences - 1:
            _reduce_batch(
                scratch_ptr,
                sequences,
                normalizer_ptr,
                tl.full([], divisor_scale, tl.float64),
                loss_ptr,
                divisor_ptr,
                metrics_ptr,
                DIVISOR,
                STATS,
                SEQUENCES_PER_BLOCK,
            )


@row_kernel
def sequence_step_kernel(
    logprobs_ptr,
    mask_ptr,
    old_ptr,
    advantages_ptr,
    weights_ptr,
    lengths_ptr,
    normalizer_ptr,
    cu_seqlens_ptr,
    coefficients_ptr,
    loss_ptr,
    divisor_ptr,
    metrics_ptr,
    scratch_ptr,
    counter_ptr,
    N: tl.int32,
    T: tl.int32,
    sequences: tl.int32,
    log_low: tl.float64,
    log_high: tl.float64,
    log_dual: tl.float64,
    divisor_scale: tl.float64,
    mask_stride_b: tl.int64,
    mask_stride_t: tl.int64,
    old_stride_b: tl.int64,
    old_stride_t: tl.int64,
    advantages_stride: tl.int64,
    weights_stride: tl.int64,
    lengths_stride: tl.int64,
    COUNT_TOKENS: tl.constexpr,
    DIVISOR: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SEQUENCES_PER_BLOCK: tl.constexpr,
):
    """One sequence whose log-probs are given, computed in fp64; the module's docstring says how."""
    sequence = tl.program_id(0)
    first, last = _rows_of(sequence, cu_seqlens_ptr, N, T)
    _reduce_sequence(
        sequence,
        first,
        last,
        T,
        mask_ptr,
        old_ptr,
        logprobs_ptr,
        advantages_ptr,
        weights_ptr,
        lengths_ptr,
        coefficients_ptr,
        scratch_ptr,
        sequences,
        0,
        tl.full([], log_low, tl.float64),
        tl.full([], log_high, tl.float64),
        tl.full([], log_dual, tl.float64),
        mask_stride_b,
        mask_stride_t,
        old_stride_b,
        old_stride_t,
        advantages_stride,
        weights_stride,
        lengths_stride,
        cu_seqlens_ptr is not None,
        COUNT_TOKENS,
        tl.float64,
        TOKENS_PER_BLOCK,
    )
    if _arrive(counter_ptr) == sequences - 1:
        _reduce_batch(
            scratch_ptr,
            sequences,
            normalizer_ptr,
            tl.full([], divisor_scale, tl.float64),
            loss_ptr,
            divisor_ptr,
            metrics_ptr,
            DIVISOR,
            tl.float64,
            SEQUENCES_PER_BLOCK,
        )


def _without_sequences(
    form: ClippedSequenceRatio, step: SequenceRatioStep, normalizer: Tensor | None
) -> None:
    """Fill in the step of an empty batch."""
    step.loss.zero_()
    step.divisor.fill_(form.divisor_scale)
    if normalizer is not None:
        step.divisor.mul_(torch.where(normalizer == 0, 1.0, normalizer))
    step.metrics.zero_()[:3] = 1.0


def sequence_ratio_step(
    logprobs: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    form: ClippedSequenceRatio,
    *,
    sequence_weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
) -> SequenceRatioStep:
    """See ``ops.backends.SequenceRatioBackend.sequence_ratio_step``."""
    B, T = logprobs.shape
    sequences, new = advantages.shape[0], logprobs.new_empty
    step = SequenceRatioStep(new(()), new(sequences), new(()), new(len(METRICS)))
    if sequences == 0:
        _without_sequences(form, step, normalizer)
        return step
    old = logprobs if old_logprobs is None else old_logprobs
    launch(
        sequence_step_kernel,
        sequences,
        logprobs.device,
        _STEP,
        logprobs,
        mask.view(torch.int8),
        old,
        advantages,
        sequence_weights,
        lengths,
        normalizer,
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
        step.coefficients,
        step.loss,
        step.divisor,
        step.metrics,
        torch.empty(_SCRATCH_ROWS * sequences, dtype=torch.float64, device=logprobs.device),
        torch.zeros(1, dtype=torch.int32, device=logprobs.device),
        B * T,
        T,
        sequences,
        form.log_low,
        form.log_high,
        form.log_dual,
        form.divisor_scale,
        *mask.stride(),
        *old.stride(),
        advantages.stride(0),
        0 if sequence_weights is None else sequence_weights.stride(0),
        0 if lengths is None else lengths.stride(0),
        COUNT_TOKENS=form.count_tokens,
        DIVISOR=form.divisor,
        TOKENS_PER_BLOCK=_TOKENS_PER_BLOCK,
        SEQUENCES_PER_BLOCK=_SEQUENCES_PER_BLOCK,
    )
    return step


def sequence_ratio_forward(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    form: ClippedSequenceRatio,
    transform: LogitTransform,
    *,
    ignore_index: int,
    sequence_weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
) -> SequenceRatioStats:
    """See ``ops.backends.SequenceRatioBackend.sequence_ratio_forward``."""
    B, T, V = logits.shape
    sequences = advantages.shape[0]
    logprobs = torch.empty(B, T, dtype=stats_dtype(logits.dtype), device=logits.device)
    stats = SequenceRatioStats(
        loss=logprobs.new_empty(()),
        logprobs=logprobs,
        lse=torch.empty_like(logprobs, dtype=torch.float64),
        coefficients=logprobs.new_empty(sequences),
        divisor=logprobs.new_empty(()),
        metrics=logprobs.new_empty(len(METRICS)),
    )
    if sequences == 0:
        step = SequenceRatioStep(stats.loss, stats.coefficients, stats.divisor, stats.metrics)
        _without_sequences(form, step, normalizer)
        stats.logprobs.zero_()
        stats.lse.zero_()
        return stats
    slopes = Slopes.of(transform)
    tile = FOLD[logits.element_size()]
    launch(
        sequence_ratio_kernel,
        B * T + sequences,
        logits.device,
        tile,
        logits,
        labels,
        slopes.row_temperature,
        old_logprobs,
        advantages,
        sequence_weights,
        lengths,
        normalizer,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        stats.logprobs,
        stats.lse,
        stats.coefficients,
        stats.loss,
        stats.divisor,
        stats.metrics,
        torch.empty(_SCRATCH_ROWS * sequences, dtype=torch.float64, device=logits.device),
        torch.zeros(sequences + 1, dtype=torch.int32, device=logits.device),
        B * T,
        T,
        V,
        sequences,
        ignore_index,
        slopes.slope,
        slopes.inner,
        slopes.outer,
        form.log_low,
        form.log_high,
        form.log_dual,
        form.divisor_scale,
        *logits.stride(),
        *labels.stride(),
        slopes.stride_b,
        slopes.stride_t,
        *old_logprobs.stride(),
        advantages.stride(0),
        0 if sequence_weights is None else sequence_weights.stride(0),
        0 if lengths is None else lengths.stride(0),
        COUNT_TOKENS=form.count_tokens,
        DIVISOR=form.divisor,
        STATS=stats_type(logits.dtype),
        SCALED=slopes.scaled,
        SOFTCAP=slopes.softcap,
        UNIT_STRIDE=logits.stride(2) == 1,
        ALIGNED=is_aligned(logits),
        BLOCK=tile.block,
        TOKENS_PER_BLOCK=_TOKENS_PER_BLOCK,
        SEQUENCES_PER_BLOCK=_SEQUENCES_PER_BLOCK,
        PLATFORM=platform(),
    )
    return stats
