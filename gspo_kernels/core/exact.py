"""The precision of numbers per token and per sequence: fp64, or fp32 with compensated sums on a device
without fp64 (Apple's MPS); and arithmetic of coefficients that neither overflow nor vanish.
"""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FP64 = ("mps",)
"""Types of devices that have no fp64."""


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
    """Sum over the last dimension, [..., N] -> [...]: add halves until one is left, and sum rounding errors.

    Knuth's TwoSum gives the rounding error of an addition exactly. The gradient is that of a plain sum.
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
    # infinite and NaN sums stay as they are: they have no rounding error
    return (values + kept.masked_fill(~values.isfinite(), 0.0)).squeeze(-1)


def segment_reduce(values: Tensor, operation: str, offsets: Tensor) -> Tensor:
    """Reduce the values between offsets [B + 1] by "sum", "max" or "min", [N] -> [B]; an empty sum is 0."""
    if operation == "sum" and not values.numel():
        return values.new_zeros(offsets.numel() - 1)
    if exact_dtype(values.device) == torch.float64:
        initial = 0 if operation == "sum" else None
        return torch.segment_reduce(values, operation, offsets=offsets, unsafe=True, initial=initial)
    # MPS has no segment_reduce: reduce rows that are as long as the longest segment
    lengths = offsets.diff().unsqueeze(1)
    places = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=values.device)
    index = (offsets[:-1].unsqueeze(1) + places).clamp(max=values.numel() - 1)
    nothing = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[operation]
    table = values[index].masked_fill(places >= lengths, nothing)
    if operation == "sum":
        return exact_sum(table)
    return table.amax(1) if operation == "max" else table.amin(1)


# Arithmetic in which coefficients of any size neither overflow nor vanish on their way into gradients

_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
"""By dtype: the integer type of the same width, and the bits of the exponent in it."""


def largest(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude, of all values or along a dimension."""
    if values.is_cpu:
        # on the CPU a norm takes a hundred times as long
        return values.abs().amax(() if dim is None else dim)
    norm: Tensor = torch.linalg.vector_norm(values, float("inf"), dim)
    return norm


def power_of_two(values: Tensor) -> Tensor:
    """Return the power of two at or below the magnitude of each value, fp32 or fp64. Dividing by it rounds
    nothing and leaves less than 2. Values that are 0, infinite or NaN get some finite power, too.
    """
    integers, exponent = _EXPONENT[values.dtype]
    limits = torch.finfo(values.dtype)
    power: Tensor = values.view(integers).bitwise_and(exponent).view(values.dtype)
    return power.clamp(limits.tiny, 0.25 / limits.tiny)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """Return the product, where an exact zero of either operand beats an overflow of the other."""
    return torch.where((values == 0) | (factor == 0), 0.0, values * factor)


def times_(values: Tensor, factor: Tensor) -> Tensor:
    """Do what ``times`` does in place, for few factors and many values (checking each is slow on the CPU)."""
    zero = factor == 0
    if not (factor.is_cpu and bool(factor.isfinite().all())):
        zero = zero | (values == 0)
    values.mul_(factor)
    return values if factor.is_cpu and not bool(zero.any()) else values.masked_fill_(zero, 0.0)


MAX_IN_SUMS = {dtype: torch.finfo(dtype).max * 2.0**-24 for dtype in _EXPONENT}
"""The bound on coefficients by dtype. It keeps products finite: infinities of both signs would add to NaN."""
