"""A clipped sequence ratio in one launch from the logits: ratios, clip decisions, loss and metrics.

There are N + B programs. Program n < N folds one row and arrives at its sequence's counter; program N + i
only arrives, for sequence i, so that (rows of i) + 1 arrivals complete a sequence, an empty one too. Whoever
completes a sequence reduces its log-ratios; whoever completes the last sequence reduces the loss and the
metrics. Nobody waits for anybody, and every reduction runs over memory in a fixed order, so the order of
programs leaves no trace in the result.
"""

# ruff: noqa: SIM108 - in Triton, branches choose code.
from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import row_pointer
from gspo_kernels.kernels.kept import in_row, kept_row
from gspo_kernels.kernels.launch import (
    FOLD,
    RowArguments,
    launch,
    row_kernel,
    without_spills,
)
from gspo_kernels.kernels.rows import element, fold_row, joined, open_row, row_slopes
from gspo_kernels.kernels.sequences import (
    SCRATCH_ROWS,
    arrive,
    clip_sequence,
    length_of,
    reduce_batch,
    rows_of,
    sequence_of,
    store_sequence,
    sum_sequence,
    without_sequences,
)
from gspo_kernels.types import (
    METRICS,
    LogitTransform,
    RatioClip,
    SequenceRatioStats,
    stats_dtype,
)

# What is reduced at a time, per thread: with more, the reductions would take more registers than the fold of
# a row, and leave room for fewer programs.
_TOKENS_PER_THREAD = 4
_SEQUENCES_PER_THREAD = 1


@row_kernel
def sequence_ratio_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
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
    kept_stride_b: tl.int64,
    kept_stride_t: tl.int64,
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
    ACCESS: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
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
        label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
        counted = label != ignore_index
        kept = kept_ptr
        if kept_ptr is not None:
            kept = kept_row(kept_ptr, b, t, kept_stride_b, kept_stride_t)
        slopes = row_slopes(
            (slope, inner, outer),
            row_temperature_ptr,
            b,
            t,
            temperature_stride_b,
            temperature_stride_t,
            STATS,
        )
        opened = open_row(
            row_pointer(logits_ptr, b, t, logits_stride_b, logits_stride_t, ACCESS),
            label,
            counted & in_row(label, V, kept),
            tl.where(counted, V, 0),
            logits_stride_v,
            ACCESS,
            BLOCK,
            WARPS,
            "evict_first",
            PLATFORM,
        )
        # While the first logits are under way.
        if cu_seqlens_ptr is not None:
            sequence = sequence_of(n, cu_seqlens_ptr, sequences)
        else:
            sequence = b
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
            "evict_first",
            PLATFORM,
        )
        tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
        tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, lse_ptr.dtype.element_ty), 0.0))

    first, last = rows_of(sequence, cu_seqlens_ptr, N, T)
    if arrive(counters_ptr + sequence) == last - first:
        count, log_ratio = sum_sequence(
            sequence,
            first,
            last,
            T,
            labels_ptr,
            old_ptr,
            logprobs_ptr,
            ignore_index,
            labels_stride_b,
            labels_stride_t,
            old_stride_b,
            old_stride_t,
            cu_seqlens_ptr is not None,
            STATS,
            TOKENS_PER_BLOCK,
        )
        length = length_of(sequence, count, lengths_ptr, lengths_stride)
        ratio, loss, coefficient, low, high = clip_sequence(
            sequence,
            count,
            log_ratio,
            length,
            advantages_ptr,
            weights_ptr,
            tl.full([], log_low, STATS),
            tl.full([], log_high, STATS),
            tl.full([], log_dual, STATS),
            advantages_stride,
            weights_stride,
            COUNT_TOKENS,
            STATS,
        )
        coefficient = coefficient.to(STATS)
        tl.store(coefficients_ptr + sequence, coefficient)
        store_sequence(
            scratch_ptr,
            sequence,
            sequences,
            count,
            log_ratio,
            length,
            ratio,
            loss,
            low,
            high,
            coefficient != 0,
        )
        if arrive(counters_ptr + sequences) == sequences - 1:
            reduce_batch(
                scratch_ptr,
                sequences,
                normalizer_ptr,
                tl.full([], divisor_scale, tl.float64),
                loss_ptr,
                divisor_ptr,
                metrics_ptr,
                DIVISOR,
                False,
                False,
                STATS,
                SEQUENCES_PER_BLOCK,
            )


def sequence_ratio_forward(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    form: RatioClip,
    transform: LogitTransform,
    *,
    ignore_index: int,
    weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    doubt: Callable[[], None] | None = None,
) -> SequenceRatioStats:
    """See ``ops.backends.RatioBackend.sequence_ratio_forward``."""
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
        without_sequences(form, normalizer, stats.loss, stats.divisor, stats.metrics)
        stats.logprobs.zero_()
        stats.lse.zero_()
        return stats
    much = transform.softcap > 0 or logits.dtype == torch.float64
    tile = without_spills(FOLD[logits.element_size()], much)
    rows = RowArguments.of(logits, labels, transform, tile)
    launch(
        sequence_ratio_kernel,
        B * T + sequences,
        logits.device,
        tile,
        *rows.tensors,
        old_logprobs,
        advantages,
        weights,
        lengths,
        normalizer,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        stats.logprobs,
        stats.lse,
        stats.coefficients,
        stats.loss,
        stats.divisor,
        stats.metrics,
        torch.empty(SCRATCH_ROWS * sequences, dtype=torch.float64, device=logits.device),
        torch.zeros(sequences + 1, dtype=torch.int32, device=logits.device),
        B * T,
        T,
        V,
        sequences,
        ignore_index,
        *rows.slopes,
        form.log_low,
        form.log_high,
        form.log_dual,
        form.divisor_scale,
        *rows.strides,
        *old_logprobs.stride(),
        advantages.stride(0),
        0 if weights is None else weights.stride(0),
        0 if lengths is None else lengths.stride(0),
        COUNT_TOKENS=form.count_tokens,
        DIVISOR=form.divisor,
        **rows.constants,
        WARPS=tile.warps,
        TOKENS_PER_BLOCK=32 * tile.warps * _TOKENS_PER_THREAD,
        SEQUENCES_PER_BLOCK=32 * tile.warps * _SEQUENCES_PER_THREAD,
    )
    if doubt is not None:
        doubt()
    return stats
