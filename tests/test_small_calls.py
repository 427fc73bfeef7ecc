"""Small calls on the CPU: what they leave to the careful way, and that both ways say the same."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp, losses
from gspo_kernels.linear import loss
from tests.cases import generator

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason="the C++ extension is not built"
)
B, T, V, H = 4, 6, 40, 8
LEAVES = ("hidden", "weight", "bias")


def batch(dtype=torch.float32):
    """A call's arguments; every sequence is active, in the middle of the clip range."""
    rng = generator(0)
    call = {
        name: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
        for name, shape in (("hidden", (B, T, H)), ("weight", (V, H)), ("bias", (V,)))
    }
    call["labels"] = torch.randint(V, (B, T), generator=rng)
    call["old_logprobs"] = gk.linear_token_logprobs(**call).logprobs
    return call | {"advantages": 0.5 + torch.rand(B, generator=rng).to(dtype)}


def outcome(call, upstream=1.0, twice=False, **options):
    """Loss and gradients of hidden states, weight and bias."""
    leaves = {name: call[name].clone().requires_grad_() for name in LEAVES}
    total = gk.fused_linear_policy_loss(**(call | leaves), **options).loss
    if twice:
        torch.autograd.grad(total * upstream, list(leaves.values()), retain_graph=True)
    return total.detach(), *torch.autograd.grad(total * upstream, list(leaves.values()))


@pytest.fixture
def kept(monkeypatch):
    """Whether each call's logits stayed until its backward."""
    found, small_loss = [], losses.small_loss

    def watched(*args):
        result = small_loss(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(losses, "small_loss", watched)
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(("upstream", "twice"), ((1.0, False), (-3.0, True), (0.0, False)))
def test_both_ways_agree(kept, dtype, upstream, twice):
    call = batch(dtype)
    # one clipped sequence, one without advantage
    call["old_logprobs"][0] -= 0.1
    call["advantages"][1] = 0.0
    plain = outcome(call, upstream, twice)
    careful = outcome(call, upstream, twice, schedule="aligned")
    assert kept == [True, False]
    # sums of V or B * T products, each rounded a few times
    for one, other in zip(plain, careful, strict=True):
        allowed = 16 * torch.finfo(dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0.0, atol=allowed)


def with_nan_where_nothing_is_learned(call):
    call["hidden"][1], call["advantages"][1] = float("nan"), 0.0
    return {}


CAREFUL = {
    "masked": lambda call: {"loss_mask": torch.arange(T).expand(B, T) < T - 1},
    "NaN without advantage": with_nan_where_nothing_is_learned,
    "large ratios": lambda call: {"old_logprobs": call["old_logprobs"] - 60, "objective": gk.GSPO(1.0, 1e30)},
    "budget": lambda call: {"max_chunk_bytes": 4 * V * (B * T - 1)},
    "skip all": lambda call: {"skip_inactive": "all"},
    "entropy": lambda call: {"return_entropy": True},
    "KL": lambda call: {"kl_beta": 0.1, "ref_logprobs": call["old_logprobs"] - 0.1},
}


@pytest.mark.parametrize("change", CAREFUL)
def test_what_plain_products_could_spoil_goes_the_careful_way(kept, change):
    call = batch()
    changes = CAREFUL[change](call)
    _, _, *gradients = outcome(call | changes)
    assert not any(kept)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_logits_beyond_the_limit_are_not_kept(kept, monkeypatch):
    for limit, expected in ((4 * V * B * T, True), (4 * V * B * T - 1, False)):
        monkeypatch.setattr(loss, "SMALL_BYTES", limit)
        outcome(batch())
        assert kept.pop() is expected
