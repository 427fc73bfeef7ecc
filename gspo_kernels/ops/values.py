"""Checks of values: always on CPU tensors, on others with GSPO_KERNELS_VALIDATE=1 (they synchronise)."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.ops.library import checked_values, operator


def check_cu_seqlens(cu_seqlens: Tensor | None, tokens: Tensor) -> None:
    """Offsets must start at 0, never decrease, and end at the number of tokens."""
    if cu_seqlens is None or not checked_values(cu_seqlens.device):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"cu_seqlens: starts at {first}, expected 0")
    if last != tokens.numel():
        raise ValueError(f"cu_seqlens: ends at {last}, expected the number of tokens, {tokens.numel()}")
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError("cu_seqlens: decreases, expected offsets that never do")


def check_mask(loss_mask: Tensor | None) -> None:
    """A mask of numbers must hold only 0 and 1."""
    if loss_mask is None or loss_mask.dtype == torch.bool or not checked_values(loss_mask.device):
        return
    if not bool(((loss_mask != 0) == loss_mask).all()):
        raise ValueError("loss_mask: expected only 0 and 1 (or bool)")


def check_lengths(lengths: Tensor | None, counts: Tensor) -> None:
    """Lengths must be positive where tokens are counted."""
    if lengths is None or not checked_values(lengths.device):
        return
    if bool(((counts > 0) & ~(lengths > 0)).any()):
        raise ValueError("lengths: expected positive numbers for all sequences with a counted token")


def check_normalizer(normalizer: Tensor | None) -> None:
    """A normalizer must be positive."""
    if normalizer is None or not checked_values(normalizer.device):
        return
    if not bool(normalizer > 0):
        raise ValueError(f"normalizer: got {normalizer.item()}, expected a positive number")


def check_temperature(temperature: Tensor | None) -> None:
    """Temperatures must be positive."""
    if temperature is None or not checked_values(temperature.device):
        return
    if not bool((temperature > 0).all()):
        raise ValueError("temperature: expected only positive numbers")


@operator
def mask_labels(
    labels: Tensor, loss_mask: Tensor | None, cu_seqlens: Tensor | None, ignore_index: int
) -> Tensor:
    """A copy of the labels, ``ignore_index`` where ``loss_mask`` is 0, after checking mask and offsets."""
    check_cu_seqlens(cu_seqlens, labels)
    check_mask(loss_mask)
    return labels.clone() if loss_mask is None else labels.masked_fill(loss_mask == 0, ignore_index)


@mask_labels.register_fake
def _(labels: Tensor, loss_mask: Tensor | None, cu_seqlens: Tensor | None, ignore_index: int) -> Tensor:
    return torch.empty_like(labels)
