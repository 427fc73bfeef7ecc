"""Which tokens count, and how many of each sequence, in one launch each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import decode, decode_wide, element
from gspo_kernels.kernels.launch import Tile, Wide, encode, encode_strides, encode_wide, launch, row_kernel
from gspo_kernels.kernels.sequences import rows_of, strides_of

_TILE = Tile(1024, 4)


class MaskNumbers(NamedTuple):
    """Sizes and strides of a mask [B, T] and labels of its shape, all of them encoded.

    Attributes:
        T, tokens: tokens of a sequence, and of all sequences.
        ignore_index: the label of tokens that don't count.
        mask, labels: strides of these tensors.
    """

    T: int
    tokens: int
    ignore_index: Wide
    mask: tuple[Wide, ...] | None
    labels: tuple[Wide, ...] | None


@row_kernel
def merge_mask_kernel(mask_ptr, labels_ptr, counted_ptr, merged_ptr, numbers, BLOCK: tl.constexpr):
    """Merge a block of tokens. ``numbers`` is a ``MaskNumbers``."""
    T = decode(numbers.T)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < decode(numbers.tokens)
    b = n // T
    t = n - b * T
    counted = tl.load(element(mask_ptr, b, t, numbers.mask), mask=inside, other=0) != 0
    if labels_ptr is not None:
        ignore_index = decode_wide(numbers.ignore_index)
        label = tl.load(element(labels_ptr, b, t, numbers.labels), mask=inside, other=0).to(tl.int64)
        label = tl.where(counted, label, ignore_index)
        tl.store(merged_ptr + n, label.to(merged_ptr.dtype.element_ty), mask=inside)
        counted = label != ignore_index
    tl.store(counted_ptr + n, counted, mask=inside)


def merge_mask(
    mask: Tensor, labels: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None, bool | None]:
    """See ``ops.backends.RowBackend.merge_mask``."""
    B, T = mask.shape
    counted, merged = torch.empty(B, T, dtype=torch.bool, device=mask.device), None
    if labels is not None:
        merged = torch.empty(B, T, dtype=labels.dtype, device=mask.device)
    launch(
        merge_mask_kernel, -(-B * T // _TILE.block), mask.device, _TILE,
        mask, labels, counted, merged,
        MaskNumbers(
            encode(T), encode(B * T), encode_wide(ignore_index), encode_strides(mask), encode_strides(labels)
        ),
        BLOCK=_TILE.block,
    )  # fmt: skip
    return counted, merged, None


class LengthNumbers(NamedTuple):
    """Sizes and strides of the tokens of some sequences, all of them encoded.

    Attributes:
        T, tokens, sequences: tokens of a padded sequence, of all sequences, and how many sequences there are.
        ignore_index: the label of tokens that don't count.
        labels, advantages: strides from one sequence to the next and from one token to the next.
    """

    T: int
    tokens: int
    sequences: int
    ignore_index: Wide
    labels: tuple[Wide, Wide]
    advantages: tuple[Wide, Wide]


@row_kernel
def lengths_kernel(labels_ptr, advantages_ptr, cu_seqlens_ptr, out_ptr, numbers, BLOCK: tl.constexpr):
    """Count the tokens of one sequence. ``numbers`` is a ``LengthNumbers``."""
    T = decode(numbers.T)
    sequences = decode(numbers.sequences)
    ignore_index = decode_wide(numbers.ignore_index)
    sequence = tl.program_id(0)
    first, last = rows_of(sequence, cu_seqlens_ptr, decode(numbers.tokens), T)
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
        label = tl.load(element(labels_ptr, b, t, numbers.labels), mask=inside, other=0).to(tl.int64)
        counted = inside & (label != ignore_index)
        counts += tl.where(counted, 1, 0)
        if advantages_ptr is not None:
            advantage = tl.load(element(advantages_ptr, b, t, numbers.advantages), mask=counted, other=0.0)
            active |= tl.where(advantage != 0, 1, 0)
    tl.store(out_ptr + sequence, tl.sum(counts, axis=0).to(tl.int64))
    inactive = tl.zeros([], tl.int64)
    if advantages_ptr is not None:
        inactive = tl.where(tl.max(active, axis=0) == 0, 1, 0).to(tl.int64)
    tl.store(out_ptr + sequences + sequence, inactive)


def lengths(
    labels: Tensor, ignore_index: int, cu_seqlens: Tensor | None, advantages: Tensor | None
) -> Tensor:
    """See ``ops.backends.HiddenKernels.lengths``."""
    B, T = labels.shape
    packed = cu_seqlens is not None
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty(2, sequences, dtype=torch.int64, device=labels.device)
    launch(
        lengths_kernel, sequences, labels.device, _TILE,
        labels, advantages, None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(), out,
        LengthNumbers(
            encode(T), encode(B * T), encode(sequences), encode_wide(ignore_index),
            strides_of(labels, packed), strides_of(advantages, packed),
        ),
        BLOCK=_TILE.block,
    )  # fmt: skip
    return out
