"""Arithmetic in which coefficients of any size neither overflow nor vanish on their way into gradients."""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
"""Integers of a dtype's width, and the bits of the exponent among them."""


def largest(values: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude, of all or along a dimension."""
    if values.is_cpu:
        # there a norm takes a hundred times as long
        return values.abs().amax(() if dim is None else dim)
    return torch.linalg.vector_norm(values, float("inf"), dim)


def power_of_two(values: Tensor) -> Tensor:
    """The power of two at or below the magnitude of each of ``values``, fp32 or fp64, so that dividing by it
    rounds nothing and leaves less than 2. What is 0, infinite or NaN gets some finite power, too.
    """
    integers, exponent = _EXPONENT[values.dtype]
    limits = torch.finfo(values.dtype)
    power = values.view(integers).bitwise_and(exponent).view(values.dtype)
    return power.clamp(limits.tiny, 0.25 / limits.tiny)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """The product, where an exact zero of either beats an overflow of the other."""
    return torch.where((values == 0) | (factor == 0), 0.0, values * factor)


def times_(values: Tensor, factor: Tensor) -> Tensor:
    """The same in place, for few factors beside many values (on the CPU, to look at each costs more)."""
    zero = factor == 0
    if not (factor.is_cpu and bool(factor.isfinite().all())):
        zero = zero | (values == 0)
    values.mul_(factor)
    return values if factor.is_cpu and not bool(zero.any()) else values.masked_fill_(zero, 0.0)


MOST_IN_SUMS = {dtype: torch.finfo(dtype).max * 2.0**-24 for dtype in _EXPONENT}
"""A bound of coefficients with which no product overflows: infinities of both signs would add to NaN."""


def bounded_for_sums(coefficients: Tensor) -> Tensor:
    """Coefficients within ``MOST_IN_SUMS``."""
    most = MOST_IN_SUMS[coefficients.dtype]
    return coefficients.clamp(-most, most)
