"""``protocol.HiddenKernels`` in PyTorch, for backends without kernels for hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.core.exact import exact, largest, power_of_two, times, times_
from gspo_kernels.core.layout import layout_of
from gspo_kernels.core.types import stats_dtype


def product_operand(
    hidden: Tensor,
    coefficients: Tensor,
    factors: Tensor | None,
    active: Tensor | None,
    unit: Tensor | None,
    bound: float,
    dtype: torch.dtype,
) -> Tensor:
    """See ``protocol.HiddenKernels.product_operand``."""
    shares = coefficients.to(stats_dtype(hidden.dtype)).clamp(-bound, bound)
    shares = shares if factors is None else times(factors, shares)
    if unit is not None:
        shares = shares / unit
    if active is None:
        active = coefficients != 0
    chosen = hidden.to(shares.dtype)
    if not (active.is_cpu and bool(active.all())):
        # select instead of multiply, as hidden states of rows without gradient may be NaN
        chosen = torch.where(active.unsqueeze(1), chosen, 0.0)
    return (chosen * shares.unsqueeze(1)).to(dtype)


def lengths(
    labels: Tensor, ignore_index: int, cu_seqlens: Tensor | None, advantages: Tensor | None
) -> Tensor:
    """See ``protocol.HiddenKernels.lengths``."""
    layout, counted = layout_of(labels, cu_seqlens), labels != ignore_index
    counts = layout.sum(exact(counted))
    if advantages is None:
        inactive = torch.zeros_like(counts)
    elif advantages.ndim == 1:
        inactive = (advantages == 0) | (counts == 0)
    else:
        inactive = layout.sum(exact(counted & (advantages != 0))) == 0
    return torch.stack([counts.to(torch.int64), inactive.to(torch.int64)])


def sum_unit(
    coefficients: Tensor,
    factors: Tensor | None,
    before: Tensor | None,
    bound: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See ``protocol.HiddenKernels.sum_unit``."""
    shares = coefficients.to(dtype).clamp(-bound, bound)
    unit = power_of_two(largest(shares if factors is None else times(factors, shares)))
    if before is None:
        return unit, unit
    unit = torch.maximum(before, unit)
    return unit, before / unit


def store_hidden(
    values: Tensor,
    coefficients: Tensor,
    factors: Tensor | None,
    where: slice | Tensor,
    hidden: Tensor,
    scales: Tensor | None,
    whole_last: bool,
) -> None:
    """See ``protocol.HiddenKernels.store_hidden``."""
    # a coefficient is a power of two, whose product is exact, times a factor below 2, applied here
    coefficients = coefficients.to(values.dtype)
    last = coefficients if whole_last else power_of_two(coefficients)
    if not whole_last:
        factor = coefficients / last
        values = times_(values, (factor if factors is None else times(factors, factor)).unsqueeze(1))
    elif factors is not None:
        last = times(factors, last)
    if scales is None:
        values = times_(values, last.unsqueeze(1))
    else:
        power = power_of_two(largest(values, 1))
        values.div_(power.unsqueeze(1))
        scales[where] = power * last
    hidden[where] = values.to(hidden.dtype)


def scale_rows_(values: Tensor, scales: Tensor, factor: Tensor) -> None:
    """See ``protocol.HiddenKernels.scale_rows_``."""
    times_(values, (scales * factor).unsqueeze(-1))
