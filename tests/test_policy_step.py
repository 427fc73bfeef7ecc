"""Steps that are a clipped ratio take one launch, and say what the evaluation of all others says."""

import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import losses, step, terms
from gspo_kernels.ops.backends import why_not
from gspo_kernels.types import NO_RATIO
from tests.cases import generator

B, T = 4, 9
STEP = {
    "gspo": gk.GSPO(),
    "dual": gk.GSPO(dual_clip=3.0),
    "tokens": gk.GSPO(aggregation="token_mean"),
    "luspo": gk.LUSPO(),
}
# bounds among ratios of 1 +- 1e-3
CLIP = {"clip_low": 8e-4, "clip_high": 6e-4}
TOKEN_STEP = {
    "grpo": gk.GRPO(**CLIP),
    "dual grpo": gk.GRPO(**CLIP, dual_clip=1.001),
    "dapo": gk.DAPO(**CLIP),
    "dr_grpo": gk.DrGRPO(**CLIP, aggregation_constant=7.0),
    "sum": gk.GRPO(**CLIP, aggregation="sum"),
}
HOLES = torch.tensor([[1.0, 0.0] * 4 + [1.0], [0.0] * 9, [1.0] * 9, [0.0, 1.0] + [0.0] * 7])
TERMS = {
    "plain": {},
    "on-policy": {"old_logprobs": None},
    "mask of numbers": {"loss_mask": HOLES},
    "entropy": {"entropy": torch.linspace(0.1, 2.0, B * T).view(B, T), "loss_mask": HOLES},
    "weights of tokens": {
        "rollout_weights": torch.linspace(0.5, 1.5, B * T).view(B, T),
        "loss_mask": HOLES,
    },
    "lengths and normalizer": {"lengths": torch.tensor([3.0, 9.0, 20.0, 1.0]), "normalizer": 7.0},
}
REFERENCE = {"ref_logprobs": torch.linspace(-2.5, -1.5, B * T).view(B, T), "loss_mask": HOLES}
BETAS = torch.tensor([[0.1], [0.0], [0.3], [0.2]], dtype=torch.float64)
KL_TERMS = {
    "reference's metric": REFERENCE,
    "k1": REFERENCE | {"kl_beta": 0.1, "kl_estimator": "k1"},
    "k2": REFERENCE | {"kl_beta": 0.1, "kl_estimator": "k2", "lengths": torch.tensor([3.0, 9.0, 20.0, 1.0])},
    "k3, entropy": REFERENCE | {"kl_beta": BETAS.expand(B, T), "entropy": -REFERENCE["ref_logprobs"]},
    "k3, on-policy": REFERENCE | {"kl_beta": 0.1, "old_logprobs": None, "normalizer": 7.0},
}
TOKEN_TERMS = {
    "advantages of tokens": {"advantages": torch.linspace(-1.0, 1.0, B * T).view(B, T), "loss_mask": HOLES},
    "zero advantages": {"advantages": torch.tensor([0.0, 1.0, -0.4, 0.0])},
}
LAID_OUT = [(False, torch.float32), (True, torch.float32), (False, torch.float64), (True, torch.bfloat16)]


