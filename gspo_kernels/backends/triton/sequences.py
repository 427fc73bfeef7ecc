"""What kernels of clipped ratios do after all rows of a sequence, and after all sequences, are finished.

The kernels write contiguous tensors:

- gradient: dLoss/dlogprobs times the divisor, of each sequence in a launch from logits, otherwise of each
  token; in a launch from log-probs not times a divisor that is known beforehand
- loss, divisor, metrics: as in ``types.SequenceRatioStats``
- scratch: fp64 [SCRATCH_ROWS, sequences]
- counters: int32, zeros before the launch. The last counts finished sequences; in a launch from logits, one
  for each sequence before it counts the sequence's finished rows
- merged, in a launch from logits with a mask: labels, ``ignore_index`` where the mask is 0
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element
from gspo_kernels.core.types import RatioClip


def strides_of(values: Tensor | None, packed: bool) -> tuple[int, int]:
    """Return the strides from one sequence to the next, and from one token to the next, of values [sequences]
    or like the tokens; 0 where one value serves all.
    """
    if values is None:
        return 0, 0
    if values.ndim == 1:
        return values.stride(0), 0
    return 0 if packed else values.stride(0), values.stride(1)


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


# Rows of the fp64 scratch [11, sequences], which the final reduction reads. If tokens have ratios, _RATIO,
# _LOW and _HIGH are sums over a sequence's tokens.
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
    """Publish what this program has written, and return how many programs have done so before. What these
    programs have written can then be read.
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
def clip(log_ratio, advantage, weight, log_low, log_high, log_dual):
    """Return (ratio, loss, dloss / dlog-ratio, clipped low, clipped high) of PPO's clip, fp64 and bool.

    The clip decision is taken on the log-ratio, in the dtype of the log-ratio and the advantage.
    """
    log_low = tl.full([], log_low, log_ratio.dtype)
    log_high = tl.full([], log_high, log_ratio.dtype)
    log_dual = tl.full([], log_dual, log_ratio.dtype)
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
def sum_sequence(
    sequence,
    first,
    last,
    T,
    labels_ptr,
    labels_b,
    labels_t,
    ignore_index,
    old_ptr,
    old_b,
    old_t,
    logprobs_ptr,
    WRITTEN: tl.constexpr,
    PACKED: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return how many of a sequence's tokens count, and the fp64 sum of their log-ratios. WRITTEN: this
    launch has written the labels, which are contiguous.

    Log-ratios of fp32 log-probs are rounded to multiples of 2^-40. All are such multiples anyway, except for
    log-probs near 0. fp64 adds such numbers without rounding as long as sums stay below 2^13, so that the sum
    does not depend on where in the rows the tokens stand.
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
        if WRITTEN:
            labels = tl.load(labels_ptr + rows, mask=inside, other=0, volatile=True)
        else:
            labels = tl.load(element(labels_ptr, b, t, labels_b, labels_t), mask=inside, other=0)
        counted = inside & (labels != ignore_index)
        old = tl.load(element(old_ptr, b, t, old_b, old_t), mask=counted, other=0.0)
        # Volatile, because other programs have written the log-probs during this launch.
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0, volatile=True)
        log_ratio = tl.where(counted, log_ratio_of(new, old.to(STATS)), 0.0).to(tl.float64)
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
def clip_sequence(
    sequence,
    count,
    log_ratio,
    length,
    advantages_ptr,
    advantages_stride,
    weights_ptr,
    weights_stride,
    log_low,
    log_high,
    log_dual,
    RATIO: tl.constexpr,
):
    """Return ratio, loss, coefficient and clip flags of a sequence, from the sum of its log-ratios.

    Sums and products are fp64, so that no intermediate overflows where the result doesn't; the clip decision
    is taken on log s in the statistics' dtype, as everywhere else.
    """
    advantage = tl.load(advantages_ptr + sequence.to(tl.int64) * advantages_stride).to(RATIO.STATS)
    weight = tl.full([], 1.0, RATIO.STATS)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + sequence.to(tl.int64) * weights_stride).to(RATIO.STATS)
    log_s = (log_ratio / length).to(RATIO.STATS)
    s, loss, coefficient, low, high = clip(log_s, advantage, weight, log_low, log_high, log_dual)
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
def store_sequence(
    scratch_ptr, sequence, sequences, count, log_ratio, length, ratio, loss, low, high, active
):
    """Store the numbers that the reduction of the batch reads of every sequence."""
    store_cell(scratch_ptr, _RATIO, sequence, sequences, ratio)
    store_cell(scratch_ptr, _LOSS, sequence, sequences, loss)
    store_cell(scratch_ptr, _LENGTH, sequence, sequences, tl.where(count > 0, length, 0.0))
    store_cell(scratch_ptr, _COUNT, sequence, sequences, count)
    store_cell(scratch_ptr, _LOG_RATIO, sequence, sequences, log_ratio)
    store_cell(scratch_ptr, _LOW, sequence, sequences, low)
    store_cell(scratch_ptr, _HIGH, sequence, sequences, high)
    store_cell(scratch_ptr, _ACTIVE, sequence, sequences, active)


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
def reduce_batch(
    scratch_ptr,
    loss_ptr,
    divisor_ptr,
    metrics_ptr,
    sequences,
    normalizer_ptr,
    divisor_scale,
    WITH_KL: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Compute loss, divisor and metrics from the sequences' scratch."""
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
        if WITH_KL:
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
    if WITH_KL:
        tl.store(metrics_ptr + 8, _share(tl.sum(kls, axis=0), tokens).to(STATS))


@triton.jit
def rows_of(sequence, cu_seqlens_ptr, tokens, T):
    """Return the first row of a sequence, and the row after its last."""
    if cu_seqlens_ptr is not None:
        # Clamped: unchecked values of cu_seqlens may give wrong results, but no address outside of the rows.
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), tokens)
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1), first), tokens)
    else:
        first = sequence * T
        last = first + T
    return first, last


def fill_without_sequences(
    ratio_clip: RatioClip, normalizer: Tensor | None, loss: Tensor, divisor: Tensor, metrics: Tensor
) -> None:
    """Fill in loss, divisor and metrics of a batch without sequences."""
    loss.zero_()
    divisor.fill_(ratio_clip.divisor_scale)
    if normalizer is not None:
        divisor.mul_(torch.where(normalizer == 0, 1.0, normalizer))
    metrics.zero_()[:3] = 1.0
