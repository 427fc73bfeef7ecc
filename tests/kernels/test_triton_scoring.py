"""Scoring from hidden states against extended precision, under the interpreter unless a GPU is present."""

import pytest
import torch

from tests.draws import shifted_seed
from tests.kernels.row_oracle import PLAIN, Judge, exact, neighbour, plain

pytest.importorskip("triton")

import gspo_kernels as gk
from gspo_kernels import kernels
from gspo_kernels.kernels import launch as launching
from gspo_kernels.kernels import scoring
from gspo_kernels.types import LogitTransform

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPS = torch.finfo(torch.float32).eps
IGNORE = -100
SOFT = LogitTransform(0.5, 30.0, 0.7)
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


def head(N, H, V, dtype=torch.float32, *, scale=4.0, seed=0):
    """Hidden states and a weight whose products spread by about ``scale``, labels, and a bias."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    hidden = torch.randn(N, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) * scale / H**0.5).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    # Every other label is the likeliest one, as in sampled text.
    labels[::2] = (hidden.float() @ weight.float().T)[::2].argmax(-1)
    return hidden, weight, bias, labels


def integers(N, H, V):
    """Small ones, whose products are exact."""
    generator = torch.Generator().manual_seed(shifted_seed(0))
    hidden = torch.randint(-1, 2, (N, H), generator=generator).to(torch.bfloat16)
    weight = torch.randint(-1, 2, (V, H), generator=generator).to(torch.bfloat16)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def forward(hidden, weight, bias, labels, transform=PLAIN, entropy=True, ignore_index=IGNORE):
    temperature = transform.row_temperature
    stats = kernels.linear_logprobs_forward(
        hidden.to(DEVICE),
        weight.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
        labels.to(DEVICE),
        transform._replace(row_temperature=None if temperature is None else temperature.to(DEVICE)),
        ignore_index=ignore_index,
        entropy=entropy,
    )
    return stats.each(torch.Tensor.cpu)


def check(hidden, weight, bias, labels, transform=PLAIN):
    """Rows without specials: as exact as fp32 logits and log_softmax."""
    labels_1N = labels.unsqueeze(0)
    ones = torch.ones(labels_1N.shape)

    def draw(k):
        near, shift = neighbour(hidden, k), 0.0 if bias is None else bias.double()
        logits = (near.double() @ weight.double().T + shift).unsqueeze(0)
        if GPU and hidden.dtype != torch.float32:
            product = torch.mm(near.cuda(), weight.cuda().T, out_dtype=torch.float32).cpu()
        else:
            product = near.float() @ weight.float().T
        rounded = product.unsqueeze(0) if bias is None else product.unsqueeze(0) + bias.float()
        return exact(logits, labels_1N, transform, ones), [
            plain(rounded, labels_1N, transform, ones, None, False)
        ]

    judge = Judge(draw)
    stats = forward(hidden, weight, bias, labels, transform)
    for name, got in zip(stats._fields, stats, strict=True):
        assert got.dtype == (torch.float64 if name == "lse" else torch.float32), name
        assert got.shape == labels.shape, name
        judge.hold(name, got.unsqueeze(0), eps=EPS)
    assert (stats.logprobs <= 0).all()
    without = forward(hidden, weight, bias, labels, transform, entropy=False)
    assert without.entropy is None
    assert torch.equal(without.logprobs, stats.logprobs) and torch.equal(without.lse, stats.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "N, H, V",
    [
        (3, 64, 1),  # the label's column is all there is
        (2, 64, 2),  # the other column alone makes the log-sum-exp
        (37, 101, 131),  # primes: no tile divides them
        (64, 128, 256),  # tiles divide all of them
        (33, 64, 129),  # one row and one column more than a tile
        (5, 1, 300),
    ],
)
def test_shapes(N, H, V, dtype):
    hidden, weight, _, labels = head(N, H, V, dtype)
    check(hidden, weight, None, labels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_head(dtype):
    hidden, weight, bias, labels = head(8, 512, 5003, dtype)
    check(hidden, weight, bias, labels)


@pytest.mark.slow
def test_a_vocabulary_that_16_does_not_divide():
    hidden, weight, bias, labels = head(2, 32, 37917, torch.bfloat16)
    check(hidden, weight, bias, labels)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(
    "transform",
    [SOFT, LogitTransform(1.0, 0.0, 0.7), LogitTransform(-2.0, 0.0, 1.0), LogitTransform(0.05, 5.0, 1.0)],
)
def test_transforms_and_bias(transform, dtype):
    hidden, weight, bias, labels = head(35, 96, 300, dtype)
    check(hidden, weight, bias, labels, transform)


@pytest.mark.parametrize("softcap", (0.0, 20.0))
def test_a_temperature_per_row(softcap):
    hidden, weight, bias, labels = head(35, 96, 300, torch.bfloat16)
    temperature = torch.linspace(0.5, 2.0, 70)[None, ::2]
    check(hidden, weight, bias, labels, LogitTransform(1.5, softcap, 1.0, temperature))


@pytest.mark.parametrize("gap", (5, 20, 60))
def test_peaked_rows_keep_the_relative_accuracy_of_small_log_probs(gap):
    hidden, weight, _ = integers(40, 48, 300)
    labels = torch.arange(40) * 7
    hidden[:, :16] = weight[:, :16] = weight[labels] = 0
    hidden[:, 0] = 1
    weight[labels, 0] = gap
    reference, _, entropy, _ = exact((hidden.double() @ weight.double().T)[None], labels[None], PLAIN)
    stats = forward(hidden, weight, None, labels)
    # An exponential turns the rounding of its argument, here about the gap, into a relative error.
    assert ((stats.logprobs / reference[0] - 1).abs() <= (8 + gap) * EPS).all()
    assert (stats.logprobs <= 0).all()
    if gap < 30:
        assert ((stats.entropy / entropy[0] - 1).abs() <= 100 * (8 + gap) * EPS).all()


@pytest.mark.parametrize("ignore_index", (IGNORE, 7))
def test_ignored_rows_are_inert(ignore_index):
    hidden, weight, bias, labels = head(70, 64, 300, torch.bfloat16)
    ignored = torch.zeros(70, dtype=torch.bool)
    ignored[[0, 5, 69]] = ignored[32:64] = True  # some rows of a tile, and a whole one
    labels[(labels == ignore_index) & ~ignored] += 1
    want = forward(hidden, weight, bias, labels, ignore_index=ignore_index)
    labels[ignored] = ignore_index
    hidden[ignored] = torch.where(torch.arange(64) % 2 == 0, float("nan"), float("inf")).bfloat16()
    stats = forward(hidden, weight, bias, labels, ignore_index=ignore_index)
    for got, same in zip(stats, want, strict=True):
        assert (got[ignored] == 0).all() and torch.equal(got[~ignored], same[~ignored])
    stats = forward(hidden, weight, bias, torch.full_like(labels, ignore_index), ignore_index=ignore_index)
    assert all((stat == 0).all() for stat in stats)


@pytest.mark.parametrize("bad", (-1, -(2**40), 300, 383, 2**40))
def test_labels_out_of_range(bad):
    hidden, weight, bias, labels = head(10, 64, 300)
    good = forward(hidden, weight, bias, labels)
    labels[3] = bad
    stats = forward(hidden, weight, bias, labels)
    assert stats.logprobs[3].isnan() and stats.logprobs.isnan().sum() == 1
    torch.testing.assert_close(stats.lse, good.lse)
    torch.testing.assert_close(stats.entropy, good.entropy)


def test_a_rows_result_is_its_own():
    """Not a bit depends on the other rows; the interpreter's products would, if they had to be rounded."""
    hidden, weight, labels = integers(70, 64, 300)
    temperature = torch.linspace(0.5, 2.0, 70).unsqueeze(0)
    transform = LogitTransform(1.0, 20.0, 1.0, temperature)
    want = forward(hidden, weight, None, labels, transform)
    assert all(map(torch.equal, forward(hidden, weight, None, labels, transform), want))
    for rows in (torch.randperm(70), torch.arange(5), torch.tensor([69]), torch.arange(0, 70, 3)):
        at_rows = transform._replace(row_temperature=temperature[:, rows])
        stats = forward(hidden[rows], weight, None, labels[rows], at_rows)
        for name, got, all_rows in zip(want._fields, stats, want, strict=True):
            assert torch.equal(got, all_rows[rows]), name


