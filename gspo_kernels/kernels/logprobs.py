"""Log-prob, log-sum-exp and entropy of logit rows. One program owns one row.

Statistics are contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gspo_kernels.kernels.columns import decode, decode_wide, element, row_pointer
from gspo_kernels.kernels.launch import FORWARD, RowConstants, RowNumbers, launch, row_kernel, without_spills
from gspo_kernels.kernels.rows import add_hi_lo, online_logsumexp, row_label, row_slopes
from gspo_kernels.kernels.sampling_mask import in_row
from gspo_kernels.types import LogitRows, RowStats, stats_dtype


@row_kernel
def logprobs_forward_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    rows,
    ROW: tl.constexpr,
):
    """Compute one row's statistics. ``rows`` is a ``RowNumbers``, ROW a ``RowConstants``."""
    ACCESS: tl.constexpr = ROW.ACCESS
    n = tl.program_id(0)
    V = decode(rows.V)
    b, t, label, counted = row_label(n, labels_ptr, rows)
    mask = None if kept_ptr is None else element(kept_ptr, b, t, rows.kept)
    row = row_pointer(logits_ptr, b, t, rows.logits, ACCESS)
    stride_v = decode_wide(rows.logits[2])
    labelled = counted & in_row(label, V, mask)
    width = tl.where(counted, V, 0)
    slopes = row_slopes(rows, row_temperature_ptr, b, t, ROW.STATS)
    logp, lse_hi, lse_lo, entropy = online_logsumexp(
        row, stride_v, label, labelled, width, mask, slopes, entropy_ptr is not None, "evict_first", ROW
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, add_hi_lo(lse_hi, lse_lo, tl.float64), 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + n, tl.where(counted, entropy, 0.0))


def logprobs_forward(rows: LogitRows, entropy: bool) -> RowStats:
    """See ``ops.backends.RowBackend.logprobs_forward``."""
    logits, labels, transform, _ = rows
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
        *stats,
        RowNumbers.of(*rows),
        ROW=RowConstants.of(logits, transform, tile),
    )  # fmt: skip
    return stats
