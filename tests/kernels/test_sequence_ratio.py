"""A sequence ratio in one launch against closed forms over its own log-probs.

From logits and from log-probs, in Triton and in C++.
"""

import math

import pytest
import torch

from gspo_kernels import cpp
from gspo_kernels.layout import layout_of
from gspo_kernels.ops.backends import load, why_not
from gspo_kernels.reference import rows as reference_rows
from gspo_kernels.types import (
    METRICS,
    LogitRows,
    LogitTransform,
    RatioClip,
    RatioOperands,
    SequenceRatioStats,
    stats_dtype,
)
from tests.cases import device_of, generator, offsets

IGNORE = -100
OPTIONS = ("weights", "lengths", "normalizer")
GSPO = RatioClip(math.log(1 - 3e-4), math.log(1 + 4e-4), math.inf, False, "sequences", 1.0)
DUAL = RatioClip(math.log(0.8), math.log(1.2), math.log(3.0), False, "sequences", 1.0)
V = 40


def divisor_of(form, sizes, normalizer=None):
    """From L of each sequence that has a counted token."""
    divisor = {"sequences": len(sizes), "tokens": sum(sizes), "one": 1}[form.divisor]
    return ((divisor if normalizer is None else float(normalizer)) or 1.0) * form.divisor_scale


def closed_form(
    logprobs, labels, old, advantages, form, segments, weights=None, lengths=None, normalizer=None
):
    """(loss, coefficients, divisor, metrics by name), sequence by sequence, in Python floats."""
    losses, coefficients, sizes, ratios = [], [], [], []
    low, high, clipped_tokens, tokens, drift, active = 0, 0, 0, 0, 0.0, 0
    for i, where in enumerate(segments):
        counted = labels[where] != IGNORE
        new, before = logprobs[where][counted].double(), old[where][counted].double()
        count = len(new)
        if count == 0:
            coefficients.append(0.0)
            continue
        A, w = float(advantages[i]), 1.0 if weights is None else float(weights[i])
        L = count if lengths is None else float(lengths[i])
        log_s = (new - before).sum().item() / L
        below = A < 0 and log_s < form.log_low
        above = (A > 0 and log_s > form.log_high) or (A < 0 and log_s > form.log_dual)
        bound = form.log_low if below else form.log_high if A > 0 else form.log_dual
        enters = L if form.count_tokens else 1.0
        s = math.exp(log_s) if log_s < 709 else math.inf
        idle = A == 0 or w == 0
        bounded = bound if below or above else log_s
        losses.append(0.0 if idle else -enters * w * A * (math.exp(bounded) if bounded < 709 else math.inf))
        coefficients.append(0.0 if idle or below or above else -enters * w * A * s / L)
        sizes.append(L)
        ratios.append(s)
        low, high, tokens = low + below, high + above, tokens + count
        clipped_tokens += count * (below or above)
        drift -= (new - before).sum().item()
        active += coefficients[-1] != 0
    n = len(ratios)
    divisor = divisor_of(form, sizes, normalizer)
    some = n > 0
    metrics = {
        "ratio/mean": sum(ratios) / n if some else 1.0,
        "ratio/min": min(ratios, default=1.0),
        "ratio/max": max(ratios, default=1.0),
        "clip_fraction/low": low / n if some else 0.0,
        "clip_fraction/high": high / n if some else 0.0,
        "clip_fraction/tokens": clipped_tokens / tokens if some else 0.0,
        "kl/old": drift / tokens if some else 0.0,
        "active_fraction": active / n if some else 0.0,
    }
    return sum(losses) / divisor, coefficients, divisor, metrics


