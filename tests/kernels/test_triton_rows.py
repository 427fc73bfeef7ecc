"""The Triton row kernels against extended precision, under the interpreter unless a GPU is present."""

import pytest
import torch

from tests.draws import shifted_seed
from tests.kernels.row_oracle import PLAIN, Judge, exact, neighbour, plain

pytest.importorskip("triton")

from gspo_kernels import kernels
from gspo_kernels.kernels import launch as launching
from gspo_kernels.kernels import one_pass
from gspo_kernels.types import LogitTransform, stats_dtype

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IGNORE = -100
SOFT = LogitTransform(0.5, 30.0, 0.7)
WARM = LogitTransform(1.0, 0.0, 0.7)


def rows(V, dtype, *, B=2, T=3, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    logits = (torch.randn(B, T, V, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, V, (B, T), generator=generator)
    # Every other label is the likeliest one, as in sampled text.
    labels[:, ::2] = logits[:, ::2].argmax(-1)
    grads = torch.randn(2, B, T, generator=generator, dtype=torch.float64).to(stats_dtype(dtype))
    return logits, labels, grads[0], grads[1]


def to(value, device=DEVICE):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def forward(logits, labels, transform=PLAIN, entropy=True, ignore_index=IGNORE):
    transform = transform._replace(row_temperature=to(transform.row_temperature))
    stats = kernels.logprobs_forward(
        to(logits), to(labels), transform, ignore_index=ignore_index, entropy=entropy
    )
    return stats.each(torch.Tensor.cpu)


def backward(
    logits, labels, stats, grad_logprobs, grad_entropy=None, grad_scale=None, transform=PLAIN, out=None
):
    transform = transform._replace(row_temperature=to(transform.row_temperature))
    poisoned = torch.full(logits.shape, float("nan"), dtype=logits.dtype) if out is None else out
    out = to(poisoned)
    kernels.logprobs_backward(
        to(logits),
        to(labels),
        stats.each(to),
        to(grad_logprobs),
        to(grad_entropy),
        to(grad_scale),
        transform,
        ignore_index=IGNORE,
        out=out,
    )
    return out.cpu()


def and_grad(logits, labels, coefficients, transform=PLAIN, out=None, held=True):
    """``held`` allows rows to stay on the chip where they can."""
    transform = transform._replace(row_temperature=to(transform.row_temperature))
    out = to(torch.full(logits.shape, float("nan"), dtype=logits.dtype) if out is None else out)
    with pytest.MonkeyPatch.context() as patch:
        if not held:
            patch.setattr(one_pass, "on_chip_tile", lambda *_: None)
        stats = kernels.logprobs_and_grad(
            to(logits), to(labels), to(coefficients), transform, ignore_index=IGNORE, out=out
        )
    return stats.each(torch.Tensor.cpu), out.cpu()


def check(logits, labels, grad_logprobs, grad_entropy, transform):
    """All three functions on rows without specials."""
    eps = torch.finfo(stats_dtype(logits.dtype)).eps
    eps_out = torch.finfo(logits.dtype).eps
    # Only fp64 rows keep a log-sum-exp that is rounded as they are, like the plain formula through logsumexp.
    ways = (False, True) if logits.dtype == torch.float64 else (False,)

    def judge(*grads):
        def draw(k):
            here = neighbour(logits, k), labels, transform, *grads
            return exact(*here), [plain(*here, way) for way in ways]

        return Judge(draw)

    both = judge(grad_logprobs, grad_entropy)
    stats = forward(logits, labels, transform)
    for name, got in zip(stats._fields, stats, strict=True):
        assert got.dtype == (torch.float64 if name == "lse" else stats_dtype(logits.dtype)), name
        both.hold(name, got, eps=eps)
    assert (stats.logprobs <= 0).all()
    got = backward(logits, labels, stats, grad_logprobs, grad_entropy, transform=transform)
    both.hold("grad", got, eps=eps_out)

    alone = judge(grad_logprobs, None)
    alone.hold("grad", backward(logits, labels, stats, grad_logprobs, transform=transform), eps=eps_out)
    # In one go the log-sum-exp is never rounded: held to log_softmax alone.
    can_be_held = one_pass.on_chip_tile(logits, torch.empty_like(logits), transform) is not None
    for held in {False, can_be_held}:
        known, got = and_grad(logits, labels, grad_logprobs, transform, held=held)
        alone.hold("grad", got, eps=eps_out, formulas=1)
        alone.hold("logprobs", known.logprobs, eps=eps, formulas=1)
        alone.hold("lse", known.lse, eps=eps, formulas=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "V",
    [
        1,
        2,  # the other column alone makes the log-sum-exp
        1009,  # prime: no block, no vector divides it
        4096 + 1,  # one column into the second 16-bit block
        8192 + 16,  # aligned, third block nearly empty
    ],
)
def test_vocabularies(V, dtype):
    check(*rows(V, dtype), PLAIN)


def test_a_real_vocabulary():
    check(*rows(32000, torch.bfloat16, B=1, T=3), PLAIN)
    check(*rows(32000, torch.float32, B=1, T=3), SOFT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "transform", [WARM, SOFT, LogitTransform(-2.0, 0.0, 1.0), LogitTransform(0.05, 5.0, 1.0)]
)
def test_transforms(transform, dtype):
    check(*rows(1009, dtype), transform)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("softcap", (0.0, 20.0))
def test_a_temperature_per_row(softcap, dtype):
    temperature = torch.tensor([[0.5], [1.7]], dtype=dtype).expand(2, 3)
    check(*rows(300, dtype), LogitTransform(1.5, softcap, 1.0, temperature))


@pytest.mark.parametrize("gap", (5.0, 20.0, 60.0))
def test_peaked_rows_keep_the_relative_accuracy_of_small_log_probs(gap):
    logits, labels, grad, _ = rows(1009, torch.float32, scale=1.0)
    logits.scatter_(-1, labels.unsqueeze(-1), gap)
    reference = exact(logits, labels, PLAIN, grad)
    stats = forward(logits, labels)
    # An exponential turns the rounding of its argument, here about the gap, into a relative error.
    eps = (8 + gap) * torch.finfo(torch.float32).eps
    assert ((stats.logprobs.double() / reference[0] - 1).abs() <= eps).all()
    assert (stats.logprobs <= 0).all()
    gradient = backward(logits, labels, stats, grad)
    chosen = gradient.gather(-1, labels.unsqueeze(-1)).double() / reference[3].gather(
        -1, labels.unsqueeze(-1)
    )
    assert ((chosen - 1).abs() <= 2 * eps).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("V", (1009, 4096))
def test_kernels_agree_to_the_last_bit(V, dtype):
    """Old log-probs from one kernel and new ones from another make a ratio of exactly 1."""
    logits, labels, _, _ = rows(V, dtype)
    with_entropy, without = forward(logits, labels), forward(logits, labels, entropy=False)
    assert without.entropy is None
    assert torch.equal(with_entropy.logprobs, without.logprobs)
    assert torch.equal(with_entropy.lse, without.lse)


@pytest.mark.parametrize("V", (33, 5000))
def test_strides(V):
    logits, labels, grad, other = rows(V, torch.float32, B=2, T=4)
    layouts = {
        "transposed": logits.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": torch.cat([torch.full_like(logits, float("nan")), logits], -1)[..., V:],
        "sequence first": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "every other": torch.stack([logits, torch.full_like(logits, float("nan"))], -1).flatten(-2)[..., ::2],
    }
    want = forward(logits, labels)
    want_grad = backward(logits, labels, want, grad, other)
    spread = torch.stack([labels, labels + 1], -1)[..., 0].to(torch.int32)
    for name, layout in layouts.items():
        assert torch.equal(layout, logits), name
        got = forward(layout, spread)
        eps = torch.finfo(torch.float32).eps * 40
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=eps, atol=eps, msg=name)
        grad_spread = torch.stack([grad, torch.full_like(grad, float("nan"))], -1)[..., 0]
        gradient = backward(layout, spread, want, grad_spread, other.t().contiguous().t())
        assert torch.equal(gradient, want_grad), name


def test_expanded_logits_and_gradients():
    logits, labels, _, _ = rows(700, torch.float32, B=3, T=2)
    shared = logits[:1, :1].expand(3, 2, 700)
    stats = forward(shared, labels)
    same = forward(shared.contiguous(), labels)
    assert torch.equal(stats.logprobs, same.logprobs)
    one = torch.tensor(-0.25)
    got = backward(shared, labels, stats, one.expand(3, 2), grad_scale=torch.tensor(2.0))
    want = backward(shared.contiguous(), labels, stats, torch.full((3, 2), -0.5))
    assert torch.equal(got, want)


@pytest.mark.parametrize("bad", (-1, -(2**40), 1009, 2**40))
def test_labels_out_of_range(bad):
    logits, labels, grad, other = rows(1009, torch.float32)
    good, in_range = forward(logits, labels), labels
    labels = labels.clone()
    labels[0, 1] = bad
    stats = forward(logits, labels)
    assert stats.logprobs[0, 1].isnan() and stats.logprobs.isnan().sum() == 1
    torch.testing.assert_close(stats.lse[0, 1], good.lse[0, 1])
    torch.testing.assert_close(stats.entropy[0, 1], good.entropy[0, 1])
    # The log-prob that doesn't exist has no gradient; the entropy's is there.
    assert (backward(logits, labels, stats, grad)[0, 1] == 0).all()
    got = backward(logits, labels, stats, torch.zeros_like(grad), other)
    want = backward(logits, in_range, good, torch.zeros_like(grad), other)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    known, gradient = and_grad(logits, labels, grad)
    assert known.logprobs[0, 1].isnan() and (gradient[0, 1] == 0).all()


@pytest.mark.parametrize("ignore_index", (-100, 7))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_masked_rows_are_inert(dtype, ignore_index):
    logits, labels, grad, other = rows(1009, dtype)
    labels[1, 0] = labels[0, 2] = ignore_index
    logits[1, 0] = logits[0, 2] = float("nan")
    stats = forward(logits, labels, ignore_index=ignore_index)
    for stat in stats:
        assert stat.isfinite().all() and stat[1, 0] == 0 and stat[0, 2] == 0
    labels = labels.masked_fill(labels == ignore_index, IGNORE)
    grad[1, 0] = other[1, 0] = float("nan")
    gradient = backward(logits, labels, stats, grad, other)
    assert gradient.isfinite().all() and (gradient[1, 0] == 0).all() and (gradient[0, 1] != 0).any()
    grad[1, 0] = float("inf")
    known, gradient = and_grad(logits, labels, grad)
    assert gradient.isfinite().all() and (gradient[1, 0] == 0).all()
    # the kernel that does both walks other blocks, so its sums may round otherwise
    torch.testing.assert_close(known.logprobs, stats.logprobs)


def test_rows_without_gradient_are_zero_and_unread():
    logits, labels, grad, other = rows(1009, torch.float32)
    stats = forward(logits, labels)
    grad[0, 0] = other[0, 0] = grad[1, 2] = 0.0
    logits[0, 0] = float("nan")
    gradient = backward(logits, labels, stats, grad, other)
    assert (gradient[0, 0] == 0).all() and gradient.isfinite().all() and (gradient[1, 2] != 0).any()
    assert (backward(logits, labels, stats, grad, grad_scale=torch.tensor(0.0)) == 0).all()
    logits[0, 0] = 0.0
    known, gradient = and_grad(logits, labels, grad)
    torch.testing.assert_close(known.logprobs[1, 2], stats.logprobs[1, 2])
    assert (gradient[1, 2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype):
    logits, labels, grad, other = rows(4096 * 3 + 5, dtype, T=2)
    stats = forward(logits, labels)
    want = backward(logits, labels, stats, grad, other)
    mine = logits.clone()
    device = to(mine)
    kernels.logprobs_backward(
        device, to(labels), stats.each(to), to(grad), to(other), None, PLAIN, ignore_index=IGNORE, out=device
    )
    assert torch.equal(device.cpu(), want)
    _, want = and_grad(logits, labels, grad)
    device = to(logits.clone())
    kernels.logprobs_and_grad(device, to(labels), to(grad), PLAIN, ignore_index=IGNORE, out=device)
    assert torch.equal(device.cpu(), want)


@pytest.mark.parametrize("narrow", (torch.bfloat16, torch.float16))
def test_gradients_in_another_dtype_are_rounded_to_nearest_even(narrow):
    logits, labels, grad, _ = rows(1009, torch.float32)
    stats = forward(logits, labels)
    wide = backward(logits, labels, stats, grad)
    out = torch.full(logits.shape, float("nan"), dtype=narrow)
    assert torch.equal(backward(logits, labels, stats, grad, out=out), wide.to(narrow))
    _, wide = and_grad(logits, labels, grad)
    assert torch.equal(and_grad(logits, labels, grad, out=out.clone())[1], wide.to(narrow))
    # A padded row stride, as chunks of logits have.
    padded = torch.full((2, 3, 1024), float("nan"), dtype=narrow)
    kernels.logprobs_and_grad(
        to(logits), to(labels), to(grad), PLAIN, ignore_index=IGNORE, out=(room := to(padded))[..., :1009]
    )
    assert torch.equal(room.cpu()[..., :1009], wide.to(narrow)) and room.cpu()[..., 1009:].isnan().all()


def room_for(logits, narrow):
    """A chunk of fp32 rows padded to 64 elements: logits [1, n, V] and the 16-bit rows in their memory."""
    B, T, V = logits.shape
    room = torch.full((B, T, (V + 63) // 64 * 64), float("nan"), device=logits.device)
    room[..., :V] = logits
    return room[..., :V], room.view(narrow)[..., :V]


@pytest.mark.parametrize("narrow", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "V",
    [
        1,
        1009,  # less than a block
        4096 * 3 + 16,  # aligned, last block nearly empty
        4096 * 4 + 5,  # the last block's gradient ends in the third block of logits
    ],
)
def test_narrowing_in_place(V, narrow):
    logits, labels, grad, other = rows(V, torch.float32, B=1, T=4)
    labels[0, 2] = IGNORE
    logits[0, 2] = float("nan")
    grad[0, 3] = 0.0
    for transform in (PLAIN, SOFT):
        stats = forward(logits, labels, transform)
        for entropy in (None, other):
            elsewhere = torch.full(logits.shape, float("nan"), dtype=narrow)
            want = backward(logits, labels, stats, grad, entropy, transform=transform, out=elsewhere)
            chunk, out = room_for(to(logits), narrow)
            got = backward(chunk, labels, stats, grad, entropy, transform=transform, out=out)
            assert torch.equal(got, want)
            assert (want[0, 2] == 0).all() and want.isfinite().all()
        chunk, out = room_for(to(logits), narrow)
        known, got = and_grad(chunk, labels, grad, transform, out=out)
        want_known, want = and_grad(logits, labels, grad, transform, out=elsewhere)
        assert torch.equal(got, want) and torch.equal(known.logprobs, want_known.logprobs)


@pytest.mark.skipif(not GPU, reason="threads race on a GPU only")
@pytest.mark.parametrize("V", (32000, 50257, 151936))
def test_narrowing_in_place_races_with_nothing(V):
    generator = torch.Generator("cuda").manual_seed(shifted_seed(0))
    logits = torch.randn(1, 1024, V, device="cuda", generator=generator)
    labels = torch.randint(0, V, (1, 1024), device="cuda", generator=generator)
    grad = torch.ones(1, 1024, device="cuda")
    stats = kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=False)
    want = torch.empty(logits.shape, dtype=torch.bfloat16, device="cuda")
    kernels.logprobs_backward(logits, labels, stats, grad, None, None, PLAIN, ignore_index=IGNORE, out=want)
    for _ in range(20):
        chunk, out = room_for(logits, torch.bfloat16)
        kernels.logprobs_backward(chunk, labels, stats, grad, None, None, PLAIN, ignore_index=IGNORE, out=out)
        assert torch.equal(out, want)
        chunk, out = room_for(logits, torch.bfloat16)
        kernels.logprobs_and_grad(chunk, labels, grad, PLAIN, ignore_index=IGNORE, out=out)
        torch.testing.assert_close(out, want)


def test_other_overlaps_are_refused():
    logits, labels, grad, _ = rows(128, torch.float32, B=1, T=4)
    narrow, shared = logits.view(torch.bfloat16), logits[:, :1].expand(1, 4, 128)
    overlaps = {
        "rows begin elsewhere": (logits, narrow.flatten()[: 4 * 128].view(1, 4, 128)),
        "upper half": (logits, narrow[..., 128:]),
        "the next rows": (logits[:, :3], logits[:, 1:]),
        "other rows": (logits.view(2, 2, 128), logits.view(2, 2, 128).transpose(0, 1)),
        "wider": (logits[..., :64], logits.view(torch.float64)),
        "one row for all": (shared, shared),
        "every other column": (logits[..., ::2], narrow[..., :64]),
    }
    for name, (given, out) in overlaps.items():
        with pytest.raises(ValueError, match=r"out: shares memory with logits.* bytes after"):
            pytest.fail(f"{name}: {launching.narrows_in_place(given, out)}")
    assert not launching.narrows_in_place(logits, logits)
    assert not launching.narrows_in_place(logits[:, :2], logits[:, 2:])
    stats = forward(logits, labels)
    with pytest.raises(ValueError, match="out: shares memory"):
        kernels.logprobs_backward(
            logits, labels, stats, grad, None, None, PLAIN, ignore_index=IGNORE, out=narrow[..., 128:]
        )
    with pytest.raises(ValueError, match="out: shares memory"):
        kernels.logprobs_and_grad(logits, labels, grad, PLAIN, ignore_index=IGNORE, out=narrow[..., 128:])


@pytest.mark.parametrize("shape", [(0, 3, 50), (2, 0, 50), (0, 0, 50)])
def test_empty_batches(shape):
    logits, labels = torch.empty(shape), torch.empty(shape[:2], dtype=torch.int64)
    stats = forward(logits, labels)
    assert stats.logprobs.shape == stats.entropy.shape == shape[:2]
    assert backward(logits, labels, stats, torch.empty(shape[:2])).shape == shape
    assert and_grad(logits, labels, torch.empty(shape[:2]))[1].shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", (1, 8192, 8192 * 2 + 3))
def test_scale(count, dtype):
    values = torch.randn(count, dtype=torch.float64).to(dtype)
    # Times 1.5, every other 16-bit number lies half-way between two.
    factor = torch.tensor(-1.5, dtype=stats_dtype(dtype))
    scaled = to(values.clone())
    kernels.scale_(scaled, to(factor))
    want = (values.to(factor.dtype) * factor).to(dtype)
    assert torch.equal(scaled.cpu(), want)
    kernels.scale_(scaled, to(torch.ones_like(factor)))
    assert torch.equal(scaled.cpu(), want)


def test_unavailable_says_why(monkeypatch):
    assert kernels.unavailable(torch.device("cuda")) is None
    assert "meta" in kernels.unavailable(torch.device("meta"))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert "TRITON_INTERPRET" in kernels.unavailable(torch.device("cpu"))
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert kernels.unavailable(torch.device("cpu")) is None
    assert launching.platform() == ("cuda" if GPU else "interpreter")
