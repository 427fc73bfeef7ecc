"""Matrix products with a head's weight: torch's, or on the CPU the C++ backend's where those are faster.

bf16 operands go to the C++ backend if the processor has AVX-512: on a CPU torch has no product from bf16 to
fp32. Large fp32 operands go to it on AMD (``fp32_library``).
The choice depends on the weight alone, so that a token's logits come from one library however many rows are
projected together: log-probs from an earlier call remain comparable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import cpp
from gspo_kernels.cpp.products import multiplies, multiply, on_intel, values_in_step
from gspo_kernels.torch_internals import constant_when_traced

__all__ = [
    "SEGMENT",
    "fixed_product",
    "fixed_unavailable",
    "in_blocks",
    "in_parts",
    "multiply",
    "sum_of_parts",
    "transposed_product",
    "values_in_step",
]

SEGMENT = 128
"""The number of rows whose products are summed in one piece where the order of sums is fixed: at most
``cpp.products.PIECE``."""
SMALL = 2**20
"""Elements of an fp32 weight below which torch multiplies."""


def fp32_library() -> str:
    """Return which library multiplies large fp32 matrices on this processor: "torch" (MKL) or "cpp".

    Milliseconds of the three products of a head, [256, 2048, 512], and their share of the peak at
    [512, 32000, 512] on one thread, AVX-512:

    | processor | torch | cpp |
    |---|---|---|
    | Intel Xeon with AMX | 5.3 ms | 7.4 ms |
    | AMD EPYC (Zen 4) | 0.79 to 0.83 | 0.80 to 0.84 |

    Torch's products may give a token other bits when other rows are projected with it, cpp's never do. So cpp
    multiplies where it is no slower.
    """
    return "cpp" if multiplies(torch.float32) and not on_intel() else "torch"


def in_blocks(weight: Tensor) -> bool:
    """Return whether ``multiply`` computes the products with a weight [V, H]."""
    if not weight.is_cpu:
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= SMALL and fp32_library() == "cpp"
    return multiplies(weight.dtype)


def transposed_product(rows: Tensor, operand: Tensor) -> Tensor:
    """Return [n, V].T @ [n, k] in the operand's dtype."""
    if rows.dtype == operand.dtype:
        return torch.mm(rows.t(), operand)
    operand = operand.to(rows.dtype)
    if rows.is_cpu:
        shape = rows.shape[1], operand.shape[1]
        return multiply(rows.t(), operand, torch.empty(shape, dtype=torch.float32, device=rows.device))
    return torch.mm(rows.t(), operand, out_dtype=torch.float32)


def in_parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [n, k] in ``dtype``; of fp32 values three 16-bit parts side by side, [n, 3 * k].

    The parts add up to the values, and ``sum_of_parts`` of a product to the product with fp32 values.
    """
    if values.dtype == dtype:
        return values
    parts = []
    for _ in range(3):
        parts.append(values.to(dtype))
        values = values - parts[-1]
    return torch.cat(parts, 1)


def sum_of_parts(product: Tensor, width: int) -> Tensor:
    """Return a product [n, width] from that of ``in_parts``."""
    return product.unflatten(1, (-1, width)).sum(1)


def fixed_unavailable(weight: Tensor, trained: bool) -> str | None:
    """Return None if ``fixed_product`` serves a weight, which may be ``trained``; otherwise why not."""
    if weight.dtype == torch.float64:
        return "products of fp64 have no fixed order of their sums"
    if weight.is_cpu:
        return _missing_on_the_cpu()
    if not weight.is_cuda:
        return f"there are products with a fixed order of their sums for CPU and GPU, not for {weight.device}"
    if trained and weight.dtype == torch.float16:
        return (
            "dWeight of fp16 counts in a power of two that grows with the batch's coefficients; bf16 and "
            "fp32 have the range"
        )
    return None


@constant_when_traced
def _missing_on_the_cpu() -> str | None:
    return cpp.unavailable(torch.device("cpu"))


def fixed_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """Multiply as ``cpp.products.multiply`` does, on a GPU, too. The order of an element's sum is fixed."""
    if out.is_cpu:
        return multiply(a, b, out, bias=bias, accumulate=accumulate, ends=ends)
    from gspo_kernels.kernels import fixed_product as on_gpu

    return on_gpu(a, b, out, bias=bias, accumulate=accumulate, ends=ends)
