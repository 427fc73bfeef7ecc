"""Arithmetic in fp64, or in fp32 with compensated sums on devices without fp64 (MPS), and scaling of
coefficients that avoids overflow and underflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FP64 = ("mps",)
"""Types of devices without fp64."""


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return fp64 if the device has it, otherwise fp32."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64


def exact(values: Tensor) -> Tensor:
    """Return the values in ``exact_dtype`` of their device."""
    return values.to(exact_dtype(values.device))


def exact_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, [..., N] -> [...]; compensated where the device has no fp64."""
    if exact_dtype(values.device) == torch.float64 or not values.shape[-1]:
        return values.sum(-1)
    return compensated_sum(values)


def compensated_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, [..., N] -> [...], pairwise with Knuth's TwoSum error terms.

    The gradient is that of a plain sum.
    """
    kept = torch.zeros_like(values)
    while values.shape[-1] > 1:
        odd = values.shape[-1] % 2
        one, other = torch.nn.functional.pad(values, (0, odd)).chunk(2, -1)
        values = one + other
        with torch.no_grad():
            added = values - one
            lost = (one - (values - added)) + (other - added)
            kept = lost + sum(torch.nn.functional.pad(kept, (0, odd)).chunk(2, -1))
    # infinite and NaN sums have no error term
    return (values + kept.masked_fill(~values.isfinite(), 0.0)).squeeze(-1)


def segment_reduce(values: Tensor, operation: str, offsets: Tensor) -> Tensor:
    """Reduce the values between offsets [B + 1] by "sum", "max" or "min", [N] -> [B]; an empty sum is 0."""
    if operation == "sum" and not values.numel():
        return values.new_zeros(offsets.numel() - 1)
    if exact_dtype(values.device) == torch.float64:
        initial = 0 if operation == "sum" else None
        return torch.segment_reduce(values, operation, offsets=offsets, unsafe=True, initial=initial)
    # MPS does not support segment_reduce: pad the segments to rows
    lengths = offsets.diff().unsqueeze(1)
    places = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=values.device)
    index = (offsets[:-1].unsqueeze(1) + places).clamp(max=values.numel() - 1)
    nothing = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[operation]
    table = values[index].masked_fill(places >= lengths, nothing)
    if operation == "sum":
        return exact_sum(table)
    return table.amax(1) if operation == "max" else table.amin(1)


_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
"""By dtype, the integer type of the same width and the mask of its exponent bits."""


def largest(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude, of all values or along a dimension."""
    if values.is_cpu:
        # a norm is 100 times slower on the CPU
        return values.abs().amax(() if dim is None else dim)
    norm: Tensor = torch.linalg.vector_norm(values, float("inf"), dim)
    return norm


def power_of_two(values: Tensor) -> Tensor:
    """Return the largest power of two up to the magnitude of each value, fp32 or fp64; a finite one for 0,
    inf and NaN. Division by it is exact, with a result below 2.
    """
    integers, exponent = _EXPONENT[values.dtype]
    limits = torch.finfo(values.dtype)
    power: Tensor = values.view(integers).bitwise_and(exponent).view(values.dtype)
    return power.clamp(limits.tiny, 0.25 / limits.tiny)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """Return the product, 0 where either operand is 0, even if the other is infinite."""
    return torch.where((values == 0) | (factor == 0), 0.0, values * factor)


def times_(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place as ``times`` does, for few factors and many values."""
    zero = factor == 0
    if not (factor.is_cpu and bool(factor.isfinite().all())):
        zero = zero | (values == 0)
    values.mul_(factor)
    return values if factor.is_cpu and not bool(zero.any()) else values.masked_fill_(zero, 0.0)


MAX_IN_SUMS = {dtype: torch.finfo(dtype).max * 2.0**-24 for dtype in _EXPONENT}
"""Bound on coefficients by dtype, to keep products finite: inf - inf would be NaN."""