def cases(objectives, terms):
    """All terms, each with two of the objectives and with two of the layouts, in turn."""
    some = itertools.cycle(objectives)
    pairs = [(next(some), term) for term in terms for _ in range(2)]
    return [(*pair, *LAID_OUT[(i + i // 4) % 4]) for i, pair in enumerate(pairs)]


CASES = cases(STEP, TERMS | KL_TERMS) + cases(TOKEN_STEP, TERMS | KL_TERMS | TOKEN_TERMS)


@pytest.fixture(params=["cpp", "triton"])
def launching(request, monkeypatch):
    """A device, and on it the backend in turn that ``policy_loss`` takes."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    reason = why_not(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(losses, "resolve", lambda *_: request.param)
    return device


def outcome(terms, objective, device="cpu", *, packed=False, dtype=torch.float32, scale=1.0):
    """Ratios lie around the clip bounds."""
    rng = generator(0)
    values = {
        "logprobs": torch.randn(B, T, generator=rng).sub(2).to(dtype),
        "advantages": torch.randn(B, generator=rng),
    }
    values["old_logprobs"] = values["logprobs"] + 1e-3 * torch.randn(B, T, generator=rng)
    values = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (values | terms).items()
    }
    if packed:
        values = {
            name: value.flatten() if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            for name, value in values.items()
        } | {"cu_seqlens": torch.arange(0, B * T + 1, T, device=device)}
    logprobs = values.pop("logprobs").requires_grad_()
    out = gk.policy_loss(logprobs, **values, objective=objective)
    (out.loss * scale).backward()
    return out, logprobs.grad


@pytest.mark.parametrize(("objective", "terms", "packed", "dtype"), CASES, ids=str)
def test_one_launch_equals_the_evaluation(monkeypatch, launching, objective, terms, packed, dtype):
    arguments = ((TERMS | TOKEN_TERMS | KL_TERMS)[terms], (STEP | TOKEN_STEP)[objective], launching)
    options = {"packed": packed, "dtype": dtype}
    with monkeypatch.context() as context:
        context.setattr(step, "evaluate", None)  # not even called
        got, grad = outcome(*arguments, **options, scale=3.0)
    monkeypatch.setattr(losses, "ratio_of", lambda *_: NO_RATIO)
    want, want_grad = outcome(*arguments, **options, scale=3.0)
    tolerance = {"rtol": 1e-12, "atol": 0} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-9}
    assert want_grad.count_nonzero() > 0 and got.metrics.keys() == want.metrics.keys()
    assert ("entropy" in got.metrics) == ("entropy" in terms)
    assert ("kl/ref" in got.metrics) == (terms in KL_TERMS)
    if objective in TOKEN_STEP and terms in TERMS and terms != "on-policy":
        assert got.metrics["clip_fraction/tokens"] > 0
    for name, value in want.metrics.items():
        torch.testing.assert_close(got.metrics[name], value, **tolerance)
    torch.testing.assert_close(got.loss, want.loss, **tolerance)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 0}  # fp32 values that may round to neighbours
    torch.testing.assert_close(grad, want_grad, **tolerance)


def halved(base):
    """Another loss with the same options."""

    class Halved(base):
        def evaluate(self, batch):
            result = super().evaluate(batch)
            return result._replace(loss=result.loss / 2)

    return Halved()


REFERENCE_KL = {"ref_logprobs": torch.full((B, T), -2.0), "kl_beta": 0.1, "kl_ratio_weighted": True}
ENTROPY_BONUS = {"entropy": torch.ones(B, T), "entropy_coef": 0.1}
BEYOND = [(objective, {}) for objective in (gk.GSPOToken(), gk.CISPO(), halved(gk.GRPO), halved(gk.GSPO))]
BEYOND += [
    (objective, terms)
    for objective in (gk.GSPO(), gk.GRPO())
    for terms in (REFERENCE_KL, ENTROPY_BONUS, {"token_weights": torch.ones(B, T)})
]


@pytest.mark.parametrize(("objective", "terms"), BEYOND)
def test_what_is_beyond_it_is_evaluated(monkeypatch, objective, terms):
    called = []
    evaluate = step.evaluate
    monkeypatch.setattr(step, "evaluate", lambda *args: called.append(1) or evaluate(*args))
    outcome(terms, objective)
    assert called == [1]


INFINITE = torch.tensor(list(itertools.product(*((x, -math.inf, math.nan) for x in (-1.0, -1.1, -1.3)))))


@pytest.mark.parametrize(
    "objective", [gk.GRPO(dual_clip=3.0), gk.GSPO(clip_low=0.2, clip_high=0.2)], ids=["tokens", "sequences"]
)
def test_infinities_are_those_of_the_evaluation(monkeypatch, launching, objective):
    """Each combination of finite, banned and undefined log-probs is a token, with a finite one in its
    sequence; where values are looked at, some of them are refused.
    """
    monkeypatch.setattr(terms, "checked_values", lambda device: False)
    monkeypatch.setattr(step, "checked_values", lambda device: False)
    tokens = torch.stack([INFINITE, torch.full_like(INFINITE, -1.5)], 2).to(launching)
    kinds = [(2.0, "k1", 0.5), (2.0, "k3", 0.5), (-2.0, "k1", 0.0), (-2.0, "k2", 0.5), (0.0, "k3", 0.5)]

    def results():
        found = []
        for one, (advantage, estimator, beta) in itertools.product(tokens.split(1), kinds):
            logprobs, old, reference = one.unbind(1)
            leaf, advantages = logprobs.clone().requires_grad_(), logprobs.new_tensor([advantage])
            kl = {"ref_logprobs": reference, "kl_beta": beta, "kl_estimator": estimator}
            out = gk.policy_loss(leaf, old, advantages, objective=objective, **kl)
            (grad,) = torch.autograd.grad(out.loss, leaf)
            found += [out.loss.detach(), *out.metrics.values(), *grad.flatten()]
        return torch.stack(found)

    got = results()
    monkeypatch.setattr(losses, "ratio_of", lambda *_: NO_RATIO)
    torch.testing.assert_close(got, results(), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_small_differences_to_the_reference_keep_their_digits(launching):
    """exp(-d) - 1 would cancel: its gradient is d for small d."""
    d = torch.tensor([[1e-3, -1e-6, 1e-9, -1e-12, 0.3, -0.49, 0.51, 40.0]], dtype=torch.float64).to(launching)
    logprobs = (d - 45).requires_grad_()
    reference = logprobs.detach() - d
    d = logprobs.detach() - reference
    terms = {"ref_logprobs": reference, "kl_beta": 1.0, "normalizer": 1.0}
    zero = torch.zeros(1, device=launching)
    objective = gk.GRPO(aggregation="sum")
    gk.policy_loss(logprobs, None, zero, **terms, objective=objective).loss.backward()
    torch.testing.assert_close(logprobs.grad, -torch.expm1(-d), rtol=2e-15, atol=0)


def test_masks_of_numbers_are_checked_whoever_reads_them(launching):
    for changes in ({}, {"entropy": torch.ones(B, T)}, {"lengths": torch.full((B,), 3.0)}):
        with pytest.raises(ValueError, match="loss_mask: expected only 0 and 1"):
            outcome({"loss_mask": HOLES * 2, **changes}, STEP["gspo"], launching)
    halves, _ = outcome({"loss_mask": HOLES.half()}, STEP["gspo"], launching)
    assert torch.equal(halves.loss, outcome({"loss_mask": HOLES}, STEP["gspo"], launching)[0].loss)


def test_a_kept_graph_has_its_gradient_again(launching):
    logprobs = (torch.randn(B, T, generator=generator(0)) - 2).to(launching).requires_grad_()
    loss = gk.policy_loss(logprobs, None, torch.ones(B, device=launching)).loss
    first, again = (torch.autograd.grad(3.0 * loss, logprobs, retain_graph=True)[0] for _ in range(2))
    with_graph = torch.autograd.grad(3.0 * loss, logprobs, create_graph=True)[0]
    last = torch.autograd.grad(3.0 * loss, logprobs)[0]
    assert first.count_nonzero() == B * T and first.data_ptr() != again.data_ptr()
    assert all(torch.equal(first, each) for each in (again, with_graph, last))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GRPO()], ids=["sequences", "tokens"])
def test_an_empty_batch_has_metrics_of_its_own(monkeypatch, launching, objective, shape):
    """Whatever the memory held that they are written to."""
    new_empty = torch.Tensor.new_empty

    def full_of_nan(self, *size, **options):
        values = new_empty(self, *size, **options)
        return values.fill_(math.nan) if values.is_floating_point() else values

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    logprobs = torch.zeros(shape, device=launching, requires_grad=True)
    calls = [(logprobs, {})]
    if shape[0] == 0:
        calls.append(
            (logprobs.flatten(), {"cu_seqlens": torch.zeros(1, dtype=torch.int32, device=launching)})
        )
    for tokens, layout in calls:
        advantages = torch.ones(shape[0], device=launching)
        out = gk.policy_loss(
            tokens, tokens.detach(), advantages, ref_logprobs=tokens.detach(), kl_beta=0.1,
            objective=objective, **layout,
        )  # fmt: skip
        assert out.loss == 0 and out.metrics["kl/ref"] == 0
        assert not any(metric.isnan() for metric in out.metrics.values())
        out.loss.backward()
