"""Log-prob, log-sum-exp and entropy of labels straight from hidden states: logits never reach memory.

One program computes one tile of hidden @ weight.T and folds it into one cell per row: the largest logit, the
sum of exp(z - largest) and, for the entropy, that of exp(z - largest) (z - largest). As in a row's fold the
label's column stays out. A second kernel combines a row's cells, always in the same order. Tiles are the same
for any number of rows, so a row's result doesn't depend on the rows that it comes with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import Slopes, Tile, launch, platform, row_kernel
from gspo_kernels.kernels.rows import (
    HUGE,
    combine_lanes,
    exp_flushed,
    joined,
    joined_folds,
    lowest,
    row_slopes,
    transformed,
)
from gspo_kernels.types import LogitTransform, RowStats


class ProductTile(NamedTuple):
    """Rows and columns per program, depth and stages of the product's pipeline, and into how many slices of
    columns the fold cuts the tile: as many as keep it in the registers beside the products.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    slices: int


# For 16-bit inputs 192 KiB of shared memory, which sm_90 and sm_100 have, or 96 KiB for other NVIDIA GPUs.
# Rows that don't come in 16-byte pieces go through registers, where less fits. fp32 products are fused
# multiply-adds, 8 x 8 per thread.
_LARGE = ProductTile(128, 256, 64, 8, 4, 8)
_SMALL = ProductTile(128, 128, 64, 8, 4, 2)
_UNALIGNED = ProductTile(128, 128, 32, 8, 3, 2)
_IEEE = ProductTile(128, 64, 16, 4, 3, 1)
_AMD = ProductTile(128, 128, 64, 8, 2, 1)
_AMD_SHALLOW = ProductTile(128, 128, 32, 8, 2, 1)
_INTERPRETED = ProductTile(32, 128, 32, 1, 1, 2)
_DEPTH = 64
_COMBINE = Tile(64, 8)
_COMBINE_ROWS = 32

# Row tiles whose programs run side by side: they share the weight's tiles while these are in the L2 cache.
_GROUP = 16
# The cells of 16,384 rows take 78 to 233 MB at V = 152k; more rows take more launches.
_ROWS_PER_LAUNCH = 16384


