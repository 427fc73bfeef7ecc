"""Clipped ratios in one launch, per sequence or token, against the evaluation that serves all objectives.

Ratios come from logits or from log-probs, and launches are Triton's and C++'s.
"""

import itertools
import math

import pytest
import torch
from torch.nn.functional import pad

import gspo_kernels as gk
from gspo_kernels import losses
from gspo_kernels.arguments import terms
from gspo_kernels.backends import cpp
from gspo_kernels.backends.dispatch import hidden_kernels, load, unavailable_reason
from gspo_kernels.core.types import (
    METRICS,
    NO_RATIO,
    RatioClip,
    RatioOperands,
    stats_dtype,
)
from gspo_kernels.logits import policy_step
from tests.cases import device_of, generator, offsets

IGNORE, V = -100, 40
FP32, FP64 = torch.float32, torch.float64
LENGTHS = (3, 0, 8, 1, 8, 5)
B, T = len(LENGTHS), max(LENGTHS)
# log s and advantages: clipped from above, empty, clipped from below, by a dual clip, and not at all
DRIFT = torch.tensor([1e-3, 0.0, -1e-3, 8e-4, 1e-4, -7e-4])
ADVANTAGES = torch.tensor([1.0, 0.3, -0.7, -1.3, 0.5, 0.9])
CLIP = {"clip_low": 8e-4, "clip_high": 6e-4}
SEQUENCES = {
    "gspo": gk.GSPO(),
    "dual": gk.GSPO(dual_clip=1.0005),
    "tokens": gk.GSPO(aggregation="token_mean"),
    "luspo": gk.LUSPO(clip_low=3e-4, clip_high=4e-4),
    "sum": gk.GSPO(aggregation="sum"),
    "constant": gk.GSPO(aggregation="constant", aggregation_constant=7.3),
}
TOKENS = {
    "grpo": gk.GRPO(**CLIP),
    "dual grpo": gk.GRPO(**CLIP, dual_clip=1.0007),
    "dapo": gk.DAPO(**CLIP),
    "dr_grpo": gk.DrGRPO(**CLIP, aggregation_constant=6.7),
    "sum of tokens": gk.GRPO(**CLIP, aggregation="sum"),
}
SIZES = torch.arange(B, dtype=FP64) + 3.3
REFERENCE = torch.linspace(-2.5, -1.5, B * T).view(B, T)
BETAS = torch.tensor([[0.1], [0.0], [0.3], [0.2], [0.4], [0.1]], dtype=FP64).expand(B, T)
# terms of sequence ratios from logits; MORE_TERMS of those from log-probs; TOKEN_TERMS of token ratios
TERMS = {
    "plain": {},
    "zero advantages": {"advantages": torch.tensor([0.0, 1.0, -0.4, 0.0, 0.8, -0.9])},
    "weights of tokens": {"rollout_weights": torch.linspace(0.5, 1.5, B * T, dtype=FP64).view(B, T)},
    "weights, lengths, normalizer": {
        "rollout_weights": torch.tensor([0.5, 1.1, 1.3, 2.0, 0.0, 0.7], dtype=FP64),
        "lengths": SIZES,
        "normalizer": 7.3,
    },
}
MORE_TERMS = TERMS | {
    "on-policy": {"old_logprobs": None},
    "entropy": {"entropy": torch.linspace(0.1, 2.0, B * T).view(B, T)},
    "metric of a KL": {"ref_logprobs": REFERENCE},
    "k1": {"ref_logprobs": REFERENCE, "kl_beta": 0.1, "kl_estimator": "k1"},
    "k2": {"ref_logprobs": REFERENCE, "kl_beta": 0.1, "kl_estimator": "k2", "lengths": SIZES},
    "k3, entropy": {"ref_logprobs": REFERENCE, "kl_beta": BETAS, "entropy": -REFERENCE},
    "k3, on-policy": {"ref_logprobs": REFERENCE, "kl_beta": 0.1, "old_logprobs": None, "normalizer": 7.3},
}
TOKEN_TERMS = MORE_TERMS | {
    "advantages of tokens": {"advantages": torch.linspace(-1.0, 1.0, B * T).view(B, T)}
}


def cases(source, objectives, terms):
    """Return cases of all terms, and of all objectives; objectives and dtypes take turns."""
    some, dtypes = itertools.cycle(objectives), itertools.cycle((FP32, FP64, FP32, torch.bfloat16, FP32))
    terms = list(terms) * (2 if len(terms) < len(objectives) else 1)
    return [(source, next(some), term, next(dtypes)) for term in terms]


