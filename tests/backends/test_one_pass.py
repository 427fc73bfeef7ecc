"""Rows that stay on the chip between their log-prob and their gradient, and which rows can."""

import pytest
import torch

pytest.importorskip("triton")

from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.triton import launch, logprobs
from gspo_kernels.backends.triton.logprobs import on_chip_tile
from gspo_kernels.core.types import LogitTransform
from tests.backends.accesses import backwards, counted, without_races
from tests.backends.row_calls import (
    IGNORE,
    NEGATIVE,
    PLAIN,
    SOFT,
    WARM,
    Rows,
    Truth,
    check,
    chunk_of,
    draw,
    exact,
)

GPU = torch.cuda.is_available()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = Rows("triton")


def empty(V, dtype):
    """Return logits and memory for their gradient, whose values do not matter."""
    return torch.empty(1, 2, V, dtype=dtype), torch.empty(1, 2, V, dtype=dtype)


@pytest.mark.parametrize(
    ("V", "dtype", "transform"),
    [
        (16, BF16, PLAIN),  # most threads have no column
        (10240, FP16, WARM),  # one block of threads is full
        (10240 + 16, BF16, NEGATIVE),  # two blocks of threads, and the last piece is nearly empty
        (20480, FP32, LogitTransform(1.0, 0.0, 1.0, torch.tensor([[0.5], [1.7]]).expand(2, 3))),
    ],
)
def test_as_exact_as_plain_pytorch(V, dtype, transform):
    assert on_chip_tile(*empty(V, dtype), transform) is not None
    check(ROWS, *draw(V, dtype), transform)


def test_a_real_vocabulary_on_sixteen_multiprocessors():
    assert GPU or on_chip_tile(*empty(151936, BF16), PLAIN).blocks == 16
    check(ROWS, *draw(151936, BF16, B=1, T=1), PLAIN)


def test_labels_anywhere_in_the_row():
    """Labels are the first and the last column of every piece; the sum leaves the label's term out."""
    V = 8192 + 16
    piece = on_chip_tile(*empty(V, BF16), PLAIN).block
    labels = torch.tensor([sorted({0, V - 1, *range(piece, V, piece), *range(piece - 1, V, piece)})])
    logits = torch.randn(1, labels.shape[1], V).scatter(-1, labels.unsqueeze(-1), 30.0).to(BF16)
    ones = torch.ones(labels.shape)
    known, gradient = ROWS.and_grad(logits, labels, ones)
    want = exact(logits, labels, PLAIN, ones)
    torch.testing.assert_close(known.logprobs.double(), want[0], rtol=1e-5, atol=0.0)
    at_label = (each.double().gather(-1, labels.unsqueeze(-1)) for each in (gradient, want[3]))
    torch.testing.assert_close(*at_label, rtol=2**-8, atol=0.0)


# --- rows for the products of hidden states, over their own logits

CHUNK = 10240 + 16
"""Columns of fp32 rows that take two blocks of threads, whose last pieces are nearly empty."""


def and_rows(logits, labels, narrow, transform=PLAIN):
    """Return statistics and 16-bit rows d logprob/dlogits; the rows are in the memory of the fp32 logits."""
    chunk, out = chunk_of(ROWS.there(logits), narrow)
    assert on_chip_tile(chunk, out, transform) is not None
    return ROWS.and_rows(chunk, labels, transform, out=out)[:2]


@pytest.mark.parametrize("narrow", (BF16, FP16))
def test_in_place_rows_are_exact(narrow):
    logits, labels, *_ = draw(CHUNK, FP32, B=1, T=4)
    ones = torch.ones(labels.shape)
    assert GPU or on_chip_tile(logits, logits, WARM).blocks == 2
    truth = Truth(logits, labels, WARM, ones, draws=3)
    stats, got = and_rows(logits, labels, narrow, WARM)
    truth.hold(logprobs=stats.logprobs, grad=got)
    known, elsewhere = ROWS.and_grad(logits, labels, ones, WARM, out=torch.empty_like(logits, dtype=narrow))
    assert torch.equal(elsewhere, got) and torch.equal(known.logprobs, stats.logprobs)


