"""Clipped ratios in one launch: ratios, clip decisions, loss and metrics, from the logits or the log-probs.

From the logits there are B T + sequences programs. Each of the first B T computes one row and adds 1 to the
counter of the row's sequence; each of the others only adds 1, for one sequence each, so that the counter of a
sequence ends at its rows + 1, also where it is empty. The last program of a sequence reduces its log-ratios.

From the log-probs there is one program per sequence, for a ratio per sequence or token, with or without a KL
penalty. It sums the log-ratios, then reads the tokens again for their ratios, penalties and gradients. A
divisor that counts sequences or tokens is known only at the end: another launch divides the gradients by it.

The program that finishes the last sequence reduces the loss and the metrics. No program waits for another,
and reductions run over memory in a fixed order, so the order of programs does not change the result. The
kernels write contiguous tensors:

- gradient: dLoss/dlogprobs times the divisor, of each sequence in a launch from logits, otherwise of each
  token; in a launch from log-probs not times a divisor that is known beforehand
- loss, divisor, metrics: as in ``types.SequenceRatioStats``
- scratch: fp64 [SCRATCH_ROWS, sequences]
- counters: int32, zeros before the launch. The last counts finished sequences; in a launch from logits, one
  for each sequence before it counts the sequence's finished rows
- merged, in a launch from logits with a mask: labels, ``ignore_index`` where the mask is 0
"""

