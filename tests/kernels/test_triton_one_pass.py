"""Rows that stay on the chip between their log-prob and their gradient, and which rows do."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gspo_kernels import kernels
from gspo_kernels.kernels import one_pass
from gspo_kernels.kernels.one_pass import on_chip_tile
from gspo_kernels.types import LogitTransform
from tests.kernels.accesses import backwards, counted, order_of_programs, rebuilt, shuffle, without_races
from tests.kernels.row_oracle import PLAIN, Judge, exact, neighbour, plain
from tests.kernels.test_triton_rows import DEVICE, IGNORE, SOFT, WARM, and_grad, check, room_for, rows

GPU = torch.cuda.is_available()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NEGATIVE = LogitTransform(-2.0, 0.0, 1.0)


def empty(V, dtype, out=None):
    """Logits and the gradient's memory, of which only the shape matters."""
    return torch.empty(1, 2, V, dtype=dtype), torch.empty(1, 2, V, dtype=out or dtype)


@pytest.mark.parametrize(
    ("V", "dtype", "transform"),
    [
        (16, BF16, PLAIN),  # most threads have no column
        (10240, FP16, WARM),  # one block of threads is full
        (10240 + 16, BF16, NEGATIVE),  # two, and the last piece nearly empty
        (10240 + 16, FP32, WARM),
        (20480, FP32, LogitTransform(1.0, 0.0, 1.0, torch.tensor([[0.5], [1.7]]).expand(2, 3))),
    ],
)
def test_as_exact_as_plain_pytorch(V, dtype, transform):
    assert on_chip_tile(*empty(V, dtype), transform) is not None
    check(*rows(V, dtype), transform)


def test_a_real_vocabulary_on_sixteen_multiprocessors():
    logits = empty(151936, BF16)
    assert GPU or on_chip_tile(*logits, PLAIN).blocks == 16
    check(*rows(151936, BF16, B=1, T=1), PLAIN)


