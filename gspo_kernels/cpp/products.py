"""Matrix products of the C++ backend (csrc/products.h): fp32 sums, of fp32 or bf16 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.cpp import _operators, unavailable


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
    portable: bool = False,
) -> Tensor:
    """``out = a @ b + bias``, or ``out += a @ b`` with ``accumulate``.

    An element of ``out`` doesn't depend on what is computed along with it, nor on the number of threads.

    Args:
        a, b: [M, K] and [K, N], both fp32 or both bf16, any strides.
        out: [M, N] fp32, contiguous along N.
        bias: [N] or None; not with ``accumulate``.
        portable: in plain C++, as on processors without the instructions. Slow; from bf16 the same bits, but
            for subnormal numbers, which the instruction takes for 0.

    Raises:
        RuntimeError: shapes or dtypes don't fit.
    """
    if bias is not None:
        bias = bias.detach().to(torch.float32).contiguous()
    _operators().product(a.detach(), b.detach(), bias, out, accumulate, portable)
    return out