# ruff: noqa: SIM108 - in Triton, branches choose code.
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element, in_row, program_rows, row_pointer
from gspo_kernels.backends.triton.launch import (
    FORWARD,
    RowConstants,
    Tile,
    launch,
    row_numbers,
    stats_type,
    strides,
    strides_of,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.masks import rows_of
from gspo_kernels.backends.triton.rows import add_hi_lo, online_logsumexp, row_label, row_slopes
from gspo_kernels.core.types import (
    METRICS,
    KLPenalty,
    LogitRows,
    RatioClip,
    RatioOperands,
    RatioStep,
    Recheck,
    SequenceRatioStats,
    stats_dtype,
)

_STEP = Tile(1024, 8)
_TOKENS_PER_THREAD = 4
"""Values that a thread reduces at a time; with more, reductions would take more registers than a row does."""


class RatioConstants(NamedTuple):
    """The constants for which a kernel of clipped ratios is compiled.

    Attributes:
        STATS: the dtype of statistics.
        COUNT_TOKENS, DIVISOR: see ``types.RatioClip``.
        PER_TOKEN: whether each token has a ratio.
        ESTIMATOR: the estimator of the KL penalty, or None.
        TOKENS_PER_BLOCK, SEQUENCES_PER_BLOCK: how many are reduced at a time.
    """

    STATS: tl.dtype
    COUNT_TOKENS: bool
    DIVISOR: str
    PER_TOKEN: bool
    ESTIMATOR: str | None
    TOKENS_PER_BLOCK: int
    SEQUENCES_PER_BLOCK: int

    @staticmethod
    def of(
        ratio_clip: RatioClip, stats: tl.dtype, tile: Tile, estimator: str | None = None
    ) -> RatioConstants:
        """Return the constants for a ratio, a dtype of statistics, and a KL penalty's estimator."""
        return RatioConstants(
            STATS=stats,
            COUNT_TOKENS=ratio_clip.count_tokens,
            DIVISOR=ratio_clip.divisor,
            PER_TOKEN=ratio_clip.level == "token",
            ESTIMATOR=estimator,
            TOKENS_PER_BLOCK=32 * tile.warps * _TOKENS_PER_THREAD,
            SEQUENCES_PER_BLOCK=32 * tile.warps,
        )


# Rows of the scratch. If tokens have ratios, _RATIO, _LOW and _HIGH are sums over a sequence's tokens.
_RATIO: tl.constexpr = tl.constexpr(0)
_LOSS: tl.constexpr = tl.constexpr(1)
_LENGTH: tl.constexpr = tl.constexpr(2)
_COUNT: tl.constexpr = tl.constexpr(3)
_LOG_RATIO: tl.constexpr = tl.constexpr(4)
_LOW: tl.constexpr = tl.constexpr(5)
_HIGH: tl.constexpr = tl.constexpr(6)
_ACTIVE: tl.constexpr = tl.constexpr(7)
SMALLEST: tl.constexpr = tl.constexpr(8)
LARGEST: tl.constexpr = tl.constexpr(9)
KL: tl.constexpr = tl.constexpr(10)
SCRATCH_ROWS = 11

# Adding and subtracting this number rounds to multiples of 2^-40.
_GRID: tl.constexpr = tl.constexpr(1.5 * 2.0**12)


@triton.jit
def sequence_of(n, cu_seqlens_ptr, sequences):
    """Return the sequence that holds row n: the last that starts at or before it, which is never empty."""
    low = sequences * 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        after = tl.load(cu_seqlens_ptr + middle) <= n
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    return low


@triton.jit
def signal_and_count(counter_ptr):
    """Release this program's writes, and return the number of programs that did so before, whose writes are
    then visible.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def log_ratio_of(a, b):
    """Return the log-ratio of two log-probs; it is 0 if they are equal, also where both are -inf."""
    return tl.where(a != b, a - b, 0.0)


@triton.jit
def clip(log_ratio, advantage, weight, bounds):
    """Return (ratio, loss, dloss / dlog-ratio, clipped low, clipped high) of PPO's clip, fp64 and bool.

    The clip decision is taken on the log-ratio, in the dtype of the log-ratio and the advantage. ``bounds``
    are (log_low, log_high, log_dual).
    """
    log_low = tl.full([], bounds[0], log_ratio.dtype)
    log_high = tl.full([], bounds[1], log_ratio.dtype)
    log_dual = tl.full([], bounds[2], log_ratio.dtype)
    low = (advantage < 0) & (log_ratio < log_low)
    high = ((advantage > 0) & (log_ratio > log_high)) | ((advantage < 0) & (log_ratio > log_dual))
    # The bound is selected before the exponential is taken, so that nothing is 0 * inf and NaN stays NaN.
    bound = tl.where(low, log_low, tl.where(advantage > 0, log_high, log_dual))
    bounded = tl.where(low | high, bound, log_ratio)
    ratio = tl.exp(log_ratio.to(tl.float64))
    scale = weight.to(tl.float64) * advantage.to(tl.float64)
    without_loss = (advantage == 0) | (weight == 0)
    loss = tl.where(without_loss, 0.0, -scale * tl.exp(bounded.to(tl.float64)))
    coefficient = tl.where(without_loss | low | high, 0.0, -scale * ratio)
    return ratio, loss, coefficient, low, high


@triton.jit
def _load_tokens(values, b, t, mask):
    """Load one number per token of ``values`` (pointer, stride_b, stride_t), 0 where the mask is False."""
    pointer, stride_b, stride_t = values
    return tl.load(element(pointer, b, t, stride_b, stride_t), mask=mask, other=0)


@triton.jit
def sum_sequence(
    sequence, first, last, labels, ignore_index, old, logprobs_ptr,
    WRITTEN: tl.constexpr, PACKED: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return how many of a sequence's tokens count, and the fp64 sum of their log-ratios. ``labels`` and
    ``old`` are as in ``_load_tokens``. WRITTEN: this launch has written the labels, which are contiguous.

    Log-ratios of fp32 log-probs are rounded to multiples of 2^-40, as all but those near 0 already are. fp64
    adds these without rounding below 2^13, so that the sum does not depend on where in the rows tokens are.
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
            t = rows - first
        inside = rows < last
        if WRITTEN:
            token_labels = tl.load(labels[0] + rows, mask=inside, other=0, volatile=True)
        else:
            token_labels = _load_tokens(labels, b, t, inside)
        counted = inside & (token_labels != ignore_index)
        # Volatile, because other programs have written the log-probs during this launch.
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0, volatile=True)
        log_ratio = log_ratio_of(new, _load_tokens(old, b, t, counted).to(STATS))
        log_ratio = tl.where(counted, log_ratio, 0.0).to(tl.float64)
        if logprobs_ptr.dtype.element_ty == tl.float32:
            log_ratio = (log_ratio + _GRID) - _GRID
        log_ratios += log_ratio
        counts += tl.where(counted, 1, 0)
    return tl.sum(counts, axis=0), tl.sum(log_ratios, axis=0)


@triton.jit
def length_of(sequence, count, lengths_ptr, stride):
    """Return the length L of a sequence as fp64; 1 if no token counts."""
    length = count.to(tl.float64)
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + sequence.to(tl.int64) * stride).to(tl.float64)
    return tl.where(count > 0, length, 1.0)


@triton.jit
def clip_sequence(sequence, count, log_ratio, length, advantages, weights, bounds, RATIO: tl.constexpr):
    """Return ratio, loss, coefficient and clip flags of a sequence, from the sum of its log-ratios.

    Sums and products are fp64, so that no intermediate overflows where the result doesn't; the clip decision
    is taken on log s in the statistics' dtype. ``advantages`` and ``weights`` are (pointer, stride).
    """
    advantage = tl.load(advantages[0] + sequence.to(tl.int64) * advantages[1]).to(RATIO.STATS)
    weight = tl.full([], 1.0, RATIO.STATS)
    if weights[0] is not None:
        weight = tl.load(weights[0] + sequence.to(tl.int64) * weights[1]).to(RATIO.STATS)
    log_s = (log_ratio / length).to(RATIO.STATS)
    s, loss, coefficient, low, high = clip(log_s, advantage, weight, bounds)
    if RATIO.COUNT_TOKENS:
        loss = loss * length
    else:
        coefficient = coefficient / length
    some = count > 0
    return s, tl.where(some, loss, 0.0), tl.where(some, coefficient, 0.0), some & low, some & high


@triton.jit
def store_cell(scratch_ptr, row: tl.constexpr, sequence, sequences, value):
    """Store one number of a sequence for the reduction of the batch."""
    tl.store(scratch_ptr + row * sequences.to(tl.int64) + sequence, value.to(tl.float64))


@triton.jit
def store_sequence(scratch_ptr, sequence, sequences, numbers):
    """Store the eight numbers, in the order of the scratch, that every sequence has for the reduction."""
    for row in tl.static_range(8):
        store_cell(scratch_ptr, row, sequence, sequences, numbers[row])


@triton.jit
def _column(scratch_ptr, row: tl.constexpr, indices, sequences):
    """Load one row of the scratch for some sequences, 0 beyond the last sequence."""
    pointers = scratch_ptr + row * sequences.to(tl.int64) + indices
    return tl.load(pointers, mask=indices < sequences, other=0.0, volatile=True)


@triton.jit
def _share(part, total):
    return part / tl.where(total > 0, total, 1.0)


@triton.jit
def divisor_of(number, length, normalizer_ptr, divisor_scale, RATIO: tl.constexpr):
    """Return the loss's divisor, for a number of sequences and the sum of their lengths, fp64."""
    if normalizer_ptr is not None:
        divisor = tl.load(normalizer_ptr).to(tl.float64)
    elif RATIO.DIVISOR == "sequences":
        divisor = number
    elif RATIO.DIVISOR == "tokens":
        divisor = length
    else:
        divisor = tl.full([], 1.0, tl.float64)
    return tl.where(divisor == 0, 1.0, divisor) * divisor_scale


@triton.jit
def reduce_batch(scratch_ptr, outputs, sequences, normalizer_ptr, divisor_scale, RATIO: tl.constexpr):
    """Compute loss, divisor and metrics, the ``outputs``, from the sequences' scratch."""
    loss_ptr, divisor_ptr, metrics_ptr = outputs
    STATS: tl.constexpr = RATIO.STATS
    BLOCK: tl.constexpr = RATIO.SEQUENCES_PER_BLOCK
    lanes = tl.arange(0, BLOCK)
    ratios = tl.zeros([BLOCK], tl.float64)
    min_ratio = tl.full([BLOCK], float("inf"), STATS)
    max_ratio = tl.full([BLOCK], -float("inf"), STATS)
    losses = tl.zeros([BLOCK], tl.float64)
    lengths = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.float64)
    log_ratios = tl.zeros([BLOCK], tl.float64)
    lows = tl.zeros([BLOCK], tl.int32)
    highs = tl.zeros([BLOCK], tl.int32)
    clipped_counts = tl.zeros([BLOCK], tl.float64)
    kls = tl.zeros([BLOCK], tl.float64)
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
        smallest = ratio
        largest = ratio
        if RATIO.PER_TOKEN:
            smallest = _column(scratch_ptr, SMALLEST, indices, sequences)
            largest = _column(scratch_ptr, LARGEST, indices, sequences)
        min_ratio = tl.minimum(min_ratio, tl.where(some, smallest, float("inf")).to(STATS))
        max_ratio = tl.maximum(max_ratio, tl.where(some, largest, -float("inf")).to(STATS))
        losses += _column(scratch_ptr, _LOSS, indices, sequences)
        lengths += _column(scratch_ptr, _LENGTH, indices, sequences)
        counts += count
        log_ratios += _column(scratch_ptr, _LOG_RATIO, indices, sequences)
        lows += low.to(tl.int32)
        highs += high.to(tl.int32)
        if RATIO.PER_TOKEN:
            clipped_counts += low + high
        else:
            clipped_counts += count * (low + high)
        if RATIO.ESTIMATOR is not None:
            kls += _column(scratch_ptr, KL, indices, sequences)
        actives += _column(scratch_ptr, _ACTIVE, indices, sequences).to(tl.int32)
        filled += tl.where(some, 1, 0)

    number = tl.sum(filled, axis=0).to(tl.float64)
    length = tl.sum(lengths, axis=0)
    tokens = tl.sum(counts, axis=0)
    divisor = divisor_of(number, length, normalizer_ptr, divisor_scale, RATIO)
    tl.store(divisor_ptr, divisor.to(STATS))
    tl.store(loss_ptr, (tl.sum(losses, axis=0) / divisor).to(STATS))

    # In the order of types.METRICS.
    items = number
    if RATIO.PER_TOKEN:
        items = tokens
    mean = tl.sum(ratios, axis=0) / tl.where(items > 0, items, 1.0)
    undefined = mean != mean
    low_ratio = tl.where(undefined, mean, tl.min(min_ratio, axis=0))
    high_ratio = tl.where(undefined, mean, tl.max(max_ratio, axis=0))
    tl.store(metrics_ptr + 0, tl.where(number > 0, mean, 1.0).to(STATS))
    tl.store(metrics_ptr + 1, tl.where(number > 0, low_ratio, 1.0).to(STATS))
    tl.store(metrics_ptr + 2, tl.where(number > 0, high_ratio, 1.0).to(STATS))
    tl.store(metrics_ptr + 3, _share(tl.sum(lows, axis=0), items).to(STATS))
    tl.store(metrics_ptr + 4, _share(tl.sum(highs, axis=0), items).to(STATS))
    tl.store(metrics_ptr + 5, _share(tl.sum(clipped_counts, axis=0), tokens).to(STATS))
    tl.store(metrics_ptr + 6, _share(0.0 - tl.sum(log_ratios, axis=0), tokens).to(STATS))
    tl.store(metrics_ptr + 7, _share(tl.sum(actives, axis=0), number).to(STATS))
    if RATIO.ESTIMATOR is not None:
        tl.store(metrics_ptr + 8, _share(tl.sum(kls, axis=0), tokens).to(STATS))


