"""Banned tokens, infinities and NaN do what docs/precision.md says, on every backend and in every entry.

Other tests judge how accurate finite values are; here each value must be recognizably the right one.
"""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.hidden import gradients as linear_gradients
from tests.cases import device_of

LABEL = 3
INF, NAN = math.inf, math.nan

# Rows of logits by the line of the page: the columns that are not banned, and values of some columns.
EVERY = slice(None)
MAKERS = {
    "nothing is banned": [(EVERY, {})],
    "others are banned": [
        (EVERY, {5: -INF}), (slice(LABEL, None), {}), (slice(18), {}), (slice(1, None, 2), {}),
        ([LABEL, 6], {}),
    ],
    "all others are banned": [([LABEL], {})],
    "the label is banned": [(EVERY, {LABEL: -INF}), (slice(18, None), {}), (slice(0, None, 2), {})],
    "all but one are banned, and the label is": [([0], {}), ([4], {}), ([-1], {})],
    "all are banned, or any token is +inf or NaN": [
        ([], {}), (EVERY, {5: INF}), (EVERY, {0: INF, 6: INF}), (EVERY, {LABEL: INF}),
        (EVERY, {LABEL: INF, 5: INF}), (EVERY, {LABEL: -INF, 5: INF}), (EVERY, {5: NAN}),
        (EVERY, {0: NAN, 1: INF}), (EVERY, {6: NAN, 1: -INF}), (EVERY, {LABEL: NAN}), ([], {5: NAN}),
        ([], {LABEL: NAN}),
    ],
}  # fmt: skip


def make_row(allowed, values, vocabulary, dtype):
    numbers = torch.randn(vocabulary, dtype=torch.float64)
    row = torch.full_like(numbers, -INF)
    row[allowed] = numbers[allowed]
    for column, value in values.items():
        row[column] = value
    return row.to(dtype)


OPTIONS = {torch.float32: {}, torch.bfloat16: {"temperature": 0.7, "logit_scale": 1.7}}


def expected(logits, options):
    """Return log-prob, entropy and their gradients of a row of logits in fp64."""
    slope = options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
    z = slope * logits.double()
    if not -INF < z.max() < INF:
        z = torch.full_like(z, NAN)
    p, label = z.softmax(-1), torch.arange(z.numel()) == LABEL
    entropy = torch.special.entr(p).sum()
    of_entropy = torch.special.entr(p) - p * entropy
    return p[LABEL].log(), entropy, slope * (label.double() - p), slope * of_entropy


def assert_is(got, want, dtype):
    eps = torch.finfo(dtype).eps
    got, want = got.detach().cpu().double(), want.expand(got.shape)
    torch.testing.assert_close(got, want, rtol=64 * eps, atol=16 * eps, equal_nan=True)


def score(entry, inputs, labels, **options):
    """Return log-probs and entropies, and the sums to differentiate."""
    options["return_entropy"] = True
    if entry.endswith("logprobs"):
        out = getattr(gk, entry)(*inputs, labels, **options)
        return out, (out.logprobs.sum(), out.entropy.sum())
    objective, ones = gk.Linear(aggregation="sum"), torch.ones(labels.shape, device=labels.device)
    out = getattr(gk, entry)(*inputs, labels, None, None, token_weights=ones, objective=objective, **options)
    return out, (out.loss,)


@pytest.mark.parametrize(
    ("entry", "vocabulary", "dtype"),
    [
        ("token_logprobs", 37, torch.float32),
        ("token_logprobs", 37, torch.bfloat16),
        ("token_logprobs", 9001, torch.float32),
        ("fused_policy_loss", 37, torch.bfloat16),
    ],
)
def test_rows_of_logits(entry, vocabulary, dtype, backend):
    """All rows are in one call. Of 9,001 columns whole blocks are banned."""
    made = [make_row(*maker, vocabulary, dtype) for makers in MAKERS.values() for maker in makers]
    logits = torch.stack(made).unsqueeze(0).to(device_of(backend)).requires_grad_()
    labels = torch.full(logits.shape[:2], LABEL, device=logits.device)
    out, totals = score(entry, (logits,), labels, backend=backend, **OPTIONS[dtype])
    grads = [torch.autograd.grad(total, logits, retain_graph=True)[0] for total in totals]
    for i, row in enumerate(made):
        logprob, entropy, *gradients = expected(row, OPTIONS[dtype])
        assert_is(out.logprobs[0, i], logprob, torch.float32)
        assert_is(out.entropy[0, i], entropy, torch.float32)
        for got, want in zip(grads, gradients, strict=False):
            assert_is(got[0, i], want, dtype)