def test_launches_share_the_rows(monkeypatch):
    hidden, weight, bias, labels = head(70, 64, 300)
    transform = LogitTransform(1.0, 0.0, 1.0, torch.linspace(0.5, 2.0, 70).unsqueeze(0))
    want = forward(hidden, weight, bias, labels, transform)
    monkeypatch.setattr(scoring, "_ROWS_PER_LAUNCH", 32)
    assert all(map(torch.equal, forward(hidden, weight, bias, labels, transform), want))
    monkeypatch.setattr(scoring, "_GROUP", 2)
    monkeypatch.setattr(scoring, "_ROWS_PER_LAUNCH", 16384)
    assert all(map(torch.equal, forward(hidden, weight, bias, labels, transform), want))


@pytest.mark.skipif(GPU, reason="the GPU has tiles of its own")
@pytest.mark.parametrize("tile", [(16, 64, 16, 1, 1, 1), (32, 128, 32, 1, 1, 4), (64, 256, 64, 1, 1, 8)])
def test_tiles(tile, monkeypatch):
    monkeypatch.setattr(scoring, "_INTERPRETED", scoring.ProductTile(*tile))
    # Several blocks of cells to combine.
    monkeypatch.setattr(scoring, "_COMBINE", launching.Tile(2, 1))
    check(*head(35, 80, 700, torch.bfloat16), SOFT)


