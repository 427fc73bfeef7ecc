"""Calls of a backend's row functions, and what their answers must be."""

import pytest
import torch
from torch import Tensor

from gspo_kernels.ops.backends import load
from gspo_kernels.types import LogitRows, LogitTransform, RowGradients, RowStats, stats_dtype
from tests.cases import device_of, generator
from tests.kernels.row_oracle import PLAIN, Judge, exact, neighbour, plain

IGNORE = -100
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WARM = LogitTransform(1.0, 0.0, 0.7)
SOFT = LogitTransform(0.5, 30.0, 0.7)
NEGATIVE = LogitTransform(-2.0, 0.0, 1.0)


class Rows:
    """The row functions of a backend, on tensors of the CPU or of its device; results are on the CPU.
    Gradients go to memory full of NaN unless ``out`` is passed.
    """

    def __init__(self, name: str):
        self.name, self.functions, self.device = name, load(name), device_of(name)

    def there(self, value):
        """A tensor on the backend's device; anything else as it is."""
        return value.to(self.device) if isinstance(value, Tensor) else value

    def rows(self, logits, labels, transform, ignore_index=IGNORE) -> LogitRows:
        return LogitRows(self.there(logits), self.there(labels), transform.rows(self.there), ignore_index)

    def forward(self, logits, labels, transform=PLAIN, *, entropy=True, ignore_index=IGNORE) -> RowStats:
        rows = self.rows(logits, labels, transform, ignore_index)
        return self.functions.logprobs_forward(rows, entropy).each(Tensor.cpu)

    def backward(
        self, logits, labels, stats, grad, grad_entropy=None, transform=PLAIN, *, scale=None, out=None
    ) -> Tensor:
        rows, out = self.rows(logits, labels, transform), self._out(logits, logits.dtype, out)
        grads = RowGradients(self.there(grad), self.there(grad_entropy), self.there(scale))
        self.functions.logprobs_backward(rows, stats.each(self.there), grads, out)
        return out.cpu()

    def and_grad(
        self, logits, labels, coefficients, transform=PLAIN, *, out=None, held=True
    ) -> tuple[RowStats, Tensor]:
        """``held`` lets Triton keep rows on the chip where they fit."""
        out = self._out(logits, logits.dtype, out)
        with pytest.MonkeyPatch.context() as patch:
            if not held:
                patch.setattr("gspo_kernels.kernels.one_pass.on_chip_tile", lambda *_: None)
            rows = self.rows(logits, labels, transform)
            stats = self.functions.logprobs_and_grad(rows, self.there(coefficients), out)
        return stats.each(Tensor.cpu), out.cpu()

    def and_rows(self, logits, labels, transform=PLAIN, *, out=None) -> tuple[RowStats, Tensor, Tensor]:
        """Statistics, rows, and the factors that make them d logprob/dlogits."""
        out = self._out(logits, stats_dtype(logits.dtype), out)
        stats, factors = self.functions.logprobs_and_rows(self.rows(logits, labels, transform), out)
        factors = torch.ones_like(stats.logprobs) if factors is None else factors
        return stats.each(Tensor.cpu), out.cpu(), factors.cpu()

    def _out(self, logits, dtype, out):
        poisoned = torch.full(logits.shape, float("nan"), dtype=dtype) if out is None else out
        return self.there(poisoned)


def draw(vocabulary, dtype, *, B=2, T=3, spread=4.0, seed=0):
    """Logits, labels of which every other is the likeliest, and gradients of log-probs and entropy."""
    rng = generator(seed)
    logits = (torch.randn(B, T, vocabulary, generator=rng, dtype=torch.float64) * spread).to(dtype)
    labels = torch.randint(0, vocabulary, (B, T), generator=rng)
    labels[:, ::2] = logits[:, ::2].argmax(-1)
    grads = torch.randn(2, B, T, generator=rng, dtype=torch.float64).to(stats_dtype(dtype))
    return logits, labels, grads[0], grads[1]


def chunk_of(logits, narrow):
    """A chunk of fp32 rows padded to 64 elements: the logits, and 16-bit rows in their memory."""
    B, T, V = logits.shape
    room = torch.full((B, T, (V + 63) // 64 * 64), float("nan"), device=logits.device)
    room[..., :V] = logits
    return room[..., :V], room.view(narrow)[..., :V]


def same(got, want) -> bool:
    """The same dtypes and bits, NaN included."""
    return all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
        for a, b in zip(got, want, strict=True)
    )


def check(rows: Rows, logits, labels, grad, grad_entropy, transform=PLAIN):
    """All functions on finite rows are as exact as plain PyTorch, statistics the same bits with and without
    the entropy.
    """
    eps, eps_out = (torch.finfo(dtype).eps for dtype in (stats_dtype(logits.dtype), logits.dtype))
    # only fp64 rows keep a log-sum-exp that is rounded as they are, like the plain formula through logsumexp
    ways = (False, True) if logits.dtype == torch.float64 else (False,)

    def judge(*grads):
        def judged(k):
            here = neighbour(logits, k), labels, transform, *grads
            return exact(*here), [plain(*here, way) for way in ways]

        return Judge(judged)

    both, alone = judge(grad, grad_entropy), judge(grad, None)
    stats = rows.forward(logits, labels, transform)
    for name, got in zip(stats._fields, stats, strict=True):
        assert got.dtype == (torch.float64 if name == "lse" else stats_dtype(logits.dtype)), name
        both.hold(name, got, eps=eps)
    assert (stats.logprobs <= 0).all()
    without = rows.forward(logits, labels, transform, entropy=False)
    assert same(without, stats._replace(entropy=None))
    both.hold("grad", rows.backward(logits, labels, stats, grad, grad_entropy, transform), eps=eps_out)
    got = rows.backward(logits, labels, stats, grad, None, transform)
    alone.hold("grad", got, eps=eps_out)
    if rows.name == "triton":
        from gspo_kernels.kernels import one_pass

        held = one_pass.on_chip_tile(logits, logits, transform) is not None
        in_one_pass = [rows.and_grad(logits, labels, grad, transform, held=way) for way in {held, False}]
    else:
        in_one_pass = [rows.and_grad(logits, labels, grad, transform)]
        known, row, factors = rows.and_rows(logits, labels, transform)
        row = row.double() * (factors.double() * grad.double()).unsqueeze(-1)
        alone.hold("grad", row, eps=2 * eps, formulas=1)
        in_one_pass.append((known, in_one_pass[0][1]))
    # the log-sum-exp is never rounded there: compared with log_softmax alone
    for known, got in in_one_pass:
        alone.hold("logprobs", known.logprobs, eps=eps, formulas=1)
        alone.hold("lse", known.lse, eps=eps, formulas=1)
        alone.hold("grad", got, eps=eps_out, formulas=1)