def fill_without_sequences(
    ratio_clip: RatioClip, normalizer: Tensor | None, loss: Tensor, divisor: Tensor, metrics: Tensor
) -> None:
    """Fill in loss, divisor and metrics of a batch without sequences."""
    loss.zero_()
    divisor.fill_(ratio_clip.divisor_scale)
    if normalizer is not None:
        divisor.mul_(torch.where(normalizer == 0, 1.0, normalizer))
    metrics.zero_()[:3] = 1.0


# --- from logits


@typed_kernel
def sequence_ratio_kernel(
    logits_ptr, labels_ptr, mask_ptr, temperature_ptr, kept_ptr,
    old_ptr, advantages_ptr, weights_ptr, lengths_ptr, normalizer_ptr, cu_seqlens_ptr,
    logprobs_ptr, lse_ptr, merged_ptr, gradient_ptr, loss_ptr, divisor_ptr, metrics_ptr,
    scratch_ptr, counters_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    mask_b: tl.int64, mask_t: tl.int64, old_b: tl.int64, old_t: tl.int64,
    advantages_stride: tl.int64, weights_stride: tl.int64, lengths_stride: tl.int64,
    tokens: tl.int32, sequences: tl.int32,
    log_low: tl.float64, log_high: tl.float64, log_dual: tl.float64, divisor_scale: tl.float64,
    ROW: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Compute one row and count it, or only count; for the outputs see the module."""
    n = tl.program_id(0)
    sequence = n - tokens
    if n < tokens:
        b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
        if mask_ptr is not None:
            counted &= tl.load(element(mask_ptr, b, t, mask_b, mask_t)) != 0
            merged = tl.where(counted, label, ignore_index)
            tl.store(merged_ptr + n, merged.to(merged_ptr.dtype.element_ty))
        kept = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
        row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
        labeled = counted & in_row(label, V, kept)
        width = tl.where(counted, V, 0)
        slopes = row_slopes(
            slope, inner, outer, temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
        )
        logp, lse_hi, lse_lo, _ = online_logsumexp(
            row, label, labeled, width, kept, slopes, False, "evict_first", ROW
        )
        tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
        tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
        if cu_seqlens_ptr is not None:
            sequence = sequence_of(n, cu_seqlens_ptr, sequences)
        else:
            sequence = b

    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    if signal_and_count(counters_ptr + sequence) == last - first:
        labels = (labels_ptr if mask_ptr is None else merged_ptr, labels_b, labels_t)
        count, log_ratio = sum_sequence(
            sequence, first, last, labels, ignore_index, (old_ptr, old_b, old_t), logprobs_ptr,
            mask_ptr is not None, cu_seqlens_ptr is not None, RATIO.STATS, RATIO.TOKENS_PER_BLOCK,
        )  # fmt: skip
        length = length_of(sequence, count, lengths_ptr, lengths_stride)
        advantages = (advantages_ptr, advantages_stride)
        weights = (weights_ptr, weights_stride)
        bounds = (log_low, log_high, log_dual)
        s, loss, coefficient, low, high = clip_sequence(
            sequence, count, log_ratio, length, advantages, weights, bounds, RATIO
        )
        coefficient = coefficient.to(RATIO.STATS)
        tl.store(gradient_ptr + sequence, coefficient)
        active = coefficient != 0
        length = tl.where(count > 0, length, 0.0)
        numbers = (s, loss, length, count, log_ratio, low, high, active)
        store_sequence(scratch_ptr, sequence, sequences, numbers)
        if signal_and_count(counters_ptr + sequences) == sequences - 1:
            outputs = (loss_ptr, divisor_ptr, metrics_ptr)
            reduce_batch(scratch_ptr, outputs, sequences, normalizer_ptr, divisor_scale, RATIO)


def sequence_ratio_forward(
    rows: LogitRows,
    mask: Tensor | None,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    recheck: Recheck = None,
) -> SequenceRatioStats:
    """See ``protocol.RatioBackend.sequence_ratio_forward``."""
    logits, labels, transform, ignore_index = rows
    logits = with_contiguous_rows(logits)
    old, advantages, weights, lengths, normalizer, cu_seqlens = operands
    B, T, _ = logits.shape
    sequences = advantages.shape[0]
    new = functools.partial(torch.empty, dtype=stats_dtype(logits.dtype), device=logits.device)
    stats = SequenceRatioStats(
        loss=new(()),
        logprobs=new((B, T)),
        lse=new((B, T), dtype=torch.float64),
        coefficients=new((sequences,)),
        divisor=new(()),
        metrics=new((len(METRICS),)),
        labels=new(0 if mask is None else (B, T), dtype=labels.dtype),
    )
    if sequences == 0:
        fill_without_sequences(ratio_clip, normalizer, stats.loss, stats.divisor, stats.metrics)
        stats.logprobs.zero_()
        stats.lse.zero_()
        stats.labels.fill_(ignore_index)
        return stats
    # A softcap and fp64 keep more numbers of a block at a time. A mask needs a few: nine programs run then.
    much = transform.softcap > 0 or logits.dtype == torch.float64
    registers = 128 if much else 56
    tile = without_spills(FORWARD[logits.element_size()], much or mask is not None, registers)
    launch(
        sequence_ratio_kernel, B * T + sequences, logits.device, tile,
        logits, labels, mask, transform.row_temperature, transform.kept,
        old, advantages, weights, lengths, normalizer,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        stats.logprobs, stats.lse, stats.labels, stats.coefficients, stats.loss, stats.divisor, stats.metrics,
        new((SCRATCH_ROWS * sequences,), dtype=torch.float64),
        torch.zeros(sequences + 1, dtype=torch.int32, device=logits.device),
        *row_numbers(logits, labels, transform, ignore_index), *strides(mask, old),
        *(0 if each is None else each.stride(0) for each in (advantages, weights, lengths)),
        B * T, sequences, *ratio_clip[:3], ratio_clip.divisor_scale,
        ROW=RowConstants.of(logits, transform, tile),
        RATIO=RatioConstants.of(ratio_clip, stats_type(logits.dtype), tile),
    )  # fmt: skip
    if recheck is not None:
        recheck()
    return stats


# --- from log-probs


@triton.jit
def kl_penalty(d, ESTIMATOR: tl.constexpr):
    """Return ``evaluate.kl_penalty`` of an fp64 log-ratio to the reference, and its derivative."""
    if ESTIMATOR == "k1":
        value = d
        slope = tl.full(d.shape, 1.0, tl.float64)
    elif ESTIMATOR == "k2":
        value = 0.5 * d * d
        slope = d
    else:
        # expm1(-d), by Kahan's correction where exp(-d) - 1 would cancel
        power = tl.exp(-d)
        exact = power - 1.0
        corrected = tl.where(exact == 0.0, -d, exact * -d / tl.log(power))
        grown = tl.where(tl.abs(d) < 0.5, corrected, exact)
        # exp(-d) outgrows d, also where both are infinite: the sum is then +inf, not NaN
        value = grown + tl.where(d < -1.7976931348623157e308, -1.7976931348623157e308, d)
        slope = -grown
    return value, slope


@typed_kernel
def ratio_step_kernel(
    logprobs_ptr, mask_ptr, old_ptr, advantages_ptr, weights_ptr, lengths_ptr, normalizer_ptr,
    cu_seqlens_ptr, reference_ptr, beta_ptr,
    gradient_ptr, loss_ptr, divisor_ptr, metrics_ptr, scratch_ptr, counter_ptr,
    mask_b: tl.int64, mask_t: tl.int64, old_b: tl.int64, old_t: tl.int64,
    advantages_b: tl.int64, advantages_t: tl.int64, weights_b: tl.int64, weights_t: tl.int64,
    lengths_b: tl.int64, lengths_t: tl.int64, reference_b: tl.int64, reference_t: tl.int64,
    beta_b: tl.int64, beta_t: tl.int64,
    T: tl.int32, tokens: tl.int32, sequences: tl.int32,
    log_low: tl.float64, log_high: tl.float64, log_dual: tl.float64, divisor_scale: tl.float64,
    RATIO: tl.constexpr,
):  # fmt: skip
    """Compute one sequence in fp64; for the outputs see the module."""
    ESTIMATOR: tl.constexpr = RATIO.ESTIMATOR
    TOKENS_PER_BLOCK: tl.constexpr = RATIO.TOKENS_PER_BLOCK
    KNOWN: tl.constexpr = normalizer_ptr is not None or RATIO.DIVISOR == "one"
    if KNOWN:
        divisor = divisor_of(1.0, 1.0, normalizer_ptr, divisor_scale, RATIO)
    sequence = tl.program_id(0)
    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    mask = (mask_ptr, mask_b, mask_t)
    old = (old_ptr, old_b, old_t)
    bounds = (log_low, log_high, log_dual)
    count, log_ratio = sum_sequence(
        sequence, first, last, mask, 0, old, logprobs_ptr,
        False, cu_seqlens_ptr is not None, tl.float64, TOKENS_PER_BLOCK,
    )  # fmt: skip
    length = length_of(sequence, count, lengths_ptr, lengths_b)
    share = tl.full([], 1.0, tl.float64)
    if not RATIO.COUNT_TOKENS:
        share = share / length
    if not RATIO.PER_TOKEN:
        advantages = (advantages_ptr, advantages_b)
        weights = (weights_ptr, weights_b)
        s, loss, coefficient, low, high = clip_sequence(
            sequence, count, log_ratio, length, advantages, weights, bounds, RATIO
        )

    lanes = tl.arange(0, TOKENS_PER_BLOCK)
    ratios = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    smallest = tl.full([TOKENS_PER_BLOCK], float("inf"), tl.float64)
    largest = tl.full([TOKENS_PER_BLOCK], -float("inf"), tl.float64)
    lows = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    highs = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    losses = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    kls = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    actives = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    for start in range(first, last, TOKENS_PER_BLOCK):
        rows = start + lanes
        inside = rows < last
        t = rows
        if cu_seqlens_ptr is None:
            t = rows - first
        # The stride from one sequence to the next is 0 where they are packed.
        b = rows * 0 + sequence
        counted = inside & (_load_tokens(mask, b, t, inside) != 0)
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64)
        if RATIO.PER_TOKEN:
            weight = tl.full([TOKENS_PER_BLOCK], 1.0, tl.float64)
            if weights_ptr is not None:
                weight = _load_tokens((weights_ptr, weights_b, weights_t), b, t, counted).to(tl.float64)
            token_log_ratio = log_ratio_of(new, _load_tokens(old, b, t, counted).to(tl.float64))
            advantage = _load_tokens((advantages_ptr, advantages_b, advantages_t), b, t, counted)
            token_ratio, token_loss, slope, token_low, token_high = clip(
                token_log_ratio, advantage.to(tl.float64), weight, bounds
            )
            ratios += tl.where(counted, token_ratio, 0.0)
            smallest = tl.minimum(smallest, tl.where(counted, token_ratio, float("inf")))
            largest = tl.maximum(largest, tl.where(counted, token_ratio, -float("inf")))
            lows += tl.where(counted & token_low, 1, 0)
            highs += tl.where(counted & token_high, 1, 0)
            losses += tl.where(counted, token_loss, 0.0)
            slope = slope * share
        else:
            slope = tl.zeros([TOKENS_PER_BLOCK], tl.float64) + coefficient
        if reference_ptr is not None:
            reference = _load_tokens((reference_ptr, reference_b, reference_t), b, t, counted)
            kl, kl_slope = kl_penalty(log_ratio_of(new, reference.to(tl.float64)), ESTIMATOR)
            kls += tl.where(counted, kl, 0.0)
            if beta_ptr is not None:
                beta = _load_tokens((beta_ptr, beta_b, beta_t), b, t, counted).to(tl.float64)
                # 0 * inf is 0.
                losses += tl.where((beta == 0) | (kl == 0), 0.0, beta * kl)
                slope += tl.where((beta == 0) | (kl_slope == 0), 0.0, beta * kl_slope) * share
        slope = tl.where(counted, slope, 0.0)
        actives |= tl.where(slope != 0, 1, 0)
        if KNOWN:
            slope = slope / divisor
        tl.store(gradient_ptr + rows, slope.to(gradient_ptr.dtype.element_ty), mask=inside)

    token_losses = tl.sum(losses, axis=0) * share
    if RATIO.PER_TOKEN:
        s = tl.sum(ratios, axis=0)
        loss = token_losses
        low = tl.sum(lows, axis=0)
        high = tl.sum(highs, axis=0)
        store_cell(scratch_ptr, SMALLEST, sequence, sequences, tl.min(smallest, axis=0))
        store_cell(scratch_ptr, LARGEST, sequence, sequences, tl.max(largest, axis=0))
    else:
        loss += token_losses
    if reference_ptr is not None:
        store_cell(scratch_ptr, KL, sequence, sequences, tl.sum(kls, axis=0))
    active = tl.max(actives, axis=0)
    length = tl.where(count > 0, length, 0.0)
    numbers = (s, loss, length, count, log_ratio, low, high, active)
    store_sequence(scratch_ptr, sequence, sequences, numbers)
    if signal_and_count(counter_ptr) == sequences - 1:
        outputs = (loss_ptr, divisor_ptr, metrics_ptr)
        reduce_batch(scratch_ptr, outputs, sequences, normalizer_ptr, divisor_scale, RATIO)


@typed_kernel
def divide_kernel(gradient_ptr, divisor_ptr, result_ptr, tokens: tl.int32, BLOCK: tl.constexpr):
    """Divide a block of gradients, in fp64, by the loss's divisor."""
    n, inside = program_rows(tokens, BLOCK)
    gradient = tl.load(gradient_ptr + n, mask=inside, other=0.0) / tl.load(divisor_ptr)
    tl.store(result_ptr + n, gradient.to(result_ptr.dtype.element_ty), mask=inside)


def ratio_step(
    logprobs: Tensor,
    mask: Tensor,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    kl: KLPenalty | None = None,
    recheck: Recheck = None,
) -> RatioStep:
    """See ``protocol.RatioBackend.ratio_step``."""
    old, advantages, weights, lengths, normalizer, cu_seqlens = operands
    old = logprobs if old is None else old
    B, T = logprobs.shape
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # one kind of operation makes all tensors: the first of each kind takes as long as twenty more of it
    new = functools.partial(torch.empty, dtype=logprobs.dtype, device=logprobs.device)
    loss, metrics, result = new(()), new((len(METRICS) + (kl is not None),)), new((B, T))
    divisor, known = new((), dtype=torch.float64), normalizer is not None or ratio_clip.divisor == "one"
    if sequences == 0:
        fill_without_sequences(ratio_clip, normalizer, loss, divisor, metrics)
        return RatioStep(loss, metrics, torch.zeros_like(logprobs))
    reference = None if kl is None else kl.ref_logprobs
    beta = None if kl is None or kl.beta is None else kl.beta.expand(logprobs.shape)
    gradient = result if known else new((B, T), dtype=torch.float64)
    given = (mask, old, advantages, weights, lengths, reference, beta)
    launch(
        ratio_step_kernel, sequences, logprobs.device, without_spills(_STEP, True, 255),
        logprobs, mask, old, advantages, weights, lengths, normalizer,
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
        reference, beta,
        gradient, loss, divisor, metrics,
        new((SCRATCH_ROWS * sequences,), dtype=torch.float64),
        torch.zeros(1, dtype=torch.int32, device=logprobs.device),
        *(stride for each in given for stride in strides_of(each, cu_seqlens is not None)),
        T, B * T, sequences, *ratio_clip[:3], ratio_clip.divisor_scale,
        RATIO=RatioConstants.of(ratio_clip, tl.float64, _STEP, None if kl is None else kl.estimator),
    )  # fmt: skip
    if not known:
        launch(
            divide_kernel, -(-B * T // _STEP.block), logprobs.device, _STEP,
            gradient, divisor, result, B * T, BLOCK=_STEP.block,
        )  # fmt: skip
    if recheck is not None:
        recheck()
    return RatioStep(loss, metrics, result)
