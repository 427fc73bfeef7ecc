"""Checks of values, on CPU tensors always, on other devices with GSPO_KERNELS_VALIDATE=1, as they sync."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import automatic, load
from gspo_kernels.core import bits
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.operators import must_check_values, operator
from gspo_kernels.core.types import Shard, wrong_mask
from gspo_kernels.distributed.shards import columns_of


def check_cu_seqlens(cu_seqlens: Tensor | None, tokens: Tensor) -> None:
    """Check that offsets start at 0, never decrease, and end at the number of tokens."""
    if cu_seqlens is None or not must_check_values(cu_seqlens.device):
        return
    refuse_lengths(cu_seqlens)
    last = int(cu_seqlens[-1])
    if last != tokens.numel():
        raise ValueError(f"cu_seqlens: ends at {last}, expected the number of tokens, {tokens.numel()}")
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError("cu_seqlens: got decreasing offsets, expected non-decreasing ones")


def refuse_lengths(cu_seqlens: Tensor | None) -> None:
    """Check that offsets start at 0, to detect lengths passed instead of offsets.

    Also called before a shape error, since lengths [B] read as offsets mean B - 1 sequences.
    """
    if cu_seqlens is None or cu_seqlens.is_meta or torch.compiler.is_compiling():
        return
    first = int(cu_seqlens[0])
    if first != 0:
        raise ValueError(
            f"cu_seqlens: starts at {first}, expected 0: pass the offsets [B + 1] of sequences, not their "
            "lengths [B]; use torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )


def check_mask(loss_mask: Tensor) -> Tensor:
    """Return the mask, [B, T] or [N], as bool; a mask of numbers must hold only 0 and 1."""
    if loss_mask.dtype == torch.bool:
        return loss_mask
    rows = loss_mask if loss_mask.ndim == 2 else loss_mask.unsqueeze(0)
    counted, _ = _merged(rows, None, 0)
    return counted.view(loss_mask.shape)


def _merged(loss_mask: Tensor, labels: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Return which tokens count, as bool, and the labels, ``ignore_index`` where ``loss_mask`` is 0."""
    backend = load(automatic(loss_mask.device))
    counted, merged, binary = backend.merge_mask(loss_mask, labels, ignore_index)
    if binary is None and must_check_values(loss_mask.device):
        binary = torch.equal((loss_mask != 0).to(loss_mask.dtype), loss_mask)
    if binary is False:
        raise wrong_mask(loss_mask)
    return counted, merged


def check_lengths(lengths: Tensor | None, counts: Tensor) -> None:
    """Check that lengths are positive and finite where tokens are counted."""
    if lengths is None or not must_check_values(lengths.device):
        return
    if bool(((counts > 0) & ~_positive(lengths)).any()):
        raise ValueError("lengths: expected finite positive numbers for all sequences with a counted token")


def check_normalizer(normalizer: Tensor | None) -> None:
    """Check that a normalizer is positive and finite."""
    if normalizer is None or not must_check_values(normalizer.device):
        return
    for value in normalizer.reshape(-1).tolist():
        if not 0 < value < math.inf:
            number = "finite positive numbers" if normalizer.ndim else "a finite positive number"
            raise ValueError(f"normalizer: got {value}, expected {number}")


def check_temperature(
    temperature: Tensor, labels: Tensor, ignore_index: int, name: str = "temperature"
) -> None:
    """Check that temperatures [B, T] are positive and finite where tokens count."""
    if not must_check_values(temperature.device):
        return
    if bool((wrong := ~_positive(temperature) & (labels != ignore_index)).any()):
        got = temperature[wrong][0].item()
        raise ValueError(f"{name}: got {got:g}, expected finite positive numbers")


def _positive(values: Tensor) -> Tensor:
    """Return which values are positive and finite."""
    return (values > 0) & (values < math.inf)


HIGHEST_LOGPROB = 1.0
"""The highest accepted log-prob in nats, above 0 to allow for 16-bit rounding."""


def all_valid(values: Tensor, highest: float = math.inf) -> bool:
    """Return whether no value is NaN or above ``highest``, counted or not."""
    return not values.numel() or float(values.max()) <= highest  # max() propagates NaN


def refuse_high_logprobs(name: str, logprobs: Tensor, counted: Tensor, packed: bool) -> None:
    """Reject log-probs above 1 nat where they count."""
    above = counted & (logprobs > HIGHEST_LOGPROB)
    if bool(above.any()):
        raise ValueError(
            f"{name}: got {float(logprobs[above][0]):.6g} at {_first_place(above, packed)}, expected "
            "log-probs in nats (at most 0, or 1 with rounding); are these logits or negated log-probs?"
        )