CASES = [*cases("logits", SEQUENCES, TERMS), ("logits", "gspo", "plain", torch.float16)]
CASES += cases("logprobs", SEQUENCES, MORE_TERMS) + cases("logprobs", TOKENS, TOKEN_TERMS)
# bounds so wide that nothing is clipped; a sequence's drift is the mean of its tokens' log-ratios
OPEN = RatioClip(-math.inf, math.inf, math.inf, False, "sequences", 1.0)
both_sources = pytest.mark.parametrize("source", ["logits", "logprobs"])


def draw(source, lengths=LENGTHS, dtype=FP32):
    """Draw arguments of padded sequences with holes; where no token counts, values are NaN or inf."""
    rng, shape = generator(0), (len(lengths), max(lengths))
    logits = (2 * torch.randn(*shape, V, generator=rng, dtype=FP64)).to(dtype)
    labels = torch.randint(0, V, shape, generator=rng)
    hole = torch.arange(shape[1]) >= torch.tensor(lengths).unsqueeze(1)
    hole[:, 2::5] = True
    logprobs = logits.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    logprobs = logprobs.to(dtype) if source == "logprobs" else logprobs
    drift, advantages = (each.repeat(shape[0])[: shape[0]] for each in (DRIFT, ADVANTAGES))
    noise = 2e-4 * torch.randn(shape, generator=rng)
    old = (logprobs.double() - drift.unsqueeze(1) - noise).to(stats_dtype(dtype))
    labels[hole], logits[hole], logprobs[hole], old[hole] = IGNORE, math.nan, math.nan, math.inf
    of_logits, of_logprobs = {"logits": logits, "labels": labels}, {"logprobs": logprobs, "loss_mask": ~hole}
    shared = {"old_logprobs": old, "advantages": advantages}
    return (of_logits if source == "logits" else of_logprobs) | shared


def packed(values, lengths=LENGTHS):
    """Return the arguments with the sequences packed one after another."""
    inside = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    flat = {
        name: value[inside] if isinstance(value, torch.Tensor) and value.ndim > 1 else value
        for name, value in values.items()
    }
    return flat | {"cu_seqlens": offsets(lengths)}


class Launch:
    """Losses in one launch of a backend, from logits or from log-probs, and the same by ``evaluate``."""

    def __init__(self, backend, monkeypatch):
        self.backend, self.device, self.patch = backend, device_of(backend), monkeypatch
        monkeypatch.setattr(losses, "resolve", lambda *_: backend)
        monkeypatch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})

    def there(self, values):
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    def __call__(self, values, upstream=1.0, form=None):
        """Return (output, gradient of the log-probs); ``form`` replaces the objective's ratio form."""
        with self.patch.context() as patch:
            patch.setattr(policy_step, "evaluate", None)  # one launch must not call it
            if form is not None:
                patch.setattr(losses, "ratio_clip_of", lambda *_: form)
                patch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})
            if "logprobs" in values:
                return self._of_logprobs(values, upstream)
            patch.setattr(losses, "TokenLogprobsFunction", None)
            values = self.there(values)
            leaf, labels = values.pop("logits").requires_grad_(), values["labels"]
            out = gk.fused_policy_loss(leaf, **values, backend=self.backend)
            (grad,) = torch.autograd.grad(out.loss * upstream, leaf)
        # d logprob / d(the label's logit) is 1 - p
        moved = grad.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return out, torch.where(moved == 0, 0.0, moved / -torch.expm1(out.logprobs))

    def evaluated(self, values, logprobs, upstream=1.0):
        """Return what a call returns, but by ``evaluate`` and from these log-probs."""
        values = {"logprobs": logprobs} | values
        if "logits" in values:
            values["loss_mask"] = values.pop("labels") != IGNORE
            del values["logits"]
        with self.patch.context() as patch:
            patch.setattr(losses, "ratio_clip_of", lambda *_: NO_RATIO)
            patch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})
            return self._of_logprobs(values, upstream)

    def _of_logprobs(self, values, upstream):
        values = self.there(values)
        leaf = values.pop("logprobs").detach().clone().requires_grad_()
        out = gk.policy_loss(leaf, **values)
        return out, torch.autograd.grad(out.loss * upstream, leaf)[0]


@pytest.fixture(params=["cpp", "triton"])
def launch(request, monkeypatch):
    if (reason := unavailable_reason(request.param, device_of(request.param))) is not None:
        pytest.skip(reason)
    return Launch(request.param, monkeypatch)


