"""What the launchers share: block sizes, the flags a kernel is compiled for, and the launch itself."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.rows import fold_row
from gspo_kernels.types import LogitTransform, stats_dtype

INTERPRETED = not isinstance(fold_row, triton.runtime.JITFunction)
"""Whether the kernels were imported under TRITON_INTERPRET=1 and so run on CPU tensors."""


class Tile(NamedTuple):
    """Columns per block and warps per program."""

    block: int
    warps: int


# A fold keeps two (with entropy three) fp32 registers per lane, so its blocks are 32 bytes per thread: two 16-byte
# loads, with the next block's two already under way. The backward keeps nothing and takes 64 bytes per thread.
FOLD = {2: Tile(4096, 8), 4: Tile(2048, 8), 8: Tile(1024, 8)}
BACKWARD = {2: Tile(8192, 8), 4: Tile(4096, 8), 8: Tile(2048, 8)}

# The on-policy kernel reads its row twice, the second time from the L2 cache: few rows may be in flight, so one
# program takes as many threads as a multiprocessor can give it.
FOLD_AND_GRAD = {2: Tile(8192, 16), 4: Tile(4096, 16), 8: Tile(2048, 16)}

_STATS = {torch.float32: tl.float32, torch.float64: tl.float64}


def stats_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for the dtype of the statistics."""
    return _STATS[stats_dtype(dtype)]


def is_aligned(tensor_BTV: Tensor) -> bool:
    """Whether each row starts at a multiple of 16 bytes and each 16-byte load stays inside or outside the row."""
    vocabulary = tensor_BTV.shape[-1]
    size = tensor_BTV.element_size()
    return (
        vocabulary % 16 == 0
        and tensor_BTV.stride(2) == 1
        and tensor_BTV.data_ptr() % 16 == 0
        and tensor_BTV.stride(0) * size % 16 == 0
        and tensor_BTV.stride(1) * size % 16 == 0
    )


class Slopes(NamedTuple):
    """A ``LogitTransform`` as the kernels take it: z = slope * x, or z = outer * tanh(inner * x) under a softcap."""

    slope: float
    inner: float
    outer: float
    row_temperature: Tensor | None
    stride_b: int
    stride_t: int
    scaled: bool
    softcap: bool

    @staticmethod
    def of(transform: LogitTransform) -> Slopes:
        """Fold the transform's constants together in fp64."""
        scale, softcap, temperature, row_temperature = transform
        slope = scale / temperature
        inner, outer = (scale / softcap, softcap / temperature) if softcap else (1.0, 1.0)
        stride_b, stride_t = (0, 0) if row_temperature is None else row_temperature.stride()
        scaled = slope != 1.0 or row_temperature is not None
        return Slopes(slope, inner, outer, row_temperature, stride_b, stride_t, scaled, bool(softcap))


def launch(kernel: Any, programs: int, device: torch.device, tile: Tile, *args: Any, **constants: Any) -> None:
    """Run ``programs`` programs of ``kernel`` on ``device``, which needn't be the current one.

    Fusing of multiplications and additions is off, so that the same helper rounds the same in every kernel: old
    log-probs from one kernel and new ones from another then differ by nothing. Kernels ask for fma where it pays.
    """
    if programs == 0:
        return
    guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if INTERPRETED:
        import numpy as np

        guard = np.errstate(all="ignore")
    elif device.index != torch.cuda.current_device():
        guard = torch.cuda.device(device)
    with guard:
        kernel[(programs,)](*args, **constants, num_warps=tile.warps, num_stages=1, enable_fp_fusion=False)
