"""Sets of token ids as bitmasks, one per row; bit v % 32 of int32 word v // 32 is set if id v is in it."""

from __future__ import annotations

import torch
from torch import Tensor

NO_ID = -100
"""Padding of rows with fewer ids."""


def words(vocabulary: int) -> int:
    """Return the length of a mask in words."""
    return -(-vocabulary // 32)


def packed_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Turn ids [..., K], unordered and possibly repeated, into masks [..., W]; skip ids out of range."""
    # bits are summed, so only the first of repeated ids may count
    ids = ids.to(torch.int64).sort(dim=-1).values
    counts = (ids >= 0) & (ids < vocabulary)
    counts[..., 1:] &= ids[..., 1:] != ids[..., :-1]
    bit = torch.ones_like(ids, dtype=torch.int32) << (ids & 31).to(torch.int32)
    mask = torch.zeros((*ids.shape[:-1], words(vocabulary)), dtype=torch.int32, device=ids.device)
    return mask.scatter_add_(-1, torch.where(counts, ids >> 5, 0), torch.where(counts, bit, 0))


def packed_rows(ids: Tensor, counts: Tensor, vocabulary: int) -> Tensor:
    """Turn the concatenated ids [S] of n rows, ``counts`` [n] each, into masks [n, W], as ``packed_ids``."""
    length = words(vocabulary)
    rows = torch.arange(len(counts), device=ids.device).repeat_interleave(counts)
    inside = (ids >= 0) & (ids < vocabulary)
    places = torch.where(inside, 32 * length * rows + ids, -1).sort().values
    first = places >= 0
    first[1:] &= places[1:] != places[:-1]
    bit = torch.ones_like(places, dtype=torch.int32) << (places & 31).to(torch.int32)
    mask = torch.zeros(len(counts) * length, dtype=torch.int32, device=ids.device)
    index = torch.where(first, places >> 5, 0)
    return mask.scatter_add_(0, index, torch.where(first, bit, 0)).view(-1, length)


def packed_columns(kept: Tensor) -> Tensor:
    """Turn bool [..., V] into masks [..., W]."""
    length = words(kept.shape[-1])
    padded = torch.nn.functional.pad(kept, (0, length * 32 - kept.shape[-1]))
    bits = torch.arange(32, dtype=torch.int32, device=kept.device)
    return (padded.reshape(*kept.shape[:-1], length, 32).to(torch.int32) << bits).sum(-1, dtype=torch.int32)


def part(mask: Tensor, first: int, count: int) -> Tensor:
    """Return the masks [..., words(count)] of ids ``first`` to ``first + count - 1``, renumbered from 0."""
    length, shift = words(count), first & 31
    covering = torch.nn.functional.pad(mask[..., first >> 5 : (first >> 5) + length + 1], (0, length + 1))
    if not shift:
        return covering[..., :length].contiguous()
    # clear the sign bits that an arithmetic right shift fills in
    low = (covering[..., :length] >> shift) & ((1 << (32 - shift)) - 1)
    return low | (covering[..., 1 : length + 1] << (32 - shift))


def columns(mask: Tensor, vocabulary: int) -> Tensor:
    """Turn masks [..., W] into bool [..., V]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :vocabulary].to(torch.bool)


def holds(mask: Tensor, ids: Tensor) -> Tensor:
    """Return whether each row of ``mask`` [..., W] contains the row's id (in range), bool [...]."""
    ids = ids.to(torch.int64).unsqueeze(-1)
    word = mask.gather(-1, ids >> 5)
    return ((word >> (ids & 31).to(torch.int32)) & 1).squeeze(-1).to(torch.bool)