def test_labels_anywhere_in_the_row():
    """Of every piece the first and the last column, whose own log-prob stays out of the sum."""
    V = 8192 + 16
    piece = on_chip_tile(*empty(V, BF16), PLAIN).block
    labels = torch.tensor([sorted({0, V - 1, *range(piece, V, piece), *range(piece - 1, V, piece)})])
    logits = torch.randn(1, labels.shape[1], V, dtype=FP64)
    logits.scatter_(-1, labels.unsqueeze(-1), 30.0)
    grad = torch.ones(labels.shape)
    known, gradient = and_grad(logits.to(BF16), labels, grad)
    want = torch.log_softmax(logits.to(BF16).double(), -1)
    chosen = want.gather(-1, labels.unsqueeze(-1))
    others = 1 - torch.nn.functional.one_hot(labels, V)
    exact = torch.log1p(-(want.exp() * others).sum(-1))
    torch.testing.assert_close(known.logprobs.double(), exact, rtol=1e-5, atol=0.0)
    at_label = gradient.gather(-1, labels.unsqueeze(-1)).double()
    torch.testing.assert_close(at_label, -torch.expm1(chosen), rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("narrow", (BF16, FP16))
def test_narrower_gradients_elsewhere_and_over_the_logits(narrow):
    logits, labels, grad, _ = rows(8192 + 16, FP32, B=1, T=4)
    labels[0, 2], grad[0, 3] = IGNORE, 0.0
    logits[0, 2] = float("nan")
    wide_known, wide = and_grad(logits, labels, grad)
    elsewhere = torch.full(logits.shape, float("nan"), dtype=narrow)
    known, got = and_grad(logits, labels, grad, out=elsewhere)
    assert torch.equal(got, wide.to(narrow)) and torch.equal(known.logprobs, wide_known.logprobs)
    assert (got[0, 2:] == 0).all() and known.logprobs[0, 2] == 0 and known.logprobs[0, 3] < 0
    if GPU:
        return
    for arrange in (shuffle(0), backwards):
        chunk, out = room_for(logits, narrow)
        with order_of_programs(arrange), without_races():
            kernels.logprobs_and_grad(chunk, labels, grad, PLAIN, ignore_index=IGNORE, out=out)
        assert torch.equal(out, got)


# --- rows for the products of hidden states

CHUNK = 10240 + 16
"""fp32 columns of two blocks of threads, of whose last pieces little is full."""


def and_rows(logits, labels, narrow, transform=PLAIN):
    """16-bit rows d logprob/dlogits in the memory of fp32 logits."""
    chunk, out = room_for(logits.to(DEVICE), narrow)
    assert on_chip_tile(chunk, out, transform) is not None
    stats, factors = kernels.logprobs_and_rows(
        chunk, labels.to(DEVICE), transform, ignore_index=IGNORE, out=out
    )
    assert factors is None
    return stats.each(torch.Tensor.cpu), out.cpu()


@triton.jit
def two_ulps_more(coefficients_ptr, b, t, rows, labelled, STATS):
    return tl.where(labelled, 1.0 + 2.0**-6, 0.0).to(STATS)


@pytest.mark.parametrize("narrow", (BF16, FP16))
def test_rows_over_their_own_logits_are_as_exact_as_plain_pytorch(monkeypatch, narrow):
    logits, labels, *_ = rows(CHUNK, FP32, B=1, T=4)
    ones, eps = torch.ones(labels.shape), torch.finfo(narrow).eps
    assert GPU or on_chip_tile(logits, logits, WARM).blocks == 2

    def draw(k):
        here = neighbour(logits, k), labels, WARM, ones, None
        return exact(*here), [plain(*here, False)]

    judge = Judge(draw, draws=3)
    stats, got = and_rows(logits, labels, narrow, WARM)
    judge.hold("logprobs", stats.logprobs, eps=torch.finfo(FP32).eps)
    judge.hold("grad", got, eps=eps)
    known, elsewhere = and_grad(logits, labels, ones, WARM, out=torch.empty_like(logits, dtype=narrow))
    assert torch.equal(elsewhere, got) and torch.equal(known.logprobs, stats.logprobs)
    if not GPU and narrow == BF16:
        monkeypatch.setattr(one_pass, "_coefficient", two_ulps_more)
        with pytest.raises(AssertionError, match="grad"):
            judge.hold("grad", and_rows(logits, labels, narrow, WARM)[1], eps=eps)


def test_special_rows_over_their_own_logits():
    """A label that is ignored or no column, columns at -inf, the label at -inf, +inf and NaN."""
    logits, labels, *_ = rows(CHUNK, FP32, B=1, T=7)
    inf = float("inf")
    labels[0, 0], labels[0, 1], labels[0, 2:] = IGNORE, CHUNK, 77
    logits[0, 0] = float("nan")
    logits[0, 2, 78:9000] = logits[0, 3, 77] = -inf
    logits[0, 4, 9000] = inf
    logits[0, 5, 77] = inf
    logits[0, 6, 9000] = float("nan")
    want = -torch.softmax(logits.double(), -1)
    want[..., 77] += 1
    chosen = torch.log_softmax(logits.double(), -1)[..., 77]
    want[0, :2], chosen[0, 0], chosen[0, 1] = 0.0, 0.0, float("nan")
    for narrow in (BF16, FP16):
        stats, got = and_rows(logits, labels, narrow)
        torch.testing.assert_close(stats.logprobs.double(), chosen, rtol=2e-6, atol=1e-6, equal_nan=True)
        limits = torch.finfo(narrow)
        torch.testing.assert_close(
            got.double(), want, rtol=limits.eps, atol=limits.smallest_normal * limits.eps, equal_nan=True
        )
        assert not got[0, :4].isnan().any() and got[0, 4:].isnan().all()


@pytest.mark.skipif(GPU, reason="the interpreter orders programs and counts accesses")
def test_rows_over_their_own_logits_need_no_order_and_read_once():
    logits, labels, *_ = rows(CHUNK, FP32, B=1, T=3)
    labels[0, 1] = IGNORE
    _, want = and_rows(logits, labels, BF16)
    for arrange in (backwards, shuffle(0)):
        with order_of_programs(arrange), without_races():
            assert torch.equal(and_rows(logits, labels, BF16)[1], want)
    out = torch.empty_like(logits, dtype=BF16)
    with counted(logits, out) as traffic:
        kernels.logprobs_and_rows(logits, labels, PLAIN, ignore_index=IGNORE, out=out)
    expected = torch.ones_like(logits, dtype=torch.int64)
    expected.scatter_(-1, labels.clamp(min=0).unsqueeze(-1), 2)  # the label's by itself
    expected[0, 1] = 0
    assert torch.equal(traffic.reads[0].view_as(logits), expected)
    assert traffic.per_row(traffic.writes, 1) == [1] * 3
    unordered = pytest.raises(triton.runtime.errors.InterpreterError, match="race: store by program 0")
    with without_races(), rebuilt(create_barrier=lambda plain: None), unordered:
        and_rows(logits, labels, BF16)


def test_rows_come_along_only_where_that_is_less_work():
    device = torch.device(DEVICE)
    assert kernels.one_pass_pays(4096, FP32, PLAIN, device, True)
    assert not kernels.one_pass_pays(4096, FP32, PLAIN, device, False)
    kept = PLAIN._replace(kept=torch.empty(1, 2, 128, dtype=torch.int32))
    for V, dtype, transform in ((4104, FP32, PLAIN), (4096, FP64, PLAIN), (0, FP32, PLAIN)):
        assert not kernels.one_pass_pays(V, dtype, transform, device, True)
    assert not any(kernels.one_pass_pays(4096, FP32, one, device, True) for one in (SOFT, kept))
    # A launch that is asked for all the same reads rows twice.
    logits, labels, *_ = rows(1009, FP32, B=1, T=2)
    stats, _ = kernels.logprobs_and_rows(logits, labels, PLAIN, ignore_index=IGNORE, out=logits.clone())
    assert torch.equal(stats.logprobs, and_grad(logits, labels, torch.ones(1, 2))[0].logprobs)


@pytest.mark.skipif(GPU, reason="accesses are counted under the interpreter")
@pytest.mark.parametrize("in_place", (False, True))
def test_each_logit_is_read_once(in_place):
    """And the label's once more; an ignored row isn't read, and every gradient is written once."""
    logits, labels, grad, _ = rows(10240 + 16, BF16)
    labels[1, 0], grad[0, 1] = IGNORE, 0.0
    out = logits if in_place else torch.empty_like(logits)
    with counted(logits, out) as traffic:
        kernels.logprobs_and_grad(logits, labels, grad, PLAIN, ignore_index=IGNORE, out=out)
    expected = torch.ones_like(logits, dtype=torch.int64)
    expected.scatter_(-1, labels.clamp(min=0).unsqueeze(-1), 2)
    expected[1, 0] = 0
    assert torch.equal(traffic.reads[0].view_as(logits), expected)
    assert traffic.per_row(traffic.writes, 1) == [1] * 6


BLOCKS = {"sm_80": 1, "sm_90": 16, "sm_100": 16, "sm_120": 8}


@pytest.mark.skipif(GPU, reason="asks as on other devices")
@pytest.mark.parametrize(
    ("V", "dtype", "expected"),
    [
        # (warps, blocks) on sm_80, sm_90, sm_100 and sm_120
        (10240, BF16, [(8, 1)] * 4),
        (20480, FP32, [(16, 1), (8, 2), (8, 2), (8, 2)]),
        (32000, BF16, [None, (8, 4), (8, 4), (8, 4)]),
        (151936, BF16, [None, (8, 16), (8, 16), (16, 8)]),
        (163840, FP32, [None, (8, 16), (8, 16), (16, 8)]),
        (256000, BF16, [None, (16, 16), (16, 16), None]),
        (151669, BF16, [None] * 4),
    ],
)
def test_rows_are_held_where_they_fit(monkeypatch, V, dtype, expected):
    for blocks, wanted in zip(BLOCKS.values(), expected, strict=True):
        monkeypatch.setattr(one_pass, "most_blocks", lambda device, blocks=blocks: blocks)
        tile = on_chip_tile(*empty(V, dtype), PLAIN)
        assert (tile and (tile.warps, tile.blocks)) == wanted, blocks


def test_other_rows_are_read_twice():
    assert on_chip_tile(*empty(4096, BF16), PLAIN) is not None
    kept = torch.empty(1, 2, 128, dtype=torch.int32)
    for transform in (SOFT, PLAIN._replace(kept=kept)):
        assert on_chip_tile(*empty(4096, BF16), transform) is None
    assert on_chip_tile(*empty(4096, FP64), PLAIN) is None
    assert on_chip_tile(*empty(0, BF16), PLAIN) is None
    logits, _ = empty(4096, BF16)
    assert on_chip_tile(logits, torch.empty(1, 2, 4096 + 1, dtype=BF16)[..., 1:], PLAIN) is None


@pytest.mark.parametrize(
    ("triton_version", "capability", "platform", "expected"),
    [
        ("3.9.0", (9, 0), "cuda", 16),
        ("3.8.0", (10, 0), "cuda", 16),
        ("4.0.0", (12, 0), "cuda", 8),
        ("3.7.1", (9, 0), "cuda", 1),
        ("3.9.0", (8, 0), "cuda", 1),
        ("3.9.0", (13, 0), "cuda", 1),
        ("3.9.0", (9, 4), "hip", 1),
    ],
)
def test_clusters_need_a_triton_and_a_gpu_that_know_them(
    monkeypatch, triton_version, capability, platform, expected
):
    monkeypatch.setattr(one_pass.triton, "__version__", triton_version)
    monkeypatch.setattr(one_pass, "platform", lambda: platform)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert one_pass.most_blocks(torch.device("cuda", 0)) == expected
