"""Rows of logits in C++: values and gradients within the budget, whatever the memory's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo_kernels import cpp
from gspo_kernels.types import LogitTransform, stats_dtype
from tests.cpp.cpp_oracle import assert_within_budget, exact, plain, wide
from tests.cpp.row_calls import (
    DTYPES,
    IDENTITY,
    TRANSFORMS,
    and_grad,
    and_rows,
    backward,
    equal,
    forward,
    make,
)

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)


# 1, 2: degenerate; 7..33, 257: around vector widths; 2047..4097: around the block.
VOCABULARIES = (1, 2, 7, 8, 9, 31, 33, 257, 1009, 2047, 2048, 2049, 4097)
A_REAL_ONE = 32000


@pytest.mark.parametrize(
    ("vocabulary", "transform"),
    [(V, name) for name in TRANSFORMS for V in VOCABULARIES]
    + [(A_REAL_ONE, name) for name in ("identity", "all")],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_within_budget(vocabulary, transform, dtype):
    transform = TRANSFORMS[transform]
    logits, labels, g, ge = make(vocabulary, dtype, rows=(2, min(256, max(24, 180_000 // vocabulary))))
    stats = forward(logits, labels, transform)
    assert (
        stats.logprobs.dtype == stats.entropy.dtype == stats_dtype(dtype) and stats.lse.dtype == torch.float64
    )
    assert (stats.logprobs <= 0).all() and (stats.entropy >= 0).all()

    want, usual = exact(logits, labels, transform, g, ge), plain(logits, labels, transform, g, ge)
    assert_within_budget("logprobs", stats.logprobs, usual, want, "logprobs")
    # fp64 only so that nothing more is lost: what it holds was computed in the statistics' dtype
    assert_within_budget("lse", stats.lse.to(stats_dtype(dtype)), usual, want, "lse")
    assert_within_budget("entropy", stats.entropy, usual, want, "entropy")
    grad = backward(logits, labels, stats, g, ge, transform)
    assert_within_budget("grad with entropy", grad, usual, want, "grad")

    want, usual = exact(logits, labels, transform, g), plain(logits, labels, transform, g)
    without_entropy = forward(logits, labels, transform, entropy=False)
    assert without_entropy.entropy is None
    assert equal(without_entropy[:2], stats[:2])
    assert_within_budget("grad", backward(logits, labels, stats, g, None, transform), usual, want, "grad")

    one_pass, grad = and_grad(logits, labels, g, transform)
    assert equal(one_pass, without_entropy)
    assert_within_budget("grad in one pass", grad, usual, want, "grad")

    usual = plain(logits.to(stats_dtype(dtype)), labels, transform, g)
    stats, rows, factors = and_rows(logits, labels, transform)
    assert stats.entropy is None and (stats.logprobs <= 0).all()
    assert_within_budget("logprobs with rows", stats.logprobs, usual, want, "logprobs")
    assert_within_budget("lse with rows", stats.lse.to(stats_dtype(dtype)), usual, want, "lse")
    assert_within_budget("rows", rows, usual, want, "grad", wide(g) * wide(factors))


@pytest.mark.parametrize("spread", [0.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5])
def test_logits_far_from_zero_and_far_apart(spread, offset):
    logits, labels, g, ge = make(5000, torch.float32, rows=(1, 40), spread=spread)
    logits += offset
    want, usual = exact(logits, labels, IDENTITY, g, ge), plain(logits, labels, IDENTITY, g, ge)
    stats = forward(logits, labels)
    assert_within_budget("logprobs", stats.logprobs, usual, want, "logprobs")
    assert_within_budget("entropy", stats.entropy, usual, want, "entropy")
    assert_within_budget("grad", backward(logits, labels, stats, g, ge), usual, want, "grad")
    want, usual = exact(logits, labels, IDENTITY, g), plain(logits, labels, IDENTITY, g)
    assert_within_budget("one pass", and_grad(logits, labels, g)[1], usual, want, "grad")
    stats, rows, factors = and_rows(logits, labels)
    assert_within_budget("logprobs with rows", stats.logprobs, usual, want, "logprobs")
    assert_within_budget("rows", rows, usual, want, "grad", wide(g) * wide(factors))


@pytest.mark.parametrize("step", [-90.0, -33.0, 5.0, 31.0, 33.0, 60.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 80.0])
def test_rows_whose_blocks_rise_and_fall(step, dtype, softcap):
    """Exponentials are written before the row's maximum is known: they must come out as if it had been."""
    logits, labels, g, _ = make(9001, dtype, rows=(2, 80))
    logits += step * torch.tensor([0, 1, 2, 2, 1, 3], dtype=dtype)[torch.arange(9001) // 2048]
    labels[1, :2] = torch.tensor([100, 8999])
    transform = LogitTransform(softcap=softcap)
    want, usual = exact(logits, labels, transform, g), plain(logits, labels, transform, g)
    stats, rows, factors = and_rows(logits, labels, transform)
    assert_within_budget("logprobs", stats.logprobs, usual, want, "logprobs")
    assert_within_budget("lse", stats.lse.to(dtype), usual, want, "lse")
    factors = wide(g) * wide(factors)
    assert_within_budget("rows", rows, usual, want, "grad", factors)
    # the largest elements alone would hide the others: those that count for anything, each for itself
    small = np.abs(want.grad) > 1e-30
    error = np.abs((wide(rows) * factors[..., None])[small] / want.grad[small] - 1).max()
    usual_error = np.abs(usual.grad[small] / want.grad[small] - 1).max()
    assert error <= 2 * usual_error + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("gap", [5.0, 12.0, 17.0, 30.0, 80.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_rows_keep_relative_precision(gap, dtype):
    """p(label) rounds to 1 while log p and the gradient at the label must still tell how far it is from 1."""
    logits = torch.randn(1, 4, 3001).to(dtype)
    labels = torch.tensor([[0, 1500, 3000, 2048]])
    logits.scatter_(-1, labels[..., None], gap + 9.0)
    c = torch.ones(1, 4)
    stats = forward(logits, labels)
    odds = logits.double().numpy().astype(np.longdouble) - (gap + 9)
    np.put_along_axis(odds, labels.numpy()[..., None], -np.inf, -1)
    odds = np.exp(odds).sum(-1)  # of all others together
    eps = torch.finfo(stats.logprobs.dtype).eps
    assert (stats.logprobs < 0).all()
    # The sum over the others is all that is rounded. Only in fp64, with nothing wider to compute in, their
    # distance to the label is rounded too, which shifts an exponent.
    eps *= 2 if dtype != torch.float64 else 2 + gap + 9
    assert (np.abs(stats.logprobs.double().numpy() + np.log1p(odds)) <= eps * np.log1p(odds)).all()
    _, rows, factors = and_rows(logits, labels)
    rows = (rows * factors.unsqueeze(-1)).to(dtype)
    for grad in (backward(logits, labels, stats, c), and_grad(logits, labels, c)[1], rows):
        at_label = grad.gather(-1, labels[..., None])[..., 0]
        expected = odds / (1 + odds)
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        slack = (eps + torch.finfo(dtype).eps) * np.abs(expected) + subnormal
        assert (np.abs(at_label.double().numpy() - expected) <= slack).all()


def views(base: Tensor) -> dict[str, Tensor]:
    """Tensors [2, 4, 300] of any layout; ``base`` is [8, 8, 700]."""
    return {
        "sliced rows": base[::4, 1:8:2, :300],
        "sliced vocabulary": base[:2, :4, 5:305],
        "every other column": base[:2, :4, 1:601:2],
        "transposed": base[:2, :, :4].expand(2, 8, 4)[:, :1].expand(2, 300, 4).transpose(1, 2),
        "vocabulary first": base[:, :2, :].reshape(-1)[: 300 * 8].view(300, 2, 4).permute(1, 2, 0),
        "expanded batch": base[:1, :4, :300].expand(2, 4, 300),
        "expanded rows": base[:2, :1, :300].expand(2, 4, 300),
        "expanded vocabulary": base[:2, :4, :1].expand(2, 4, 300),
        "one element": base[:1, :1, :1].expand(2, 4, 300),
        "overlapping": base.reshape(-1).as_strided((2, 4, 300), (11, 3, 2)),
    }


@pytest.mark.parametrize("layout", views(torch.zeros(8, 8, 700)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_give_the_bits_of_contiguous_logits(layout, dtype):
    logits = views(torch.randn(8, 8, 700).to(dtype))[layout]
    before = logits.clone()
    assert logits.shape == (2, 4, 300) and not logits.is_contiguous()
    labels = torch.randint(0, 300, (4, 2)).t()
    g, ge, scale = torch.randn(1, 1).expand(2, 4), torch.randn(2, 8)[:, ::2], torch.tensor(2.0)
    stats = forward(logits, labels)
    assert equal(stats, forward(before, labels.contiguous()))
    got = backward(logits, labels, stats, g, ge, scale=scale)
    assert equal([got], [backward(before, labels, stats, g.contiguous() * 2, ge.contiguous() * 2)])
    assert equal(and_grad(logits, labels, g)[1:], and_grad(before, labels, g)[1:])
    assert equal(and_rows(logits, labels)[1:], and_rows(before, labels)[1:])
    assert equal([logits], [before])


def test_strided_gradient_rows_touch_nothing_between_them():
    logits, labels, g, _ = make(300, torch.float32)
    padded = torch.full((2, 10, 320), 7.0)
    backward(logits, labels, forward(logits, labels), g, out=padded[:, ::2, 10:310])
    assert equal([padded[:, ::2, 10:310]], [backward(logits, labels, forward(logits, labels), g)])
    padded[:, ::2, 10:310] = 7.0
    and_rows(logits, labels, out=padded[:, ::2, 10:310])
    padded[:, ::2, 10:310] = 7.0
    assert (padded == 7.0).all()
