"""What a call leaves alone, and what it returns."""

import math
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.types import METRICS
from tests.cases import KIND, device_of, generator, make_case, run
from tests.invariants.common import ENTRIES, LOSSES, SHORT, forward, leaves_of, on_device
from tests.judging import assert_equals_oracle


@pytest.mark.parametrize("terms", ["all", "on_policy"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_inputs_are_never_modified(entry, terms, backend):
    case = make_case(KIND[entry], "padded", terms, **SHORT)
    moved = on_device(backend)
    case = replace(
        case, labels=moved(case.labels.clone()), loss_mask=moved(case.loss_mask.clone()),
        old_logprobs=None if case.old_logprobs is None else moved(case.old_logprobs.clone()),
        advantages=moved(case.advantages.clone()),
        terms={name: moved(value) for name, value in case.terms.items()},
    )  # fmt: skip
    leaves = leaves_of(case, backend)
    given = {
        **leaves, **case.terms, "labels": case.labels, "loss_mask": case.loss_mask,
        "old_logprobs": case.old_logprobs, "advantages": case.advantages,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    before = {name: (value.detach().clone(), value._version) for name, value in given.items()}
    forward(case, entry, gk.GSPO(), backend, leaves)[1].loss.backward()
    for name, value in given.items():
        assert torch.equal(value.detach(), before[name][0]), name
        assert value._version == before[name][1], name


@pytest.mark.parametrize("terms", ["plain", "on_policy", "entropy"])
@pytest.mark.parametrize("entry", ["token_logprobs", "fused_policy_loss"])
def test_inplace_backward(entry, terms, backend):
    case = make_case("logits", "packed", terms, **SHORT)
    start = case.inputs["logits"].clone().to(device_of(backend)).requires_grad_()
    # a leaf's gradient is never its own storage, so the logits are an activation, as in a trainer
    logits = start * 1.0
    kept = logits.detach()
    _, output = forward(case, entry, gk.GSPO(), backend, {"logits": logits}, inplace_backward=True)
    output.loss.backward(retain_graph=True)
    expected = run(case, entry, gk.GSPO(), backend)
    assert_equals_oracle(replace(expected, grads={"logits": start.grad.cpu()}), case, gk.GSPO())
    assert torch.equal(kept, start.grad), "the gradient was not written over the logits"
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        output.loss.backward()


def small_case(objective):
    """Uniform logits over 4 tokens; three sequences of 2, 1 and 1 counted tokens, and one without."""
    labels = torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 1], [0, 0, 0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]])
    log_ratios = torch.tensor([[0.2, 9.0, 0.4], [-0.5, 9.0, 9.0], [9.0, 0.1, 9.0], [9.0, 9.0, 9.0]])
    old = -math.log(4) - log_ratios
    advantages = torch.tensor([1.0, -1.0, -1.0, 5.0])
    return labels, mask, old, advantages


