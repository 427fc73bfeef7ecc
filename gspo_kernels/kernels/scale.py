"""Multiply a tensor in place by a number that only the device knows: for the gradient that a forward already wrote."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import Tile, launch, platform
from gspo_kernels.kernels.rows import narrowed

_TILE = Tile(8192, 8)


@triton.jit(do_not_specialize=["count"])
def scale_kernel(values_ptr, factor_ptr, count: tl.int64, BLOCK: tl.constexpr, PLATFORM: tl.constexpr):
    """One block; a factor of 1, the usual upstream gradient, costs the launch and nothing else."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        values = tl.load(values_ptr + offsets, mask=inside, other=0.0)
        scaled = values.to(factor.dtype) * factor
        tl.store(values_ptr + offsets, narrowed(scaled, values_ptr.dtype.element_ty, PLATFORM), mask=inside)


def scale_(values: Tensor, factor: Tensor) -> None:
    """See ``ops.backends.RowBackend.scale_``."""
    count = values.numel()
    launch(
        scale_kernel,
        triton.cdiv(count, _TILE.block),
        values.device,
        _TILE,
        values,
        factor,
        count,
        BLOCK=_TILE.block,
        PLATFORM=platform(),
    )
