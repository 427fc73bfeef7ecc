"""A head's matmul on Hopper and B200 that writes exponentials instead of logits; disabled by default.

It computes statistics in the epilogue, and the exponentials are the rows of the gradient matmuls up to a
factor per row (``triton.exponentials``). dHidden and dWeight use PyTorch's matmuls. A row's statistics are
bitwise identical in any batch, which makes ratios of equal weights exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.self_test import SelfTest
from gspo_kernels.core.types import LogitTransform, RowGradients, RowOptions, RowStats
from gspo_kernels.hidden.chunk import Chunk, Projected
from gspo_kernels.hidden.matmul.pytorch import HeadMatmul

STATISTICS_ROWS = 16384
"""Rows per chunk for statistics alone, where the matmul writes a few sums per row."""


class ExponentialMatmul(HeadMatmul):
    """Matmuls of a bf16 head: a Triton kernel for the forward, PyTorch for the gradients."""

    name = "a matmul with exponentials in its epilogue, and torch.mm"
    rows_from_project = True
    min_statistics_rows = STATISTICS_ROWS

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        from gspo_kernels.backends.triton import exponentials

        self._kernels = exponentials
        self.memory_dtype = self.rows_dtype
        self.stride = -(-self.vocabulary // exponentials.ALIGNED) * exponentials.ALIGNED
        self.row_bytes = self.stride * self.rows_dtype.itemsize
        self._first = 0

    def statistics(self, chunk: Chunk, entropy: bool, memory: Callable[[int], Tensor]) -> RowStats:
        """Return statistics without writing exponentials."""
        return self._project(chunk, None, entropy).stats

    def project(
        self, chunk: Chunk, entropy: bool, out: Tensor, *, all_rows_active: bool, has_ratio: bool
    ) -> Projected:
        """Return statistics and rows. With an entropy, ``add_entropy`` applies the slope of a softcap."""
        stats, factors, label_residual = self._project(chunk, out, entropy)
        written = not (entropy and self.options.transform.softcap)
        return Projected(out, stats, written, factors, label_residual)

    def _project(self, chunk: Chunk, out: Tensor | None, entropy: bool) -> Any:
        return self._kernels.exponentials(
            **self._operands(chunk), out=out, entropy=entropy, with_softcap_grad=not entropy
        )

    def _operands(self, chunk: Chunk) -> dict[str, Any]:
        hidden, bias, options = chunk.hidden.contiguous(), self.bias, chunk.options
        return {
            "hidden": hidden if hidden.data_ptr() % 16 == 0 else hidden.clone(),
            "weight": self.weight,
            "bias": None if bias is None else bias.contiguous(),
            "labels": chunk.labels,
            "transform": options.transform,
            "ignore_index": options.ignore_index,
        }

    def columns(self, first: int, last: int) -> HeadMatmul:
        """Return the matmuls of a range of columns, with its first column."""
        block = super().columns(first, last)
        assert isinstance(block, ExponentialMatmul)
        block._first = first
        return block

    def known_rows(self, chunk: Chunk, stats: RowStats, grads: RowGradients, active: Tensor) -> Any:
        """Return the rows with their log-sum-exp as offset."""
        stats, coefficients = stats.each(lambda stat: stat.contiguous()), None
        if grads.grad_entropy is None:
            coefficients = grads.grad_logprobs.to(stats.logprobs.dtype).flatten().contiguous()
        operands = self._operands(chunk)
        return self._kernels.KnownRows(**operands, stats=stats, coefficients=coefficients, active=active)

    def column_rows(
        self, memory: Tensor, chunk: Chunk, stats: RowStats, grads: RowGradients, known: Any
    ) -> Tensor:
        """Return gradient rows; the entropy's gradient takes another pass."""
        known.exponentials(memory, self._first)
        if grads.grad_entropy is not None:
            self._add_entropy(memory, known.head, chunk, grads)
        return memory

    def add_entropy(self, projected: Projected, chunk: Chunk, grads: RowGradients) -> None:
        """Turn exponentials into the gradient of log-probs and entropy, in place."""
        head = self._kernels.HeadRows(projected.stats, projected.factors, projected.label_residual)
        self._add_entropy(projected.values, head, chunk, grads)

    def _add_entropy(self, values: Tensor, head: Any, chunk: Chunk, grads: RowGradients) -> None:
        dtype, zeros = head.stats.logprobs.dtype, torch.zeros_like(head.stats.logprobs)
        both = (grads.grad_logprobs, zeros if grads.grad_entropy is None else grads.grad_entropy)
        of_logprobs, of_entropy = (each.to(dtype).flatten().contiguous() for each in both)
        options = chunk.options
        self._kernels.entropy_rows_(
            values,
            chunk.labels,
            options.transform,
            options.ignore_index,
            head,
            of_logprobs,
            of_entropy,
        )


def exponentials_unavailable(weight: Tensor, logits_dtype: str, options: RowOptions) -> str | None:
    """Return None if ``ExponentialMatmul`` supports a weight and options, otherwise the reason."""
    if logits_dtype != "float32":
        return "it needs bf16 inputs and fp32 logits"
    if options.backend != "triton" or options.shard.group or options.transform.kept is not None:
        return "it needs Triton, and does not support sampling masks and a tp_group"
    rows = weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0
    if not rows or weight.shape[1] % 8 or not weight.numel():
        return "rows of hidden states and weight must be aligned to 16 bytes"
    return unavailable_on(weight.device)


def excess(device: torch.device) -> float:
    """Compare a small head, with all kinds of labels and rows, with PyTorch in fp64; see ``SelfTest``."""
    from gspo_kernels.backends.triton.exponentials import exponentials

    n, V, H = 132, 300, 72
    rng = torch.Generator("cpu").manual_seed(0)
    hidden = torch.randn(n, H, generator=rng, dtype=torch.float32, device="cpu")
    weight = torch.randn(V, H, generator=rng, dtype=torch.float32, device="cpu") / H**0.5
    labels = (torch.arange(n, dtype=torch.int64, device="cpu") * 37 % V).unsqueeze(0)
    hidden[::9] *= 40  # labels far from the other logits
    hidden, weight = (each.to(device, torch.bfloat16) for each in (hidden, weight))
    labels = labels.to(device)
    out = torch.zeros(n, V + 4, dtype=torch.bfloat16, device=device)[:, :V]
    head = exponentials(hidden, weight, None, labels, LogitTransform(), -100, out, entropy=True)
    alone = exponentials(hidden, weight, None, labels, LogitTransform(), -100, None)
    assert head.factors is not None
    logp = (hidden.double() @ weight.double().t()).log_softmax(-1)
    want = logp.gather(1, labels.t()).squeeze(1)
    p = logp.exp()
    rows = -p.scatter_add(1, labels.t(), torch.full_like(want, -1.0).unsqueeze(1))
    shares = (
        (head.stats.logprobs[0] - want).abs() / (1 + want.abs()) / 1e-4,
        (out.double() * head.factors.double().unsqueeze(1) - rows).abs() / 2.0**-7,
        torch.where(head.stats.logprobs == alone.stats.logprobs, 0.0, torch.inf),
    )
    return float(torch.stack([share.max() for share in shares]).max())


_SELF_TEST = SelfTest(excess)


def unavailable_on(device: torch.device) -> str | None:
    """Return the reason why the matmul can't run on a device, or None."""
    return _SELF_TEST.unavailable_reason(device)
