"""Matrix products with a head's weight: torch's, or on the CPU the C++ backend's where those are faster.

bf16 operands go to the C++ backend wherever the processor multiplies them natively: no product of torch's
takes bf16 and leaves fp32 there. fp32 operands go where they have been measured to be faster (calibration).
The choice depends on the weight alone, so that a token's logits come from one library however many rows are
projected together: log-probs that were taken earlier, by another call, remain comparable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.cpp.products import multiplies, multiply
from gspo_kernels.linear.calibration import fp32_library

__all__ = ["in_blocks", "multiply", "transposed_product"]

SMALL = 2**20
"""Elements of an fp32 weight below which nothing is measured and torch multiplies."""


def in_blocks(weight: Tensor) -> bool:
    """Whether ``multiply`` computes the products with a weight [V, H]."""
    if not weight.is_cpu:
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= SMALL and fp32_library() == "cpp"
    return multiplies(weight.dtype)


def transposed_product(rows: Tensor, operand: Tensor) -> Tensor:
    """[n, V].T @ [n, k] in the operand's dtype."""
    if rows.dtype == operand.dtype:
        return torch.mm(rows.t(), operand)
    operand = operand.to(rows.dtype)
    if rows.is_cpu:
        return multiply(rows.t(), operand, torch.empty(rows.shape[1], operand.shape[1]))
    return torch.mm(rows.t(), operand, out_dtype=torch.float32)