def batch(lengths, width, *, spread, dtype=torch.float32, seed=0):
    """Padded logits, labels with holes, current log-probs and old ones that differ by about ``spread``."""
    rng, B = generator(seed), len(lengths)
    logits = (torch.randn(B, width, V, generator=rng) * 2).to(dtype)
    labels = torch.randint(0, V, (B, width), generator=rng)
    labels[torch.arange(width) >= torch.tensor(lengths).unsqueeze(1)] = IGNORE
    labels[:, 2::5] = IGNORE
    logits[labels == IGNORE] = float("nan")
    new = torch.log_softmax(logits.double(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    shift = torch.randn(B, 1, generator=rng) + 0.1 * torch.randn(B, width, generator=rng)
    old = (new - spread * shift).to(stats_dtype(dtype))
    hole = labels == IGNORE
    old[hole] = torch.where(torch.arange(int(hole.sum())) % 2 == 0, float("nan"), float("inf")).to(old.dtype)
    advantages = torch.randn(B, generator=rng)
    return logits, labels, old, advantages


class Way:
    """How a test gets its results: a backend's launch from logits, or from plain PyTorch's log-probs."""

    def __init__(self, backend, source):
        self.backend, self.source = load(backend), source
        self.device = device_of(backend)
        # where sums and clip decisions are fp64 whatever the log-probs
        self.wide = backend == "cpp" or source == "log-probs"

    def move(self, value):
        return None if value is None else value.to(self.device)

    def rows(self, logits, labels, entropy=False):
        backend = self.backend if self.source == "logits" else reference_rows
        rows = LogitRows(self.move(logits), self.move(labels), LogitTransform(), IGNORE)
        return backend.logprobs_forward(rows, entropy).each(torch.Tensor.cpu)

    def __call__(self, logits, labels, old, advantages, form=GSPO, cu=None, **given):
        """``given``: some of weights, lengths and normalizer."""
        terms = {name: self.move(given.get(name)) for name in OPTIONS} | {"cu_seqlens": self.move(cu)}
        operands = RatioOperands(self.move(old), self.move(advantages), **terms)
        if self.source == "logits":
            rows = LogitRows(self.move(logits), self.move(labels), LogitTransform(), IGNORE)
            stats = self.backend.sequence_ratio_forward(rows, operands, form)
            return type(stats)(*(value.cpu() for value in stats))
        rows, mask = self.rows(logits, labels).each(self.move), self.move(labels) != IGNORE
        step = self.backend.ratio_step(rows.logprobs, mask, operands, form)
        layout = layout_of(mask, terms["cu_seqlens"])
        counts = layout.sum(mask.double())
        sizes = counts if terms["lengths"] is None else terms["lengths"].double()
        divisor = divisor_of(form, sizes[counts > 0].tolist(), terms["normalizer"])
        # every counted token of a sequence has its coefficient
        each = (layout.sum(step.grad_logprobs.double()) / counts.clamp(min=1)).to(step.loss.dtype)
        want = torch.where(mask, layout.expand(each), 0.0)
        # the mean of equal numbers may be rounded, in fp64
        torch.testing.assert_close(step.grad_logprobs, want, rtol=1e-15, atol=0.0, equal_nan=True)
        stats = (step.loss, rows.logprobs, rows.lse, each * divisor, torch.tensor(divisor), step.metrics)
        return SequenceRatioStats(*(value.cpu() for value in stats))


WAYS = [(backend, source) for backend in ("triton", "cpp") for source in ("logits", "log-probs")]


@pytest.fixture(params=WAYS, ids="-".join)
def run(request):
    backend, source = request.param
    if (reason := why_not(backend, device_of(backend))) is not None:
        pytest.skip(reason)
    return Way(backend, source)


def packed(tensor, lengths):
    """[1, N, ...]: the first ``lengths[i]`` positions of each row, one after another."""
    return torch.cat([row[:length] for row, length in zip(tensor, lengths, strict=True)]).unsqueeze(0)


def check(stats, expected, dtype=torch.float32):
    loss, coefficients, divisor, metrics = expected
    # log s is rounded once, to the statistics' dtype; a ratio then carries that rounding as a relative error.
    tolerance = (
        4 * torch.finfo(dtype).eps * max(1.0, *(abs(math.log(m)) for m in list(metrics.values())[1:3]))
    )
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(stats.loss.item(), loss, rtol=tolerance, atol=tolerance * 10)
    torch.testing.assert_close(
        stats.coefficients.double(), torch.tensor(coefficients, dtype=torch.float64), **near
    )
    torch.testing.assert_close(stats.divisor.item(), float(divisor), rtol=1e-6, atol=0.0)
    for name, got in zip(METRICS, stats.metrics.tolist(), strict=True):
        torch.testing.assert_close(got, metrics[name], **near, msg=lambda m, name=name: f"{name}: {m}")


FORMS = {
    "gspo": GSPO,
    "dual": DUAL,
    "token mean": DUAL._replace(count_tokens=True, divisor="tokens"),
    "sum": DUAL._replace(divisor="one"),
    "constant": GSPO._replace(divisor_scale=7.5),
}


@pytest.mark.parametrize("options", ((), OPTIONS), ids=("no options", "all options"))
@pytest.mark.parametrize("form", FORMS)
def test_padded_and_packed_equal_the_closed_form(run, form, options):
    form = FORMS[form]
    lengths = [0, 1, 3, 6, 0, 7, 5, 7, 4, 0]
    spread = (4e-4 if form.log_low > -0.01 else 1.0) * (4.0 if "lengths" in options else 1.0)
    logits, labels, old, advantages = batch(lengths, 7, spread=spread)
    advantages[5] = 0.0
    # one that is clipped and one that isn't, whatever is drawn
    advantages[[6, 8]] = advantages[[6, 8]].abs() + 0.1
    old[6] -= 3 * spread
    old[8] += 3 * spread
    extra = {}
    if "weights" in options:
        extra["weights"] = torch.rand(10)
        extra["weights"][3] = 0.0
    if "lengths" in options:
        extra["lengths"] = torch.arange(3.0, 13.0)
    if "normalizer" in options:
        extra["normalizer"] = torch.tensor(40)
    stats = run(logits, labels, old, advantages, form, **extra)
    rows = [(i, slice(None)) for i in range(10)]
    expected = closed_form(stats.logprobs, labels, old, advantages, form, rows, **extra)
    assert 0 < expected[3]["clip_fraction/tokens"] < 1 and 0 < expected[3]["active_fraction"] < 1
    check(stats, expected)

    ends = offsets(tuple(lengths))
    args = [packed(value, lengths) for value in (logits, labels, old)]
    flat = run(*args, advantages, form, cu=ends, **extra)
    rows = [(0, slice(ends[i], ends[i + 1])) for i in range(10)]
    check(flat, closed_form(flat.logprobs, args[1], args[2], advantages, form, rows, **extra))
    assert torch.equal(flat.logprobs, packed(stats.logprobs, lengths))
    # Sums are fp64, so the layout leaves no trace.
    assert torch.equal(flat.loss, stats.loss) and torch.equal(flat.coefficients, stats.coefficients)
    assert torch.equal(flat.metrics, stats.metrics)


def test_dtypes(run):
    rows = [(i, slice(None)) for i in range(3)]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        *given, advantages = batch([5, 8, 3], 8, spread=4e-4, dtype=dtype)
        given.append(advantages.to(stats_dtype(dtype)) / 3)
        stats = run(*given)
        assert stats.loss.dtype == stats.metrics.dtype == stats_dtype(dtype)
        check(stats, closed_form(stats.logprobs, *given[1:], GSPO, rows), stats_dtype(dtype))


def test_more_tokens_and_sequences_than_a_block(run):
    """Several rounds of the reducing loops: from log-probs blocks are of 1,024 tokens and 256 sequences, from
    logits of half as many.
    """
    lengths = (530, *[1] * 130, 5) if run.source == "logits" else (1100, *[1] * 258, 5)
    args = list(batch([sum(lengths)], sum(lengths), spread=4e-4))
    args[3], ends = torch.randn(len(lengths), generator=generator(1)), offsets(lengths)
    stats = run(*args, cu=ends)
    rows = [(0, slice(ends[i], ends[i + 1])) for i in range(len(lengths))]
    check(stats, closed_form(stats.logprobs, *args[1:], GSPO, rows))


@pytest.mark.parametrize("form", (GSPO, DUAL), ids=("gspo", "dual"))
def test_enormous_log_ratios(run, form):
    """Each sequence's coefficient is its own; an overflow is inf and never NaN."""
    limit = torch.finfo(torch.float32).max
    for sizes in ((-1e4, -1e3, -80.0, -30.0, 30.0, 80.0), (-1e4, 1e3, 1e4)):
        cases = [(size, advantage) for size in sizes for advantage in (1.0, -1.0, 0.0)]
        logits, labels, old, _ = batch([2] * len(cases), 2, spread=0.0)
        old -= torch.tensor([size for size, _ in cases]).unsqueeze(1)
        advantages = torch.tensor([advantage for _, advantage in cases])
        stats = run(logits, labels, old, advantages, form)
        rows = [(i, slice(None)) for i in range(len(cases))]
        want = closed_form(stats.logprobs, labels, old, advantages, form, rows)
        assert not any(value.isnan().any() for value in (stats.loss, stats.coefficients, stats.metrics))
        for (size, _), got, expected in zip(cases, stats.coefficients.tolist(), want[1], strict=True):
            expected = expected if abs(expected) < limit else math.copysign(math.inf, expected)
            assert got == pytest.approx(expected, rel=1e-6 * abs(size)), size
        loss = want[0] if abs(want[0]) < limit else math.inf
        assert stats.loss.item() == pytest.approx(loss, rel=1e-4)
        assert math.isinf(loss) == (form is GSPO and max(sizes) > 100)
    # exp(100) doesn't fit fp32; 1e-20 times it does
    logits, labels, old, _ = batch([2], 2, spread=0.0)
    stats = run(logits, labels, old - 100.0, torch.tensor([-1e-20]))
    assert stats.loss.item() == pytest.approx(1e-20 * math.exp(100.0), rel=1e-4)
    assert stats.metrics[0] == math.inf


def test_bounds_themselves_are_not_clipped(run):
    logits, labels, old, _ = batch([1, 1], 1, spread=0.0)
    high = 0.25
    old = torch.where(labels == IGNORE, 0.0, old - high)
    new = run.rows(logits, labels).logprobs
    exactly = (new.double() - old.double() if run.wide else new - old).flatten().tolist()
    for index, advantage in ((0, 1.0), (1, -1.0)):
        at = exactly[index]
        form = RatioClip(min(at, 0.0), max(at, 0.0), math.inf, False, "one", 1.0)
        stats = run(
            logits[index : index + 1],
            labels[index : index + 1],
            old[index : index + 1],
            torch.tensor([advantage]),
            form,
        )
        assert stats.coefficients[0] != 0 and stats.metrics[3:6].sum() == 0
    form = RatioClip(-1.0, math.nextafter(exactly[0], 0.0) - 1e-6, math.inf, False, "one", 1.0)
    stats = run(logits[:1], labels[:1], old[:1], torch.tensor([1.0]), form)
    assert stats.coefficients[0] == 0 and stats.metrics[4] == 1


def test_same_weights_give_a_ratio_of_exactly_one(run):
    logits, labels, _, advantages = batch([7, 9, 2], 9, spread=0.0, dtype=torch.bfloat16)
    old = run(logits, labels, torch.zeros(labels.shape), advantages).logprobs
    stats = run(logits, labels, old, advantages)
    assert stats.metrics[:3].tolist() == [1.0, 1.0, 1.0] and stats.metrics[6] == 0
    rows = run.rows(logits, labels, entropy=True)
    assert torch.equal(rows.logprobs, old) and torch.equal(rows.lse, stats.lse)


def test_nan_in_a_counted_row_reaches_its_own_sequence_only(run):
    logits, labels, old, advantages = batch([6, 6, 6], 6, spread=1e-4)
    advantages = torch.tensor([1.0, -1.0, 1.0])
    logits[1, 0] = float("nan")
    stats = run(logits, labels, old, advantages)
    assert stats.logprobs.isnan().sum() == 1 and stats.loss.isnan() and stats.metrics[:3].isnan().all()
    assert stats.coefficients.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("normalizer", (None, 0.0, 3.0))
def test_nothing_counted(run, normalizer):
    logits, labels, old, advantages = batch([0, 0], 4, spread=0.0)
    normalizer = None if normalizer is None else torch.tensor(normalizer)
    cases = [(logits, labels, old, advantages, None)]
    cases.append((logits[:, :0], labels[:, :0], old[:, :0], advantages, None))
    cases.append((logits[:0], labels[:0], old[:0], advantages[:0], None))
    cases.append((logits[:1, :0], labels[:1, :0], old[:1, :0], advantages, torch.zeros(3, dtype=torch.int32)))
    for *args, cu in cases:
        stats = run(*args, cu=cu, normalizer=normalizer)
        assert stats.loss == 0 and stats.divisor == (3.0 if normalizer == 3.0 else 1.0)
        assert (stats.coefficients == 0).all() and (stats.logprobs == 0).all()
        assert stats.metrics.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("run", [way for way in WAYS if way[1] == "log-probs"], ids="-".join, indirect=True)
def test_without_old_logprobs_every_ratio_is_one(run):
    logits, labels, _, advantages = batch([7, 0, 9, 2], 9, spread=0.0)
    logprobs = run.rows(logits, labels).logprobs
    with_them, without = run(logits, labels, logprobs, advantages), run(logits, labels, None, advantages)
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))
    assert without.metrics[:3].tolist() == [1.0, 1.0, 1.0]


