"""Rows that stay on the chip between their log-prob and their gradient, and which rows do."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.traffic import counted
from gspo_kernels import kernels
from gspo_kernels.kernels import one_pass
from gspo_kernels.kernels.one_pass import held_tile
from gspo_kernels.types import LogitTransform
from tests.kernels.accesses import backwards, order_of_programs, shuffle, without_races
from tests.kernels.row_oracle import PLAIN
from tests.kernels.test_triton_rows import IGNORE, SOFT, WARM, and_grad, check, room_for, rows

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
    assert held_tile(*empty(V, dtype), transform) is not None
    check(*rows(V, dtype), transform)


def test_a_real_vocabulary_on_sixteen_multiprocessors():
    logits = empty(151936, BF16)
    assert GPU or held_tile(*logits, PLAIN).blocks == 16
    check(*rows(151936, BF16, B=1, T=1), PLAIN)


def test_labels_anywhere_in_the_row():
    """Of every piece the first and the last column, whose own log-prob stays out of the sum."""
    V = 8192 + 16
    piece = held_tile(*empty(V, BF16), PLAIN).block
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
        tile = held_tile(*empty(V, dtype), PLAIN)
        assert (tile and (tile.warps, tile.blocks)) == wanted, blocks


def test_other_rows_are_read_twice():
    assert held_tile(*empty(4096, BF16), PLAIN) is not None
    kept = torch.empty(1, 2, 128, dtype=torch.int32)
    for transform in (SOFT, PLAIN._replace(kept=kept)):
        assert held_tile(*empty(4096, BF16), transform) is None
    assert held_tile(*empty(4096, FP64), PLAIN) is None
    assert held_tile(*empty(0, BF16), PLAIN) is None
    logits, _ = empty(4096, BF16)
    assert held_tile(logits, torch.empty(1, 2, 4096 + 1, dtype=BF16)[..., 1:], PLAIN) is None


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
