"""Matrix products of the C++ backend (csrc/products.h): fp32 sums, of fp32 or bf16 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.backends.cpp import operators, unavailable

PIECE = 128
"""The most values along K that ``ends`` may put in one piece."""
INSTRUCTIONS = ("best", "amx", "avx512_bf16", "avx512", "avx2", "portable", "portable_amx")
"""The instructions of products, as csrc/tiles.h lists them. From bf16, AMX has bits of its own, and so has
"avx512", which widens bf16 to fp32. All others give the same bits, with two exceptions: "avx512_bf16" takes
subnormal bf16 numbers for 0, and "portable" has other bits from fp32. "portable_amx" is AMX in plain C++."""


def has_instructions(instructions: str, dtype: torch.dtype) -> bool:
    """Return whether this processor has these instructions, and they multiply ``dtype``."""
    return dtype in (torch.float32, torch.bfloat16) and bool(
        operators().has_product_instructions(INSTRUCTIONS.index(instructions), dtype == torch.bfloat16)
    )


def best_instructions(dtype: torch.dtype) -> str:
    """Return what "best" means for fp32 or bf16 on this processor: csrc/products.cpp has the rule."""
    return INSTRUCTIONS[operators().product_instructions(dtype == torch.bfloat16)]


def values_in_step(dtype: torch.dtype) -> int:
    """Return how many values along K the best instructions for ``dtype`` sum up in an order of their own."""
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

    Torch's products may give a token other bits when other rows are projected with it, cpp's never do. So cpp
    multiplies where it is no slower.
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

    An element of ``out`` doesn't depend on what is computed along with it, nor on the number of threads.

    Args:
        a, b: [M, K] and [K, N], both fp32 or both bf16, any strides.
        out: [M, N] fp32, contiguous along N.
        bias: [N] or None; not with ``accumulate``.
        ends: int64, ascending, the last is K. The sum along K is cut into pieces with these ends: each is
            summed up by itself, then added to the total, in order. A piece has at most ``PIECE`` values.
            None: pieces of ``PIECE`` values, or of 256 where two bf16 values are multiplied at once.
        instructions: one of ``INSTRUCTIONS``.

    Raises:
        RuntimeError: shapes, dtypes or ends don't fit, or the processor lacks the instructions.
    """
    if bias is not None:
        bias = bias.detach().to(torch.float32).contiguous()
    level = INSTRUCTIONS.index(instructions)
    operators().product(a.detach(), b.detach(), bias, ends, out, accumulate, level)
    return out
