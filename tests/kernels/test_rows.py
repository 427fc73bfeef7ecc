"""The row kernels of Triton and C++ against extended precision: values, strides, rows that are left out."""

import numpy as np
import pytest
import torch

from gspo_kernels.ops.backends import why_not
from gspo_kernels.types import LogitTransform, stats_dtype
from tests.cases import device_of
from tests.kernels.row_calls import DTYPES, IGNORE, NEGATIVE, SOFT, WARM, Rows, check, chunk_of, draw, same
from tests.kernels.row_oracle import PLAIN, exact, plain


@pytest.fixture(params=("triton", "cpp"))
def rows(request):
    if (reason := why_not(request.param, device_of(request.param))) is not None:
        pytest.skip(reason)
    return Rows(request.param)


# --- values

# degenerate; around vectors; a prime; one column into a second block, and a third block nearly empty
VOCABULARIES = {"triton": (1, 2, 1009, 4097, 8192 + 16), "cpp": (1, 2, 7, 8, 33, 257, 2047, 2049, 4097)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies(rows, dtype):
    for vocabulary in VOCABULARIES[rows.name]:
        check(rows, *draw(vocabulary, dtype))


def test_real_vocabularies(rows):
    """In 16-byte pieces, and where the next row begins 5 columns behind such a piece."""
    check(rows, *draw(32000, torch.float32, B=1, T=2), SOFT)
    check(rows, *draw(151669, torch.bfloat16, B=1, T=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transforms(rows, dtype):
    temperature = torch.tensor([[0.5], [1.7]], dtype=stats_dtype(dtype)).expand(2, 3)
    check(rows, *draw(1009, dtype), SOFT)
    for transform in (WARM, NEGATIVE, LogitTransform(0.05, 5.0)):
        check(rows, *draw(300, dtype), transform)
    for softcap in (0.0, 20.0):
        check(rows, *draw(300, dtype), LogitTransform(1.5, softcap, 1.0, temperature))


@pytest.mark.parametrize("spread", (0.0, 30.0))
def test_logits_far_from_zero_and_far_apart(rows, spread):
    for offset in (1e3, -1e5):
        logits, labels, *grads = draw(2500, torch.float32, spread=spread)
        check(rows, logits + offset, labels, *grads)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("softcap", (0.0, 80.0))
def test_rows_whose_blocks_rise_and_fall(rows, dtype, softcap):
    """Exponentials are taken before the row's maximum is known: they must come out as if it had been, also
    those that are far below the largest.
    """
    for step in (-90.0, -33.0, 5.0, 33.0, 1000.0):
        logits, labels, grad, _ = draw(9001, dtype, T=2)
        logits += step * torch.tensor([0, 1, 2, 2, 1, 3], dtype=dtype)[torch.arange(9001) // 2048]
        transform = LogitTransform(softcap=softcap)
        want, usual = (
            exact(logits, labels, transform, grad),
            plain(logits, labels, transform, grad, None, False),
        )
        stats, row, factors = rows.and_rows(logits, labels, transform)
        got = row.double() * (factors.double() * grad.double()).unsqueeze(-1)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(stats.lse, want[1], rtol=2 * eps, atol=2 * eps)
        # each element for itself: the largest would hide the others
        seen = want[3].abs() > 1e-30
        error, usual_error = (
            float((each.double() / want[3] - 1)[seen].abs().max()) for each in (got, usual[3])
        )
        assert error <= 2 * usual_error + 4 * eps, step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_rows_keep_the_relative_accuracy_of_small_log_probs(rows, dtype):
    """p(label) rounds to 1 while log p and the gradient at the label must tell how far it is from 1."""
    eps, eps_out = torch.finfo(stats_dtype(dtype)).eps, torch.finfo(dtype)
    for gap in (5.0, 12.0, 17.0, 30.0, 80.0):
        logits, labels, *_ = draw(3001, dtype, B=1, T=4, spread=1.0)
        labels[0] = torch.tensor([0, 1500, 3000, 2048])
        logits.scatter_(-1, labels.unsqueeze(-1), gap + 9.0)
        one = torch.ones(labels.shape)
        want = exact(logits, labels, PLAIN, one)
        stats = rows.forward(logits, labels)
        # C++ computes fp32 rows' exponents without rounding; elsewhere that of the gap is a relative error
        most = eps * (2 if rows.name == "cpp" and dtype != torch.float64 else 18 + gap)
        assert (stats.logprobs < 0).all()
        assert ((stats.logprobs.double() / want[0] - 1).abs() <= most).all(), gap
        row, factors = rows.and_rows(logits, labels)[1:]
        grads = [rows.backward(logits, labels, stats, one), rows.and_grad(logits, labels, one)[1]]
        there = want[3].gather(-1, labels.unsqueeze(-1))
        for grad in (*grads, (row * factors.unsqueeze(-1)).to(dtype)):
            error = (grad.gather(-1, labels.unsqueeze(-1)).double() - there).abs()
            slack = (2 * most + eps_out.eps) * there.abs() + eps_out.smallest_normal * eps_out.eps
            assert (error <= slack).all(), gap


# --- where rows lie


def layouts(base):
    """Tensors [2, 2, 300] of any strides; ``base`` is [8, 8, 700]."""
    return {
        "sliced rows": base[::4, 1:8:4, :300],
        "every other column": base[:2, :2, 1:601:2],
        "vocabulary first": base[:, :2, :].reshape(-1)[: 300 * 4].view(300, 2, 2).permute(1, 2, 0),
        "expanded rows": base[:2, :1, :300].expand(2, 2, 300),
        "expanded vocabulary": base[:2, :2, :1].expand(2, 2, 300),
        "overlapping": base.reshape(-1).as_strided((2, 2, 300), (11, 3, 2)),
    }


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_any_strides_give_the_bits_of_contiguous_logits(rows, dtype):
    spread = torch.randint(0, 300, (2, 2, 2))[..., 0].t().to(torch.int32)
    grad, grad_entropy = torch.randn(1, 1).expand(2, 2), torch.randn(2, 4)[:, ::2]
    for name, logits in layouts(torch.randn(8, 8, 700).to(dtype)).items():
        if name == "overlapping" and rows.name == "triton":
            continue  # the checker of accesses takes one stride after the other
        dense, labels = logits.contiguous(), spread.long().contiguous()
        assert logits.shape == (2, 2, 300) and not logits.is_contiguous(), name
        stats = rows.forward(logits, spread)
        assert same(stats, rows.forward(dense, labels)), name
        got = rows.backward(logits, spread, stats, grad, grad_entropy, scale=torch.tensor(2.0))
        want = rows.backward(dense, labels, stats, grad.contiguous() * 2, grad_entropy.contiguous() * 2)
        assert same([got], [want]), name
        got, want = (rows.and_grad(*given, grad) for given in ((logits, spread), (dense, labels)))
        assert same([*got[0], got[1]], [*want[0], want[1]]), name
        # and nothing between strided rows of gradients is written
        room = torch.full((2, 4, 320), 7.0, dtype=dtype)
        out = room[:, ::2, 10:310]
        assert same([rows.and_grad(dense, labels, grad, out=out)[1]], [want[1]])
        assert (
            (room[:, 1::2] == 7.0).all() and (room[..., :10] == 7.0).all() and (room[..., 310:] == 7.0).all()
        )
        if rows.name == "cpp":
            got, want = rows.and_rows(logits, spread), rows.and_rows(dense, labels)
            assert same([*got[0], *got[1:]], [*want[0], *want[1:]]), name
        assert torch.equal(logits, dense), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_anywhere(rows, dtype):
    """At every alignment: the bits of aligned rows, and NaN between rows that is neither read nor written."""
    places = 16 // dtype.itemsize + 1
    for vocabulary in (3, 4096 + 11):
        logits, labels, grad, grad_entropy = draw(vocabulary, dtype, B=1, T=places)
        labels[0, :3] = torch.tensor([0, vocabulary - 1, vocabulary // 2])
        grad[0, 2] = grad_entropy[0, 2] = 0.0
        # rows begin an odd number of elements apart
        stride = vocabulary + 1 + vocabulary % 2
        room = torch.full((places * stride + 1,), float("nan"), dtype=dtype)

        def rows_of(room, vocabulary=vocabulary, stride=stride):
            return room[1:].view(1, places, stride)[..., :vocabulary]

        rows_of(room).copy_(logits)
        aligned = torch.full((1, places, (vocabulary + 63) // 64 * 64), float("nan"), dtype=dtype)
        aligned = aligned[..., :vocabulary].copy_(logits)
        stats = rows.forward(rows_of(room), labels)
        assert same(stats, rows.forward(aligned, labels))
        want = rows.backward(aligned, labels, stats, grad, grad_entropy)
        device = rows.there(room.clone())
        rows.backward(rows_of(device), labels, stats, grad, grad_entropy, out=rows_of(device))
        assert torch.equal(rows_of(device.cpu()), want)
        elsewhere = rows.backward(rows_of(room), labels, stats, grad, grad_entropy)
        assert torch.equal(elsewhere, want)
        if dtype == torch.float32:
            narrowed = rows.there(room.clone())
            out = narrowed.view(torch.float16)[2:].view(1, places, 2 * stride)[..., :vocabulary]
            rows.backward(rows_of(narrowed), labels, stats, grad, grad_entropy, out=out)
            assert torch.equal(out.cpu(), want.half())
        known, want = rows.and_grad(aligned, labels, grad)
        again = rows.there(room.clone())
        got, _ = rows.and_grad(rows_of(again), labels, grad, out=rows_of(again))
        assert torch.equal(rows_of(again.cpu()), want) and same(got, known)
        for written in (device, again):
            assert written[0].isnan() and written[1:].view(places, stride)[:, vocabulary:].isnan().all()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_any_dtype_are_the_wide_one_rounded_in_place_or_elsewhere(rows, dtype, out_dtype):
    if rows.name == "triton" and torch.float64 in (dtype, out_dtype) and dtype != out_dtype:
        pytest.skip("no caller mixes fp64 with others")
    # the last 16-bit block's gradient ends in the third block of fp32 logits
    logits, labels, grad, grad_entropy = draw(4096 * 3 + 5, dtype, B=1, T=7)
    # fp16 normals, subnormals, overflow; bf16 near its end; none; and a row that is ignored
    grad[0] = torch.tensor([1.0, 1e-4, 1e5, 3e38, 1e-30, 0.0, 1.0]).to(grad.dtype)
    labels[0, 6], logits[0, 6] = IGNORE, float("nan")
    for transform in (PLAIN, SOFT) if (dtype, out_dtype) == (torch.float32, torch.bfloat16) else (PLAIN,):
        stats = rows.forward(logits, labels, transform)

        def both(values, out, stats=stats, transform=transform):
            """Of the backward and of the pass that does both."""
            first = rows.backward(values(), labels, stats, grad, grad_entropy, transform, out=out())
            return first, rows.and_grad(values(), labels, grad, transform, out=out())[1]

        wide = both(lambda: logits, lambda: torch.full(logits.shape, torch.nan, dtype=stats_dtype(dtype)))
        # PyTorch rounds fp64 to 16 bits by way of fp32, as we do
        want = [each.to(out_dtype) for each in wide]
        got = both(lambda: logits, lambda: torch.full(logits.shape, torch.nan, dtype=out_dtype))
        assert same(got, want)
        if out_dtype == dtype or (dtype == torch.float32 and out_dtype.itemsize == 2):
            for write, expected in zip((rows.backward, rows.and_grad), want, strict=True):
                there = rows.there(logits.clone())
                chunk, out = (there, there) if out_dtype == dtype else chunk_of(there, out_dtype)
                if write == rows.backward:
                    write(chunk, labels, stats, grad, grad_entropy, transform, out=out)
                else:
                    write(chunk, labels, grad, transform, out=out)
                assert same([out.cpu()], [expected])


# --- rows that are left out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ignored_rows_and_rows_without_gradient_are_zeros_and_never_read(rows, dtype):
    logits, labels, grad, grad_entropy = draw(2500, dtype)
    labels[labels == 7] = 8
    labels[1, 1] = IGNORE
    stats = rows.forward(logits, labels)
    want = rows.backward(logits, labels, stats, grad, grad_entropy)
    known, both = rows.and_grad(logits, labels, grad)
    with_rows = rows.and_rows(logits, labels)
    for poison in (float("nan"), float("inf"), -float("inf")):
        spoiled, g, ge = logits.clone(), grad.clone(), grad_entropy.clone()
        spoiled[1, 1] = g[1, 1] = ge[1, 1] = poison
        got = rows.forward(spoiled, labels)
        assert same(got, stats) and all(stat[1, 1] == 0 for stat in got)
        sevens = labels.masked_fill(labels == IGNORE, 7)
        assert same(rows.forward(spoiled, sevens, ignore_index=7), stats)
        got = rows.and_rows(spoiled, labels)
        assert same([*got[0], *got[1:]], [*with_rows[0], *with_rows[1:]]) and (got[1][1, 1] == 0).all()
        g[0, 2] = ge[0, 2] = 0.0
        got, gradient = rows.and_grad(spoiled, labels, g)
        zeroed = [each.clone() for each in (both, want)]
        for each in zeroed:
            each[0, 2] = each[1, 1] = 0
        assert same([*got, gradient], [*known, zeroed[0]])
        spoiled[0, 2] = poison
        assert same([rows.backward(spoiled, labels, stats, g, ge)], [zeroed[1]])
        nothing = rows.backward(spoiled, labels, stats, g, scale=torch.tensor(0.0))
        assert (nothing == 0).all()


@pytest.mark.parametrize("label", (-1, 300, 2**40, -(2**62)))
def test_a_label_out_of_range_is_nan_and_no_address(rows, label):
    logits, labels, grad, grad_entropy = draw(300, torch.float32)
    stats = rows.forward(logits, labels)
    # the log-prob that doesn't exist has no gradient; the entropy's is there
    only_entropy = torch.where(torch.arange(6).view(2, 3) == 0, 0.0, grad)
    want = rows.backward(logits, labels, stats, only_entropy, grad_entropy)
    labels[0, 0] = label
    bad = rows.forward(logits, labels)
    assert bad.logprobs[0, 0].isnan() and bad.logprobs.isnan().sum() == 1
    torch.testing.assert_close(bad.lse, stats.lse, rtol=2e-7, atol=0)
    torch.testing.assert_close(bad.entropy, stats.entropy, rtol=1e-6, atol=0)
    got = rows.backward(logits, labels, bad, grad, grad_entropy)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert (rows.backward(logits, labels, bad, grad)[0, 0] == 0).all()
    for stats, gradient, *_ in (rows.and_grad(logits, labels, grad), rows.and_rows(logits, labels)):
        assert stats.logprobs[0, 0].isnan() and (gradient[0, 0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 50), (2, 0, 50), (0, 0, 1)])
def test_no_rows(rows, shape):
    logits, labels, grad = (
        torch.empty(shape),
        torch.empty(shape[:2], dtype=torch.int64),
        torch.empty(shape[:2]),
    )
    stats = rows.forward(logits, labels)
    assert stats.logprobs.shape == stats.entropy.shape == shape[:2]
    assert rows.backward(logits, labels, stats, grad).shape == shape
    assert rows.and_grad(logits, labels, grad)[1].shape == rows.and_rows(logits, labels)[1].shape == shape


# --- infinities and NaN


def special_rows(lowest, highest):
    """Rows of 2512 columns, which Triton can keep on the chip; the label is column 3."""
    inf, row = torch.inf, torch.randn(2512, dtype=torch.float64)

    def change(where, value):
        changed = row.clone()
        changed[where] = value
        return changed

    return {
        "some -inf": change(slice(100, 2100, 3), -inf),
        "first blocks -inf": change(slice(0, 2100), -inf).index_fill(0, torch.tensor([3]), 1.0),
        "all but the label -inf": change(torch.arange(2512) != 3, -inf),
        "all but another -inf": change(torch.arange(2512) != 4, -inf),
        "label -inf": change(3, -inf),
        "all -inf": change(slice(None), -inf),
        "a NaN": change(2511, torch.nan),
        "a NaN among -inf": change(slice(0, 2511), -inf).index_fill(0, torch.tensor([10]), torch.nan),
        "label NaN": change(3, torch.nan),
        "a +inf": change(1250, inf),
        "two +inf behind a finite maximum": change(slice(2300, 2302), inf).index_fill(
            0, torch.tensor([9]), highest / 2
        ),
        "a +inf and a NaN": change(1250, inf).index_fill(0, torch.tensor([1251]), torch.nan),
        "label +inf": change(3, inf),
        "some lowest": change(slice(0, 2512, 2), lowest),
        "all lowest": change(slice(None), lowest),
        "label highest": change(3, highest),
        "another highest": change(2511, highest),
        "both ends": change(slice(0, 2512, 2), lowest).index_fill(0, torch.tensor([3]), highest),
    }


@pytest.mark.parametrize(
    ("dtype", "transform"),
    [*((dtype, PLAIN) for dtype in DTYPES), *((torch.float32, one) for one in (WARM, SOFT, NEGATIVE))],
    ids=[*map(str, DTYPES), "temperature", "softcap", "negative"],
)
def test_special_values_behave_as_in_log_softmax(rows, dtype, transform):
    info, stats_type = torch.finfo(dtype), stats_dtype(dtype)
    # what a transform multiplies must stay in range
    within = 1.0 if transform == PLAIN else 0.1
    cases = special_rows(within * info.min, within * info.max)
    logits = torch.stack(list(cases.values())).to(dtype).unsqueeze(0)
    if transform == NEGATIVE:
        logits = -logits
    labels, grad = torch.full((1, len(cases)), 3), torch.full((1, len(cases)), -1.5)
    leaf = logits.double().requires_grad_()
    z = leaf * transform.logit_scale
    z = transform.softcap * torch.tanh(z / transform.softcap) if transform.softcap else z
    logp = torch.log_softmax(z / transform.temperature, -1)
    p = logp.exp()
    entropy = -torch.where(p == 0, 0.0, p * logp).sum(-1)
    chosen = logp[..., 3]
    (want,) = torch.autograd.grad(chosen, leaf, -1.5 * torch.ones_like(chosen))
    stats = rows.forward(logits, labels, transform)
    eps = torch.finfo(stats_type).eps
    close = {"rtol": 32 * eps, "atol": 16 * eps, "equal_nan": True}
    wide = torch.empty_like(logits, dtype=stats_type)
    in_one_pass, both = rows.and_grad(logits, labels, grad, transform, out=wide.clone())
    twice_read, again = rows.and_grad(logits, labels, grad, transform, out=wide.clone(), held=False)
    with_rows, row, factors = rows.and_rows(logits, labels, transform)
    gradient = rows.backward(logits, labels, stats, grad, None, transform, out=wide.clone())
    with_entropy = rows.backward(logits, labels, stats, grad, grad, transform, out=wide.clone())
    for i, name in enumerate(cases):

        def near(got, want, name=name, **more):
            torch.testing.assert_close(
                got.double(), want, **(close | more), msg=lambda text: f"{name}: {text}"
            )

        for known in (stats, in_one_pass, twice_read, with_rows):
            near(known.logprobs[0, i], chosen[0, i].detach())
            # of +inf and NaN either may be the answer
            if not logits[0, i].isnan().any():
                near(known.lse[0, i], torch.logsumexp(z / transform.temperature, -1)[0, i].detach())
            else:
                assert not known.lse[0, i].isfinite(), name
        near(stats.entropy[0, i], entropy[0, i].detach())
        grads = [both, again, row * (-1.5 * factors).unsqueeze(-1), gradient]
        if name == "all lowest" and rows.name == "triton":
            grads.pop()  # its log-sum-exp as one number is that of a single logit, too
        for got in grads:
            near(got[0, i], want[0, i], rtol=1e2 * eps)
        finite = bool(entropy[0, i].isfinite())
        assert bool(with_entropy[0, i].isfinite().all()) == finite, name
        # a column at -inf has no share in the entropy
        cut = (p[0, i] == 0).index_fill(0, torch.tensor([3]), False)
        assert not finite or (with_entropy[0, i][cut] == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_logit_is_read_exactly(dtype):
    """In C++. With one column, log-sum-exp is the logit. Among 40, the label's at -inf, vectors read it."""
    rows = Rows("cpp")
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()].view(1, -1, 1)
    zeros = torch.zeros(x.shape[:2], dtype=torch.int64)
    assert same([rows.forward(x, zeros).lse], [x[..., 0].double()])
    wide = x.expand(-1, -1, 40).contiguous()
    wide[..., 33] = -float("inf")
    lse = rows.forward(wide, zeros + 33).lse.double()
    torch.testing.assert_close(lse, x[..., 0].double() + np.log(39), rtol=1.2e-7, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_16_bit_gradient_is_rounded_as_pytorch_rounds(dtype):
    """In C++. A label at -inf has p = 0, so its gradient is the coefficient itself: any bits go through."""
    rows = Rows("cpp")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = torch.nextafter(every, torch.tensor(float("inf"))) * 0.5 + every * 0.5
    random = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    values = torch.cat([random, every, halfway, every * (1 + 2**-9), every * 0.75])
    values = values[values != 0][None]
    # column 0 has p = 1; what column 1 has is subnormal among many values
    logits = torch.tensor([0.0, -85.0, -float("inf")]).expand(1, values.shape[1], 3)
    labels, out = torch.full(values.shape, 2), torch.empty(1, values.shape[1], 3, dtype=dtype)
    want = [values.to(dtype), (-values).to(dtype)]
    for got in (
        rows.and_grad(logits, labels, values, out=out.clone())[1],
        rows.backward(logits, labels, rows.forward(logits, labels), values, out=out.clone()),
    ):
        assert same([got[..., 2], got[..., 0]], want)