def agree(got, want, source="logprobs", dtype=FP32):
    (out, grad), (expected, want_grad) = got, want
    near = {"rtol": 1e-12, "atol": 0} if dtype == FP64 else {"rtol": 1e-6, "atol": 1e-9}
    assert out.metrics.keys() == expected.metrics.keys()
    torch.testing.assert_close(out.metrics, expected.metrics, **near)
    torch.testing.assert_close(out.loss, expected.loss, **near)
    if dtype.itemsize == 2:  # fp32 values that may round to neighbors
        near = {"rtol": torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).smallest_normal}
    elif source == "logits":
        near = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(grad.to(want_grad.dtype), want_grad, **near)


@pytest.mark.parametrize(("source", "objective", "terms", "dtype"), CASES, ids=str)
def test_one_launch_equals_the_evaluation(launch, source, objective, terms, dtype):
    """Packed sequences have the bits of padded ones, too."""
    values = draw(source, dtype=dtype) | TOKEN_TERMS[terms] | {"objective": (SEQUENCES | TOKENS)[objective]}
    out, grad = got = launch(values, 3.0)
    agree(got, launch.evaluated(values, out.logprobs, 3.0), source, dtype)
    assert grad.count_nonzero() > 0 and ("entropy" in out.metrics) == ("entropy" in terms)
    assert ("kl/ref" in out.metrics) == ("ref_logprobs" in values)
    if values["old_logprobs"] is not None and dtype.itemsize > 2 and "advantages" not in terms:
        assert 0 < out.metrics["clip_fraction/tokens"] < 1 and out.metrics["active_fraction"] > 0
    flat, flat_grad = launch(packed(values), 3.0)
    inside = (torch.arange(T) < torch.tensor(LENGTHS).unsqueeze(1)).to(grad.device)
    assert torch.equal(flat.loss, out.loss) and torch.equal(flat_grad, grad[inside])
    assert all(torch.equal(flat.metrics[name], value) for name, value in out.metrics.items())


@both_sources
def test_more_tokens_and_sequences_than_a_block(launch, source):
    """The reducing loops take several rounds. Blocks are of 1,024 tokens and 256 sequences from log-probs, of
    half as many from logits.
    """
    lengths = (530, *[1] * 130, 5) if source == "logits" else (1100, *[1] * 258, 5)
    values = packed(draw(source, (sum(lengths),)), (sum(lengths),))
    values |= {"cu_seqlens": offsets(lengths), "advantages": ADVANTAGES.repeat(50)[: len(lengths)]}
    if source == "logits":
        with torch.no_grad():  # the gradient would be as many rows again
            out = gk.fused_policy_loss(**launch.there(values), backend=launch.backend)
        torch.testing.assert_close(out.metrics, launch.evaluated(values, out.logprobs)[0].metrics)
    else:
        agree(launch(values), launch.evaluated(values, values["logprobs"]))


# --- values at the limits


INFINITE = torch.tensor(list(itertools.product(*((x, -math.inf, math.nan) for x in (-1.0, -1.1, -1.3)))))


