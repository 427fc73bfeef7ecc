"""Matmuls of the C++ backend (csrc/operators.h), with fp32 or bf16 operands and fp32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.backends.cpp import operators, unavailable

PIECE = 128
"""Maximum number of values along K in a piece of ``ends``."""
INSTRUCTIONS = ("best", "amx", "avx512_bf16", "avx512", "avx2", "portable", "portable_amx")
"""Instruction sets of matmuls, see csrc/tiles.h. For bf16 operands results of AMX and of "avx512", which
widens bf16 to fp32, differ from all others. These are bitwise identical, except that "avx512_bf16" flushes
subnormal bf16 numbers to 0 and "portable" differs for fp32 operands. "portable_amx" is AMX in plain C++."""


def best_instructions(dtype: torch.dtype) -> str:
    """Return the instructions that "best" selects for fp32 or bf16, see csrc/products.cpp."""
    return INSTRUCTIONS[operators().product_instructions(dtype == torch.bfloat16)]


def values_in_step(dtype: torch.dtype) -> int:
    """Return the number of values along K that the best instructions for ``dtype`` sum in one step."""
    if dtype == torch.float32:
        return 1
    return {"amx": 32, "avx512": 1}.get(best_instructions(dtype), 2)


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether these products serve large heads of ``dtype``: the processor has fast instructions for
    it that PyTorch is allowed to use (``ATEN_CPU_CAPABILITY``), and for fp32 isn't Intel's: MKL is faster.

    Milliseconds of the three fp32 products of a head, [256, 2048, 512] on Intel, and their share of the peak
    at [512, 32000, 512] on AMD, on one thread with AVX-512:

    | processor | torch | cpp |
    |---|---|---|
    | Intel Xeon with AMX | 5.3 ms | 7.4 ms |
    | AMD EPYC (Zen 4) | 0.79 to 0.83 | 0.80 to 0.84 |

    Torch's results for a row may depend on the other rows, cpp's never do. So cpp is used unless it is
    slower.
    """
    if unavailable(torch.device("cpu")) is not None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.float32 and operators().on_intel():
        return False
    return best_instructions(dtype) in ("amx", "avx512_bf16", "avx512")


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    ends: Tensor | None = None,
    instructions: str = "best",
) -> Tensor:
    """Compute ``out = a @ b + bias``, or ``out += a @ b`` with ``accumulate``.

    An element of ``out`` does not depend on M, N and the number of threads.

    Args:
        a, b: [M, K] and [K, N], both fp32 or both bf16, any strides.
        out: [M, N] fp32, contiguous along N.
        bias: [N] or None; not with ``accumulate``.
        ends: ascending int64, the last is K. The sum along K is split into pieces with these ends, which are
            summed separately and added in order. A piece has at most ``PIECE`` values. Default: pieces of
            ``PIECE`` values, or of 256 for instructions that multiply two bf16 values at a time.
        instructions: one of ``INSTRUCTIONS``.

    Raises:
        RuntimeError: shapes, dtypes or ends don't fit, or the processor lacks the instructions.
    """
    if bias is not None:
        bias = bias.detach().to(torch.float32).contiguous()
    level = INSTRUCTIONS.index(instructions)
    operators().product(a.detach(), b.detach(), bias, ends, out, accumulate, level)
    return out
