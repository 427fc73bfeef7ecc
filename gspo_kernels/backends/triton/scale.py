"""Multiply a tensor in place by a number that only the device knows: for a gradient that a forward wrote."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.launch import Tile, launch, platform, stats_type, typed_kernel
from gspo_kernels.backends.triton.rows import narrowed

_TILE = Tile(8192, 8)
_PROGRAMS = 2048
"""How many programs a launch has at most: enough for any GPU, and cheap if the factor is 1."""


@typed_kernel
def scale_kernel(
    values_ptr,
    factor_ptr,
    count: tl.int64,
    ALIGNED: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Multiply a program's share of the blocks; ALIGNED: values begin at a multiple of 16 bytes. A factor of
    1, the usual upstream gradient, costs only the launch.
    """
    factor = tl.load(factor_ptr).to(STATS)
    OUT: tl.constexpr = values_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.where(factor == 1, 0, count)
    for start in range(first, end, tl.num_programs(0) * BLOCK):
        pointers = values_ptr + (start + tl.arange(0, BLOCK))
        if ALIGNED:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), BLOCK)
        # Whole blocks take no mask: a mask of unknown alignment would split 16-byte accesses.
        if start + BLOCK <= count:
            values = tl.load(pointers).to(STATS) * factor
            tl.store(pointers, narrowed(values, OUT, PLATFORM))
        else:
            inside = start + tl.arange(0, BLOCK) < count
            values = tl.load(pointers, mask=inside, other=0.0).to(STATS) * factor
            tl.store(pointers, narrowed(values, OUT, PLATFORM), mask=inside)


def scale_(values: Tensor, factor: Tensor) -> None:
    """See ``protocol.RowBackend.scale_``."""
    count = values.numel()
    launch(
        scale_kernel, min(-(-count // _TILE.block), _PROGRAMS), values.device, _TILE,
        values, factor, count,
        ALIGNED=values.data_ptr() % 16 == 0,
        STATS=stats_type(values.dtype), BLOCK=_TILE.block, PLATFORM=platform(),
    )  # fmt: skip