@pytest.mark.skipif(GPU, reason="the interpreter orders programs and counts accesses")
@pytest.mark.parametrize("out_dtype", (FP32, BF16))
@pytest.mark.parametrize("coefficients", (False, True))
def test_each_logit_is_read_once_in_any_order(coefficients, out_dtype):
    """The label's logit is read once more. An ignored row isn't read, and every gradient is written once."""
    logits, labels, grad, _ = draw(CHUNK, FP32, B=1, T=3)
    labels[0, 1], grad[0, 2] = IGNORE, 0.0
    logits[0, 1] = float("nan")

    def call(values, out):
        if coefficients:
            return ROWS.and_grad(values, labels, grad, out=out)[1]
        return ROWS.and_rows(values, labels, out=out)[1]

    out = torch.full_like(logits, torch.nan, dtype=out_dtype)
    with counted(logits, out) as traffic:
        want = call(logits, out).clone()
    reads = torch.ones_like(logits, dtype=torch.int64).scatter(-1, labels.clamp(min=0).unsqueeze(-1), 2)
    reads[0, 1] = 0
    assert torch.equal(traffic.reads[0].view_as(logits), reads)
    assert traffic.per_row(traffic.writes, 1) == [1] * 3
    assert (want[0, 1] == 0).all() and (want[0, 2] == 0).all() == coefficients
    with backwards(), without_races():
        assert torch.equal(call(*chunk_of(logits, out_dtype)), want)


# --- which rows


def test_rows_come_along_only_where_that_is_less_work():
    """Nor where log-probs are compared, as sums have another order; 4,104 columns have no whole pieces."""

    def pays(V=4096, dtype=FP32, transform=PLAIN, active=True, compared=False):
        rows = ROWS.rows(empty(V, dtype)[0], None, transform)
        return kernels.one_pass_pays(rows, all_rows_active=active, has_ratio=compared)

    kept = PLAIN._replace(kept=torch.empty(1, 2, 128, dtype=torch.int32))
    others = ({"active": False}, {"compared": True}, {"V": 4104}, {"V": 0}, {"dtype": FP64})
    assert pays() and not any(pays(**each) for each in others)
    assert not pays(transform=SOFT) and not pays(transform=kept)


# --- what is refused


def test_overlapping_gradients_are_refused():
    logits, labels, grad, _ = draw(128, FP32, B=1, T=4)
    narrow, shared = logits.view(BF16), logits[:, :1].expand(1, 4, 128)
    for name, (values, out) in {
        "rows begin elsewhere": (logits, narrow.flatten()[: 4 * 128].view(1, 4, 128)),
        "upper half": (logits, narrow[..., 128:]),
        "the next rows": (logits[:, :3], logits[:, 1:]),
        "other rows": (logits.view(2, 2, 128), logits.view(2, 2, 128).transpose(0, 1)),
        "wider": (logits[..., :64], logits.view(FP64)),
        "one row for all": (shared, shared),
        "every other column": (logits[..., ::2], narrow[..., :64]),
    }.items():
        with pytest.raises(ValueError, match=r"out: shares memory with logits.* bytes after"):
            pytest.fail(f"{name}: {launch.narrows_in_place(values, out)}")
    assert not launch.narrows_in_place(logits, logits)
    assert not launch.narrows_in_place(logits[:, :2], logits[:, 2:])
    there = ROWS.there(logits)
    out = there.view(BF16)[..., 128:]
    with pytest.raises(ValueError, match="out: shares memory"):
        ROWS.backward(there, labels, ROWS.forward(logits, labels), grad, out=out)
    with pytest.raises(ValueError, match="out: shares memory"):
        ROWS.and_grad(there, labels, grad, out=out)


@pytest.mark.parametrize(
    ("version", "capability", "platform", "blocks"),
    [
        ("3.8.0", (9, 0), "cuda", 16),
        ("4.0.0", (12, 0), "cuda", 8),
        ("3.7.1", (9, 0), "cuda", 1),
        ("3.9.0", (8, 0), "cuda", 1),
        ("3.9.0", (9, 4), "hip", 1),
    ],
)
def test_clusters_need_a_triton_and_a_gpu(monkeypatch, version, capability, platform, blocks):
    monkeypatch.setattr(logprobs.triton, "__version__", version)
    monkeypatch.setattr(logprobs, "platform", lambda: platform)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert logprobs.max_blocks(torch.device("cuda", 0)) == blocks


def test_unavailable_reason(monkeypatch):
    assert kernels.unavailable(torch.device("cuda")) is None
    assert "meta" in kernels.unavailable(torch.device("meta"))
    for interpreted in (False, True):
        monkeypatch.setattr(kernels, "INTERPRETED", interpreted)
        reason = kernels.unavailable(torch.device("cpu"))
        assert reason is None if interpreted else "TRITON_INTERPRET" in reason
    for version in ((3, 8), (3, 9)):
        for platform in ("cuda", "hip"):
            monkeypatch.setattr(kernels, "platform", lambda platform=platform: platform)
            monkeypatch.setattr(kernels, "triton_version", lambda version=version: version)
            refused = kernels.unavailable(torch.device("cuda")) or ""
            # a Triton that does not order arrivals on AMD GPUs
            assert ("Triton before 3.9" in refused) == (platform == "hip" and version < (3, 9))
