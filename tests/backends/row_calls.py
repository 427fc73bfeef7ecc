"""Calls of a backend's row functions, and the results that they must return."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import load, unavailable_reason
from gspo_kernels.core.types import LogitRows, LogitTransform, RowGradients, RowStats, stats_dtype
from tests.accuracy import assert_draws_as_exact
from tests.cases import device_of, generator

IGNORE = -100
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PLAIN = LogitTransform()
WARM = LogitTransform(1.0, 0.0, 0.7)
SOFT = LogitTransform(0.5, 30.0, 0.7)
NEGATIVE = LogitTransform(-2.0, 0.0, 1.0)


class Rows:
    """The row functions of a backend. Arguments are on the CPU or the backend's device, results on the CPU.
    Gradients are written to memory full of NaN unless ``out`` is passed.
    """

    def __init__(self, name: str):
        self.name, self.device = name, device_of(name)
        if (reason := unavailable_reason(name, self.device)) is not None:
            pytest.skip(reason)
        self.functions = load(name)

    def there(self, value):
        """Return a tensor on the backend's device, and anything else unchanged."""
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
        """Return statistics and gradient; ``held`` lets Triton keep rows on the chip where they fit."""
        out = self._out(logits, logits.dtype, out)
        with pytest.MonkeyPatch.context() as patch:
            if not held:
                patch.setattr("gspo_kernels.backends.triton.logprobs.on_chip_tile", lambda *_: None)
            rows = self.rows(logits, labels, transform)
            stats = self.functions.logprobs_and_grad(rows, self.there(coefficients), out)
        return stats.each(Tensor.cpu), out.cpu()

    def and_rows(self, logits, labels, transform=PLAIN, *, out=None) -> tuple[RowStats, Tensor, Tensor]:
        """Return statistics, rows, and the factors that turn the rows into d logprob/dlogits."""
        out = self._out(logits, stats_dtype(logits.dtype), out)
        stats, factors = self.functions.logprobs_and_rows(self.rows(logits, labels, transform), out)
        factors = torch.ones_like(stats.logprobs) if factors is None else factors
        return stats.each(Tensor.cpu), out.cpu(), factors.cpu()

    def _out(self, logits, dtype, out):
        return self.there(torch.full(logits.shape, torch.nan, dtype=dtype) if out is None else out)


def draw(vocabulary, dtype, *, B=2, T=3, spread=4.0, seed=0):
    """Draw logits, labels (every other one the likeliest id), and gradients of log-probs and entropy."""
    rng = generator(seed)
    logits = (torch.randn(B, T, vocabulary, generator=rng, dtype=torch.float64) * spread).to(dtype)
    labels = torch.randint(0, vocabulary, (B, T), generator=rng)
    labels[:, ::2] = logits[:, ::2].argmax(-1)
    grads = torch.randn(2, B, T, generator=rng, dtype=torch.float64).to(stats_dtype(dtype))
    return logits, labels, grads[0], grads[1]


