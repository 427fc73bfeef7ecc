"""Rollout weights and the off-policy mask against plain loops."""

import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import LAYOUTS, generator, make_case, offsets, replace, run

LENGTHS = (3, 0, 1, 4)
BOUNDS = [(None, 1.1), (0.9, None), (0.9, 1.1), (0.0, 0.0)]


def example(layout, dtype=torch.float64):
    rng = generator(0)
    tokens = sum(LENGTHS)
    old = -torch.rand(tokens, generator=rng, dtype=torch.float64)
    rollout = old - 0.3 * torch.randn(tokens, generator=rng, dtype=torch.float64)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[1], mask[3] = False, False  # a hole; the third sequence has nothing left
    if layout == "packed":
        return old.to(dtype), rollout.to(dtype), mask, offsets(LENGTHS)
    padded = []
    for value, fill in ((old, -9.0), (rollout, 5.0), (mask, False)):
        out = torch.full((len(LENGTHS), 5), fill, dtype=value.dtype)
        for i, (a, b) in enumerate(itertools.pairwise(offsets(LENGTHS).tolist())):
            out[i, : b - a] = value[a:b]
        padded.append(out)
    return padded[0].to(dtype), padded[1].to(dtype), padded[2], None


def bounded(weight, mode, low, high):
    if mode == "truncate":
        weight = weight if low is None else max(weight, low)
        return weight if high is None else min(weight, high)
    inside = (low is None or weight >= low) and (high is None or weight <= high)
    return weight if inside else 0.0


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_level_equals_the_loop(layout, mode, low, high):
    old, rollout, mask, cu_seqlens = example(layout)
    got = gk.rollout_weights(
        old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, mode=mode, low=low, high=high
    )
    expected = [
        bounded(math.exp(a - b), mode, low, high) if counted else 1.0
        for a, b, counted in zip(
            old.flatten().tolist(), rollout.flatten().tolist(), mask.flatten().tolist(), strict=True
        )
    ]
    assert got.shape == old.shape
    assert got.flatten().tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequence_level_equals_the_loop(layout, reduce, mode, low, high):
    old, rollout, mask, cu_seqlens = example(layout)
    got = gk.rollout_weights(
        old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, level="sequence", reduce=reduce, mode=mode,
        low=low, high=high,
    )  # fmt: skip
    expected = []
    for sequence in oracle.sequences(mask, cu_seqlens):
        log_ratios = (sequence.pick(old) - sequence.pick(rollout)).tolist()
        if not log_ratios:
            expected.append(1.0)
            continue
        total = sum(log_ratios) / (len(log_ratios) if reduce == "mean" else 1)
        expected.append(bounded(math.exp(total), mode, low, high))
    assert got.tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_on_a_bound_is_kept(level):
    same = torch.tensor([[-1.0], [-2.0]])
    for bounds in ({"low": 1.0}, {"high": 1.0}, {"low": 1.0, "high": 1.0}):
        assert (gk.rollout_weights(same, same, level=level, mode="mask", **bounds) == 1).all()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_are_inert(level, mode):
    old, rollout, mask, _ = example("padded")
    clean = gk.rollout_weights(old, rollout, loss_mask=mask, level=level, mode=mode, high=1.1)
    for poison in (math.nan, math.inf, -math.inf):
        got = gk.rollout_weights(
            old.masked_fill(~mask, poison), rollout.masked_fill(~mask, math.nan), loss_mask=mask, level=level,
            mode=mode, high=1.1,
        )  # fmt: skip
        assert torch.equal(got, clean)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_overflow_is_bounded(level):
    old, rollout = torch.tensor([[0.0, -2e4]]), torch.tensor([[-1e4, -1e4]])
    for a, b, truncated, masked in (
        (old[:, :1], rollout[:, :1], 2.0, 0.0),
        (old[:, 1:], rollout[:, 1:], 0.0, 0.0),
    ):
        assert gk.rollout_weights(a, b, level=level, high=2.0).item() == truncated
        assert gk.rollout_weights(a, b, level=level, mode="mask", low=1e-3, high=2.0).item() == masked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_dtype_and_no_gradient(level, dtype):
    old, rollout, mask, cu_seqlens = example("packed", dtype)
    got = gk.rollout_weights(
        old.requires_grad_(), rollout.requires_grad_(), loss_mask=mask, cu_seqlens=cu_seqlens, level=level,
        high=2.0,
    )  # fmt: skip
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not got.requires_grad


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_fit_the_losses(layout, level, objective):
    old, rollout, mask, cu_seqlens = example(layout)
    weights = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, level=level, high=1.05)
    logprobs = (old + 0.0).requires_grad_()
    output = gk.policy_loss(
        logprobs, old, torch.ones(len(LENGTHS)), loss_mask=mask, cu_seqlens=cu_seqlens,
        rollout_weights=weights, objective=objective,
    )  # fmt: skip
    # ratio 1 and advantage 1: minus the mean weight
    means = [
        sequence.pick(weights).mean() if level == "token" else weights[sequence.index]
        for sequence in oracle.sequences(mask, cu_seqlens)
        if sequence.count
    ]
    assert output.loss.item() == pytest.approx(-float(sum(means)) / len(means), rel=1e-12)
    # the ratio itself never sees them
    assert output.metrics["ratio/mean"].item() == 1.0