# --- sums over tokens in C++


# wide enough that nothing is clipped, and a mean of tokens: the drift is the mean of the log-ratios
OPEN = RatioClip(-math.inf, math.inf, math.inf, False, "sequences", 1.0)


def tokens(length, dtype, old_dtype):
    """Log-probs, old ones, and a mask with holes, behind which nothing is a number."""
    logprobs = -3 * torch.rand(2, length, dtype=torch.float64)
    old = logprobs + 1e-2 * torch.randn(2, length, dtype=torch.float64)
    mask = torch.rand(2, length) < 0.7
    mask[:, -1] = torch.tensor([True, False])
    mask[1] = False
    logprobs, old = logprobs.to(dtype), old.to(old_dtype)
    logprobs[~mask] = float("nan")
    logprobs[0, -1] = old[0, -1] = -math.inf
    return logprobs, mask, old, torch.ones(2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("old_dtype", (torch.float32, torch.float64), ids=str)
def test_only_counted_tokens_are_summed_up_in_cpp(dtype, old_dtype):
    """In sums of any length, to which padding behind a sequence adds no bit."""
    eps = torch.finfo(dtype).eps
    for length in (1, 2, 15, 16, 17, 127, 128, 129, 160, 1000):
        logprobs, mask, old, ones = tokens(length, dtype, old_dtype)
        step = cpp.ratio_step(logprobs, mask, RatioOperands(old, ones), OPEN)
        exact = torch.where(mask, logprobs.double() - old.double(), 0.0)
        exact[0, -1] = 0.0
        mean = exact.sum() / mask.sum()
        drift = step.metrics[METRICS.index("kl/old")].double()
        torch.testing.assert_close(drift, -mean, rtol=4 * eps, atol=1e-15)
        torch.testing.assert_close(step.loss.double(), -mean.exp(), rtol=4 * eps, atol=0)
        want = torch.where(mask, (-mean.exp() / mask.sum()).to(dtype), 0.0)
        torch.testing.assert_close(step.grad_logprobs, want, rtol=4 * eps, atol=0)
        longer = [torch.nn.functional.pad(each, (0, 75)) for each in (logprobs, mask, old)]
        padded = cpp.ratio_step(*longer[:2], RatioOperands(longer[2], ones), OPEN)
        assert torch.equal(step.loss, padded.loss) and torch.equal(step.metrics, padded.metrics)
        assert torch.equal(step.grad_logprobs, padded.grad_logprobs[:, :length])


@pytest.mark.parametrize("length", (5, 70_000))
def test_masks_of_numbers_are_read_as_they_are_in_cpp(length):
    logprobs, mask, *rest = tokens(length, torch.float32, torch.float32)
    operands = RatioOperands(*rest)
    want = cpp.ratio_step(logprobs, mask, operands, OPEN)
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        numbers = mask.to(dtype)
        assert cpp.reads_mask(numbers)
        got = cpp.ratio_step(logprobs, numbers, operands, OPEN)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        numbers[1, -1] = 2
        with pytest.raises(ValueError, match="loss_mask: expected only 0 and 1"):
            cpp.ratio_step(logprobs, numbers, operands, OPEN)
    assert cpp.reads_mask(mask) and not cpp.reads_mask(mask.to(torch.float16))