def test_zeros_with_an_infinite_upstream_gradient():
    """They are the gradient at a banned token, and all gradients of a row whose label is certain."""
    rows = torch.tensor([[[1.0, -INF, 0.5], [0.0, -INF, -INF]]], requires_grad=True)
    logprobs = gk.token_logprobs(rows, torch.zeros(1, 2, dtype=torch.int64), backend="reference").logprobs
    logprobs.backward(torch.full((1, 2), INF))
    assert rows.grad.tolist() == [[[INF, 0.0, -INF], [0.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        ("linear_token_logprobs", torch.float32),
        ("linear_token_logprobs", torch.bfloat16),
        ("fused_linear_policy_loss", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("line", MAKERS)
def test_rows_of_products(line, entry, dtype, backend, monkeypatch):
    """The gradient comes some columns at a time where weights have 16 bits."""
    monkeypatch.setattr(linear_gradients, "BLOCK_COLUMNS", {"cpu": 16, "cuda": 16})
    for maker in MAKERS[line] if "NaN" in line else MAKERS[line][:1]:
        assert_row_of_a_product(make_row(*maker, 37, dtype), entry, dtype, backend)


def assert_row_of_a_product(row, entry, dtype, backend):
    """The row is passed as a bias."""
    device, labels = device_of(backend), torch.tensor([[LABEL]], device=device_of(backend))
    hidden, weight = torch.randn(1, 1, 8).to(dtype), torch.randn(37, 8).to(dtype)
    logits = (hidden.double() @ weight.double().T).flatten() + row.double()
    leaves = [each.to(device).requires_grad_() for each in (row, hidden, weight)]
    bias, *inputs = leaves
    out, totals = score(entry, inputs, labels, bias=bias, backend=backend, **OPTIONS[dtype])
    logprob, entropy, *gradients = expected(logits, OPTIONS[dtype])
    assert_is(out.logprobs, logprob, torch.float32)
    assert_is(out.entropy, entropy, torch.float32)
    for total, want in zip(totals, gradients, strict=False):
        got, *shared = torch.autograd.grad(total, leaves, retain_graph=True)
        assert_is(got, want, dtype)
        for each in shared:
            assert each.isnan().all() if logprob.isnan() else each.isfinite().all()


# --- the loss

OBJECTIVE = gk.GSPO(clip_low=0.9, clip_high=2.0)
# Log-prob and old log-prob of a token; 0: a finite log-prob, None: on-policy.
PAIRS = [
    *((0.0, old) for old in (0.0, -INF, NAN)), *((-INF, old) for old in (-1.5, -INF, None)),
    *((NAN, old) for old in (-1.5, None)),
]  # fmt: skip


def clipped(log_s, advantage):
    """Return the objective's loss of a sequence and its derivative by log s."""
    ratio = torch.tensor(log_s).exp().item()
    if advantage == 0:
        return 0.0, 0.0
    if advantage > 0 and ratio > 3.0:
        return -3.0 * advantage, 0.0
    if advantage < 0 and ratio < 0.1:
        return -0.1 * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def check_loss(new, old, entry, backend, options):
    """Check two sequences of two tokens; the second token of the first has the given log-probs."""
    device = device_of(backend)
    labels, bias = torch.tensor([[1, LABEL], [2, 2]]), torch.zeros(16)
    bias[LABEL] = -INF if new == -INF else 0.0
    hidden, weight = torch.randn(2, 2, 8), torch.randn(16, 8)
    logits = hidden @ weight.T + bias
    if math.isnan(new):
        hidden[0, 1, 0] = logits[0, 1, 7] = NAN
    logprobs = torch.log_softmax(logits.double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
    shifts = torch.tensor([[0.1, 0.2], [-0.1, 0.1]]) * (old is not None)
    old_logprobs = logprobs - shifts
    if old is not None and (new, old) != (0.0, 0.0):
        old_logprobs[0, 1] = old
    same = logprobs == old_logprobs  # also if both are -inf
    log_s = torch.where(same, 0.0, logprobs - old_logprobs).mean(1).tolist()
    other = clipped(log_s[1], 0.5)[0]
    inputs = {
        "policy_loss": (logprobs,), "fused_policy_loss": (logits, labels),
        "fused_linear_policy_loss": (hidden, weight, labels),
    }[entry]  # fmt: skip
    if entry != "policy_loss":
        options = options | {"backend": backend}
    if "linear" in entry:
        options = options | {"bias": bias.to(device)}
    given = None if old is None else old_logprobs.to(device)
    leaf, *rest = (each.to(device) for each in inputs)
    leaf = leaf.clone().requires_grad_()

    def loss(advantage):
        advantages = torch.tensor([advantage, 0.5], device=device)
        call = getattr(gk, entry)
        return call(leaf, *rest, given, advantages, objective=OBJECTIVE, normalizer=1, **options)

    for advantage in (2.0, -2.0, 0.0):
        value, coefficient = clipped(log_s[0], advantage)
        if old is not None and math.isnan(old) and advantage and device.type == "cpu":
            with pytest.raises(ValueError, match=r"old_logprobs: got NaN at position \[0, 1\]"):
                loss(advantage)
            continue
        out = loss(advantage)
        grad = torch.autograd.grad(out.loss, leaf)[0].cpu()
        assert out.loss.item() == pytest.approx(value + other, rel=1e-5, nan_ok=True)
        assert out.logprobs[0, 1].item() == pytest.approx(logprobs[0, 1].item(), rel=1e-5, nan_ok=True)
        if entry == "policy_loss":
            want = torch.tensor([[coefficient / 2] * 2, [other / 2] * 2])
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6, equal_nan=True)
            continue
        # the other sequence keeps its gradient
        assert grad[1].isfinite().all() and (grad[1] != 0).any()
        if coefficient == 0:
            assert (grad[0] == 0).all()
        elif math.isfinite(coefficient):
            assert grad[0].isfinite().all() and (grad[0] != 0).any(-1).all()
        else:
            assert not grad[0, 1].isfinite().any()
            # on-policy, the coefficient may be known before the log-probs
            assert old is None or not grad[0, 0].isfinite().any()


@pytest.mark.parametrize(("new", "old"), PAIRS)
def test_the_loss(new, old, backend):
    paths = [("fused_policy_loss", {}), ("fused_linear_policy_loss", {})]
    if backend == "cpp":
        schedules = ("aligned", "deferred", "two_pass")
        paths += [("fused_linear_policy_loss", {"schedule": name}) for name in schedules]
        paths.append(("policy_loss", {}))
    for entry, options in paths:
        check_loss(new, old, entry, backend, options)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_zero_where_both_ban_the_label(estimator):
    logprobs = torch.tensor([[-1.0, -INF]], requires_grad=True)
    for reference, finite in ((-INF, True), (-3.0, False)):
        out = gk.policy_loss(
            logprobs, torch.tensor([[-1.0, -INF]]), torch.tensor([0.0]), kl_beta=1.0, kl_estimator=estimator,
            ref_logprobs=torch.tensor([[-1.0, reference]]),
        )  # fmt: skip
        out.loss.backward()
        assert out.loss.item() == 0.0 if finite else abs(out.loss.item()) == INF
    weights = gk.rollout_weights(torch.tensor([[-INF, -1.0]]), torch.tensor([[-INF, -1.0]]), high=2.0)
    assert (weights == 1).all()
