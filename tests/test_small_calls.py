"""Small calls on the CPU: what they leave to the careful way, and that both ways say the same."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp, losses
from gspo_kernels.linear import loss
from gspo_kernels.ops import values
from tests.draws import shifted_seed

B, T, V, H = 4, 6, 40, 8

needs_cpp = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason="the C++ extension is not built"
)


def batch(dtype=torch.float32, **changes):
    """A call's arguments; every sequence is active, in the middle of the clip range."""
    generator = torch.Generator().manual_seed(shifted_seed(0))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    given = {
        "hidden": normal(B, T, H),
        "weight": normal(V, H),
        "labels": torch.randint(V, (B, T), generator=generator),
        "advantages": normal(B).abs() + 0.5,
        "bias": normal(V),
    }
    logprobs = gk.linear_token_logprobs(given["hidden"], given["weight"], given["labels"], bias=given["bias"])
    return given | {"old_logprobs": logprobs.logprobs, **changes}


def outcome(given, upstream=1.0, twice=False, **options):
    """Loss and gradients of hidden states, weight and bias."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    loss = gk.fused_linear_policy_loss(**(given | leaves), **options).loss
    if twice:
        torch.autograd.grad(loss * upstream, list(leaves.values()), retain_graph=True)
    return loss.detach(), *torch.autograd.grad(loss * upstream, list(leaves.values()))


@pytest.fixture
def kept(monkeypatch):
    """Whether each call's logits stayed until its backward."""
    found, small_loss = [], loss.small_loss

    def watched(*args):
        result = small_loss(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(losses, "small_loss", watched)
    return found


@needs_cpp
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("upstream", (1.0, -3.0, 0.0))
@pytest.mark.parametrize("twice", (False, True))
def test_both_ways_agree(kept, dtype, upstream, twice):
    given = batch(dtype)
    # one clipped sequence, one without advantage
    given["old_logprobs"] = given["old_logprobs"] - torch.tensor([[0.1], [0.0], [0.0], [0.0]], dtype=dtype)
    given["advantages"][1] = 0.0
    plain = outcome(given, upstream, twice)
    careful = outcome(given, upstream, twice, schedule="aligned")
    assert kept == [True]
    # sums of V or B * T products, each rounded a few times
    for one, other in zip(plain, careful, strict=True):
        allowed = 16 * torch.finfo(dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0.0, atol=allowed)


@needs_cpp
@pytest.mark.parametrize("frozen", ("hidden", "weight", "bias"))
def test_what_needs_no_gradient_gets_none(kept, frozen):
    given = batch()
    learning = [name for name in ("hidden", "weight", "bias") if name != frozen]
    leaves = {name: given[name].clone().requires_grad_() for name in learning}
    gradients = torch.autograd.grad(
        gk.fused_linear_policy_loss(**(given | leaves)).loss, list(leaves.values())
    )
    expected = dict(zip(("hidden", "weight", "bias"), outcome(given)[1:], strict=True))
    assert kept == [True, True]
    assert all(
        torch.equal(gradient, expected[name]) for name, gradient in zip(learning, gradients, strict=True)
    )


def with_mask(given):
    return given | {"loss_mask": torch.arange(T).expand(B, T) < T - 1}


def with_nan_where_nothing_is_learned(given):
    given["hidden"][1], given["advantages"][1] = float("nan"), 0.0
    return given | {"old_logprobs": given["old_logprobs"].nan_to_num()}


def far_off_policy(given):
    return given | {"old_logprobs": given["old_logprobs"] - 60.0, "objective": gk.GSPO(1.0, 1e30)}


@needs_cpp
@pytest.mark.parametrize(
    "change",
    (
        with_mask,
        with_nan_where_nothing_is_learned,
        far_off_policy,
        lambda given: given | {"max_chunk_bytes": 4 * V * (B * T - 1)},
        lambda given: given | {"skip_inactive": "all"},
        lambda given: given | {"return_entropy": True},
        lambda given: given | {"objective": gk.GRPO(), "kl_beta": 0.1, "kl_ratio_weighted": True,
                               "ref_logprobs": given["old_logprobs"] - 0.1},
    ),
    ids=("masked", "NaN without advantage", "large ratios", "budget", "skip all", "entropy", "KL"),
)  # fmt: skip
def test_what_plain_products_could_spoil_goes_the_careful_way(kept, change):
    _, *gradients = outcome(change(batch()))
    assert not any(kept)
    for gradient in gradients[1:]:
        assert gradient.isfinite().all()


@needs_cpp
def test_logits_beyond_the_limit_are_not_kept(kept, monkeypatch):
    given = batch()
    for limit, expected in ((4 * V * B * T, True), (4 * V * B * T - 1, False)):
        monkeypatch.setattr(loss, "SMALL_BYTES", limit)
        outcome(given)
        assert kept.pop() is expected


MASKS = {
    torch.bool: (None,),
    torch.int32: (None, 2, -1),
    torch.int64: (None, 2, -1),
    torch.float32: (None, 2, -1, 0.5, float("nan"), float("inf")),
    torch.float64: (None, 2, -1, 0.5, float("nan"), float("inf")),
}
"""Dtypes of masks, and numbers that don't belong in one."""


@needs_cpp
@pytest.mark.parametrize(("dtype", "wrong"), [(dtype, wrong) for dtype in MASKS for wrong in MASKS[dtype]])
def test_masks_are_merged_alike_in_cpp_and_torch(dtype, wrong):
    labels = torch.tensor([[5, -100, 7, 3], [-100, 2, 0, 1]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0]]).to(dtype)
    if wrong is not None:
        mask[1, 2] = wrong
    for given in (labels, None):
        counted, merged, binary = cpp.merge_mask(mask, given, -100)
        expected = values._merged_in_torch(mask, given, -100)
        assert torch.equal(counted, expected[0]) and binary == expected[2] == (wrong is None)
        assert merged is expected[1] if given is None else torch.equal(merged, expected[1])
