"""Matrix products of the C++ backend (csrc/products.h): fp32 sums, of fp32 or bf16 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.cpp import _operators, unavailable

PIECE = 128
"""Values along K that are summed up before they are added to the rest; bf16 has twice as many."""
INSTRUCTIONS = ("best", "avx2", "portable")


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the processor has instructions for products of ``dtype``, and PyTorch is allowed to use them
    (``ATEN_CPU_CAPABILITY``).
    """
    if unavailable(torch.device("cpu")) is not None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if dtype == torch.float32:
        return bool(_operators().multiplies_fp32())
    return dtype == torch.bfloat16 and bool(_operators().multiplies_bf16())


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
    """``out = a @ b + bias``, or ``out += a @ b`` with ``accumulate``.

    An element of ``out`` doesn't depend on what is computed along with it, nor on the number of threads.

    Args:
        a, b: [M, K] and [K, N], both fp32 or both bf16, any strides.
        out: [M, N] fp32, contiguous along N.
        bias: [N] or None; not with ``accumulate``.
        ends: int64, ascending, the last of them K; the sum along K runs in pieces that end there, each summed
            up by itself and then added to what there is, in their order. None: pieces of ``PIECE`` fp32 or
            twice as many bf16 values, which is the longest that a piece may be.
        instructions: "best", or those of processors that have less: "avx2", and "portable" for plain C++,
            which is slow. The sums are the same with AVX2, and from bf16 with all of them, but for
            subnormal bf16 numbers, which the best instruction takes for 0.

    Raises:
        RuntimeError: shapes, dtypes or ends don't fit.
    """
    if bias is not None:
        bias = bias.detach().to(torch.float32).contiguous()
    level = INSTRUCTIONS.index(instructions)
    _operators().product(a.detach(), b.detach(), bias, ends, out, accumulate, level)
    return out
