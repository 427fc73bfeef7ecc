"""Arithmetic in which 0 * inf is 0, forward and backward.

Objectives use these functions to give clipped, masked and zero-advantage sequences a zero gradient even if
their ratio overflows. For finite operands they are the ordinary product and exponential.
"""

from typing import Any

import torch
from torch import Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == 0) | (b == 0), torch.zeros_like(a * b), a * b)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        return (
            _product(grad, b).sum_to_size(a.shape) if need_a else None,
            _product(grad, a).sum_to_size(b.shape) if need_b else None,
        )


class _WithSlope(torch.autograd.Function):
    """A value whose derivative with respect to x is ``slope``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return _product(grad, slope), None, None


class _ZeroWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def mul(a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` with broadcasting; 0 where either is 0."""
    return _Multiply.apply(a, b)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """``a - b``; 0 with the gradient of ``a`` where they are equal, even if both are infinite.

    The ratio of equal probabilities is 1, even if they are 0.
    """
    return torch.where(a == b, zero_with_gradient(a), a - b)


def exp(x: Tensor) -> Tensor:
    """``exp(x)``; its gradient is 0 where the incoming gradient is 0."""
    y = x.detach().exp()
    return _WithSlope.apply(x, y, y)


def k3(d: Tensor) -> Tensor:
    """``exp(-d) + d - 1``, without cancellation for small d; its gradient is 0 where d or grad is."""
    x = d.detach()
    grown = torch.expm1(-x)
    # exp(-d) dominates d, also where both are infinite
    return _WithSlope.apply(d, grown + x.clamp(min=torch.finfo(x.dtype).min), -grown)


def logsumexp(x: Tensor) -> Tensor:
    """``x.logsumexp(-1, keepdim=True)``; values of +inf share the gradient equally. Rows of -inf are not
    supported.
    """
    values = x.detach()
    result = values.logsumexp(-1, keepdim=True)
    infinite = (values == torch.inf).to(x.dtype)
    shares = infinite / infinite.sum(-1, keepdim=True).clamp(min=1.0)
    return _WithSlope.apply(x, result, torch.where(result == torch.inf, shares, (values - result).exp()))


def zero_with_gradient(x: Tensor) -> Tensor:
    """``x - stop_gradient(x)``, zeros with the gradient of x, even where x is infinite."""
    return _ZeroWithGradient.apply(x)
