"""Where sequences begin and end: one interface over padded [B, T] and packed [1, N] + ``cu_seqlens`` token
tensors.

Packed tensors keep a leading dimension of 1 inside the package, so that tokens always have two dimensions.

Sums over sequences are the only reductions that a sequence-level loss needs. They are deterministic on every
device: no atomics, and the adjoint of ``expand`` is ``sum`` instead of an ``index_add``. On the CPU they run
from a sequence's first token to its last, so that neither the zeros of tokens that don't count nor the layout
change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.exact import exact_sum, segment_reduce


class Layout(ABC):
    """Which sequence a token belongs to, and which ranks have the tokens."""

    @property
    @abstractmethod
    def sequences(self) -> int:
        """Number of sequences, empty ones included."""

    @abstractmethod
    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each sequence: tokens -> [B]."""

    @abstractmethod
    def expand(self, values: Tensor) -> Tensor:
        """Give each token the value of its sequence: [B] -> tokens."""

    def over_ranks(self, sums: Tensor) -> Tensor:
        """Turn sums over this rank's tokens, of any shape, into sums over the tokens of all ranks."""
        return sums

    def largest(self, values: Tensor) -> Tensor:
        """Turn this rank's largest values into the largest of all ranks; without a gradient."""
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
        # the autograd function takes longer than a small sum, so it runs only if a gradient is needed
        if tokens.requires_grad and torch.is_grad_enabled():
            return _Sum.apply(tokens, self)
        if not tokens.is_cpu or not tokens.numel():
            return exact_sum(tokens)
        offsets = torch.arange(0, tokens.numel() + 1, self.length, device=tokens.device)
        return segment_reduce(tokens.flatten(), "sum", offsets)

    def expand(self, values: Tensor) -> Tensor:
        """[B] -> [B, T], without copying."""
        if values.requires_grad and torch.is_grad_enabled():
            return _Expand.apply(values, self)
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
            return _Sum.apply(tokens, self)
        return segment_reduce(tokens.flatten(), "sum", self.offsets)

    def expand(self, values: Tensor) -> Tensor:
        """[B] -> [1, N]."""
        if values.requires_grad and torch.is_grad_enabled():
            return _Expand.apply(values, self)
        return values[self.segments].unsqueeze(0)


def layout_of(tokens: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """Return the layout of a token tensor: [B, T] without ``cu_seqlens``, [1, N] with it.

    Offsets may be on the CPU, regardless of the tokens' device.
    """
    if cu_seqlens is None:
        return Padded(tokens.shape[0], tokens.shape[1])
    if cu_seqlens.is_cpu:
        cu_seqlens = queued(cu_seqlens, tokens.device, "cu_seqlens")
    # unchecked offsets may give wrong results, but no address outside of the tokens
    offsets = cu_seqlens.clamp(0, tokens.numel()).cummax(0).values
    return Packed(offsets, segment_ids(cu_seqlens, tokens.numel()))


def as_rows(tokens: Tensor, packed: bool) -> Tensor:
    """Add the leading dimension of packed tokens: [N] -> [1, N]; padded tokens stay as they are."""
    return tokens.unsqueeze(0) if packed else tokens


def from_rows(tokens: Tensor, packed: bool) -> Tensor:
    """Remove the leading dimension of packed tokens: [1, N] -> [N]; padded tokens stay as they are."""
    return tokens.squeeze(0) if packed else tokens


def queued(values: Tensor, device: torch.device, name: str = "values") -> Tensor:
    """Return values on a device. Where they come from the CPU, the host doesn't wait for what the device has
    still to do, and may change its own values immediately.
    """
    if device.type != "cuda" or not values.is_cpu or torch.compiler.is_compiling():
        return values.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name}: is on the CPU, expected {device} while a CUDA graph is captured: replays would read "
            "that memory of the host, which others use by then"
        )
    pinned = values.clone() if values.is_pinned() else values
    return pinned.pin_memory().to(device, non_blocking=True)


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence, int64 [N], from offsets [B + 1]; no host synchronisation.

    An index is below B for any offsets: on a GPU nothing has checked these, and the indices are addresses.
    """
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:-1].contiguous(), positions, right=True)


def runs(*keys: Tensor) -> Packed:
    """Return the layout in which each run of equal keys among [N] is a sequence; no host synchronisation."""
    changes = torch.zeros_like(keys[0], dtype=torch.bool)
    for ids in keys:
        changes[1:] |= ids[1:] != ids[:-1]
    segments = changes.cumsum(0)
    # as many sequences as there are keys, so that the number of runs need not be read from the device
    places = torch.arange(segments.numel() + 1, device=segments.device)
    return Packed(torch.searchsorted(segments, places), segments)


class _Sum(torch.autograd.Function):
    """``Layout.sum``; its backward is ``Layout.expand``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.sum(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.expand(grad), None


class _Expand(torch.autograd.Function):
    """``Layout.expand``; its backward is ``Layout.sum``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.expand(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.sum(grad), None
