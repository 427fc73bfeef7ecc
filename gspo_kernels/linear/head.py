"""The projection from hidden states to logits and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gspo_kernels.ops.backends import OnlineSoftmax
from gspo_kernels.ops.products import fixed_product, in_blocks, in_parts, multiply, sum_of_parts
from gspo_kernels.torch_internals import onednn_multiplies
from gspo_kernels.types import stats_dtype

LOGITS_SLAB, HIDDEN_SLAB = 2048, 8192
"""How many rows of the weight torch multiplies at a time on the CPU, for logits and, if the weight is 16-bit,
for dHidden. So logits are written in columns that stay in cache, with the same bits. With MKL on two AVX2
cores this is a twentieth faster, and a quarter where a product has only 16 rows."""


class Head:
    """The projection from hidden states to logits, and how its products are computed.

    Attributes:
        weight: [V, H].
        trained: the matrix whose gradient is dWeight: the weight, or the low-rank adapter's [V, r], which
            multiplies the last r columns of hidden states. With it hidden states have the statistics' dtype.
        bias: [V], or None.
        fixed: whether products add up in an order that depends on nothing but the weight.
        vocabulary: V.
        exact: whether gradients show the last bit of the logits; with 16-bit weights they don't.
        dtype: the dtype of the logits.
        rows_dtype: the dtype of the rows that enter the gradient products.
        row_bytes: bytes of a row of logits, plus those of its gradient row where this has a wider dtype.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        logits_dtype: str,
        fixed: bool = False,
        base: Tensor | None = None,
    ):
        self.trained, self.has_adapter = weight, base is not None
        weight = weight if base is None else base
        self.weight, self.bias, self.fixed = weight, bias, fixed
        self.vocabulary = weight.shape[0]
        self.exact = weight.dtype in (torch.float32, torch.float64)
        self.dtype = weight.dtype if self.exact or logits_dtype == "input" else torch.float32
        # whether the C++ backend computes the products
        self.in_blocks = in_blocks(weight)
        if fixed:
            self.in_blocks = weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16)
        as_weight = weight.is_cuda or weight.dtype == torch.float64 or self.in_blocks
        self.rows_dtype = weight.dtype if as_weight else torch.float32
        extra = self.rows_dtype.itemsize if self.rows_dtype.itemsize > self.dtype.itemsize else 0
        self.row_bytes = self.vocabulary * (self.dtype.itemsize + extra)

    @property
    def shows_other_rows(self) -> bool:
        """Whether gradients show a difference if logits are projected again along with other rows."""
        return self.exact and not self.fixed

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Project hidden states [n, H], with an adapter [n, H + r], to logits [n, V] in ``out``."""
        transposed, bias, low = self.weight.t(), self.bias, None
        if self.has_adapter:
            hidden, low = hidden.split([self.weight.shape[1], self.trained.shape[1]], dim=1)
            hidden = hidden.to(self.weight.dtype)  # which they had
        rounded = out.dtype in (torch.float16, torch.bfloat16)
        if self.fixed and (out.is_cuda or (self.in_blocks and not rounded)):
            fixed_product(hidden, transposed, out, bias=bias)
        elif self.weight.is_cuda and out.dtype != self.weight.dtype:
            torch.mm(hidden, transposed, out_dtype=out.dtype, out=out)
            out = out if bias is None else out.add_(bias)
        elif self.weight.is_cuda or (rounded and not self.fixed and onednn_multiplies(out.dtype)):
            if bias is None:
                torch.mm(hidden, transposed, out=out)
            else:
                torch.addmm(bias, hidden, transposed, out=out)
        elif self.in_blocks and not rounded:
            multiply(hidden, transposed, out, bias=bias)
        else:
            for first, columns in self._slabs(hidden, None if rounded else out):
                if rounded:
                    out[:, first : first + columns.shape[1]] = columns
        if low is None:
            return out
        adapter = self.trained.t()
        if self.in_blocks and not rounded:
            return multiply(low, adapter, out, accumulate=True)
        return out.addmm_(low.to(out.dtype), adapter.to(out.dtype))

    def fold_logits(self, hidden: Tensor, sums: OnlineSoftmax) -> None:
        """Add each logit of hidden states [n, H] to running sums, on the CPU, with the bits that ``logits``
        writes in fp32 or fp64.
        """
        if self.in_blocks:
            sums.add_product(hidden, self.weight, self.bias)
            return
        for first, columns in self._slabs(hidden, None):
            sums.add(columns, first)

    def _slabs(self, hidden: Tensor, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yield logits on the CPU in fp32 or fp64, slab by slab: the first column, and the columns [n, k].

        Slabs are parts of ``out``; without it every slab overwrites the one before.
        """
        dtype = self.weight.dtype
        if not (self.exact or (self.fixed and self.in_blocks)):
            dtype = stats_dtype(dtype)
        hidden, memory = hidden.to(dtype), out
        if memory is None:
            # rows whose distance is a power of two would share a few cache lines
            width = min(self.vocabulary, LOGITS_SLAB) + 16
            memory = hidden.new_empty(hidden.shape[0], width, dtype=stats_dtype(dtype))
        for first in range(0, self.vocabulary, LOGITS_SLAB):
            slab = slice(first, min(first + LOGITS_SLAB, self.vocabulary))
            columns = memory[:, : slab.stop - first] if out is None else memory[:, slab]
            weight, bias = self.weight[slab].to(dtype).t(), None if self.bias is None else self.bias[slab]
            if self.fixed:
                fixed_product(hidden, weight, columns, bias=bias)
            else:
                torch.mm(hidden, weight, out=columns)
                if bias is not None:
                    columns.add_(bias)
            yield first, columns

    def grad_hidden(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply rows [n, V] by the weight: [n, H] in the statistics' dtype, [n, H + r] with an adapter.

        ``weight``: multiply by this matrix alone.
        """
        if weight is None and self.has_adapter:
            low = self.grad_hidden(rows, in_parts(self.trained, rows.dtype))
            return torch.cat(
                [self.grad_hidden(rows, self.weight), sum_of_parts(low, self.trained.shape[1])], 1
            )
        weight = self.weight if weight is None else weight
        shape = rows.shape[0], weight.shape[1]
        if self.fixed:
            out = torch.empty(shape, dtype=torch.float32, device=rows.device)
            if rows.dtype == weight.dtype:
                return fixed_product(rows, weight, out)
            for first in range(0, self.vocabulary, HIDDEN_SLAB):
                slab = slice(first, first + HIDDEN_SLAB)
                fixed_product(rows[:, slab], weight[slab].to(rows.dtype), out, accumulate=first > 0)
            return out
        if self.in_blocks:
            return multiply(rows, weight, torch.empty(shape, dtype=torch.float32, device=rows.device))
        if rows.dtype == weight.dtype:
            if rows.is_cuda and rows.dtype in (torch.float16, torch.bfloat16):
                return torch.mm(rows, weight, out_dtype=torch.float32)
            return torch.mm(rows, weight).to(stats_dtype(rows.dtype))
        out = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
        for first in range(0, self.vocabulary, HIDDEN_SLAB):
            slab = slice(first, first + HIDDEN_SLAB)
            out.addmm_(rows[:, slab], weight[slab].to(rows.dtype))
        return out
