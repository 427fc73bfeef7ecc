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

from gspo_kernels.kernels.columns import decode, decode_float, decode_wide, element, row_pointer
from gspo_kernels.kernels.launch import (
    FORWARD,
    RowConstants,
    RowNumbers,
    launch,
    row_kernel,
    stats_type,
    without_spills,
)
from gspo_kernels.kernels.rows import add_hi_lo, online_logsumexp, row_label, row_slopes
from gspo_kernels.kernels.sampling_mask import in_row
from gspo_kernels.kernels.sequences import (
    SCRATCH_ROWS,
    RatioConstants,
    RatioNumbers,
    RatioOutputs,
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
from gspo_kernels.types import (
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


@row_kernel
def sequence_ratio_kernel(
    logits_ptr,
    labels_ptr,
    mask_ptr,
    row_temperature_ptr,
    kept_ptr,
    old_ptr,
    advantages_ptr,
    weights_ptr,
    lengths_ptr,
    normalizer_ptr,
    cu_seqlens_ptr,
    out,
    rows,
    ratio,
    ROW: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Compute one row and count it, or only count. ``out`` is a ``RatioOutputs``, ``rows`` a ``RowNumbers``,
    ``ratio`` a ``RatioNumbers``.
    """
    ACCESS: tl.constexpr = ROW.ACCESS
    n = tl.program_id(0)
    T = decode(rows.T)
    V = decode(rows.V)
    tokens = decode(ratio.tokens)
    sequences = decode(ratio.sequences)
    sequence = n - tokens
    if n < tokens:
        b, t, label, counted = row_label(n, labels_ptr, rows)
        if mask_ptr is not None:
            counted &= tl.load(element(mask_ptr, b, t, ratio.mask)) != 0
            merged = tl.where(counted, label, decode_wide(rows.ignore_index))
            tl.store(out.labels + n, merged.to(out.labels.dtype.element_ty))
        mask = None if kept_ptr is None else element(kept_ptr, b, t, rows.kept)
        row = row_pointer(logits_ptr, b, t, rows.logits, ACCESS)
        stride_v = decode_wide(rows.logits[2])
        labelled = counted & in_row(label, V, mask)
        width = tl.where(counted, V, 0)
        slopes = row_slopes(rows, row_temperature_ptr, b, t, ROW.STATS)
        logp, lse_hi, lse_lo, _ = online_logsumexp(
            row, stride_v, label, labelled, width, mask, slopes, False, "evict_first", ROW
        )
        tl.store(out.logprobs + n, tl.where(counted, logp, 0.0))
        tl.store(out.lse + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
        if cu_seqlens_ptr is not None:
            sequence = sequence_of(n, cu_seqlens_ptr, sequences)
        else:
            sequence = b

    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    if signal_and_count(out.counters + sequence) == last - first:
        if mask_ptr is not None:
            counted_ptr = out.labels
            strides = None
        else:
            counted_ptr = labels_ptr
            strides = rows.labels
        count, log_ratio = sum_sequence(
            sequence, first, last, T,
            counted_ptr, strides, decode_wide(rows.ignore_index), old_ptr, ratio.old, out.logprobs,
            cu_seqlens_ptr is not None, RATIO.STATS, RATIO.TOKENS_PER_BLOCK,
        )  # fmt: skip
        length = length_of(sequence, count, lengths_ptr, ratio)
        s, loss, coefficient, low, high = clip_sequence(
            sequence, count, log_ratio, length, advantages_ptr, weights_ptr, ratio, RATIO
        )
        coefficient = coefficient.to(RATIO.STATS)
        tl.store(out.gradient + sequence, coefficient)
        active = coefficient != 0
        store_sequence(out.scratch, sequence, sequences, count, log_ratio, length, s, loss, low, high, active)
        if signal_and_count(out.counters + sequences) == sequences - 1:
            reduce_batch(out, sequences, normalizer_ptr, decode_float(ratio.divisor_scale), False, RATIO)


def sequence_ratio_forward(
    rows: LogitRows,
    mask: Tensor | None,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    recheck: Recheck = None,
) -> SequenceRatioStats:
    """See ``ops.backends.RatioBackend.sequence_ratio_forward``."""
    logits, labels, transform, _ = rows
    *ratio_tensors, cu_seqlens = operands
    B, T, _ = logits.shape
    sequences = operands.advantages.shape[0]
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
        fill_without_sequences(ratio_clip, operands.normalizer, stats.loss, stats.divisor, stats.metrics)
        stats.logprobs.zero_()
        stats.lse.zero_()
        stats.labels.fill_(rows.ignore_index)
        return stats
    # A softcap and fp64 keep more numbers of a block at a time. A mask needs a few: nine programs run then.
    much = transform.softcap > 0 or logits.dtype == torch.float64
    registers = 128 if much else 56
    tile = without_spills(FORWARD[logits.element_size()], much or mask is not None, registers)
    launch(
        sequence_ratio_kernel, B * T + sequences, logits.device, tile,
        logits, labels, mask, transform.row_temperature, transform.kept,
        *ratio_tensors, None if cu_seqlens is None else cu_seqlens.contiguous(),
        RatioOutputs(
            stats.logprobs, stats.lse, stats.coefficients, stats.loss, stats.divisor, stats.metrics,
            new((SCRATCH_ROWS * sequences,), dtype=torch.float64),
            torch.zeros(sequences + 1, dtype=torch.int32, device=logits.device),
            stats.labels,
        ),
        RowNumbers.of(*rows),
        RatioNumbers.of(ratio_clip, T, B * T, sequences, False, mask, *ratio_tensors[:4], None, None),
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
