"""The same bits from run to run, inert masked positions, and ratios and logits at the ends of their range."""

import importlib.util
import itertools
import math
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import sequence_ratio, step, terms
from tests.cases import (
    FUSED_ENTRIES,
    KIND,
    LAYOUTS,
    device_of,
    for_objective,
    generator,
    make_case,
    offsets,
    poisoned,
    run,
)
from tests.invariants.common import LOSSES, SHORT, assert_same_bits, forward


@pytest.mark.parametrize("terms", ["weighted", "on_policy"])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_bit_identical_from_run_to_run(entry, terms, backend):
    case = make_case(KIND[entry], "packed", terms, vocabulary=1009)
    assert_same_bits(*(run(case, entry, gk.GSPO(), backend) for _ in range(2)))


def test_bit_identical_with_several_threads():
    case = make_case("linear", "packed", "all", vocabulary=4097, width=64, lengths=(40, 50, 60))
    assert_same_bits(*(run(case, "fused_linear_policy_loss", gk.GSPO(), "cpp") for _ in range(2)))


@pytest.mark.parametrize("poison", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("terms", ["weighted", "kl_tensor", "entropy_tensor", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO", "Linear"])
def test_masked_positions_of_policy_loss_are_inert(name, layout, terms, poison):
    objective = getattr(gk, name)()
    terms += "+token_advantages" if name in ("GSPOToken", "GRPO") else ""
    case = for_objective(make_case("logprobs", layout, terms), objective)
    if layout == "padded" and case.loss_mask is None:
        case = replace(case, loss_mask=case.counted)
    spoiled = poisoned(case, poison)
    assert not spoiled.inputs["logprobs"].isfinite().all() or case.counted.all()
    clean, got = run(case, "policy_loss", objective), run(spoiled, "policy_loss", objective)
    assert torch.equal(clean.loss, got.loss)
    for key, grad in got.grads.items():
        assert torch.equal(grad, clean.grads[key]), key
        assert (grad[~case.counted] == 0).all()


@pytest.mark.parametrize("poison", ["mixed"])
@pytest.mark.parametrize("terms", ["weighted", "all"])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_masked_positions_are_inert(entry, terms, poison, backend):
    case = make_case(KIND[entry], "padded", terms, **SHORT)
    spoiled = poisoned(case, poison)
    assert not spoiled.inputs["logits" if KIND[entry] == "logits" else "hidden"].isfinite().all()
    clean, got = run(case, entry, gk.GSPO(), backend), run(spoiled, entry, gk.GSPO(), backend)
    assert_same_bits(got, clean)
    assert all(grad.isfinite().all() for grad in got.grads.values())


@pytest.mark.parametrize("schedule", ["known", "aligned", "deferred", "two_pass", "auto"])
@pytest.mark.parametrize("skip_inactive", ["none", "backward"])
def test_masked_hidden_states_are_inert_in_every_schedule(schedule, skip_inactive, backend):
    case = make_case("linear", "packed", "holes", **SHORT)
    objective = gk.GRPO() if schedule == "known" else gk.GSPO()
    options = {"schedule": schedule, "skip_inactive": skip_inactive, "max_chunk_bytes": 4 * 61 * 4}
    got = run(poisoned(case, math.nan), "fused_linear_policy_loss", objective, backend, **options)
    assert_same_bits(got, run(case, "fused_linear_policy_loss", objective, backend, **options))


@pytest.mark.parametrize("name", ["GSPO", "Linear"])
def test_masked_positions_are_inert_on_policy(name, backend):
    objective = getattr(gk, name)()
    case = for_objective(make_case("logits", "padded", "on_policy", **SHORT), objective)
    got = run(poisoned(case, math.nan), "fused_policy_loss", objective, backend)
    assert_same_bits(got, run(case, "fused_policy_loss", objective, backend))


def clipped_value(advantage, log_ratio, low, high, dual):
    """Loss of one sequence of one token, and its coefficient; fp32's infinities."""
    if advantage == 0:
        return 0.0, 0.0
    if advantage > 0 and log_ratio > math.log1p(high):
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and log_ratio < math.log1p(-low):
        return -(1 - low) * advantage, 0.0
    if advantage < 0 and dual is not None and log_ratio > math.log(dual):
        return -dual * advantage, 0.0
    ratio = math.exp(log_ratio) if log_ratio < 700 else math.inf
    value = -ratio * advantage
    value = math.copysign(math.inf, value) if abs(value) > torch.finfo(torch.float32).max else value
    return value, value


EXTREMES = (-1e4, -200.0, -87.0, 0.0, 87.0, 200.0, 1e4)


@pytest.mark.parametrize("log_ratio", EXTREMES)
@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_extreme_ratios(name, dual, advantage, log_ratio):
    objective = getattr(gk, name)(dual_clip=dual)
    # neither side is above 0
    logprobs = torch.tensor([[-1.0 + min(log_ratio, 0.0)], [-2.0]]).requires_grad_()
    old = torch.tensor([[-1.0 - max(log_ratio, 0.0)], [-2.0]])
    output = gk.policy_loss(logprobs, old, torch.tensor([advantage, 1.0]), objective=objective, normalizer=1)
    output.loss.backward()
    value, coefficient = clipped_value(advantage, log_ratio, objective.clip_low, objective.clip_high, dual)
    assert output.loss.item() == pytest.approx(value - 1.0, rel=1e-6)
    # the neighbour's gradient is its own, whatever happens beside it
    assert logprobs.grad.flatten().tolist() == pytest.approx([coefficient, -1.0], rel=1e-6)
    assert not any(metric.isnan() for metric in output.metrics.values())


@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
@pytest.mark.parametrize("name", ["GSPO", "GRPO"])
def test_extreme_ratios_fused(monkeypatch, name, entry, backend):
    """All combinations in one batch: each sequence's gradient is as if it were alone."""
    for module in (terms, step, sequence_ratio):  # old log-probs that go with low ratios are refused
        monkeypatch.setattr(module, "checked_values", lambda device: False)
    if backend == "triton" and (name, entry) != ("GSPO", "fused_policy_loss"):
        backend = "cpp"
    objective = getattr(gk, name)()
    pairs = list(itertools.product(EXTREMES, (1.5, -1.5, 0.0)))
    case = make_case(
        KIND[entry], "packed", "plain", lengths=(1,) * len(pairs), bias=False,
        log_s=tuple(log_ratio for log_ratio, _ in pairs), advantages=tuple(a for _, a in pairs),
    )  # fmt: skip
    leaves, output = forward(case, entry, objective, backend)
    output.loss.backward()
    expected = [
        clipped_value(advantage, log_ratio, objective.clip_low, objective.clip_high, None)
        for log_ratio, advantage in pairs
    ]
    assert output.loss.item() == math.inf
    grad = leaves["logits" if "logits" in leaves else "hidden"].grad.cpu()
    assert not grad.isnan().any()
    for (_, coefficient), row in zip(expected, grad, strict=True):
        if coefficient == 0:
            assert (row == 0).all()
        elif math.isinf(coefficient):
            assert not row.isfinite().all()
        else:
            # exp(-1e4) and exp(-200) are zeros of fp32
            assert row.isfinite().all() and (row != 0).any() == (abs(coefficient) > 1e-40)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_extreme_kl(weighted, estimator, sign):
    logprobs = (torch.tensor([[-1.0, -2.0]]) + min(sign * 1e4, 0.0)).requires_grad_()
    reference = logprobs.detach() - sign * torch.tensor([[1e4, 0.0]])
    output = gk.policy_loss(
        logprobs, logprobs.detach() - sign * 1e4, torch.tensor([0.0]), ref_logprobs=reference, kl_beta=0.5,
        kl_estimator=estimator, kl_ratio_weighted=weighted,
    )  # fmt: skip
    output.loss.backward()
    assert not output.loss.isnan() and not logprobs.grad.isnan().any()
    if not weighted and (estimator, sign) != ("k3", -1):
        value = {"k1": sign * 1e4, "k2": 5e7, "k3": 1e4 - 1}[estimator]
        assert output.loss.item() == pytest.approx(0.25 * value, rel=1e-6)
        assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_equality_with_a_bound_is_inside(name, advantage):
    objective = getattr(gk, name)(clip_low=0.5, clip_high=1.0)
    bound = math.log1p(1.0) if advantage > 0 else math.log1p(-0.5)
    logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -bound, dtype=torch.float64)
    for shift, inside in ((0.0, True), (math.copysign(1e-12, advantage), False)):
        logprobs.grad = None
        output = gk.policy_loss(logprobs, old - shift, torch.tensor([advantage]), objective=objective)
        output.loss.backward()
        assert (logprobs.grad.item() != 0) == inside
        clipped = output.metrics["clip_fraction/low"] + output.metrics["clip_fraction/high"]
        assert clipped.item() == (0.0 if inside else 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 1009, 4097])
def test_logprobs_are_never_positive(vocabulary, dtype, backend):
    peaks = (0.0, 5.0, 20.0, 200.0, 3e4)
    logits = torch.randn(len(peaks), 1, vocabulary, generator=generator(0)).to(dtype)
    labels = torch.full((len(peaks), 1), vocabulary - 1)
    for row, peak in enumerate(peaks):
        logits[row, 0, -1] += peak
    device = device_of(backend)
    leaf = logits.to(device).requires_grad_()
    output = gk.token_logprobs(leaf, labels.to(device), return_entropy=True, backend=backend)
    assert (output.logprobs <= 0).all() and (output.entropy >= 0).all()
    assert output.logprobs.isfinite().all() and output.entropy.isfinite().all()
    if vocabulary == 1:
        assert (output.logprobs == 0).all() and (output.entropy == 0).all()
    (output.logprobs.sum() + output.entropy.sum()).backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("vocabulary", [61, 4097])
def test_logits_of_minus_infinity(vocabulary, backend):
    """A whole first block without probability, as a constrained decoder leaves it."""
    logits = torch.randn(2, 1, vocabulary, generator=generator(0))
    logits[:, :, : vocabulary - 3] = -math.inf
    device = device_of(backend)
    leaf = logits.to(device).requires_grad_()
    labels = torch.full((2, 1), vocabulary - 2, device=device)
    output = gk.token_logprobs(leaf, labels, return_entropy=True, backend=backend)
    (output.logprobs.sum() + output.entropy.sum()).backward()
    tail = logits[:, :, -3:].double()
    expected = torch.log_softmax(tail, -1)
    assert torch.allclose(output.logprobs.cpu().double(), expected[..., 1], rtol=0, atol=1e-6)
    assert torch.allclose(
        output.entropy.cpu().double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-6
    )
    assert leaf.grad.isfinite().all() and (leaf.grad[:, :, :-3] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize("linear", [False, True])
def test_ratio_is_exactly_one_on_the_identical_path(linear, name, layout, backend):
    if backend == "triton" and layout == "padded":
        layout = "packed"
    case = make_case("linear" if linear else "logits", layout, "holes", vocabulary=1009, **SHORT)
    entry = "fused_linear_policy_loss" if linear else "fused_policy_loss"
    objective = getattr(gk, name)()
    with torch.no_grad():
        old = forward(case, entry, objective, backend)[1].logprobs.cpu()
    _, output = forward(replace(case, old_logprobs=old), entry, objective, backend)
    assert output.metrics["ratio/min"].item() == output.metrics["ratio/max"].item() == 1.0
    assert output.metrics["ratio/mean"].item() == 1.0 and output.metrics["kl/old"].item() == 0.0
    assert output.metrics["clip_fraction/tokens"].item() == 0.0
    composed = "linear_token_logprobs" if linear else "token_logprobs"
    # over the same rows: a product over more of them may round otherwise
    same = replace(case, labels=case.labels.masked_fill(~case.counted, case.ignore_index))
    assert torch.equal(run(same, composed, objective, backend).logprobs, old)


def test_ratio_is_one_through_any_other_path_of_ours():
    def usual(layout):
        # logits of a language model's size: the last bit of fp32 at 25 is 2e-6 already
        case = make_case("linear", layout, lengths=(6, 8, 12), vocabulary=1009, width=32)
        hidden = case.inputs["hidden"] * (2.0 / math.sqrt(32))
        return replace(case, inputs={**case.inputs, "hidden": hidden})

    packed, padded = usual("packed"), usual("padded")
    assert torch.equal(packed.inputs["hidden"], padded.inputs["hidden"][padded.counted])
    found = {}
    for name in ("reference", "cpp", *(("triton",) if importlib.util.find_spec("triton") else ())):
        device = device_of(name)
        sizes = (None, 1009 * 4, 7 * 1009 * 4)
        interpreted = name == "triton" and device.type == "cpu"
        for case, size in itertools.product((packed, padded), sizes[:1] if interpreted else sizes):
            moved = [value.to(device) for value in (*case.inputs.values(), case.labels)]
            hidden, weight, bias, labels = moved
            output = gk.linear_token_logprobs(
                hidden, weight, labels, bias=bias, max_chunk_bytes=size, backend=name
            )
            shape = "padded" if case is padded else "packed"
            found[name, shape, size] = output.logprobs.cpu()[case.counted]
            if size is None:
                logits = torch.nn.functional.linear(hidden, weight, bias)
                output = gk.token_logprobs(logits, labels, backend=name)
                found[name, shape, "logits"] = output.logprobs.cpu()[case.counted]
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        log_s = torch.stack([part.double().mean() for part in (a - b).split((6, 8, 12))])
        assert log_s.abs().max() <= 1e-6, (one, other, log_s)


def empty_case(kind, what):
    shape, cu_seqlens, batch = {
        "no sequences": ((0, 4), None, 0),
        "no positions": ((3, 0), None, 3),
        "no tokens": ((0,), offsets((0, 0)), 2),
        "nothing at all": ((0,), offsets(()), 0),
        "all masked": ((2, 3), None, 2),
        "all masked, packed": ((5,), offsets((2, 0, 3)), 3),
    }[what]
    case = make_case(kind, "packed", "plain")
    rows = {
        name: value if name in ("weight", "bias") else torch.zeros(*shape, *value.shape[1:])
        for name, value in case.inputs.items()
    }
    return replace(
        case, labels=torch.zeros(shape, dtype=torch.int64), inputs=rows, old_logprobs=torch.zeros(shape),
        advantages=torch.ones(batch), cu_seqlens=cu_seqlens, loss_mask=torch.zeros(shape, dtype=torch.bool),
    )  # fmt: skip


EMPTY = ("no sequences", "no positions", "no tokens", "nothing at all", "all masked", "all masked, packed")


@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO", "Linear"])
@pytest.mark.parametrize("entry", LOSSES)
def test_nothing_to_do(entry, name, what, backend):
    objective = getattr(gk, name)()
    case = for_objective(empty_case(KIND[entry], what), objective)
    for old in (case.old_logprobs, None):
        leaves, output = forward(replace(case, old_logprobs=old), entry, objective, backend)
        assert output.loss.item() == 0.0 and output.loss.requires_grad
        output.loss.backward()
        for leaf in leaves.values():
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape and (leaf.grad == 0).all()
        assert output.logprobs.shape == case.labels.shape
        assert all(metric.isfinite() for metric in output.metrics.values()), output.metrics


@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_nothing_to_do_with_every_term(entry):
    case = make_case(KIND[entry], "padded", "all")
    case = replace(case, loss_mask=torch.zeros_like(case.loss_mask))
    result = run(case, entry, gk.GSPO())
    assert result.loss.item() == 0.0 and all((grad == 0).all() for grad in result.grads.values())
