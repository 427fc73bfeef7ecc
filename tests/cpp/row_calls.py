"""What tests of rows of logits in C++ share."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import cpp
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype
from tests.cpp.cpp_oracle import IGNORE

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IDENTITY = LogitTransform()
TRANSFORMS = {
    "identity": IDENTITY,
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(logit_scale=1.7),
    "softcap": LogitTransform(softcap=5.0),
    "all": LogitTransform(logit_scale=0.3, softcap=2.0, temperature=1.3),
}


def make(vocabulary: int, dtype: torch.dtype, *, rows: tuple[int, int] = (2, 5), spread: float = 3.0):
    """Logits, labels (one ignored, one the row's maximum), gradients of log-probs and entropy."""
    logits = (torch.randn(*rows, vocabulary, dtype=torch.float64) * spread).to(dtype)
    labels = torch.randint(0, vocabulary, rows)
    labels[0, 0] = logits[0, 0].argmax()
    labels[-1, 1] = IGNORE
    return logits, labels, torch.randn(rows), torch.randn(rows)


def forward(
    logits: Tensor, labels: Tensor, transform: LogitTransform = IDENTITY, entropy: bool = True
) -> RowStats:
    return cpp.logprobs_forward(logits, labels, transform, ignore_index=IGNORE, entropy=entropy)


def backward(
    logits: Tensor,
    labels: Tensor,
    stats: RowStats,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient, in memory poisoned with NaN unless ``out`` is given."""
    if out is None:
        out = torch.full(logits.shape, float("nan"), dtype=logits.dtype)
    cpp.logprobs_backward(
        logits, labels, stats, grad_logprobs, grad_entropy, scale, transform, ignore_index=IGNORE, out=out
    )
    return out


def and_grad(logits: Tensor, labels: Tensor, c: Tensor, transform: LogitTransform = IDENTITY, out=None):
    if out is None:
        out = torch.full(logits.shape, float("nan"), dtype=logits.dtype)
    return cpp.logprobs_and_grad(logits, labels, c, transform, ignore_index=IGNORE, out=out), out


def and_rows(logits: Tensor, labels: Tensor, transform: LogitTransform = IDENTITY, out=None):
    """Statistics, rows, and the factors that make them d logprob/dlogits."""
    if out is None:
        out = torch.full(logits.shape, float("nan"), dtype=stats_dtype(logits.dtype))
    stats, factors = cpp.logprobs_and_rows(logits, labels, transform, ignore_index=IGNORE, out=out)
    assert factors.shape == labels.shape and factors.isfinite().all()
    return stats, out, factors


def equal(a, b) -> bool:
    """Same bits, NaN included."""
    return all(
        x is y is None or (x.dtype == y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)))
        for x, y in zip(a, b, strict=True)
    )
