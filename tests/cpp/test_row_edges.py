"""Rows of logits in C++: idle rows, rounding, special values, threads, sizes and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo_kernels.types import RowStats, stats_dtype
from tests.cpp.cpp_oracle import IGNORE
from tests.cpp.row_calls import DTYPES, TRANSFORMS, and_grad, and_rows, backward, equal, forward, make


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ignored_and_idle_rows_are_zeros_and_never_read(poison, dtype):
    logits, labels, g, ge = make(2500, dtype)
    stats = forward(logits, labels)
    grad = backward(logits, labels, stats, g, ge)
    g0, ge0 = g.clone(), ge.clone()
    g0[0, 2] = ge0[0, 2] = 0.0
    assert (stats.logprobs[-1, 1], stats.lse[-1, 1], stats.entropy[-1, 1]) == (0, 0, 0)
    assert (grad[-1, 1] == 0).all()

    poisoned = logits.clone()
    poisoned[-1, 1] = poison
    assert equal(forward(poisoned, labels), stats)
    one_pass = and_grad(poisoned, labels, g0)
    assert (one_pass[1][-1, 1] == 0).all() and (one_pass[1][0, 2] == 0).all()
    assert equal(one_pass[0], stats._replace(entropy=None))
    with_rows = and_rows(poisoned, labels)
    assert (with_rows[0].logprobs[-1, 1], with_rows[0].lse[-1, 1]) == (0, 0)
    assert (with_rows[1][-1, 1] == 0).all() and equal(with_rows[1:], and_rows(logits, labels)[1:])

    poisoned[0, 2] = poison
    idle = backward(poisoned, labels, stats, g0, ge0)
    expected = grad.clone()
    expected[0, 2] = 0
    assert equal([idle], [expected])


def test_gradient_scale_zero_reads_nothing():
    logits, labels, g, ge = make(100, torch.float32)
    stats = forward(logits, labels)
    grad = backward(torch.full_like(logits, float("nan")), labels, stats, g, ge, scale=torch.tensor(0.0))
    assert (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [TRANSFORMS["identity"], TRANSFORMS["all"]], ids=["identity", "all"])
def test_in_place_gives_the_same_bits(dtype, transform):
    logits, labels, g, ge = make(5003, dtype)
    stats = forward(logits, labels, transform)
    expected, one_pass = (
        backward(logits, labels, stats, g, ge, transform),
        and_grad(logits, labels, g, transform),
    )
    scratch = logits.clone()
    assert equal([backward(scratch, labels, stats, g, ge, transform, out=scratch)], [expected])
    scratch = logits.clone()
    in_place = and_grad(scratch, labels, g, transform, out=scratch)
    assert equal(in_place[0], one_pass[0]) and equal(in_place[1:], one_pass[1:])
    if dtype == stats_dtype(dtype):
        scratch = logits.clone()
        with_rows, in_place = (
            and_rows(logits, labels, transform),
            and_rows(scratch, labels, transform, scratch),
        )
        assert equal(in_place[0], with_rows[0]) and equal(in_place[1:], with_rows[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradient_inside_the_memory_of_its_own_fp32_rows(dtype):
    logits, labels, g, ge = make(5003, torch.float32)
    stats = forward(logits, labels)
    expected = backward(logits, labels, stats, g, ge, out=torch.empty_like(logits, dtype=dtype))
    scratch = logits.clone()
    narrow = scratch.view(dtype)[..., :5003]
    assert equal([backward(scratch, labels, stats, g, ge, out=narrow)], [expected])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_gradient_dtype_is_the_wide_gradient_rounded_to_nearest_even(dtype, out_dtype):
    logits, labels, g, ge = make(5003, dtype, spread=4.0)
    g[0, :] = torch.tensor(
        [1.0, 1e-4, 1e5, 3e38, 1e-30]
    )  # fp16 normals, subnormals, overflow; bf16 near its end
    stats = forward(logits, labels)
    wide = torch.full(logits.shape, float("nan"), dtype=stats_dtype(dtype))
    backward(logits, labels, stats, g, ge, out=wide)
    out = torch.full(logits.shape, float("nan"), dtype=out_dtype)
    backward(logits, labels, stats, g, ge, out=out)
    # PyTorch rounds fp64 to 16 bits by way of fp32, as we do.
    assert equal([out], [wide.to(out_dtype)])
    assert equal(
        and_grad(logits, labels, g, out=out)[1:], [and_grad(logits, labels, g, out=wide)[1].to(out_dtype)]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_logit_is_read_exactly(dtype):
    """With one column, log-sum-exp is the logit. Among 40, one of them a label at -inf, vectors read it."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite()].view(1, -1, 1)
    zeros = torch.zeros(x.shape[:2], dtype=torch.int64)
    assert equal([forward(x, zeros).lse], [x[..., 0].double()])
    wide = x.expand(-1, -1, 40).contiguous()
    wide[..., 33] = -float("inf")
    lse = forward(wide, zeros + 33).lse.double()
    torch.testing.assert_close(lse, x[..., 0].double() + np.log(39), rtol=1.2e-7, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_gradient_is_rounded_as_pytorch_rounds(dtype):
    """A label at -inf has p = 0, so its gradient is the coefficient itself: any bits can be sent through."""
    values = (
        torch.randint(-(2**31), 2**31, (1, 200_000), dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = torch.nextafter(every, torch.tensor(float("inf"))) * 0.5 + every * 0.5
    values = torch.cat(
        [values, every[None], halfway[None], (every * (1 + 2**-9))[None], (every * 0.75)[None]], 1
    )
    values = values[values != 0][None]
    # Column 0 has p = 1; what column 1 has is subnormal beside many values.
    logits = torch.tensor([0.0, -85.0, -float("inf")]).expand(1, values.shape[1], 3)
    labels = torch.full(values.shape, 2)
    rounded = [values.to(dtype), (-values).to(dtype)]
    at_once = and_grad(logits, labels, values, out=torch.empty(logits.shape, dtype=dtype))[1]
    assert equal([at_once[..., 2], at_once[..., 0]], rounded)
    later = torch.empty(logits.shape, dtype=dtype)
    backward(logits, labels, forward(logits, labels), values, out=later)
    assert equal([later[..., 2], later[..., 0]], rounded)


@pytest.mark.parametrize("vocabulary", [32000, 30011])
def test_a_gradient_too_large_for_caches_is_written_like_any(vocabulary):
    """Above 32 MiB it may go past them, where a row begins with a cache line."""
    logits, labels, g, _ = make(vocabulary, torch.float32, rows=(2, 150))
    stats = forward(logits, labels)
    large = backward(logits, labels, stats, g)
    assert large.nbytes > 2**25
    parts = []
    for one in torch.arange(logits.shape[1]).split(1):
        own = stats.each(lambda x, one=one: x[:, one])
        parts.append(backward(logits[:, one], labels[:, one], own, g[:, one]))
    assert equal([large], [torch.cat(parts, 1)])


@pytest.mark.parametrize("label", [-1, 300, 301, 2**40, -(2**62)])
def test_label_out_of_range_is_nan_and_no_address(label):
    logits, labels, g, ge = make(300, torch.float32)
    labels[0, 0] = 5
    stats = forward(logits, labels)
    only_entropy = torch.where(torch.arange(10).view(2, 5) == 0, 0.0, g)
    expected = backward(logits, labels, stats, only_entropy, ge)
    labels[0, 0] = label
    bad = forward(logits, labels)
    assert bad.logprobs[0, 0].isnan() and not bad.logprobs.flatten()[1:].isnan().any()
    torch.testing.assert_close(bad.lse, stats.lse, rtol=2e-7, atol=0)
    torch.testing.assert_close(bad.entropy, stats.entropy, rtol=1e-6, atol=0)
    # Only the entropy has a gradient there.
    got = backward(logits, labels, bad, g, ge)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    assert (backward(logits, labels, bad, g)[0, 0] == 0).all()
    one_pass = and_grad(logits, labels, g)
    assert one_pass[0].logprobs[0, 0].isnan() and (one_pass[1][0, 0] == 0).all()
    with_rows = and_rows(logits, labels)
    assert with_rows[0].logprobs[0, 0].isnan() and (with_rows[1][0, 0] == 0).all()


def special_rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of 5000 columns; the label is column 3."""
    info, inf = torch.finfo(dtype), float("inf")
    row = torch.randn(5000).to(dtype)

    def change(where, value) -> Tensor:
        changed = row.clone()
        changed[where] = value
        return changed

    return {
        "some -inf": change(slice(100, 2100, 3), -inf),
        "first blocks -inf": change(slice(0, 4200), -inf),
        "all but the label -inf": change(torch.arange(5000) != 3, -inf),
        "all but another -inf": change(torch.arange(5000) != 4, -inf),
        "label -inf": change(3, -inf),
        "all -inf": change(slice(None), -inf),
        "a NaN": change(4999, float("nan")),
        "a NaN among -inf": change(slice(0, 4999), -inf).index_fill(0, torch.tensor([10]), float("nan")),
        "label NaN": change(3, float("nan")),
        "a +inf": change(2500, inf),
        "label +inf": change(3, inf),
        "some finfo.min": change(slice(0, 5000, 2), info.min),
        "all finfo.min": change(slice(None), info.min),
        "label finfo.max": change(3, info.max),
        "another finfo.max": change(4999, info.max),
        "all finfo.max": change(slice(None), info.max),
        "both ends": change(slice(0, 5000, 2), info.min).index_fill(0, torch.tensor([3]), info.max),
    }


@pytest.mark.parametrize("kind", special_rows(torch.float32))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_behave_as_log_softmax(kind, dtype):
    logits = special_rows(dtype)[kind].view(1, 1, -1)
    labels, c = torch.tensor([[3]]), torch.tensor([[-1.5]])
    leaf = logits.to(stats_dtype(dtype)).requires_grad_()
    expected = torch.log_softmax(leaf, -1)[0, 0, 3]
    (expected_grad,) = torch.autograd.grad(expected * -1.5, leaf)
    stats = forward(logits, labels)
    eps = torch.finfo(leaf.dtype).eps
    close = {"rtol": 8 * eps, "atol": 8 * eps, "equal_nan": True}
    torch.testing.assert_close(stats.logprobs[0, 0], expected.detach(), **close)
    torch.testing.assert_close(stats.lse.to(leaf.dtype), torch.logsumexp(leaf.detach(), -1), **close)
    one_pass = and_grad(logits, labels, c, out=torch.full_like(leaf.detach(), 7.0))
    two_pass = backward(logits, labels, stats, c, out=torch.full_like(leaf.detach(), 7.0))
    assert equal(one_pass[0], stats._replace(entropy=None))
    with_rows = and_rows(logits, labels)
    torch.testing.assert_close(with_rows[0].logprobs[0, 0], expected.detach(), **close)
    torch.testing.assert_close(with_rows[0].lse, stats.lse, **close)
    for grad in (one_pass[1], two_pass, -1.5 * with_rows[1] * with_rows[2].item()):
        torch.testing.assert_close(grad, expected_grad, rtol=1e2 * eps, atol=8 * eps, equal_nan=True)
    finite = logits.isfinite().any() and not (logits.isnan() | (logits == float("inf"))).any()
    assert stats.entropy.isfinite().all() == finite
    entropy_grad = backward(logits, labels, stats, c, c)
    assert entropy_grad.isfinite().all() == finite
    if finite:
        masked = logits == -float("inf")
        masked[0, 0, 3] = False
        assert (entropy_grad[masked] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_neither_on_threads_nor_on_the_run(dtype):
    logits, labels, g, ge = make(4099, dtype, rows=(3, 17))

    def everything():
        stats = forward(logits, labels)
        one_pass, with_rows = and_grad(logits, labels, g), and_rows(logits, labels)
        ends = (*one_pass[0][:2], one_pass[1], *with_rows[0][:2], *with_rows[1:])
        return *stats, backward(logits, labels, stats, g, ge), *ends

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = everything()
        for threads in (1, 2, 2, 3, 64):
            torch.set_num_threads(threads)
            assert equal(everything(), expected)
    finally:
        torch.set_num_threads(before)


def test_two_threads_share_the_work():
    logits, labels = torch.randn(1, 400, 32000), torch.zeros(1, 400, dtype=torch.int64)
    labels[:, :200] = IGNORE  # equal shares of the rows would leave one thread idle
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        forward(logits, labels)
        process, thread = time.process_time(), time.thread_time()
        for _ in range(20):
            forward(logits, labels)
        process, thread = time.process_time() - process, time.thread_time() - thread
    finally:
        torch.set_num_threads(before)
    assert thread < 0.9 * process


def test_every_statistic_is_written(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    logits, labels, g, _ = make(100, torch.float32, rows=(7, 9))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
        assert torch.empty(3).isnan().all()
        stats, (one_pass, _) = forward(logits, labels), and_grad(logits, labels, g)
        with_rows, _, factors = and_rows(logits, labels)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not any(values.isnan().any() for values in (*stats, *one_pass[:2], *with_rows[:2], factors))


@pytest.mark.parametrize("shape", [(0, 4, 10), (3, 0, 10), (0, 0, 1)])
def test_no_rows(shape):
    logits, labels, c = torch.empty(shape), torch.empty(shape[:2], dtype=torch.int64), torch.empty(shape[:2])
    stats = forward(logits, labels)
    assert stats.logprobs.shape == stats.entropy.shape == shape[:2]
    assert backward(logits, labels, stats, c).shape == shape
    assert and_grad(logits, labels, c)[1].shape == and_rows(logits, labels)[1].shape == shape


def test_offsets_beyond_32_bits():
    """Memory that is reserved but, save for the few rows in use, never touched."""
    far, vocabulary = 2**31 + 64, 1000
    rows = torch.randn(1, 2, vocabulary).bfloat16()
    labels, c = torch.tensor([[1, 2]]), torch.ones(1, 2)

    def spread_out() -> Tensor:
        memory = torch.empty(far + vocabulary, dtype=torch.bfloat16)
        return memory.as_strided((1, 2, vocabulary), (0, far, 1))

    logits, out = spread_out(), spread_out()
    logits.copy_(rows)
    stats = forward(logits, labels)
    assert equal(stats, forward(rows, labels))
    assert equal([backward(logits, labels, stats, c, out=out)], [backward(rows, labels, stats, c)])

    columns = torch.empty(2**32 + 1, dtype=torch.bfloat16).as_strided((1, 1, 3), (0, 0, 2**31))
    columns.copy_(rows[:, :1, :3])
    assert equal(forward(columns, labels[:, 1:]), forward(rows[:, :1, :3].contiguous(), labels[:, 1:]))


def test_more_than_2_to_31_logits():
    logits = torch.randn(32768).bfloat16().expand(1, 70000, 32768)
    assert logits.numel() > 2**31
    labels = torch.full((1, 70000), IGNORE)
    labels[0, [0, 69999]] = torch.tensor([32767, 5])
    logprobs = forward(logits, labels, entropy=False).logprobs
    expected = torch.log_softmax(logits[0, 0].double(), -1)
    torch.testing.assert_close(logprobs[0, [0, 69999]].double(), expected[[32767, 5]], rtol=2e-7, atol=0)
    assert logprobs.count_nonzero() == 2


def test_the_thread_keeps_its_subnormals():
    forward(torch.randn(1, 2, 100), torch.zeros(1, 2, dtype=torch.int64))
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


REFUSED: dict[str, tuple[type[Exception], Callable[[Tensor, Tensor, RowStats], object]]] = {
    "out: got shape": (ValueError, lambda x, y, s: backward(x, y, s, s.lse, out=torch.empty(2, 5, 11))),
    "vocabulary stride 1": (
        ValueError,
        lambda x, y, s: backward(x, y, s, s.lse, out=torch.empty(12, 2, 5).permute(1, 2, 0)),
    ),
    "out: got torch.int64": (
        TypeError,
        lambda x, y, s: backward(x, y, s, s.lse, out=torch.empty_like(x, dtype=torch.int64)),
    ),
    "stats.entropy": (
        ValueError,
        lambda x, y, s: backward(x, y, s._replace(entropy=None), s.lse, s.lse),
    ),
    "labels: got shape": (ValueError, lambda x, y, s: forward(x, y[:1])),
    "out: got torch.float16, expected torch.float32": (
        TypeError,
        lambda x, y, s: and_rows(x, y, out=torch.empty_like(x, dtype=torch.float16)),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    logits, labels, _, _ = make(12, torch.float32)
    error, call = REFUSED[message]
    with pytest.raises(error, match=message):
        call(logits, labels, forward(logits, labels))