E = math.exp
BY_HAND = {
    # clip 0.2: the first sequence is over 1.2, the second under 0.8, the third inside
    "GSPO": {
        "ratio/mean": (E(0.3) + E(-0.5) + E(0.1)) / 3, "ratio/min": E(-0.5), "ratio/max": E(0.3),
        "clip_fraction/low": 1 / 3, "clip_fraction/high": 1 / 3, "clip_fraction/tokens": 3 / 4,
        "kl/old": -0.05, "active_fraction": 1 / 3,
    },
    # per token; r = exp(0.2) is over 1.2 too
    "GRPO": {
        "ratio/mean": (E(0.2) + E(0.4) + E(-0.5) + E(0.1)) / 4, "ratio/min": E(-0.5), "ratio/max": E(0.4),
        "clip_fraction/low": 1 / 4, "clip_fraction/high": 2 / 4, "clip_fraction/tokens": 3 / 4,
        "kl/old": -0.05, "active_fraction": 1 / 3,
    },
    # the sequence's ratio on each of its tokens
    "GSPOToken": {
        "ratio/mean": (2 * E(0.3) + E(-0.5) + E(0.1)) / 4, "ratio/min": E(-0.5), "ratio/max": E(0.3),
        "clip_fraction/low": 1 / 4, "clip_fraction/high": 2 / 4, "clip_fraction/tokens": 3 / 4,
        "kl/old": -0.05, "active_fraction": 1 / 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("entry", LOSSES)
def test_metrics_by_hand(entry, name, backend):
    objective = getattr(gk, name)(clip_low=0.2, clip_high=0.2)
    labels, mask, old, advantages = (value.to(device_of(backend)) for value in small_case(objective))
    terms = {"loss_mask": mask, "objective": objective}
    if entry == "policy_loss":
        output = gk.policy_loss(torch.full_like(old, -math.log(4)), old, advantages, **terms)
    elif entry == "fused_policy_loss":
        logits = torch.zeros(4, 3, 4, device=old.device)
        output = gk.fused_policy_loss(logits, labels, old, advantages, backend=backend, **terms)
    else:
        hidden, weight = torch.ones(4, 3, 2, device=old.device), torch.ones(4, 2, device=old.device)
        output = gk.fused_linear_policy_loss(
            hidden, weight, labels, old, advantages, backend=backend, **terms
        )
    assert tuple(output.metrics) == METRICS
    for key, value in BY_HAND[name].items():
        assert output.metrics[key].item() == pytest.approx(value, rel=1e-6), key
    assert not output.metrics["ratio/mean"].requires_grad
    sequence_loss = (-1.2 + 0.8 + E(0.1)) / 3
    token_loss = ((-1.2 - 1.2) / 2 + 0.8 + E(0.1)) / 3
    expected = sequence_loss if name == "GSPO" else token_loss
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)


def test_metrics_of_kl_and_entropy():
    case = make_case("logits", "padded", "kl_tensor")
    _, output = forward(case, "fused_policy_loss", gk.GRPO(), return_entropy=True)
    counted = case.counted
    d = (output.logprobs - case.terms["ref_logprobs"])[counted].double()
    assert output.metrics["kl/ref"].item() == pytest.approx(float((torch.exp(-d) + d - 1).mean()), rel=1e-5)
    entropies = output.entropy[counted].double()
    assert output.metrics["entropy"].item() == pytest.approx(float(entropies.mean()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("terms", ["plain", "on_policy", "entropy"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_outputs(entry, terms, dtype):
    case = make_case(KIND[entry], "packed", terms, dtype=dtype)
    leaves, output = forward(case, entry, gk.GSPO())
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(output, gk.LossOutput) and len(output) == 4
    assert output.loss.shape == () and output.loss.dtype == stats and output.loss.requires_grad
    assert output.logprobs.shape == case.labels.shape and not output.logprobs.requires_grad
    if entry != "policy_loss":
        assert output.logprobs.dtype == stats
    assert (output.entropy is not None) == (terms == "entropy")
    if output.entropy is not None:
        assert output.entropy.shape == case.labels.shape and not output.entropy.requires_grad
    expected = set(METRICS) | ({"entropy"} if terms == "entropy" else set())
    assert set(output.metrics) == expected
    for metric in output.metrics.values():
        assert metric.shape == () and metric.dtype == stats and not metric.requires_grad
        assert metric.isfinite()
    output.loss.backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_logprobs_outputs(entropy, dtype, backend):
    device = device_of(backend)
    logits = torch.randn(2, 3, 7, generator=generator(0)).to(dtype).to(device)
    labels = torch.tensor([[0, -100, 6], [1, 2, 3]], device=device)
    output = gk.token_logprobs(logits, labels, return_entropy=entropy, backend=backend)
    assert isinstance(output, gk.TokenLogprobs) and len(output) == 2
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    assert output.logprobs.dtype == stats and output.logprobs.shape == labels.shape
    assert output.logprobs[0, 1] == 0
    assert (output.entropy is not None) == entropy
    if entropy:
        assert output.entropy.dtype == stats and output.entropy.shape == labels.shape
        assert output.entropy[0, 1] == 0
