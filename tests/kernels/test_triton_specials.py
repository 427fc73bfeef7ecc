"""Rows that are special by where they begin or by infinities and NaN in them."""

import math

import pytest
import torch

pytest.importorskip("triton")

from gspo_kernels import kernels
from gspo_kernels.kernels import launch as launching
from gspo_kernels.types import LogitTransform, RatioClip
from tests.kernels.row_oracle import PLAIN
from tests.kernels.test_triton_rows import (
    DTYPES,
    IGNORE,
    SOFT,
    WARM,
    and_grad,
    backward,
    check,
    forward,
    rows,
    to,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", (1, 3, 9, 33, 4096 + 11))
def test_rows_that_begin_anywhere(V, dtype):
    """At every alignment, with NaN between them that is neither read nor overwritten."""
    places = 16 // dtype.itemsize + 1
    logits, labels, grad, other = rows(V, dtype, B=1, T=places)
    labels[0, 0], labels[0, 1], labels[0, 2] = 0, V - 1, V // 2
    grad[0, 2] = other[0, 2] = 0.0
    # Rows begin an odd number of elements apart.
    stride = V + 1 + V % 2
    room = torch.full((places * stride + 1,), float("nan"), dtype=dtype)
    shifted = room[1:].view(1, places, stride)[..., :V]
    shifted.copy_(logits)
    assert launching.access(shifted) == "shifted"
    aligned = torch.full((1, places, (V + 15) // 16 * 16), -float("inf"), dtype=dtype)
    aligned[..., :V] = logits
    assert launching.access(aligned) == "aligned"
    got, want = forward(shifted, labels), forward(aligned, labels)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)

    def written(write):
        """What ``write`` makes of the rows in their own memory, of which it leaves the rest alone."""
        device = to(room.clone())
        write(device[1:].view(1, places, stride)[..., :V])
        beside = device.cpu()[1:].view(1, places, stride)
        assert beside[..., V:].isnan().all() and device[0].isnan()
        return beside[..., :V]

    wanted = backward(aligned, labels, want, grad, other)[..., :V]
    given = to(labels), want.each(to), to(grad), to(other), None, PLAIN
    assert torch.equal(
        written(lambda there: kernels.logprobs_backward(there, *given, ignore_index=IGNORE, out=there)),
        wanted,
    )
    # Rows that stay on the chip begin at multiples of 16 bytes, and are summed in an order of their own.
    known, in_one_pass = and_grad(aligned, labels, grad, held=False)
    again = []
    got = written(
        lambda there: again.append(
            kernels.logprobs_and_grad(there, to(labels), to(grad), PLAIN, ignore_index=IGNORE, out=there)
        )
    )
    assert torch.equal(got, in_one_pass[..., :V]) and torch.equal(again[0].logprobs.cpu(), known.logprobs)
    form = RatioClip(-1e9, 1e9, math.inf, False, "one", 1.0)
    options = dict.fromkeys(("weights", "lengths", "normalizer", "cu_seqlens"))
    ratio = kernels.sequence_ratio_forward(
        to(shifted), to(labels), to(grad), to(grad[:, 0]), form, PLAIN, ignore_index=IGNORE, **options
    )
    assert torch.equal(ratio.logprobs.cpu(), want.logprobs) and torch.equal(ratio.lse.cpu(), want.lse)
    # Where the two begin at different places, both are walked element by element.
    elsewhere = to(torch.full(logits.shape, float("nan"), dtype=dtype))
    assert launching.access(shifted, elsewhere) == "single"
    assert torch.equal(backward(shifted, labels, want, grad, other, out=elsewhere), wanted)


@pytest.mark.parametrize("narrow", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("V", (3, 4096 + 11))
def test_rows_that_begin_anywhere_are_narrowed_in_place(V, narrow):
    logits, labels, grad, other = rows(V, torch.float32, B=1, T=5)
    stride = V + 1 + V % 2
    elsewhere = torch.full(logits.shape, float("nan"), dtype=narrow)
    stats = forward(logits, labels)
    wanted = backward(logits, labels, stats, grad, other, out=elsewhere)
    device = to(torch.full((5 * stride + 1,), float("nan")))
    there = device[1:].view(1, 5, stride)[..., :V]
    there.copy_(logits)
    out = device.view(narrow)[2:].view(1, 5, 2 * stride)[..., :V]
    given = to(labels), stats.each(to), to(grad), to(other), None, PLAIN
    kernels.logprobs_backward(there, *given, ignore_index=IGNORE, out=out)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_vocabulary_that_16_does_not_divide(dtype):
    """The next row begins 5 elements, of 8 or of 4, behind a multiple of 16 bytes."""
    check(*rows(151669, dtype, B=1, T=2), PLAIN)


@pytest.mark.parametrize("transform", (PLAIN, WARM, SOFT))
def test_infinite_and_extreme_logits(transform):
    # Only without a transform do the products stay in range.
    V, lowest = 9000, torch.finfo(torch.float32).min if transform == PLAIN else -1e38
    logits, labels, grad, other = rows(V, torch.float32, B=1, T=7)
    cold = -float("inf")
    logits[0, 0, :8500] = cold  # whole blocks of -inf first
    labels[0, 0] = 8700
    logits[0, 1] = cold  # all but the label
    logits[0, 1, 3] = 1.0
    labels[0, 1] = 3
    labels[0, 2] = 5  # the label itself
    logits[0, 2, 5] = cold
    logits[0, 3, 1:] = lowest
    labels[0, 3] = 0
    logits[0, 4] = lowest  # uniform, at the edge of the range
    logits[0, 5] = cold  # nothing at all
    logits[0, 6, 77] = float("nan")
    stats = forward(logits, labels, transform)
    z = logits.double() * transform.logit_scale
    z = (
        transform.softcap * torch.tanh(z / transform.softcap) if transform.softcap else z
    ) / transform.temperature
    want = torch.log_softmax(z, -1)
    chosen = want.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(stats.logprobs.double(), chosen, rtol=2e-6, atol=1e-6, equal_nan=True)
    assert stats.logprobs[0, 6].isnan()
    p = want.exp()
    entropy = -torch.where(p == 0, 0.0, p * want).sum(-1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=4e-6, atol=2e-6, equal_nan=True)
    if not transform.softcap:
        assert stats.lse[0, 5] == cold and stats.logprobs[0, 5].isnan() and stats.logprobs[0, 2] == cold
    slope = transform.logit_scale / transform.temperature
    bend = 1.0
    if transform.softcap:
        bend = 1 - torch.tanh(logits.double() * transform.logit_scale / transform.softcap) ** 2
    hat = torch.nn.functional.one_hot(labels, V).double()
    _, gradient = and_grad(logits, labels, grad, transform)
    onward = grad.double().unsqueeze(-1) * (hat - p) * slope * bend
    torch.testing.assert_close(gradient.double(), onward, rtol=2e-5, atol=2e-6, equal_nan=True)
    assert not gradient[0, :5].isnan().any() and gradient[0, 6].isnan().all()

    # A log-sum-exp that is stored as one fp32 number can't tell 9,000 logits of -3e38 from one.
    grad[0, 4] = other[0, 4] = 0.0
    gradient = backward(logits, labels, stats, grad, other, transform=transform)
    onward = grad.double().unsqueeze(-1) * (hat - p)
    onward -= other.double().unsqueeze(-1) * torch.where(p == 0, 0.0, p * (want + entropy.unsqueeze(-1)))
    onward = onward * slope * bend
    torch.testing.assert_close(gradient.double(), onward, rtol=2e-5, atol=2e-6, equal_nan=True)
    assert not gradient[0, :5].isnan().any() and gradient[0, 6].isnan().all()


def test_a_label_at_plus_infinity_is_nan_as_in_pytorch():
    logits, labels, _, _ = rows(300, torch.float32)
    logits.scatter_(-1, labels.unsqueeze(-1), float("inf"))
    assert forward(logits, labels).logprobs.isnan().all()
    assert torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).isnan().all()


@pytest.mark.parametrize("transform", (PLAIN, WARM, LogitTransform(-2.0, 0.0, 1.0)))
@pytest.mark.parametrize("also", ("nothing", "a finite maximum before", "another +inf", "NaN"))
def test_another_column_at_plus_infinity_is_nan_as_in_pytorch(transform, also):
    logits, labels, grad, _ = rows(9000, torch.float32, B=1, T=1)
    logits[logits == logits.max()] = 1.0
    labels[0, 0], where = 5, 8200
    hot = float("inf") if transform.logit_scale > 0 else -float("inf")
    logits[0, 0, where] = hot
    if also == "a finite maximum before":
        logits[0, 0, where - 4096] = 1e30 * transform.logit_scale
    if also == "another +inf":
        logits[0, 0, where + 1] = hot
    if also == "NaN":
        logits[0, 0, where + 1] = float("nan")
    stats = forward(logits, labels, transform)
    assert torch.log_softmax(logits * transform.logit_scale, -1)[0, 0, 5].isnan()
    assert stats.logprobs.isnan().all() and stats.entropy.isnan().all()
    assert (stats.lse == float("inf")).all()
    known, gradient = and_grad(logits, labels, grad, transform)
    assert known.logprobs.isnan().all() and gradient[0, 0, [5, where]].isnan().all()
