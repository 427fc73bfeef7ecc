"""Log-prob, log-sum-exp and entropy of logit rows. One program owns one row.

Statistics are contiguous [B, T]; everything else comes with its strides.
"""

from __future__ import annotations

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
)
from gspo_kernels.kernels.rows import (
    element,
    fold_row,
    joined,
    open_row,
    row_slopes,
)
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype


@row_kernel
def logprobs_forward_kernel(
    logits_ptr,
    labels_ptr,
    row_temperature_ptr,
    kept_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
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
    STATS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCESS: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One row's statistics."""
    n = tl.program_id(0)
    b = n // T
    t = n - b * T
    label = tl.load(element(labels_ptr, b, t, labels_stride_b, labels_stride_t)).to(tl.int64)
    counted = label != ignore_index
    kept = kept_ptr
    if kept_ptr is not None:
        kept = kept_row(kept_ptr, b, t, kept_stride_b, kept_stride_t)
    slopes = row_slopes(
        (slope, inner, outer), row_temperature_ptr, b, t, temperature_stride_b, temperature_stride_t, STATS
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
    logp, base, rest, entropy = fold_row(
        opened,
        kept,
        logits_stride_v,
        slopes,
        STATS,
        SCALED,
        SOFTCAP,
        entropy_ptr is not None,
        ACCESS,
        BLOCK,
        "evict_first",
        PLATFORM,
    )
    tl.store(logprobs_ptr + n, tl.where(counted, logp, 0.0))
    tl.store(lse_ptr + n, tl.where(counted, joined(base, rest, lse_ptr.dtype.element_ty), 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + n, tl.where(counted, entropy, 0.0))


def logprobs_forward(
    logits: Tensor, labels: Tensor, transform: LogitTransform, *, ignore_index: int, entropy: bool
) -> RowStats:
    """See ``ops.backends.RowBackend.logprobs_forward``."""
    B, T, V = logits.shape
    logprobs = torch.empty(B, T, dtype=stats_dtype(logits.dtype), device=logits.device)
    lse = torch.empty_like(logprobs, dtype=torch.float64)
    stats = RowStats(logprobs, lse, torch.empty_like(logprobs) if entropy else None)
    tile = FOLD[logits.element_size()]
    rows = RowArguments.of(logits, labels, transform, tile)
    launch(
        logprobs_forward_kernel,
        B * T,
        logits.device,
        tile,
        *rows.tensors,
        *stats,
        T,
        V,
        ignore_index,
        *rows.slopes,
        *rows.strides,
        **rows.constants,
        WARPS=tile.warps,
    )
    return stats
