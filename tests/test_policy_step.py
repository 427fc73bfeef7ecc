"""Steps that are a clipped sequence ratio take one launch, and say what the evaluation of all others says."""

import pytest
import torch
from cases import generator

import gspo_kernels as gk
from gspo_kernels import policy_step
from gspo_kernels.ops.sequence_ratio import has_single_launch

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
    "entropy": {"entropy": torch.linspace(0.1, 2.0, B * T).view(B, T)},
    "token weights of the rollout": {"rollout_weights": torch.linspace(0.5, 1.5, B * T).view(B, T)},
    "lengths and normalizer": {"lengths": torch.tensor([3.0, 9.0, 20.0, 1.0]), "normalizer": 7.0},
}


def outcome(terms, objective, *, packed=False, dtype=torch.float32, scale=1.0):
    rng = generator(0)
    values = {
        "logprobs": torch.randn(B, T, generator=rng).sub(2).to(dtype),
        "advantages": torch.randn(B, generator=rng),
    }
    values["old_logprobs"] = values["logprobs"] + 1e-3 * torch.randn(B, T, generator=rng)
    values |= terms
    if packed:
        values = {
            name: value.flatten() if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            for name, value in values.items()
        } | {"cu_seqlens": torch.arange(0, B * T + 1, T)}
    logprobs = values.pop("logprobs").requires_grad_()
    out = gk.policy_loss(logprobs, **values, objective=objective)
    (out.loss * scale).backward()
    return out, logprobs.grad


@pytest.fixture
def only_evaluated(monkeypatch):
    """Sends every step through `policy.evaluate`."""

    def switch():
        monkeypatch.setattr(policy_step, "sequence_form", lambda *_: None)

    return switch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("objective", STEP)
def test_one_launch_equals_the_evaluation(monkeypatch, only_evaluated, objective, terms, packed, dtype):
    if not has_single_launch(gk.ops.backends.resolve("auto", torch.device("cpu"))):
        pytest.skip("no backend for this device has it")
    arguments, options = (TERMS[terms], STEP[objective]), {"packed": packed, "dtype": dtype, "scale": 3.0}
    with monkeypatch.context() as context:
        context.setattr(policy_step, "evaluate", None)  # not even called
        got, grad = outcome(*arguments, **options)
    only_evaluated()
    want, want_grad = outcome(*arguments, **options)
    tolerance = {"rtol": 1e-12, "atol": 0} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-9}
    assert want_grad.count_nonzero() > 0 and got.metrics.keys() == want.metrics.keys()
    assert ("entropy" in got.metrics) == (terms == "entropy")
    for name, value in want.metrics.items():
        torch.testing.assert_close(got.metrics[name], value, **tolerance)
    torch.testing.assert_close(got.loss, want.loss, **tolerance)
    torch.testing.assert_close(grad, want_grad, **(tolerance if dtype != torch.bfloat16 else {}))


BEYOND = {
    "kl": {"ref_logprobs": torch.zeros(B, T) - 2.0, "kl_beta": 0.1},
    "a reference's metric": {"ref_logprobs": torch.zeros(B, T) - 2.0},
    "entropy bonus": {"entropy": torch.ones(B, T), "entropy_coef": 0.1},
    "token weights": {"token_weights": torch.ones(B, T)},
}


@pytest.mark.parametrize("terms", BEYOND)
def test_terms_beyond_it_are_evaluated(monkeypatch, terms):
    called = []
    evaluate = policy_step.evaluate
    monkeypatch.setattr(policy_step, "evaluate", lambda *args: called.append(1) or evaluate(*args))
    outcome(BEYOND[terms], gk.GSPO())
    assert called == [1]
