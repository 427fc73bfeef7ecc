"""Where sequences begin and end: one interface over padded [B, T] and packed [1, N] + ``cu_seqlens`` token
tensors.

Packed tensors keep a leading dimension of 1 inside the package, so that tokens always have two dimensions.

Sums over sequences are the only reductions that a sequence-level loss needs. They are deterministic on every
device: no atomics, and the adjoint of ``expand`` is ``sum`` instead of an ``index_add``. On the CPU they run
from a sequence's first token to its last, so that neither zeros of tokens that don't count nor the layout
leave a trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.exact import exact_sum, segment_reduce


class Layout(ABC):
    """Which sequence a token belongs to, and who has the tokens."""

    @property
    @abstractmethod
    def sequences(self) -> int:
        """Number of sequences, empty ones included."""

    @abstractmethod
    def sum(self, tokens: Tensor) -> Tensor:
        """Tokens -> [B]: sums over sequences."""

    @abstractmethod
    def expand(self, values: Tensor) -> Tensor:
        """[B] -> tokens: each token gets its sequence's value."""

    def over_ranks(self, sums: Tensor) -> Tensor:
        """The sums over all tokens from those over the tokens that are here; any shape."""
        return sums

    def largest(self, values: Tensor) -> Tensor:
        """The same for largest values; without a gradient."""
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
        # where autograd does not look on, its function would take longer than a small sum
        if tokens.requires_grad and torch.is_grad_enabled():
            return _Sum.apply(tokens, self)
        if not tokens.is_cpu or not tokens.numel():
            return exact_sum(tokens)
        offsets = torch.arange(0, tokens.numel() + 1, self.length)
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
    """The layout of a token tensor: [B, T] without ``cu_seqlens``, [1, N] with it."""
    if cu_seqlens is None:
        return Padded(tokens.shape[0], tokens.shape[1])
    return Packed(cu_seqlens.to(torch.int64), segment_ids(cu_seqlens, tokens.numel()))


def as_rows(tokens: Tensor, packed: bool) -> Tensor:
    """[N] -> [1, N] where packed."""
    return tokens.unsqueeze(0) if packed else tokens


def from_rows(tokens: Tensor, packed: bool) -> Tensor:
    """[1, N] -> [N] where packed."""
    return tokens.squeeze(0) if packed else tokens


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[B + 1] offsets -> [N] index of each token's sequence; int64, no host synchronisation."""
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


class _Sum(torch.autograd.Function):
    """``Layout.sum``, whose gradient is what ``expand`` makes of the sums'."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.sum(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.expand(grad), None


class _Expand(torch.autograd.Function):
    """``Layout.expand``, whose gradient is the tokens', summed up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.expand(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.sum(grad), None