def chunk_of(logits, narrow):
    """Return fp32 logits with rows padded to a multiple of 64 elements, and 16-bit rows in their memory."""
    B, T, V = logits.shape
    room = torch.full((B, T, (V + 63) // 64 * 64), float("nan"), device=logits.device)
    room[..., :V] = logits
    return room[..., :V], room.view(narrow)[..., :V]


def same(got, want) -> bool:
    """Return whether dtypes and values are equal; NaN equals NaN."""
    return all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
        for a, b in zip(got, want, strict=True)
    )


# --- the results that functions must return


def exact(logits, labels, transform, grad_logprobs=None, grad_entropy=None):
    """Return (logprobs, lse, entropy, grad) of finite rows with labels in range; fp64 by long double."""
    wide = np.longdouble if logits.dtype == torch.float64 else np.float64
    x = np.array(logits.double().numpy(), dtype=wide)
    scale, cap = wide(transform.logit_scale), wide(transform.softcap)
    heat = wide(transform.temperature)
    if transform.row_temperature is not None:
        heat = np.array(transform.row_temperature.double().numpy(), dtype=wide)[..., None]
    bent = np.tanh(scale * x / cap) if cap else None
    z = (cap * bent if cap else scale * x) / heat
    slope = scale / heat * (1 - bent * bent if cap else np.ones_like(x))
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    logp = z - lse
    p = np.exp(logp)
    onehot = np.arange(x.shape[-1]) == labels.numpy()[..., None]
    # A log p(label) near 0 is lost in z - lse, so it comes from the p of the other columns.
    chosen = (logp * onehot).sum(-1)
    others = (p * ~onehot).sum(-1)
    chosen = np.where(chosen > -0.5, np.log1p(-np.minimum(others, wide(0.5))), chosen)
    entropy = -(p * logp).sum(-1)
    grad = np.zeros_like(x)
    if grad_logprobs is not None:
        onehot_minus_p = np.where(onehot, others[..., None], -p)
        grad = grad + np.array(grad_logprobs.double().numpy(), dtype=wide)[..., None] * onehot_minus_p
    if grad_entropy is not None:
        weight = np.array(grad_entropy.double().numpy(), dtype=wide)[..., None]
        grad = grad - weight * p * (logp + entropy[..., None])
    numbers = (chosen, lse[..., 0], entropy, grad * slope)
    return tuple(torch.from_numpy(number.astype(np.float64)) for number in numbers)


def plain(logits, labels, transform, grad_logprobs=None, grad_entropy=None, dtype=torch.float32):
    """Return the same as ``exact``, from PyTorch with autograd in ``dtype``."""
    leaf = logits.to(dtype, copy=True).requires_grad_()
    z = leaf * transform.logit_scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    heat = transform.row_temperature
    z = z / (transform.temperature if heat is None else heat.unsqueeze(-1).to(dtype))
    logp = torch.log_softmax(z, -1)
    chosen = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    outputs = [(chosen, grad_logprobs), (entropy, grad_entropy)]
    sum((output * grad.to(dtype)).sum() for output, grad in outputs if grad is not None).backward()
    return chosen.detach(), torch.logsumexp(z, -1).detach(), entropy.detach(), leaf.grad


def neighbor(values, k):
    """Return ``values``, for k > 0 moved at random by up to 1 part in 128: other roundings, the same size."""
    if k == 0:
        return values
    noise = torch.rand(values.shape, generator=generator(k), dtype=torch.float64)
    return (values.double() * (1 + (noise - 0.5) / 64)).to(values.dtype)


class Truth:
    """The exact results and plain PyTorch's, both for some rows and for random neighbors of these rows."""

    def __init__(self, logits, labels, transform, grad_logprobs, grad_entropy=None, draws=6):
        self.dtype, self.draws, names = logits.dtype, [], ("logprobs", "lse", "entropy", "grad")
        for k in range(draws):
            here = neighbor(logits, k), labels, transform, grad_logprobs, grad_entropy
            answers = {torch.float64: exact(*here), torch.float32: plain(*here)}
            self.draws.append({key: dict(zip(names, found, strict=True)) for key, found in answers.items()})

    def hold(self, **got):
        """Check that results (some of logprobs, lse, entropy, grad) are as exact as plain PyTorch's."""
        assert all(torch.isfinite(value).all() for value in got.values())
        draws = [(answers.__getitem__, lambda: got) for answers in self.draws]
        assert_draws_as_exact(draws, self.dtype, compared=1)


def check(rows: Rows, logits, labels, grad, grad_entropy, transform=PLAIN):
    """Check that all functions on finite rows are as exact as plain PyTorch, and that statistics are the same
    with and without the entropy; from C++ also with and without the gradient.
    """
    given = logits, labels, transform
    both, alone = Truth(*given, grad, grad_entropy), Truth(*given, grad)
    stats = rows.forward(*given)
    for name, got in zip(stats._fields, stats, strict=True):
        assert got.dtype == (torch.float64 if name == "lse" else stats_dtype(logits.dtype)), name
    assert (stats.logprobs <= 0).all()
    alike = stats._replace(entropy=None)
    assert same(rows.forward(*given, entropy=False), alike)
    with_entropy = rows.backward(logits, labels, stats, grad, grad_entropy, transform)
    both.hold(**stats._asdict(), grad=with_entropy)
    alone.hold(grad=rows.backward(logits, labels, stats, grad, None, transform))
    held = {True}
    if rows.name == "triton":
        from gspo_kernels.backends.triton import logprobs

        held = {logprobs.on_chip_tile(logits, logits, transform) is not None, False}
    else:
        known, row, factors = rows.and_rows(*given)
        assert same(known, alike)
        alone.hold(logprobs=known.logprobs, lse=known.lse, grad=row * (factors * grad).unsqueeze(-1))
    for way in held:
        known, got = rows.and_grad(logits, labels, grad, transform, held=way)
        assert rows.name == "triton" or same(known, alike)
        alone.hold(logprobs=known.logprobs, lse=known.lse, grad=got)
