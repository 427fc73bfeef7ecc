"""Matmuls of a frozen weight with a low-rank adapter, which are in fp32 even with 16-bit weights."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gspo_kernels.hidden.matmul.pytorch import HeadMatmul, in_parts, sum_of_parts


class LoRAMatmul(HeadMatmul):
    """Matmuls with weight and adapter. Hidden states are [n, H + r], of which the last r are the adapter's.

    dWeight is the gradient of the adapter. With 16-bit rows an fp32 operand is split into three parts.

    Args:
        base: the matmuls with the weight.
        adapter: [V, r], in the dtype of statistics.
    """

    def __init__(self, base: HeadMatmul, adapter: Tensor):
        converts = base.rows_dtype != base.weight.dtype
        super().__init__(base.weight, base.bias, base.logits_dtype, converts, base.options)
        self.name, self.base, self.trained = f"{base.name}, with a low-rank adapter", base, adapter
        self.rounds_early = False
        self.first_column, self.operand_dtype = base.weight.shape[1], adapter.dtype

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Project hidden states [n, H + r] to logits [n, V] in ``out``."""
        hidden, low = hidden.split([self.first_column, self.trained.shape[1]], dim=1)
        self.base.logits(hidden.to(self.weight.dtype), out)
        if out.dtype == low.dtype:
            self.base.add_weight(out, low.t(), self.trained.t(), True, None)
        else:
            out.addmm_(low.to(out.dtype), self.trained.t().to(out.dtype))
        return out

    def columns(self, first: int, last: int) -> LoRAMatmul:
        """Return the matmuls with these rows of both matrices."""
        block = cast(LoRAMatmul, super().columns(first, last))
        block.base = self.base.columns(first, last)
        return block

    def grad_hidden(self, grad_rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply rows [n, V] by both matrices: [n, H + r] in the statistics' dtype."""
        parts = type(self.base)(in_parts(self.trained, grad_rows.dtype), None, "float32", False, self.options)
        low = sum_of_parts(parts.grad_hidden(grad_rows), self.trained.shape[1])
        product = torch.cat([self.base.grad_hidden(grad_rows), low], 1)
        return product if total is None else total.add_(product)

    def add_weight(
        self, total: Tensor, grad_rows: Tensor, operand: Tensor, accumulate: bool, ends: Tensor | None
    ) -> None:
        """Add to the adapter's gradient; ``operand`` has r columns, in the dtype of statistics."""
        if operand.dtype == grad_rows.dtype:
            self.base.add_weight(total, grad_rows, operand, accumulate, ends)
            return
        operand = in_parts(operand, grad_rows.dtype)
        product = torch.empty(grad_rows.shape[1], operand.shape[1], dtype=total.dtype, device=total.device)
        self.base.add_weight(product, grad_rows, operand, False, ends)
        product = sum_of_parts(product, total.shape[1])
        total.add_(product) if accumulate else total.copy_(product)

    def transposed(self, grad_rows: Tensor, operand: Tensor) -> Tensor:
        """Multiply like ``base``."""
        return self.base.transposed(grad_rows, operand)
