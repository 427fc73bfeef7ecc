"""Arithmetic in which coefficients of any size neither overflow nor vanish on their way into gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def power_of_two(largest: Tensor) -> Tensor:
    """About ``largest``, so that dividing by it rounds nothing; 1 where that is 0, infinite or NaN."""
    top = math.frexp(torch.finfo(largest.dtype).max)[1] - 1
    power = torch.exp2(torch.log2(largest).ceil().clamp(1 - top, top))
    return torch.where((largest > 0) & largest.isfinite(), power, 1.0)


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


def bounded_for_sums(coefficients: Tensor) -> Tensor:
    """Coefficients so bounded that no product overflows: infinities of both signs would add to NaN."""
    most = torch.finfo(coefficients.dtype).max * 2.0**-24
    return coefficients.clamp(-most, most)
