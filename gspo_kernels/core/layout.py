"""Sequence boundaries of token tensors, padded [B, T] or packed [1, N] with ``cu_seqlens``.

Sums over sequences are deterministic on every device: they use no atomics, and the backward of ``expand`` is
``sum`` instead of an ``index_add``. On the CPU they add a sequence's tokens in order, so results are bitwise
identical for both layouts and any padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.exact import exact_sum, segment_reduce


class Layout(ABC):
    """Mapping of tokens to sequences, across ranks if these share sequences."""

    @property
    @abstractmethod
    def sequences(self) -> int:
        """Return the number of sequences, including empty ones."""

    @abstractmethod
    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each sequence: tokens -> [B]."""

    @abstractmethod
    def expand(self, values: Tensor) -> Tensor:
        """Give each token the value of its sequence: [B] -> tokens."""

    def over_ranks(self, sums: Tensor) -> Tensor:
        """All-reduce sums of this rank's tokens, of any shape."""
        return sums

    def largest(self, values: Tensor) -> Tensor:
        """All-reduce maxima; without a gradient."""
        return values


@dataclass(frozen=True)
class Padded(Layout):
    """Tokens are [B, T]; row i is sequence i."""

    rows: int
    length: int

    @property
    def sequences(self) -> int:
        """Number of rows."""
        return self.rows

    def sum(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B]."""
        # the autograd function is slower than a small sum
        if tokens.requires_grad and torch.is_grad_enabled():
            return _Differentiable.apply(tokens, self, True)
        if not tokens.is_cpu or not tokens.numel():
            return exact_sum(tokens)
        offsets = torch.arange(0, tokens.numel() + 1, self.length, device=tokens.device)
        return segment_reduce(tokens.flatten(), "sum", offsets)

    def expand(self, values: Tensor) -> Tensor:
        """[B] -> [B, T], without copying."""
        if values.requires_grad and torch.is_grad_enabled():
            return _Differentiable.apply(values, self, False)
        return values.unsqueeze(1).expand(values.shape[0], self.length)


@dataclass(frozen=True, eq=False)
class Packed(Layout):
    """Tokens are [1, N]; sequence i is ``tokens[0, cu_seqlens[i]:cu_seqlens[i + 1]]``."""

    offsets: Tensor
    segments: Tensor

    @property
    def sequences(self) -> int:
        """Number of sequences, empty ones included."""
        return self.offsets.numel() - 1

    def sum(self, tokens: Tensor) -> Tensor:
        """[1, N] -> [B]."""
        if tokens.requires_grad and torch.is_grad_enabled():
            return _Differentiable.apply(tokens, self, True)
        return segment_reduce(tokens.flatten(), "sum", self.offsets)

    def expand(self, values: Tensor) -> Tensor:
        """[B] -> [1, N]."""
        if values.requires_grad and torch.is_grad_enabled():
            return _Differentiable.apply(values, self, False)
        return values[self.segments].unsqueeze(0)


def layout_of(tokens: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """Return the layout of a token tensor: [B, T] without ``cu_seqlens``, [1, N] with it.

    Offsets may be on the CPU.
    """
    if cu_seqlens is None:
        return Padded(tokens.shape[0], tokens.shape[1])
    if cu_seqlens.is_cpu:
        cu_seqlens = copy_async(cu_seqlens, tokens.device, "cu_seqlens")
    # unchecked offsets must not cause out-of-bounds accesses
    offsets = cu_seqlens.clamp(0, tokens.numel()).cummax(0).values
    return Packed(offsets, segment_ids(cu_seqlens, tokens.numel()))


def as_rows(tokens: Tensor, packed: bool) -> Tensor:
    """Add the leading dimension of packed tokens, [N] -> [1, N]; return padded tokens unchanged."""
    return tokens.unsqueeze(0) if packed else tokens


def from_rows(tokens: Tensor, packed: bool) -> Tensor:
    """Remove the leading dimension of packed tokens, [1, N] -> [N]; return padded tokens unchanged."""
    return tokens.squeeze(0) if packed else tokens


def copy_async(values: Tensor, device: torch.device, name: str = "values") -> Tensor:
    """Copy values to a device without a host-device sync; the caller may overwrite CPU values immediately."""
    if device.type != "cuda" or not values.is_cpu or torch.compiler.is_compiling():
        return values.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name}: is on the CPU, expected {device} while a CUDA graph is captured: replays would read "
            "freed host memory"
        )
    pinned = values.clone() if values.is_pinned() else values
    return pinned.pin_memory().to(device, non_blocking=True)


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence, int64 [N], from offsets [B + 1], without a sync.

    Indices are below B even for invalid offsets, which are not checked on a GPU.
    """
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:-1].contiguous(), positions, right=True)


def runs(*keys: Tensor) -> Packed:
    """Return the layout in which each run of equal keys among [N] is a sequence, without a sync."""
    changes = torch.zeros_like(keys[0], dtype=torch.bool)
    for ids in keys:
        changes[1:] |= ids[1:] != ids[:-1]
    segments = changes.cumsum(0)
    # the number of runs is on the device: allow for one sequence per key
    places = torch.arange(segments.numel() + 1, device=segments.device)
    return Packed(torch.searchsorted(segments, places), segments)


class _Differentiable(torch.autograd.Function):
    """``Layout.sum`` or ``Layout.expand``; each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout, sums: bool) -> Tensor:
        ctx.layout, ctx.sums = layout, sums
        return layout.sum(values) if sums else layout.expand(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.expand(grad) if ctx.sums else ctx.layout.sum(grad), None, None