def test_strides():
    hidden, weight, bias, labels = head(34, 64, 140, torch.bfloat16)
    want = forward(hidden, weight, bias, labels)
    noise = torch.full_like(hidden, float("nan"))
    spread_labels = torch.stack([labels, labels + 1], -1)[:, 0].to(torch.int32)
    spread_bias = torch.stack([bias, torch.full_like(bias, float("nan"))], -1)[:, 0]
    wide_weight = torch.cat([weight, torch.full_like(weight, float("nan"))], -1)[:, :64]
    for name, layout in {
        "wide rows": torch.cat([noise, hidden], -1)[:, 64:],
        "odd rows": torch.cat([noise[:, :1], hidden], -1)[:, 1:],
        "every other": torch.stack([hidden, noise], -1)[..., 0],
        "transposed": hidden.t().contiguous().t(),
    }.items():
        assert torch.equal(layout, hidden)
        stats = forward(layout, wide_weight, spread_bias, spread_labels)
        assert all(map(torch.equal, stats, want)), name
    one = forward(hidden[:1].expand(34, 64), weight, bias, labels[:1].expand(34))
    assert all((got == same[0]).all() for got, same in zip(one, want, strict=True))


def test_infinite_logits():
    hidden, weight, _, labels = head(6, 64, 300)
    bias = torch.zeros(300)
    bias[:290] = -float("inf")  # whole slices and tiles
    labels[:] = 295
    labels[0] = 5
    hidden[1, 3] = float("nan")
    stats = forward(hidden, weight, bias, labels)
    want = torch.log_softmax((hidden.double() @ weight.double().T + bias).nan_to_num(neginf=-1e300), -1)
    assert stats.logprobs[0] == -float("inf") and all(stat[1].isnan() for stat in stats)
    torch.testing.assert_close(stats.logprobs[2:].double(), want[2:, 295], rtol=1e-5, atol=1e-6)
    entropy = -(want.exp() * want).sum(-1)
    torch.testing.assert_close(stats.entropy[2:].double(), entropy[2:], rtol=1e-5, atol=1e-6)
    assert stats.lse[2:].isfinite().all()
    nothing = forward(hidden, weight, torch.full((300,), -float("inf")), labels)
    assert nothing.logprobs.isnan().all() and (nothing.lse[2:] == -float("inf")).all()


@pytest.mark.parametrize("N, V", [(0, 50), (0, 0), (3, 0)])
def test_nothing_to_score(N, V):
    stats = forward(torch.ones(N, 64), torch.ones(V, 64), None, torch.zeros(N, dtype=torch.int64))
    assert all(stat.shape == (N,) for stat in stats) and stats.logprobs.isnan().all()


