"""Steps that are a clipped sequence ratio take one launch, and say what the evaluation of all others says."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import losses, step
from gspo_kernels.ops.backends import why_not
from tests.cases import generator

B, T = 4, 9
STEP = {
    "gspo": gk.GSPO(),
    "dual": gk.GSPO(dual_clip=3.0),
    "tokens": gk.GSPO(aggregation="token_mean"),
    "luspo": gk.LUSPO(),
}
HOLES = torch.tensor([[1.0] * 5 + [0.0] * 4, [0.0] * 9, [1.0] * 9, [0.0, 1.0] * 4 + [1.0]])
TERMS = {
    "plain": {},
    "on-policy": {"old_logprobs": None},
    "mask of numbers": {"loss_mask": HOLES},
    "entropy": {"entropy": torch.linspace(0.1, 2.0, B * T).view(B, T), "loss_mask": HOLES},
    "token weights of the rollout": {"rollout_weights": torch.linspace(0.5, 1.5, B * T).view(B, T)},
    "lengths and normalizer": {"lengths": torch.tensor([3.0, 9.0, 20.0, 1.0]), "normalizer": 7.0},
}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("objective", STEP)
def test_one_launch_equals_the_evaluation(monkeypatch, launching, objective, terms, packed, dtype):
    arguments, options = (TERMS[terms], STEP[objective], launching), {"packed": packed, "dtype": dtype}
    with monkeypatch.context() as context:
        context.setattr(step, "evaluate", None)  # not even called
        got, grad = outcome(*arguments, **options, scale=3.0)
    monkeypatch.setattr(step, "sequence_form", lambda *_: None)
    want, want_grad = outcome(*arguments, **options, scale=3.0)
    tolerance = {"rtol": 1e-12, "atol": 0} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-9}
    assert want_grad.count_nonzero() > 0 and got.metrics.keys() == want.metrics.keys()
    assert ("entropy" in got.metrics) == (terms == "entropy")
    for name, value in want.metrics.items():
        torch.testing.assert_close(got.metrics[name], value, **tolerance)
    torch.testing.assert_close(got.loss, want.loss, **tolerance)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 0}  # fp32 values that may round to neighbours
    torch.testing.assert_close(grad, want_grad, **tolerance)


BEYOND = {
    "kl": {"ref_logprobs": torch.zeros(B, T) - 2.0, "kl_beta": 0.1},
    "a reference's metric": {"ref_logprobs": torch.zeros(B, T) - 2.0},
    "entropy bonus": {"entropy": torch.ones(B, T), "entropy_coef": 0.1},
    "token weights": {"token_weights": torch.ones(B, T)},
}


@pytest.mark.parametrize("terms", BEYOND)
def test_terms_beyond_it_are_evaluated(monkeypatch, terms):
    called = []
    evaluate = step.evaluate
    monkeypatch.setattr(step, "evaluate", lambda *args: called.append(1) or evaluate(*args))
    outcome(BEYOND[terms], gk.GSPO())
    assert called == [1]