# --- the off-policy mask


def kept_by_loop(logprobs, old, advantages, mask, cu_seqlens, delta):
    """One number per sequence, or per token where the advantages are."""
    per_token = advantages.shape == logprobs.shape
    out = torch.ones(advantages.shape, dtype=torch.float64)
    for sequence in oracle.sequences(mask, cu_seqlens):
        gaps = (sequence.pick(old) - sequence.pick(logprobs)).tolist()
        if not gaps or sum(gaps) / len(gaps) <= delta:
            continue
        if per_token:
            out[sequence.where] = 1.0 - (sequence.counted & (advantages[sequence.where] < 0)).double()
        elif advantages[sequence.index] < 0:
            out[sequence.index] = 0.0
    return out


@pytest.mark.parametrize("delta", [-0.2, 0.0, 0.02, 0.3])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_policy_mask_equals_the_loop(layout, per_token, delta):
    old, logprobs, mask, cu_seqlens = example(layout)
    shape = old.shape if per_token else (len(LENGTHS),)
    for seed in range(4):
        advantages = torch.randn(shape, generator=generator(seed))
        got = gk.off_policy.off_policy_mask(
            logprobs, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, delta=delta
        )
        expected = kept_by_loop(logprobs, old, advantages, mask, cu_seqlens, delta)
        assert torch.equal(got, expected)


def test_off_policy_mask_by_hand():
    old = torch.tensor([[-1.0, -1.0]] * 5)
    # mean(old - logp): 0.5, 0.5, 0.25, -0.5, 0.5
    gap = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.0], [-0.5, -0.5], [0.5, 0.5]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0])
    got = gk.off_policy.off_policy_mask(old - gap, old, advantages, delta=0.25)
    # far and worse; far but better; exactly at delta; moved the other way; far but indifferent
    assert got.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_off_policy_mask_ignores_what_is_masked():
    old, logprobs, mask, cu_seqlens = example("packed")
    advantages = torch.tensor([-1.0, math.nan, -1.0, -1.0])
    clean = gk.off_policy.off_policy_mask(
        logprobs, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, delta=0.0
    )
    for poison in (math.nan, math.inf, -math.inf):
        got = gk.off_policy.off_policy_mask(
            logprobs.masked_fill(~mask, poison), old.masked_fill(~mask, -poison), advantages, loss_mask=mask,
            cu_seqlens=cu_seqlens, delta=0.0,
        )  # fmt: skip
        assert torch.equal(got, clean)
    assert clean[1] == clean[2] == 1  # nothing counted


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_off_policy_mask_drops_sequences_from_every_loss(entry, layout, objective):
    """No gradient for what is dropped, the others' unchanged: the divisor doesn't shrink."""
    kind = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "linear")
    case = make_case(kind, layout, "holes", dtype=torch.float64, log_s=(1e-4, 0.0, -0.4, -5e-5, -0.3, 0.1))
    whole = run(case, entry, objective)
    logprobs = whole.logprobs
    weights = gk.off_policy.off_policy_mask(
        logprobs, case.old_logprobs, case.advantages, loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens,
        delta=0.1,
    )  # fmt: skip
    assert weights.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    masked = run(replace(case, terms={"rollout_weights": weights}), entry, objective)
    key = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "hidden")
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        got, before = (result.grads[key][sequence.where] for result in (masked, whole))
        if weights[sequence.index] == 0:
            assert (got == 0).all()
        else:
            torch.testing.assert_close(got, before, rtol=1e-12, atol=0)


TOKENS = torch.zeros(2, 3)
WRONG = [
    ((torch.zeros(3), TOKENS, torch.zeros(2)), {"delta": 0.1}, ValueError, "logprobs"),
    ((TOKENS, torch.zeros(2, 2), torch.zeros(2)), {"delta": 0.1}, ValueError, "old_logprobs"),
    ((TOKENS, None, torch.zeros(2)), {"delta": 0.1}, TypeError, "old_logprobs"),
    ((TOKENS, TOKENS, torch.zeros(3)), {"delta": 0.1}, ValueError, "advantages"),
    ((TOKENS, TOKENS, torch.zeros(2, dtype=torch.int64)), {"delta": 0.1}, TypeError, "advantages"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": "0.1"}, TypeError, "delta"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": math.nan}, ValueError, "delta"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": 0.1, "loss_mask": torch.ones(2)}, ValueError, "loss_mask"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": 0.1, "loss_mask": TOKENS + 2}, ValueError, "loss_mask"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "named"), WRONG)
def test_off_policy_mask_errors_name_the_argument(arguments, options, kind, named):
    with pytest.raises(kind, match=f"^{named}: "):
        gk.off_policy.off_policy_mask(*arguments, **options)
