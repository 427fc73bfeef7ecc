"""A fake device without fp64, such as Apple's MPS: any fp64 tensor raises an error."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gspo_kernels as gk
from gspo_kernels.backends import dispatch as backends
from gspo_kernels.core import exact
from gspo_kernels.core import operators as library
from tests.cases import generator, make_case, run
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import EVERY, NO_DEFAULTS, make_batch


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                raise TypeError(f"{func}: fp64 on a device that has none")
        if "segment_reduce" in str(func):
            raise NotImplementedError("MPS has no segment_reduce")
        return result


@pytest.fixture
def without_fp64(monkeypatch):
    monkeypatch.setattr(exact, "WITHOUT_FP64", ("cpu",))
    monkeypatch.setattr(backends, "automatic", lambda device: "reference")
    monkeypatch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})
    # an operator runs as plain calls, which are seen, instead of as one opaque call
    monkeypatch.setattr(library, "can_bypass_dispatcher", lambda _: True)
    return _Refusing()


@pytest.mark.parametrize("schedule", ["known", "aligned", "deferred", "two_pass", "frozen"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_schedules(without_fp64, layout, schedule):
    case = make_case("linear", layout, "on_policy" if schedule == "known" else "holes")
    with without_fp64:
        got = run(case, "fused_linear_policy_loss", gk.GSPO(), "reference", schedule=schedule)
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("name", gk.objectives.__all__)
def test_objectives(without_fp64, name):
    """Losses and gradients without fp64 are close to those in fp64; half of the batches are packed."""
    objective = EVERY[name](**({"aggregation_constant": 8.0} if name in NO_DEFAULTS else {}))
    batch = make_batch(objective)
    batch = batch.packed() if len(name) % 2 else batch
    here = batch.each(lambda x: x.float() if x.is_floating_point() else x)
    there = here.each(lambda x: x.double() if x.is_floating_point() else x)

    def computed(batch):
        leaf = batch.logprobs.clone().requires_grad_()
        loss = batch.call(gk.policy_loss, objective, logprobs=leaf).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    with without_fp64:
        got = computed(here)
    for value, want in zip(got, computed(there), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=2e-4, atol=1e-6)


def test_the_rest(without_fp64):
    """Advantages, rollout weights, selected log-probs and distillation work without fp64, too."""
    rng = generator(0)
    rewards, logits = torch.rand(8, generator=rng), torch.randn(2, 4, 32, generator=rng).requires_grad_()
    old, ids = torch.randn(2, 4, generator=rng) - 4, torch.randint(32, (2, 4, 3), generator=rng)
    mask = torch.ones(2, 4)
    plain = gk.advantages.group_normalized(rewards, group_size=4)
    with without_fp64:
        torch.testing.assert_close(gk.advantages.group_normalized(rewards, group_size=4), plain)
        gk.rollout_weights(old + 0.1, old, loss_mask=mask, high=2.0)
        gk.selected_logprobs(logits, ids, backend="reference").logprobs.sum().backward()
        gk.distillation_loss(logits, logits.detach().flip(-1), backend="reference").loss.backward()


def test_compensated_sums():
    """Errors are RMS over many sums of 16,385 tokens, against fp64 and relative to the mean size of a sum."""
    values = torch.randn(200, 16_385, generator=generator(0))
    true = values.double().sum(-1)
    plain, compensated, rounded = (
        float((sums.double() - true).square().mean().sqrt() / true.abs().mean())
        for sums in (values.sum(-1), exact.compensated_sum(values), true.float())
    )
    assert compensated < 1.01 * rounded < plain / 3, (plain, compensated, rounded)