def refuse_nan(name: str, values: Tensor, needed: Tensor, packed: bool, expected: str = "numbers") -> None:
    """Reject NaN where values are needed."""
    wrong = needed & values.isnan()
    if bool(wrong.any()):
        raise ValueError(f"{name}: got NaN at {_first_place(wrong, packed)}, expected {expected}")


def _first_place(where: Tensor, packed: bool) -> str:
    """Format the first true position of rows in the caller's layout."""
    place = where.nonzero()[0].tolist()
    return f"sequence {place[0]}" if where.ndim == 1 else f"position {place[1:] if packed else place}"


def check_kept(labels: Tensor, kept: Tensor, counted: Tensor, first: int = 0) -> None:
    """Check that every counted label is in the sampling mask of its position.

    Counted labels must be among the mask's columns; ``first`` is the id of the first column.
    """
    if not must_check_values(labels.device):
        return
    absent = counted & ~bits.holds(kept, torch.where(counted, labels - first, 0))
    if bool(absent.any()):
        b, t = absent.nonzero()[0].tolist()
        raise ValueError(
            f"labels: got {int(labels[b, t])} at position [{b}, {t}], expected an id in the sampling mask "
            f"({int(absent.sum())} of {int(counted.sum())} labels are not in it)"
        )


def check_logprobs(name: str, logprobs: Tensor, counted: Tensor, packed: bool) -> None:
    """Reject log-probs that are NaN or above 1 nat where they count."""
    if not all_valid(logprobs, HIGHEST_LOGPROB):
        refuse_high_logprobs(name, logprobs, counted, packed)
        refuse_nan(name, logprobs, counted, packed, "log-probs in nats")


@operator
def checked_rows(values: Tensor, counted: Tensor, packed: bool, name: str, logprobs: bool) -> Tensor:
    """Reject NaN where values in rows or [B] count, and ``logprobs`` above 1 nat; return a copy in
    ``exact_dtype``.
    """
    if must_check_values(values.device) and logprobs:
        check_logprobs(name, values, counted, packed)
    elif must_check_values(values.device) and not all_valid(values):
        refuse_nan(name, values, counted, packed)
    return values.to(exact_dtype(values.device), copy=True)


@checked_rows.register_fake
def _(values: Tensor, counted: Tensor, packed: bool, name: str, logprobs: bool) -> Tensor:
    return torch.empty_like(values, dtype=exact_dtype(values.device))


def check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """Check that every id is in the vocabulary, or -1 or ``bits.NO_ID`` for padding; 0 is an unknown size."""
    if not must_check_values(ids.device):
        return
    highest = vocabulary - 1 if vocabulary else torch.iinfo(ids.dtype).max
    wrong = (ids != bits.NO_ID) & ((ids < -1) | (ids > highest))
    if bool(wrong.any()):
        size = vocabulary or "the vocabulary's size"
        raise ValueError(
            f"{name}: got {int(ids[wrong][0])}, expected 0 <= id < {size}, or -1 or {bits.NO_ID} for none"
        )


@operator
def mask_of_shard(kept_mask: Tensor, shard: Shard, width: int) -> Tensor:
    """Return the bitmask of this process's ``width`` columns from a mask of the whole vocabulary."""
    first, total = columns_of(shard, width)
    if total and kept_mask.shape[-1] != bits.words(total):
        raise ValueError(
            f"kept_mask: got {kept_mask.shape[-1]} words, expected {bits.words(total)} for the whole "
            f"vocabulary of {total}"
        )
    return bits.part(kept_mask, first, width)


@mask_of_shard.register_fake
def _(kept_mask: Tensor, shard: Shard, width: int) -> Tensor:
    return kept_mask.new_empty((*kept_mask.shape[:-1], bits.words(width)))


class MaskedLabels(NamedTuple):
    """Labels, and a bool mask of the same shape that is False where they are ``ignore_index``."""

    labels: Tensor
    counted: Tensor


@operator
def mask_labels(
    labels: Tensor, loss_mask: Tensor | None, cu_seqlens: Tensor | None, ignore_index: int
) -> MaskedLabels:
    """Check mask and offsets; return a copy of the labels, ``ignore_index`` where ``loss_mask`` is 0."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, labels)
    if loss_mask is None:
        return MaskedLabels(
            labels.clone(memory_format=torch.contiguous_format), (labels != ignore_index).contiguous()
        )
    counted, merged = _merged(loss_mask, labels, ignore_index)
    assert merged is not None
    return MaskedLabels(merged, counted)


@mask_labels.register_fake
def _(labels: Tensor, loss_mask: Tensor | None, cu_seqlens: Tensor | None, ignore_index: int) -> MaskedLabels:
    return MaskedLabels(labels.new_empty(labels.shape), labels.new_empty(labels.shape, dtype=torch.bool))
