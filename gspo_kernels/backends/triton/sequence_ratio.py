"""A clipped sequence ratio in one launch from the logits: ratios, clip decisions, loss and metrics.

There are B T + sequences programs. Each of the first B T computes one row and adds 1 to the counter of the
row's sequence; each of the others only adds 1, for one sequence each, so that the counter of a sequence ends
at its rows + 1, also where it is empty. The last program of a sequence reduces its log-ratios; the program
that finishes the last sequence reduces the loss and the metrics. No program waits for another, and every
reduction runs over memory in a fixed order, so the order of programs does not change the result.
"""

# ruff: noqa: SIM108 - in Triton, branches choose code.
from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element, row_pointer
from gspo_kernels.backends.triton.launch import (
    FORWARD,
    RowConstants,
    launch,
    row_numbers,
    stats_type,
    strides,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.rows import add_hi_lo, online_logsumexp, row_label, row_slopes
from gspo_kernels.backends.triton.sampling_mask import in_row
from gspo_kernels.backends.triton.sequences import (
    SCRATCH_ROWS,
    RatioConstants,
    clip_sequence,
    fill_without_sequences,
    length_of,
    reduce_batch,
    rows_of,
    sequence_of,
    signal_and_count,
    store_sequence,
    sum_sequence,
)
from gspo_kernels.core.types import (
    METRICS,
    LogitRows,
    RatioClip,
    RatioOperands,
    Recheck,
    SequenceRatioStats,
    stats_dtype,
)

# Values that a thread reduces at a time. With more of them, the reductions would take more registers than a
# row does, and fewer programs would run at once.
_TOKENS_PER_THREAD = 4
_SEQUENCES_PER_THREAD = 1


@typed_kernel
def sequence_ratio_kernel(
    logits_ptr, labels_ptr, mask_ptr, row_temperature_ptr, kept_ptr,
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
    """Compute one row and count it, or only count. See ``sequences`` for the outputs."""
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
        labelled = counted & in_row(label, V, kept)
        width = tl.where(counted, V, 0)
        slopes = row_slopes(
            slope, inner, outer, row_temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
        )
        logp, lse_hi, lse_lo, _ = online_logsumexp(
            row, label, labelled, width, kept, slopes, False, "evict_first", ROW
        )
        tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
        tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
        if cu_seqlens_ptr is not None:
            sequence = sequence_of(n, cu_seqlens_ptr, sequences)
        else:
            sequence = b

    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    if signal_and_count(counters_ptr + sequence) == last - first:
        count, log_ratio = sum_sequence(
            sequence, first, last, T,
            labels_ptr if mask_ptr is None else merged_ptr, labels_b, labels_t, ignore_index,
            old_ptr, old_b, old_t, logprobs_ptr,
            mask_ptr is not None, cu_seqlens_ptr is not None, RATIO.STATS, RATIO.TOKENS_PER_BLOCK,
        )  # fmt: skip
        length = length_of(sequence, count, lengths_ptr, lengths_stride)
        s, loss, coefficient, low, high = clip_sequence(
            sequence, count, log_ratio, length, advantages_ptr, advantages_stride,
            weights_ptr, weights_stride, log_low, log_high, log_dual, RATIO,
        )  # fmt: skip
        coefficient = coefficient.to(RATIO.STATS)
        tl.store(gradient_ptr + sequence, coefficient)
        active = coefficient != 0
        store_sequence(scratch_ptr, sequence, sequences, count, log_ratio, length, s, loss, low, high, active)
        if signal_and_count(counters_ptr + sequences) == sequences - 1:
            reduce_batch(
                scratch_ptr, loss_ptr, divisor_ptr, metrics_ptr, sequences, normalizer_ptr, divisor_scale,
                False, RATIO,
            )  # fmt: skip


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
        RATIO=RatioConstants(
            STATS=stats_type(logits.dtype),
            COUNT_TOKENS=ratio_clip.count_tokens,
            DIVISOR=ratio_clip.divisor,
            PER_TOKEN=False,
            ESTIMATOR=None,
            TOKENS_PER_BLOCK=32 * tile.warps * _TOKENS_PER_THREAD,
            SEQUENCES_PER_BLOCK=32 * tile.warps * _SEQUENCES_PER_THREAD,
        ),
    )  # fmt: skip
    if recheck is not None:
        recheck()
    return stats