@triton.jit
def _slices(x, COUNT: tl.constexpr):
    """A tile's columns in COUNT parts, each in the registers that hold it already."""
    if COUNT == 1:
        return (x,)
    else:
        HALF: tl.constexpr = x.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))
        return _slices(left, COUNT // 2) + _slices(right, COUNT // 2)


@row_kernel
def score_tile_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    labels_ptr,
    row_temperature_ptr,
    peaks_ptr,
    totals_ptr,
    spreads_ptr,
    label_logits_ptr,
    N: tl.int32,
    H: tl.int32,
    V: tl.int32,
    ignore_index: tl.int64,
    slope: tl.float64,
    inner: tl.float64,
    outer: tl.float64,
    hidden_stride: tl.int64,
    weight_stride: tl.int64,
    bias_stride: tl.int64,
    labels_stride: tl.int64,
    temperature_stride_b: tl.int64,
    temperature_stride_t: tl.int64,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One tile of logits, folded into one cell per row."""
    ENTROPY: tl.constexpr = spreads_ptr is not None
    splits = tl.cdiv(V, COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP * splits) * GROUP
    height = tl.minimum(tl.cdiv(N, ROWS) - first, GROUP)
    within = program % (GROUP * splits)
    split = within // height
    rows = (first + within % height) * ROWS + tl.arange(0, ROWS)
    left = split * COLUMNS

    # Beyond the end the last row or column is loaded once more; what comes of it is left out below.
    row = tl.minimum(rows, N - 1).to(tl.int64)
    column = tl.minimum(left + tl.arange(0, COLUMNS), V - 1).to(tl.int64)
    label = tl.load(labels_ptr + row * labels_stride).to(tl.int64)
    counted = tl.max((label != ignore_index).to(tl.int32), axis=0) != 0
    hidden_rows = hidden_ptr + row * hidden_stride
    weight_rows = weight_ptr + column * weight_stride
    if ALIGNED:
        hidden_rows = tl.multiple_of(hidden_rows, 16)
        weight_rows = tl.multiple_of(weight_rows, 16)
    depths = tl.arange(0, DEPTH)
    hidden_pointers = hidden_rows[:, None] + depths[None, :]
    weight_pointers = weight_rows[None, :] + depths[:, None]
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, tl.where(counted, H, 0), DEPTH):
        if ALIGNED:
            a = tl.load(hidden_pointers)
            b = tl.load(weight_pointers)
        else:
            inside = start + depths < H
            a = tl.load(hidden_pointers, mask=inside[None, :], other=0.0)
            b = tl.load(weight_pointers, mask=inside[:, None], other=0.0)
        if PLATFORM == "interpreter":
            # The interpreter would multiply the bits of bf16 numbers as integers.
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        product = tl.dot(a, b, product, input_precision="ieee")
        hidden_pointers += DEPTH
        weight_pointers += DEPTH

    slopes = row_slopes(
        (slope, inner, outer),
        row_temperature_ptr,
        (row * 0)[:, None],
        row[:, None],
        temperature_stride_b,
        temperature_stride_t,
        tl.float32,
    )
    here = (rows < N) & (label >= left) & (label < tl.minimum(left + COLUMNS, V))
    label = tl.where(here, label, -1).to(tl.int32)
    # Most tiles hold no row's label, and all but the last lie within the vocabulary.
    special = (tl.max(label, axis=0) >= 0) | (left + COLUMNS > V)
    z_label = tl.zeros([ROWS], tl.float32)
    peak = tl.zeros([ROWS], tl.float32) + lowest(tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    spread = tl.zeros([ROWS], tl.float32)
    parts = _slices(product, SLICES)
    WIDTH: tl.constexpr = COLUMNS // SLICES
    for part in tl.static_range(SLICES):
        columns = left + part * WIDTH + tl.arange(0, WIDTH)
        x = parts[part]
        if bias_ptr is not None:
            bias_pointers = bias_ptr + tl.minimum(columns, V - 1).to(tl.int64) * bias_stride
            x += tl.load(bias_pointers).to(tl.float32)[None, :]
        z, _ = transformed(x, slopes, tl.float32, SCALED, SOFTCAP, PLATFORM)
        if special:
            is_label = columns[None, :] == label[:, None]
            z_label += tl.sum(tl.where(is_label, z, 0.0), axis=1)
            z = tl.where(is_label | (columns >= V)[None, :], -float("inf"), z)
        top = tl.maximum(tl.max(z, axis=1), lowest(tl.float32))
        distance = z - top[:, None]
        e = exp_flushed(distance, PLATFORM)
        tilt = top
        if ENTROPY:
            tilt = tl.sum(e * tl.maximum(distance, -HUGE), axis=1)
        fold = (top, tl.sum(e, axis=1), tilt)
        peak, total, spread = joined_folds((peak, total, spread), fold, ENTROPY, PLATFORM)

    cell = split.to(tl.int64) * N + rows
    tl.store(peaks_ptr + cell, peak, mask=rows < N)
    tl.store(totals_ptr + cell, total, mask=rows < N)
    if ENTROPY:
        tl.store(spreads_ptr + cell, spread, mask=rows < N)
    tl.store(label_logits_ptr + rows, z_label, mask=here)


@row_kernel
def combine_splits_kernel(
    peaks_ptr,
    totals_ptr,
    spreads_ptr,
    label_logits_ptr,
    labels_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    N: tl.int32,
    V: tl.int32,
    splits: tl.int32,
    ignore_index: tl.int64,
    labels_stride: tl.int64,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Statistics of some rows from their cells [splits, N], of which each lane takes every BLOCK-th."""
    ENTROPY: tl.constexpr = entropy_ptr is not None
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    label = tl.load(labels_ptr + rows.to(tl.int64) * labels_stride, mask=inside, other=0).to(tl.int64)
    counted = label != ignore_index
    labelled = (label >= 0) & (label < V)
    peak = tl.zeros([BLOCK, ROWS], tl.float32) + lowest(tl.float32)
    total = tl.zeros([BLOCK, ROWS], tl.float32)
    spread = tl.zeros([BLOCK, ROWS], tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        cells = split.to(tl.int64)[:, None] * N + rows[None, :]
        mask = (split < splits)[:, None] & inside[None, :]
        top = tl.load(peaks_ptr + cells, mask=mask, other=-float("inf"))
        tilt = top
        if ENTROPY:
            tilt = tl.load(spreads_ptr + cells, mask=mask, other=0.0)
        fold = (top, tl.load(totals_ptr + cells, mask=mask, other=0.0), tilt)
        peak, total, spread = joined_folds((peak, total, spread), fold, ENTROPY, PLATFORM)

    z_label = tl.load(label_logits_ptr + rows, mask=inside & labelled, other=0.0)
    logp, base, rest, entropy = combine_lanes(peak, total, spread, z_label, labelled, tl.float32, ENTROPY)
    lse = joined(base, rest, lse_ptr.dtype.element_ty)
    tl.store(logprobs_ptr + rows, tl.where(counted, logp, 0.0), mask=inside)
    tl.store(lse_ptr + rows, tl.where(counted, lse, 0.0), mask=inside)
    if ENTROPY:
        tl.store(entropy_ptr + rows, tl.where(counted, entropy, 0.0), mask=inside)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"])


def product_tile(dtype: torch.dtype, aligned: bool, device: torch.device) -> ProductTile:
    """The tile for inputs of ``dtype``, ``aligned`` if their rows come in whole steps of 16-byte pieces."""
    if platform() == "interpreter":
        return _INTERPRETED
    if platform() == "hip":
        return _AMD if aligned and dtype != torch.float32 else _AMD_SHALLOW
    if dtype == torch.float32:
        return _IEEE
    if not aligned:
        return _UNALIGNED
    needed = 2 * _LARGE.stages * _LARGE.depth * (_LARGE.rows + _LARGE.columns)
    return _LARGE if shared_memory(device) > needed else _SMALL


def _has_aligned_rows(tensor: Tensor) -> bool:
    """Whether rows of a [_, H] tensor start at multiples of 16 bytes and have whole steps of the product."""
    return (
        tensor.shape[1] % _DEPTH == 0
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
    )


def linear_logprobs_unavailable(hidden: Tensor, weight: Tensor) -> str | None:
    """None where ``linear_logprobs_forward`` can serve the tensors, otherwise the reason why not."""
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"products are summed in fp32, and hidden is {hidden.dtype}"
    if weight.dtype != hidden.dtype:
        return f"hidden is {hidden.dtype}, but weight is {weight.dtype}"
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return f"weight has strides {tuple(weight.stride())}; the one along H must be 1"
    return None


def linear_logprobs_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    *,
    ignore_index: int,
    entropy: bool,
) -> RowStats:
    """Log-prob of the label, log-sum-exp and, where asked for, entropy of rows of logits that are never
    written.

    Products are summed in fp32, of fp32 inputs without TF32. An *ignored* row gets zeros whatever its hidden
    state; where a whole tile of rows is ignored, none is read. A label out of range makes the log-prob NaN.

    Args:
        hidden: [N, H], fp16, bf16 or fp32; copied unless H has stride 1 and, where the weight's do, rows
            start at multiples of 16 bytes.
        weight: [V, H], the same dtype, stride 1 along H. Fast where H is a multiple of 64 and rows start at
            multiples of 16 bytes.
        bias: [V], any float dtype and stride, or None.
        labels: [N], int64 or int32, any stride.
        transform: with a ``row_temperature`` of [1, N], or None; without a sampling mask.
        ignore_index: the label of ignored rows.
        entropy: whether to compute the entropy.

    Returns:
        [N] each: fp32, and an fp64 log-sum-exp.

    Raises:
        ValueError: ``linear_logprobs_unavailable`` gives a reason, or there is a sampling mask.
    """
    reason = linear_logprobs_unavailable(hidden, weight)
    if reason is not None or transform.kept is not None:
        raise ValueError(f"linear_logprobs_forward: {reason or 'there are no sampling masks'}")
    (N, H), V = hidden.shape, weight.shape[0]
    aligned = _has_aligned_rows(weight)
    if hidden.stride(1) != 1 or (aligned and not _has_aligned_rows(hidden)):
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    tile = product_tile(hidden.dtype, aligned, hidden.device)
    splits = triton.cdiv(V, tile.columns)
    logprobs = torch.empty(N, dtype=torch.float32, device=hidden.device)
    lse = torch.empty_like(logprobs, dtype=torch.float64)
    stats = RowStats(logprobs, lse, torch.empty_like(logprobs) if entropy else None)
    for start in range(0, N, _ROWS_PER_LAUNCH):
        rows = slice(start, min(start + _ROWS_PER_LAUNCH, N))
        count = rows.stop - start
        temperature = transform.row_temperature
        slopes = Slopes.of(
            transform._replace(row_temperature=None if temperature is None else temperature[:, rows])
        )
        peaks, totals, *spreads = logprobs.new_empty(3 if entropy else 2, splits, count)
        cells = (peaks, totals, spreads[0] if entropy else None, logprobs.new_empty(count))
        launch(
            score_tile_kernel,
            triton.cdiv(count, tile.rows) * splits,
            hidden.device,
            Tile(tile.columns, tile.warps, tile.stages),
            hidden[rows],
            weight,
            bias,
            labels[rows],
            slopes.row_temperature,
            *cells,
            count,
            H,
            V,
            ignore_index,
            slopes.slope,
            slopes.inner,
            slopes.outer,
            hidden.stride(0),
            weight.stride(0),
            0 if bias is None else bias.stride(0),
            labels.stride(0),
            slopes.stride_b,
            slopes.stride_t,
            SCALED=slopes.scaled,
            SOFTCAP=slopes.softcap,
            ALIGNED=aligned,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            SLICES=tile.slices,
            GROUP=_GROUP,
            PLATFORM=platform(),
        )
        launch(
            combine_splits_kernel,
            triton.cdiv(count, _COMBINE_ROWS),
            hidden.device,
            _COMBINE,
            *cells,
            labels[rows],
            *stats.each(lambda stat: stat[rows]),  # noqa: B023
            count,
            V,
            splits,
            ignore_index,
            labels.stride(0),
            ROWS=_COMBINE_ROWS,
            BLOCK=_COMBINE.block,
            PLATFORM=platform(),
        )
    return stats
