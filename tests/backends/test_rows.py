"""The row kernels of Triton and C++ against extended precision: values, strides, ignored rows."""

import numpy as np
import pytest
import torch

from gspo_kernels.core.types import LogitTransform, stats_dtype
from tests.backends.row_calls import (
    DTYPES,
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
    plain,
    same,
)
from tests.test_infinities import EVERY, MAKERS, make_row


@pytest.fixture(params=("triton", "cpp"))
def rows(request):
    return Rows(request.param)


# --- values

# degenerate; around vectors; a prime; one column into a second block, and a third block nearly empty
VOCABULARIES = {"triton": (1, 2, 1009, 4097, 8192 + 16), "cpp": (1, 2, 7, 8, 33, 257, 2047, 2049, 4097)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies(rows, dtype):
    for vocabulary in VOCABULARIES[rows.name]:
        check(rows, *draw(vocabulary, dtype, B=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transforms(rows, dtype):
    temperature = torch.tensor([[0.5], [1.7]], dtype=stats_dtype(dtype)).expand(2, 3)
    check(rows, *draw(1009, dtype, B=1), SOFT)
    for transform in (WARM, NEGATIVE, LogitTransform(0.05, 5.0)):
        check(rows, *draw(300, dtype, B=1), transform)
    for softcap in (0.0, 20.0):
        check(rows, *draw(300, dtype), LogitTransform(1.5, softcap, 1.0, temperature))


@pytest.mark.parametrize("spread", (0.0, 30.0))
def test_logits_far_from_zero_and_far_apart(rows, spread):
    for offset in (1e3, -1e5):
        logits, labels, *grads = draw(2500, torch.float32, spread=spread)
        check(rows, logits + offset, labels, *grads)


# fp16 would lose what is far below the largest
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("softcap", (0.0, 80.0))
def test_rows_whose_blocks_rise_and_fall(rows, dtype, softcap):
    """Exponentials are taken before the row's maximum is known. All of them, also those far below the
    largest, must be as exact as if the maximum were known.
    """
    wide = stats_dtype(dtype)
    eps, eps_wide = torch.finfo(dtype).eps, torch.finfo(wide).eps
    for step in (-90.0, -33.0, 5.0, 33.0, 1000.0):
        logits, labels, grad, _ = draw(9001, dtype, T=2)
        logits += step * torch.tensor([0, 1, 2, 2, 1, 3], dtype=dtype)[torch.arange(9001) // 2048]
        transform = LogitTransform(softcap=softcap)
        want, usual = (
            exact(logits, labels, transform, grad),
            plain(logits, labels, transform, grad, dtype=wide),
        )
        stats, row, factors = rows.and_rows(logits, labels, transform, out=torch.empty_like(logits))
        got = row.double() * (factors.double() * grad.double()).unsqueeze(-1)
        torch.testing.assert_close(stats.lse, want[1], rtol=2 * eps_wide, atol=2 * eps_wide)
        # element by element: the largest would hide the others
        seen = want[3].abs() > 1e-30
        error, usual_error = (
            float((each.double() / want[3] - 1)[seen].abs().max()) for each in (got, usual[3])
        )
        assert error <= 2 * usual_error + 4 * eps, step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_rows_keep_relative_accuracy(rows, dtype):
    """p(label) rounds to 1 while log p and the gradient at the label must tell how far it is from 1."""
    eps, eps_out = torch.finfo(stats_dtype(dtype)).eps, torch.finfo(dtype)
    for gap in (5.0, 12.0, 17.0, 30.0, 80.0):
        logits, labels, *_ = draw(3001, dtype, B=1, T=4, spread=1.0)
        labels[0] = torch.tensor([0, 1500, 3000, 2048])
        logits.scatter_(-1, labels.unsqueeze(-1), gap + 9.0)
        one = torch.ones(labels.shape)
        want = exact(logits, labels, PLAIN, one)
        stats = rows.forward(logits, labels)
        # C++ computes fp32 rows' exponents without rounding; elsewhere the gap's rounding is a relative error
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


def layouts(dtype, backend):
    """Yield (name, memory, (shape, strides, first element) of its rows); the gaps between rows are NaN."""
    # rows an odd number of elements apart begin at every alignment, of which Triton knows two
    T = 3 if backend == "triton" else 16 // dtype.itemsize + 1
    for name, place in {
        "sliced rows": ((2, 2, 300), (11200, 2800, 1), 700),
        "every other column": ((2, 2, 300), (5600, 700, 2), 1),
        "vocabulary first": ((2, 2, 300), (2, 1, 4), 0),
        "few columns anywhere": ((1, T, 3), (0, 5, 1), 1),
        "columns anywhere": ((1, T, 4107), (0, 4109, 1), 1),
        "expanded rows": ((2, 2, 300), (700, 0, 1), 0),
        "expanded vocabulary": ((2, 2, 300), (5600, 700, 0), 0),
        "overlapping": ((2, 2, 300), (11, 3, 2), 0),
    }.items():
        memory = torch.full((40_000,), torch.nan, dtype=dtype)
        size = 1 + sum((count - 1) * stride for count, stride in zip(*place[:2], strict=True))
        if name in ("expanded rows", "expanded vocabulary", "overlapping"):
            memory[:size] = torch.randn(size).to(dtype)
        else:
            memory.as_strided(*place).copy_(torch.randn(place[0]))
        yield name, memory, place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_alignment(rows, dtype):
    """Nothing is written between the rows of gradients, either."""
    for name, memory, place in layouts(dtype, rows.name):
        if name == "overlapping" and rows.name == "triton":
            continue  # the checker of accesses does not know overlapping strides
        logits, (B, T, V) = memory.as_strided(*place), place[0]
        dense = torch.full((B, T, (V + 63) // 64 * 64), torch.nan, dtype=dtype)[..., :V].copy_(logits)
        labels = torch.randint(0, V, (T, B), dtype=torch.int32).t()
        grad, grad_entropy = torch.randn(2, T, B, dtype=stats_dtype(dtype)).mT
        labels[0, :2], grad[0, -1], grad_entropy[0, -1] = torch.tensor([0, V - 1]), 0.0, 0.0
        stats = rows.forward(dense, labels.long().contiguous())
        assert same(rows.forward(logits, labels), stats), name

        def backward(logits, grad, grad_entropy, labels=labels, stats=stats, **more):
            return rows.backward(logits, labels, stats, grad, grad_entropy, **more)

        def and_grad(logits, grad, _, labels=labels, **more):
            return rows.and_grad(logits, labels, grad, **more)[1]

        twice = (2 * grad).contiguous(), (2 * grad_entropy).contiguous()
        got = backward(logits, grad, grad_entropy, scale=torch.tensor(2.0))
        assert same([got, and_grad(logits, *twice)], [backward(dense, *twice), and_grad(dense, *twice)]), name
        known = (rows.and_grad(each, labels, grad)[0] for each in (logits, dense))
        assert same(*known), name
        if rows.name == "cpp":
            got, want = rows.and_rows(logits, labels), rows.and_rows(dense, labels)
            assert same([*got[0], *got[1:]], [*want[0], *want[1:]]), name
        assert torch.equal(logits, dense), name
        if place[1][2] != 1 or name == "expanded rows":
            continue
        narrower = [torch.float16] if dtype == torch.float32 and T > 2 and B == 1 else []
        for write, out_dtype in (
            (backward, dtype),
            (and_grad, dtype),
            *((backward, one) for one in narrower),
        ):
            there = rows.there(memory.clone())
            over = there.as_strided(*place)
            want = write(dense, grad, grad_entropy).to(out_dtype)
            out = over if out_dtype == dtype else over.view(out_dtype)[..., :V]
            assert same([write(over, grad, grad_entropy, out=out)], [want]), name
            around = there.cpu()
            around.as_strided(*place).fill_(torch.nan)
            assert around.isnan().all(), name


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [*((dtype, dtype) for dtype in DTYPES), *((torch.float32, narrow) for narrow in DTYPES[:2])],
    ids=str,
)
def test_gradients_of_any_dtype_are_rounded_once(rows, dtype, out_dtype):
    # the gradient of the last 16-bit block ends in the middle of the fp32 logits
    logits, labels, grad, grad_entropy = draw(4096 * 2 + 5, dtype, B=1, T=7)
    # fp16 normals, subnormals, overflow; near bf16's largest; tiny; zero; and a row that is ignored
    grad[0] = torch.tensor([1.0, 1e-4, 1e5, 3e38, 1e-30, 0.0, 1.0]).to(grad.dtype)
    labels[0, 6], logits[0, 6] = IGNORE, float("nan")
    for transform in (PLAIN, SOFT) if (dtype, out_dtype) == (torch.float32, torch.bfloat16) else (PLAIN,):
        stats = rows.forward(logits, labels, transform)

        def both(values, out, stats=stats, transform=transform):
            """Return gradients of the backward, and of the launch that computes log-probs and gradients."""
            first = rows.backward(values(), labels, stats, grad, grad_entropy, transform, out=out())
            return first, rows.and_grad(values(), labels, grad, transform, out=out())[1]

        wide = both(lambda: logits, lambda: torch.full(logits.shape, torch.nan, dtype=stats_dtype(dtype)))
        # PyTorch rounds fp64 to 16 bits by way of fp32, as we do
        want = [each.to(out_dtype) for each in wide]
        got = both(lambda: logits, lambda: torch.full(logits.shape, torch.nan, dtype=out_dtype))
        assert same(got, want)
        for write, expected in zip((rows.backward, rows.and_grad), want, strict=True):
            there = rows.there(logits.clone())
            chunk, out = (there, there) if out_dtype == dtype else chunk_of(there, out_dtype)
            if write == rows.backward:
                write(chunk, labels, stats, grad, grad_entropy, transform, out=out)
            else:
                write(chunk, labels, grad, transform, out=out)
            assert same([out.cpu()], [expected])


# --- rows that are left out


def test_either_gradient_makes_a_row_active(rows):
    """A row has a gradient of its log-prob alone, of its entropy alone, or of both."""
    logits, labels, grad, grad_entropy = draw(300, torch.float32)
    grad[0, 0] = grad_entropy[0, 1] = 0.0
    got = rows.backward(logits, labels, rows.forward(logits, labels), grad, grad_entropy)
    assert (got != 0).any(-1).all()
    Truth(logits, labels, PLAIN, grad, grad_entropy).hold(grad=got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inactive_rows_are_not_read(rows, dtype):
    logits, labels, grad, grad_entropy = draw(2500, dtype)
    labels[labels == 7] = 8
    labels[1, 1] = IGNORE
    stats = rows.forward(logits, labels)
    want = rows.backward(logits, labels, stats, grad, grad_entropy)
    known, both = rows.and_grad(logits, labels, grad)
    with_rows = rows.and_rows(logits, labels)
    for poison in (float("nan"), float("inf")):
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
def test_labels_out_of_range_are_nan_and_in_bounds(rows, label):
    logits, labels, grad, grad_entropy = draw(300, torch.float32)
    stats = rows.forward(logits, labels)
    # the log-prob that doesn't exist has no gradient; the entropy has one
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


# --- infinities and NaN


def special_rows(lowest, highest):
    """Return rows of 2512 columns, which Triton can keep on the chip, by name; the label is column 3."""
    column, numbers = torch.arange(2512), torch.randn(2512, dtype=torch.float64)
    extreme = {
        "first blocks -inf": ((column >= 2100) | (column == 3), {}),
        "+inf behind a finite maximum": (EVERY, {9: highest / 2, 2300: torch.inf, 2301: torch.inf}),
        "label highest": (EVERY, {3: highest}),
        "another highest": (EVERY, {2511: highest}),
    }
    makers = {line: makers[-1] for line, makers in MAKERS.items()} | extreme
    rows = {name: make_row(*maker, 2512, torch.float64) for name, maker in makers.items()}
    some_lowest = numbers.masked_fill(column % 2 == 0, lowest)
    both_ends = some_lowest.clone()
    both_ends[3] = highest
    all_lowest = torch.full_like(numbers, lowest)
    return rows | {"some lowest": some_lowest, "both ends": both_ends, "all lowest": all_lowest}


@pytest.mark.parametrize(
    ("dtype", "transform"),
    [
        (torch.float16, PLAIN),
        (torch.bfloat16, WARM),
        (torch.float64, PLAIN),
        *((torch.float32, one) for one in (PLAIN, SOFT, NEGATIVE)),
    ],
    ids=["fp16", "bf16, temperature", "fp64", "fp32", "softcap", "negative"],
)
def test_special_values_behave_as_in_log_softmax(rows, dtype, transform):
    info, stats_type = torch.finfo(dtype), stats_dtype(dtype)
    # transformed logits must stay in range
    within = 1.0 if transform == PLAIN else 0.1
    cases = special_rows(within * info.min, within * info.max)
    logits = torch.stack(list(cases.values())).to(dtype).unsqueeze(0)
    if transform == NEGATIVE:
        logits = -logits
    labels, grad = torch.full((1, len(cases)), 3), torch.full((1, len(cases)), -1.5)
    reference, wide = Rows("reference"), torch.empty_like(logits, dtype=stats_type)
    want = reference.forward(logits.double(), labels, transform)
    want_grad = reference.backward(logits.double(), labels, want, grad.double(), None, transform)
    stats = rows.forward(logits, labels, transform)
    in_one_pass, both = rows.and_grad(logits, labels, grad, transform, out=wide.clone())
    twice_read, again = rows.and_grad(logits, labels, grad, transform, out=wide.clone(), held=False)
    with_rows, row, factors = rows.and_rows(logits, labels, transform)
    gradient = rows.backward(logits, labels, stats, grad, None, transform, out=wide.clone())
    eps, numbers = torch.finfo(stats_type).eps, ~logits.isnan().any(-1)
    close = {"rtol": 32 * eps, "atol": 16 * eps, "equal_nan": True}
    for known in (stats, in_one_pass, twice_read, with_rows):
        torch.testing.assert_close(known.logprobs.double(), want.logprobs, **close)
        # in a row with NaN, the log-sum-exp may be +inf or NaN
        torch.testing.assert_close(known.lse[numbers], want.lse[numbers], **close)
        assert not known.lse[~numbers].isfinite().any()
    torch.testing.assert_close(stats.entropy.double(), want.entropy, **close)
    for got in (both, again, row * (-1.5 * factors).unsqueeze(-1), gradient):
        if got is gradient and rows.name == "triton":
            # its log-sum-exp, rounded to one number, equals that of a single logit
            one_logit = list(cases).index("all lowest")
            got[0, one_logit] = want_grad[0, one_logit]
        torch.testing.assert_close(got.double(), want_grad, **close | {"rtol": 100 * eps})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_logit_is_read_exactly(dtype):
    """C++ only. The log-sum-exp of one column is the logit; with 40 columns, vectors read the logits."""
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
def test_16_bit_gradients_round_as_in_pytorch(dtype):
    """C++ only. A label at -inf has p = 0, so its gradient is the coefficient, which may have any bits."""
    rows = Rows("cpp")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = torch.nextafter(every, torch.tensor(float("inf"))) * 0.5 + every * 0.5
    random = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    values = torch.cat([random, every, halfway, every * (1 + 2**-9), every * 0.75])
    values = values[values != 0][None]
    # column 0 has p = 1; gradients of column 1 are subnormal for many values
    logits = torch.tensor([0.0, -85.0, -float("inf")]).expand(1, values.shape[1], 3)
    labels, out = torch.full(values.shape, 2), torch.empty(1, values.shape[1], 3, dtype=dtype)
    want = [values.to(dtype), (-values).to(dtype)]
    for got in (
        rows.and_grad(logits, labels, values, out=out.clone())[1],
        rows.backward(logits, labels, rows.forward(logits, labels), values, out=out.clone()),
    ):
        assert same([got[..., 2], got[..., 0]], want)
