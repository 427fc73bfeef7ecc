"""Log-prob, log-sum-exp and entropy of logit rows. One program owns one row.

Statistics are contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gspo_kernels.backends.triton.columns import element, row_pointer
from gspo_kernels.backends.triton.launch import (
    FORWARD,
    RowConstants,
    launch,
    row_numbers,
    typed_kernel,
    with_contiguous_rows,
    without_spills,
)
from gspo_kernels.backends.triton.rows import add_hi_lo, online_logsumexp, row_label, row_slopes
from gspo_kernels.backends.triton.sampling_mask import in_row
from gspo_kernels.core.types import LogitRows, RowStats, stats_dtype


@typed_kernel
def logprobs_forward_kernel(
    logits_ptr, labels_ptr, row_temperature_ptr, kept_ptr, logprobs_ptr, lse_ptr, entropy_ptr,
    T: tl.int32, V: tl.int32, ignore_index: tl.int64, slope: tl.float64, inner: tl.float64, outer: tl.float64,
    logits_b: tl.int64, logits_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    temperature_b: tl.int64, temperature_t: tl.int64, kept_b: tl.int64, kept_t: tl.int64,
    ROW: tl.constexpr,
):  # fmt: skip
    """Compute one row's statistics. ROW is a ``RowConstants``."""
    n = tl.program_id(0)
    b, t, label, counted = row_label(n, labels_ptr, T, labels_b, labels_t, ignore_index)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, kept_b, kept_t)
    row = row_pointer(logits_ptr, b, t, logits_b, logits_t, ROW.ALIGNED)
    labelled = counted & in_row(label, V, mask)
    width = tl.where(counted, V, 0)
    slopes = row_slopes(
        slope, inner, outer, row_temperature_ptr, b, t, temperature_b, temperature_t, ROW.STATS
    )
    logp, lse_hi, lse_lo, entropy = online_logsumexp(
        row, label, labelled, width, mask, slopes, entropy_ptr is not None, "evict_first", ROW
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + n, tl.where(counted, entropy, 0.0))


def logprobs_forward(rows: LogitRows, entropy: bool) -> RowStats:
    """See ``protocol.RowBackend.logprobs_forward``."""
    logits, labels, transform, ignore_index = rows
    logits = with_contiguous_rows(logits)
    B, T, _ = logits.shape
    dtype, device = stats_dtype(logits.dtype), logits.device
    stats = RowStats(
        torch.empty(B, T, dtype=dtype, device=device),
        torch.empty(B, T, dtype=torch.float64, device=device),
        torch.empty(B, T, dtype=dtype, device=device) if entropy else None,
    )
    tile = without_spills(FORWARD[logits.element_size()], transform.softcap > 0)
    launch(
        logprobs_forward_kernel, B * T, logits.device, tile,
        logits, labels, transform.row_temperature, transform.kept,
        *stats, *row_numbers(logits, labels, transform, ignore_index),
        ROW=RowConstants.of(logits, transform, tile),
    )  # fmt: skip
    return stats