@pytest.mark.parametrize(
    "objective", [gk.GRPO(dual_clip=3.0), gk.GSPO(clip_low=0.2, clip_high=0.2)], ids=["tokens", "sequences"]
)
def test_infinities_are_those_of_the_evaluation(monkeypatch, launch, objective):
    """Each combination of finite, banned and undefined log-probs is a token, with a finite token in its
    sequence. Checks of values are off, because they would refuse some of them.
    """
    monkeypatch.setattr(terms, "must_check_values", lambda device: False)
    monkeypatch.setattr(policy_step, "must_check_values", lambda device: False)
    tokens = torch.stack([INFINITE, torch.full_like(INFINITE, -1.5)], 2)
    kinds = [(2.0, "k1", 0.5), (-2.0, "k1", 0.0), (-2.0, "k2", 0.5), (0.0, "k3", 0.5)]
    # each token with two of the kinds, in turn
    pairs = zip([*tokens.split(1)] * 2, itertools.cycle(kinds), strict=False)
    for one, (advantage, estimator, beta) in pairs:
        values = dict(zip(("logprobs", "old_logprobs", "ref_logprobs"), one.unbind(1), strict=True))
        values |= {"advantages": torch.tensor([advantage]), "objective": objective}
        values |= {"kl_beta": torch.full((1, 2), beta), "kl_estimator": estimator}
        (out, grad), (want, want_grad) = launch(values), launch.evaluated(values, values["logprobs"])
        found, expected = (
            torch.stack([each.loss.detach(), *each.metrics.values(), *of.flatten()])
            for each, of in ((out, grad), (want, want_grad))
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@both_sources
@pytest.mark.parametrize("dual", [None, 3.0])
def test_enormous_log_ratios(monkeypatch, launch, source, dual):
    """From logits, a small ratio takes a logit far below the others. Values that overflow fp32 are inf."""
    for module in (terms, policy_step):
        monkeypatch.setattr(module, "must_check_values", lambda device: False)
    objective = gk.GSPO(clip_low=0.2, clip_high=0.2, dual_clip=dual, aggregation="sum")
    for sizes in ((-1e4, -1e3, -80.0, -30.0, 30.0, 80.0), (-1e4, 1e3, 1e4)):
        of, advantages = torch.tensor(list(itertools.product(sizes, (1.0, -1.0, 0.0)))).unbind(1)
        values = draw(source, (2,) * len(of)) | {"advantages": advantages, "objective": objective}
        values["old_logprobs"] -= of.clamp(min=0).unsqueeze(1)
        if source == "logits":
            down = of.clamp(max=0).view(-1, 1, 1).expand(-1, 2, 1)
            values["logits"].scatter_add_(-1, values["labels"].unsqueeze(-1), down)
        else:
            values["logprobs"] = values["logprobs"] + of.clamp(max=0).unsqueeze(1)
        out, grad = launch(values)
        want, want_grad = launch.evaluated(values, out.logprobs)
        # the relative error of a ratio is the absolute error of its logarithm
        near = {"rtol": 1e-6 * max(map(abs, sizes)), "atol": 0}
        torch.testing.assert_close(grad, want_grad, **near)
        torch.testing.assert_close(out.loss, want.loss, **near)
        torch.testing.assert_close(out.metrics, want.metrics, **near)
    # exp(100) doesn't fit fp32; 1e-20 times it does
    values = draw(source, (2,)) | {"advantages": torch.tensor([-1e-20]), "objective": objective}
    values["old_logprobs"] -= 100.0
    if dual is None:
        out, grad = launch(values)
        assert out.loss.item() == pytest.approx(2e-20 * math.exp(100.0), rel=1e-2) and grad.isfinite().all()


def test_small_log_ratios_keep_their_digits_in_a_kl(launch):
    """The gradient is 1 - exp(-d), about d for small d; computed like that it would cancel."""
    d = torch.tensor([[1e-3, -1e-6, 1e-9, -1e-12, 0.3, -0.49, 0.51, 40.0]], dtype=FP64)
    values = {
        "logprobs": d - 45,
        "old_logprobs": None,
        "advantages": torch.zeros(1),
        "ref_logprobs": d - 45 - d,
    }
    d = values["logprobs"] - values["ref_logprobs"]
    _, grad = launch(values | {"kl_beta": 1.0, "normalizer": 1.0, "objective": gk.GRPO(aggregation="sum")})
    torch.testing.assert_close(grad.cpu(), -torch.expm1(-d), rtol=2e-15, atol=0)


# --- which tokens count


@pytest.mark.parametrize(
    ("source", "objective"), [("logits", gk.GSPO()), ("logprobs", gk.GSPO()), ("logprobs", gk.GRPO())]
)
@pytest.mark.parametrize("normalizer", [None, 0.0])
def test_nothing_counted(monkeypatch, launch, source, objective, normalizer):
    """Results do not depend on what their memory held before, here NaN."""
    new_empty = torch.Tensor.new_empty

    def full_of_nan(self, *size, **options):
        values = new_empty(self, *size, **options)
        return values.fill_(math.nan) if values.is_floating_point() else values

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    # for normalizer=0
    monkeypatch.setattr("gspo_kernels.arguments.values.must_check_values", lambda device: False)
    normalizer = None if normalizer is None else torch.tensor(normalizer)
    values = draw(source, (2, 2)) | {"objective": objective, "normalizer": normalizer}
    if source == "logprobs":
        values |= {"ref_logprobs": values["old_logprobs"], "kl_beta": 0.1}
    masked = {"loss_mask": torch.zeros(2, 2, dtype=torch.bool)}
    no_tokens, no_sequences = (
        {k: v[index[: v.ndim]] if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        for index in ((slice(2), slice(0)), (slice(0), slice(2)))
    )
    for case in (values | masked, no_tokens, no_sequences):
        out, grad = launch(case)
        assert out.loss == 0 and (grad == 0).all()
        metrics = torch.stack([*out.metrics.values()]).tolist()
        assert metrics == [1.0, 1.0, 1.0] + [0.0] * (len(metrics) - 3)


def tokens(length, dtype, old_dtype):
    """Draw new log-probs, old ones, a mask with holes, and advantages; new log-probs in holes are NaN."""
    logprobs = -3 * torch.rand(2, length, dtype=FP64)
    old = logprobs + 1e-2 * torch.randn(2, length, dtype=FP64)
    mask = torch.rand(2, length) < 0.7
    mask[:, -1] = torch.tensor([True, False])
    mask[1] = False
    logprobs, old = logprobs.to(dtype), old.to(old_dtype)
    logprobs[~mask] = math.nan
    logprobs[0, -1] = old[0, -1] = -math.inf
    return logprobs, mask, old, torch.ones(2)


@pytest.mark.parametrize("dtype", (FP32, FP64), ids=str)
@pytest.mark.parametrize("old_dtype", (FP32, FP64), ids=str)
def test_only_counted_tokens_are_summed_up_in_cpp(dtype, old_dtype):
    """Sums may have any length, and padding behind a sequence changes no bit."""
    eps = torch.finfo(dtype).eps
    for length in (1, 15, 17, 128, 129, 1000):
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
        logprobs, mask, old = (pad(each, (0, 75)) for each in (logprobs, mask, old))
        padded = cpp.ratio_step(logprobs, mask, RatioOperands(old, ones), OPEN)
        assert torch.equal(step.loss, padded.loss) and torch.equal(step.metrics, padded.metrics)
        assert torch.equal(step.grad_logprobs, padded.grad_logprobs[:, :length])


@pytest.mark.parametrize("backend", ("triton", "cpp", "reference"))
@pytest.mark.parametrize("labels_dtype", (torch.int64, torch.int32, None), ids=str)
def test_mask_and_labels_are_merged(backend, labels_dtype):
    """Any dtypes and strides; more tokens than a program takes, and none."""
    rng, served = generator(0), device_of(backend)
    for B, T in ((3, 700), (1, 0)):
        labels = torch.randint(-3, 9, (T, B), generator=rng).t().to(labels_dtype or torch.int64)
        keep = torch.randint(2, (B, 2 * T), generator=rng)[:, ::2]
        for dtype in (torch.bool, torch.uint8, torch.float16, FP64, torch.int32):
            counted, merged, binary = load(backend).merge_mask(
                keep.to(dtype).to(served), None if labels_dtype is None else labels.to(served), -2
            )
            want = (keep != 0) & ((labels != -2) | (labels_dtype is None))
            assert (
                counted.dtype == torch.bool and counted.is_contiguous() and torch.equal(counted.cpu(), want)
            )
            assert binary is not False and (merged is None) == (labels_dtype is None)
            if merged is not None:
                assert merged.dtype == labels_dtype and merged.is_contiguous()
                assert torch.equal(merged.cpu(), labels.masked_fill(keep == 0, -2))


@pytest.mark.parametrize("backend", ("triton", "reference"))
@pytest.mark.parametrize("per_token", (False, True, None))
@pytest.mark.parametrize("packed", (False, True))
def test_lengths_are_counted(backend, per_token, packed):
    """More tokens than a block has, an empty sequence, any strides; NaN is an advantage other than 0."""
    rng, served = generator(0), device_of(backend)
    ends = [0, 3, 3, 1400, 2100] if packed else [0, 700, 1400, 2100]
    labels = torch.randint(-1, 2, (700, 3), generator=rng).t().reshape(1 if packed else 3, -1)
    advantages = torch.randint(-1, 2, labels.shape if per_token else (len(ends) - 1,), generator=rng).float()
    advantages[0] = 0.0 if per_token and not packed else torch.nan
    counted, want = labels.flatten() != -1, []
    for b, (first, last) in enumerate(itertools.pairwise(ends)):
        of_tokens = (advantages if per_token else advantages[b].expand(labels.numel())).flatten()
        of_tokens = of_tokens[first:last][counted[first:last]]
        inactive = per_token is not None and not bool((of_tokens != 0).any())
        want.append([int(counted[first:last].sum()), int(inactive)])
    got = hidden_kernels(backend).lengths(
        labels.to(served), -1,
        torch.tensor(ends, device=served) if packed else None,
        None if per_token is None else advantages.to(served),
    )  # fmt: skip
    assert got.dtype == torch.int64 and got.t().tolist() == want
