"""The mask of tokens that count, merged with labels in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import decode, decode_wide, element
from gspo_kernels.kernels.launch import Tile, Wide, encode, encode_strides, encode_wide, launch, row_kernel

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
