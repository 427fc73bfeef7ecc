"""Tiles of matmuls, and their order in persistent programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gspo_kernels.backends.triton.launch import Tile, platform


class ProductTile(NamedTuple):
    """The rows and columns of a tile, the depth of a step along the sum, the columns that are loaded or
    stored at a time, warps, and stages of the pipeline.
    """

    rows: int
    columns: int
    depth: int
    piece: int
    warps: int
    stages: int

    def launched(self) -> Tile:
        """Return the launch options of a kernel with this tile."""
        return Tile(self.columns, self.warps, self.stages)

    def programs(self, rows: int, columns: int, device: torch.device) -> int:
        """Return the number of persistent programs for a result, at most one per multiprocessor."""
        return min(triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns), multiprocessors(device))


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if platform() == "interpreter":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def tile_at(number, height, width, GROUP: tl.constexpr = 8):
    """Return row and column, in tiles, of one of ``height`` times ``width`` tiles, in groups of GROUP rows of
    tiles, which share the other operand in the L2 cache.
    """
    group = number // (GROUP * width) * GROUP
    members = tl.minimum(height - group, GROUP)
    within = number % (GROUP * width)
    return group + within % members, within // members


@triton.jit
def halves(x):
    """Return the left and the right half of a tile's columns."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def add_product(sums, x, y, PLATFORM: tl.constexpr):
    """Return sums + x @ y."""
    if PLATFORM == "interpreter":
        # The interpreter's tl.dot is NumPy's: it treats bf16 bits as integers, and on some processors the
        # rounding of an element depends on its place in the tile.
        sums += tl.sum(x.to(tl.float32)[:, :, None] * y.to(tl.float32)[None, :, :], axis=1)
    else:
        sums = tl.dot(x, y, sums, input_precision="ieee")
    return sums