def test_unavailable_says_why():
    hidden, weight = torch.ones(3, 64), torch.ones(5, 64)
    assert kernels.linear_logprobs_unavailable(hidden, weight) is None
    assert "float64" in kernels.linear_logprobs_unavailable(hidden.double(), weight.double())
    assert "weight is torch.float32" in kernels.linear_logprobs_unavailable(hidden.bfloat16(), weight)
    turned = weight.t().contiguous().t()
    assert "strides (1, 5)" in kernels.linear_logprobs_unavailable(hidden, turned)
    with pytest.raises(ValueError, match="linear_logprobs_forward: weight has strides"):
        forward(hidden, turned, None, torch.zeros(3, dtype=torch.int64))


def scored(layout, *, entropy=True, **options):
    hidden, weight, bias, labels = (x.to(DEVICE) for x in head(12, 64, 300))
    labels[3] = -100
    hidden[3] = float("nan")
    temperature = torch.full((12,) if layout == "packed" else (3,), 0.7, device=DEVICE)
    if layout == "padded":
        hidden, labels = hidden.view(3, 4, 64), labels.view(3, 4)
    out = gk.linear_token_logprobs(
        hidden, weight, labels, bias=bias, temperature=temperature, softcap=20.0, return_entropy=entropy,
        backend="triton", **options,
    )  # fmt: skip
    return out, (hidden, weight, bias, labels, temperature)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_chunk_at_all(layout):
    got, (hidden, weight, bias, labels, temperature) = scored(layout, max_chunk_bytes=0)
    want, _ = scored(layout)
    rows = temperature.double() if layout == "packed" else temperature.double().unsqueeze(1)
    exact = gk.linear_token_logprobs(
        hidden.double(), weight.double(), labels, bias=bias.double(), temperature=rows.squeeze(-1),
        softcap=20.0, return_entropy=True, backend="reference",
    )  # fmt: skip
    eps = torch.finfo(torch.float32).eps
    for mine, theirs, truth in zip(got, want, exact, strict=True):
        assert mine.shape == labels.shape and mine.dtype == torch.float32
        budget = 2 * (theirs - truth).abs().max() + eps * truth.abs().max()
        assert (mine - truth).abs().max() <= budget
    assert not got.logprobs.flatten()[3] and not got.entropy.flatten()[3]
    assert scored(layout, max_chunk_bytes=0, entropy=False)[0].entropy is None


def test_no_chunk_at_all_compiles():
    hidden, weight, bias, labels = (x.to(DEVICE) for x in head(12, 64, 300))
    options = {"bias": bias, "max_chunk_bytes": 0, "backend": "triton"}
    compiled = torch.compile(gk.linear_token_logprobs, fullgraph=True, backend="aot_eager")
    got = compiled(hidden, weight, labels, **options)
    assert torch.equal(got.logprobs, gk.linear_token_logprobs(hidden, weight, labels, **options).logprobs)


@pytest.mark.parametrize(
    ("reason", "grad", "dtype", "options"),
    [
        ("no gradient", True, torch.float32, {}),
        ("rounds what is not written", False, torch.float32, {"logits_dtype": "input"}),
        ("this call's is 'reference'", False, torch.float32, {"backend": "reference"}),
        ("which batch-invariant mode takes", False, torch.float32, {"batch_invariant": True}),
        (
            "no sampling masks",
            False,
            torch.float32,
            {"kept_ids": torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)},
        ),
        ("hidden is torch.float64", False, torch.float64, {}),
    ],
)
def test_what_needs_a_chunk_is_refused(reason, grad, dtype, options):
    hidden = torch.ones(3, 64, dtype=dtype, device=DEVICE, requires_grad=grad)
    weight = torch.ones(5, 64, dtype=dtype, device=DEVICE)
    labels = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=f"max_chunk_bytes: got 0 .*{reason}"):
        gk.linear_token_logprobs(
            hidden, weight, labels, max_chunk_bytes=0, **({"backend": "triton"} | options)
        )
