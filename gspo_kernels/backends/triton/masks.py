"""Merging of masks and counting of tokens, in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element, program_rows
from gspo_kernels.backends.triton.launch import Tile, launch, strides, strides_of, typed_kernel

_TILE = Tile(1024, 4)


@typed_kernel
def merge_mask_kernel(
    mask_ptr, labels_ptr, counted_ptr, merged_ptr, T: tl.int32, tokens: tl.int32, ignore_index: tl.int64,
    mask_b: tl.int64, mask_t: tl.int64, labels_b: tl.int64, labels_t: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge a block of tokens."""
    n, inside = program_rows(tokens, BLOCK)
    b = n // T
    t = n - b * T
    counted = tl.load(element(mask_ptr, b, t, mask_b, mask_t), mask=inside, other=0) != 0
    if labels_ptr is not None:
        label = tl.load(element(labels_ptr, b, t, labels_b, labels_t), mask=inside, other=0).to(tl.int64)
        label = tl.where(counted, label, ignore_index)
        tl.store(merged_ptr + n, label.to(merged_ptr.dtype.element_ty), mask=inside)
        counted = label != ignore_index
    tl.store(counted_ptr + n, counted, mask=inside)


def merge_mask(
    mask: Tensor, labels: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None, bool | None]:
    """See ``protocol.Backend.merge_mask``."""
    B, T = mask.shape
    counted, merged = torch.empty(B, T, dtype=torch.bool, device=mask.device), None
    if labels is not None:
        merged = torch.empty(B, T, dtype=labels.dtype, device=mask.device)
    launch(
        merge_mask_kernel, -(-B * T // _TILE.block), mask.device, _TILE,
        mask, labels, counted, merged, T, B * T, ignore_index, *strides(mask, labels),
        BLOCK=_TILE.block,
    )  # fmt: skip
    return counted, merged, None


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


@typed_kernel
def lengths_kernel(
    labels_ptr, advantages_ptr, cu_seqlens_ptr, out_ptr,
    T: tl.int32, tokens: tl.int32, sequences: tl.int32, ignore_index: tl.int64,
    labels_b: tl.int64, labels_t: tl.int64, advantages_b: tl.int64, advantages_t: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the tokens of one sequence."""
    sequence = tl.program_id(0)
    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    counts = tl.zeros([BLOCK], tl.int32)
    active = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        t = rows
        if cu_seqlens_ptr is None:
            t = rows - first
        # The stride from one sequence to the next is 0 where they are packed.
        b = rows * 0 + sequence
        inside = rows < last
        label = tl.load(element(labels_ptr, b, t, labels_b, labels_t), mask=inside, other=0).to(tl.int64)
        counted = inside & (label != ignore_index)
        counts += tl.where(counted, 1, 0)
        if advantages_ptr is not None:
            place = element(advantages_ptr, b, t, advantages_b, advantages_t)
            advantage = tl.load(place, mask=counted, other=0.0)
            active |= tl.where(advantage != 0, 1, 0)
    tl.store(out_ptr + sequence, tl.sum(counts, axis=0).to(tl.int64))
    inactive = tl.zeros([], tl.int64)
    if advantages_ptr is not None:
        inactive = tl.where(tl.max(active, axis=0) == 0, 1, 0).to(tl.int64)
    tl.store(out_ptr + sequences + sequence, inactive)


def lengths(
    labels: Tensor, ignore_index: int, cu_seqlens: Tensor | None, advantages: Tensor | None
) -> Tensor:
    """See ``protocol.HiddenKernels.lengths``."""
    B, T = labels.shape
    packed = cu_seqlens is not None
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty(2, sequences, dtype=torch.int64, device=labels.device)
    launch(
        lengths_kernel, sequences, labels.device, _TILE,
        labels, advantages, None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(), out,
        T, B * T, sequences, ignore_index, *strides_of(labels, packed), *strides_of(advantages, packed),
        BLOCK=_TILE.block,
    )  # fmt: skip
    return out
