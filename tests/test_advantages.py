"""Advantages against plain loops, and against verl's own code where it is."""

import collections
import math
import typing
from types import SimpleNamespace

import numpy
import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator, offsets
from tests.integrations import peers

normalized = gk.advantages.group_normalized
NAN = math.nan


def by_loop(rewards, ids, scale="group", eps=1e-4):
    """The formula sheet, one group after the other in Python's floats."""
    out = [0.0] * len(rewards)
    everything = [reward for reward in rewards if not math.isnan(reward)]

    def std(values):
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

    for group in set(ids):
        members = [i for i, g in enumerate(ids) if g == group and not math.isnan(rewards[i])]
        values = [rewards[i] for i in members]
        if len(set(values)) < 2:
            continue
        mean = sum(values) / len(values)
        divisor = {"group": lambda v=values: std(v) + eps, "batch": lambda: std(everything) + eps}
        for i in members:
            out[i] = (rewards[i] - mean) / divisor.get(scale, lambda: 1.0)()
    return out


@pytest.mark.parametrize("eps", [1e-4, 1e-6, 0.0, 0.5])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("group_size", [1, 2, 5, 20])
def test_equals_the_loop(group_size, scale, eps):
    rewards = torch.randn(20, generator=generator(group_size), dtype=torch.float64)
    rewards[3], rewards[7] = NAN, NAN
    ids = [i // group_size for i in range(20)]
    got = normalized(rewards, group_size=group_size, scale=scale, eps=eps)
    assert got.tolist() == pytest.approx(by_loop(rewards.tolist(), ids, scale, eps), rel=1e-12, abs=1e-14)
    assert got.dtype == torch.float64 and got.shape == rewards.shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group_ids_may_be_in_any_order(dtype):
    rng = generator(0)
    ids = torch.tensor([5, -2, 5, 9, -2, 5, 9, 7], dtype=dtype)
    rewards = torch.randn(8, generator=rng, dtype=torch.float64)
    got = normalized(rewards, group_ids=ids)
    assert got.tolist() == pytest.approx(by_loop(rewards.tolist(), ids.tolist()), rel=1e-12)
    order = torch.randperm(8, generator=rng)
    torch.testing.assert_close(
        normalized(rewards[order], group_ids=ids[order]), got[order], rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -3.3, 1e30])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(count, scale, value):
    rewards = torch.cat([torch.full((count,), value), torch.arange(float(count))])
    got = normalized(rewards, group_size=count, scale=scale)
    assert (got[:count] == 0).all() and got.isfinite().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nan_rewards_are_left_out(scale):
    rewards = torch.tensor([1.0, NAN, 3.0, NAN, NAN, NAN, 5.0, NAN, NAN])
    got = normalized(rewards, group_size=3, scale=scale)
    without = normalized(torch.tensor([1.0, 3.0, 5.0]), group_ids=torch.tensor([0, 0, 2]), scale=scale)
    assert got.tolist() == pytest.approx([without[0].item(), 0.0, without[1].item(), *[0.0] * 6])
    assert (normalized(torch.full((4,), NAN), group_size=2, scale=scale) == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_gets_zero(scale):
    got = normalized(torch.tensor([3.0, 1.0, 2.0]), group_ids=torch.tensor([7, 1, 1]), scale=scale)
    assert got[0] == 0 and (got[1:] != 0).all()
    assert normalized(torch.tensor([3.0]), group_size=1, scale=scale).tolist() == [0.0]


def test_strided_and_empty():
    rewards = torch.randn(6, 2, generator=generator(0))[:, 1]
    assert torch.equal(normalized(rewards, group_size=3), normalized(rewards.clone(), group_size=3))
    assert normalized(torch.zeros(0), group_size=4).shape == (0,)
    assert normalized(torch.zeros(0), group_ids=torch.zeros(0, dtype=torch.int64)).shape == (0,)


# --- the other estimators, each by a loop of its own

ESTIMATORS = {
    "leave_one_out": lambda rewards, **groups: gk.advantages.leave_one_out(rewards, **groups),
    "optimal_baseline": lambda rewards, **groups: gk.advantages.optimal_baseline(
        rewards, torch.arange(1.0, rewards.numel() + 1), **groups
    ),
    "gdpo": lambda rewards, **groups: gk.advantages.gdpo(rewards.unsqueeze(1), **groups),
    "reinforce_plus_plus": lambda rewards, **groups: gk.advantages.reinforce_plus_plus(rewards, **groups),
}


def members_of(ids, rewards):
    """Indices of each group's rewards that are there."""
    return [[i for i, g in enumerate(ids) if g == group and not math.isnan(rewards[i])] for group in set(ids)]


def mean_and_variance(values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    return mean, squares / (total - 1)


def example(count=12, seed=0):
    rewards = torch.randn(count, generator=generator(seed), dtype=torch.float64)
    rewards[5] = NAN
    return rewards, [i // 4 for i in range(count)]


@pytest.mark.parametrize("size", [2, 4])
def test_leave_one_out_equals_the_loop(size):
    rewards, ids = example()[0], [i // size for i in range(12)]
    expected = [0.0] * 12
    for members in members_of(ids, rewards.tolist()):
        for i in members:
            others = [rewards[j].item() for j in members if j != i]
            expected[i] = rewards[i].item() - sum(others) / len(others) if others else 0.0
    got = gk.advantages.leave_one_out(rewards, group_size=size)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


def test_optimal_baseline_equals_the_loop():
    rewards, ids = example()
    lengths = torch.randint(1, 50, (12,), generator=generator(1))
    expected = [0.0] * 12
    for members in members_of(ids, rewards.tolist()):
        tokens = sum(lengths[j].item() for j in members)
        baseline = sum(lengths[j].item() * rewards[j].item() for j in members) / tokens
        for i in members:
            expected[i] = rewards[i].item() - baseline
    got = gk.advantages.optimal_baseline(rewards, lengths, group_size=4)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("eps", [1e-4, 0.3])
def test_gdpo_equals_the_loop(weighted, eps):
    rewards = torch.randn(12, 3, generator=generator(0), dtype=torch.float64)
    rewards[5, 0] = rewards[2, 1] = NAN
    rewards[7] = NAN
    weights = [0.5, 2.0, -1.0] if weighted else [1.0] * 3
    total = [0.0] * 12
    for kind in range(3):
        one = by_loop(rewards[:, kind].tolist(), [i // 4 for i in range(12)], "group", eps)
        total = [a + weights[kind] * b for a, b in zip(total, one, strict=True)]
    there = [i for i in range(12) if i != 7]
    mean, variance = mean_and_variance([total[i] for i in there])
    expected = [(a - mean) / (math.sqrt(variance) + eps) if i in there else 0.0 for i, a in enumerate(total)]
    got = gk.advantages.gdpo(
        rewards, group_size=4, eps=eps, weights=torch.tensor(weights) if weighted else None
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_equals_the_loop(baseline, with_lengths):
    rewards, ids = example()
    lengths = torch.randint(1, 50, (12,), generator=generator(1)) if with_lengths else None
    values = rewards.tolist()
    if baseline:
        for members in members_of(ids, rewards.tolist()):
            mean = sum(rewards[i].item() for i in members) / len(members)
            for i in members:
                values[i] = rewards[i].item() - mean
    there = [i for i in range(12) if i != 5]
    counts = None if lengths is None else [lengths[i].item() for i in there]
    mean, variance = mean_and_variance([values[i] for i in there], counts)
    expected = [(values[i] - mean) / math.sqrt(variance + 1e-8) if i in there else 0.0 for i in range(12)]
    groups = {"group_size": 4} if baseline else {}
    got = gk.advantages.reinforce_plus_plus(rewards, lengths=lengths, **groups)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_turn_normalized_equals_the_loop(scale):
    rewards = torch.randn(6, 3, generator=generator(0), dtype=torch.float64)
    rewards[1, 2] = rewards[4, 1] = rewards[4, 2] = NAN
    ids = [0, 0, 0, 1, 1, 1]
    turn_ids = torch.tensor([[-1, 0, 0, -1, 1, 2], [0, 0, 1, -1, -1, -1], [2, 1, 0, -1, 0, 1]] * 2)
    columns = [
        by_loop(rewards[:, k].tolist(), ids, "group" if scale == "group" else "none") for k in range(3)
    ]
    divisor = 1.0
    if scale == "batch":
        there = [value for value in rewards.flatten().tolist() if not math.isnan(value)]
        divisor = math.sqrt(mean_and_variance(there)[1]) + 1e-4
    expected = [
        [0.0 if turn < 0 else columns[turn][i] / divisor for turn in row]
        for i, row in enumerate(turn_ids.tolist())
    ]
    got = gk.advantages.turn_normalized(rewards, turn_ids, group_size=3, scale=scale)
    assert got.shape == turn_ids.shape and got.dtype == torch.float64
    for row, wanted in zip(got.tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-12)
    # packed: the same tokens without the last two columns of every other sequence
    lengths = (6, 4, 6, 4, 6, 4)
    kept = torch.cat([turn_ids[i, :n] for i, n in enumerate(lengths)])
    packed = gk.advantages.turn_normalized(
        rewards, kept, group_size=3, scale=scale, cu_seqlens=offsets(lengths)
    )
    assert torch.equal(packed, torch.cat([got[i, :n] for i, n in enumerate(lengths)]))


def test_class_normalized_makes_every_class_a_sequence_of_one_token():
    """The gradient of GRPO over classes: -A_c / C for each class at ratio 1, both ways of laying them out."""
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    advantages = gk.advantages.class_normalized(rewards, eps=0.0)
    assert advantages[0].tolist() == pytest.approx([2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])
    logits = torch.randn(2, 5, generator=generator(0), dtype=torch.float64)
    labels = torch.tensor([[0, 2, 4], [0, 2, 4]])  # the classes' tokens
    grads = []
    for shape, given in (((2, 3), advantages), ((6, 1), advantages.flatten())):
        leaf = logits.clone().requires_grad_()
        every = leaf.unsqueeze(1).expand(2, 3, 5).reshape(*shape, 5)
        gk.fused_policy_loss(
            every, labels.reshape(shape), None, given, objective=gk.GRPO(), backend="reference"
        ).loss.backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-15)
    probabilities = logits.softmax(-1)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    for p in range(2):
        for c, token in enumerate(labels[p].tolist()):
            onehot = torch.eye(5, dtype=torch.float64)[token]
            expected[p] += -advantages[p, c] / 6 * (onehot - probabilities[p])
    torch.testing.assert_close(grads[0], expected, rtol=1e-12, atol=1e-15)


# --- gdpo whitened over tokens


def gdpo_over_tokens(rewards, group_size, weights, lengths, eps=1e-6):
    """verl's form in fp64, token by token."""
    total = torch.zeros(len(rewards), dtype=torch.float64)
    for kind, weight in enumerate(weights):
        for group in torch.arange(len(rewards)).split(group_size):
            of_group = rewards[group, kind]
            total[group] += weight * (of_group - of_group.mean()) / (of_group.std() + eps)
    tokens = torch.repeat_interleave(total, lengths)
    return (total - tokens.mean()) / (tokens.var() + 1e-8).sqrt()


def gdpo_example(seed, dtype=torch.float64):
    rng = generator(seed)
    rewards = torch.randn(12, 3, generator=rng, dtype=torch.float64) * torch.tensor([1.0, 30.0, 0.01])
    return rewards.to(dtype), [0.5, 2.0, 1.0], torch.randint(1, 50, (12,), generator=rng)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_with_lengths_whitens_over_tokens_as_verl_does(seed):
    rewards, weights, lengths = gdpo_example(seed)
    got = gk.advantages.gdpo(rewards, group_size=4, weights=torch.tensor(weights), lengths=lengths, eps=1e-6)
    expected = gdpo_over_tokens(rewards, 4, weights, lengths)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    assert (got - gk.advantages.gdpo(rewards, group_size=4, weights=torch.tensor(weights))).abs().max() > 1e-3


def test_gdpo_over_tokens_is_verls_own_code():
    """verl's functions themselves, in fp32 as it runs them, each judged by fp64."""
    algorithms = peers.source("verl", "trainer/ppo/core_algos.py")
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    means = peers.extract(peers.source("verl", "utils/torch_functional.py"), *names, torch=torch)
    verl = peers.extract(
        algorithms, "compute_grpo_outcome_advantage", "compute_gdpo_outcome_advantage", torch=torch,
        np=numpy, defaultdict=collections.defaultdict, Optional=typing.Optional, AlgoConfig=dict,
        verl_F=SimpleNamespace(**means),
    )  # fmt: skip
    rewards, weights, lengths = gdpo_example(5, torch.float32)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    got = gk.advantages.gdpo(rewards, group_size=4, weights=torch.tensor(weights), lengths=lengths, eps=1e-6)
    theirs = verl["compute_gdpo_outcome_advantage"](
        torch.zeros(mask.shape), mask.float(), numpy.arange(12) // 4,
        config={"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": weights},
        non_tensor_batch={name: rewards[:, k].numpy() for k, name in enumerate("abc")},
        batch={"prompts": torch.zeros(12, 0), "attention_mask": mask.long()},
    )[0]  # fmt: skip
    expected = gdpo_over_tokens(rewards.double(), 4, weights, lengths)
    theirs_off = (theirs - expected.unsqueeze(1) * mask).norm() / (expected.unsqueeze(1) * mask).norm()
    assert theirs_off < 1e-5  # the formula is verl's
    assert (got - expected).norm() / expected.norm() <= 2**-23


# --- what all of them promise


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_leave_nan_out_and_give_loners_zero(name):
    estimate = ESTIMATORS[name]
    rewards = torch.tensor([1.0, NAN, 3.0, 2.0, NAN, 7.0, 0.0, 1.0])
    ids = torch.tensor([0, 0, 0, 1, 2, 1, 2, 3])
    got = estimate(rewards, group_ids=ids)
    assert got.isfinite().all()
    assert got[1] == 0 and got[4] == 0
    assert (got[[0, 2, 3, 5]] != 0).all()
    if name not in (
        "gdpo",
        "reinforce_plus_plus",
    ):  # whitening moves loners, not far where groups are centred
        assert got[6] == 0 and got[7] == 0
    assert (estimate(torch.full((4,), NAN), group_size=2) == 0).all()
    assert (estimate(torch.full((4,), 0.1), group_size=2) == 0).all()
    assert estimate(torch.zeros(0), group_size=2).shape == (0,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_follow_permutations_and_dtypes(name):
    rng = generator(3)
    ids = torch.tensor([5, -2, 5, 9, -2, 5, 9, 7])
    rewards = torch.randn(8, 1, generator=rng, dtype=torch.float64)
    order = torch.randperm(8, generator=rng)
    lengths = torch.arange(1.0, 9.0)

    def estimate(rewards, ids, lengths):
        if name == "optimal_baseline":
            return gk.advantages.optimal_baseline(rewards[:, 0], lengths, group_ids=ids)
        values = rewards if name == "gdpo" else rewards[:, 0]
        return getattr(gk.advantages, name)(values, group_ids=ids)

    got = estimate(rewards, ids, lengths)
    assert got.dtype == torch.float64
    moved = estimate(rewards[order], ids[order], lengths[order])
    torch.testing.assert_close(moved, got[order], rtol=1e-12, atol=1e-15)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = estimate(rewards.to(dtype).requires_grad_(), ids, lengths)
        assert low.dtype == torch.float32 and not low.requires_grad
        torch.testing.assert_close(low.double(), got, rtol=0.1, atol=0.05)


R, TURNS = torch.zeros(4), torch.zeros(4, 3, dtype=torch.int64)
WRONG = [
    ("leave_one_out", (torch.zeros(2, 2),), {"group_size": 2}, ValueError, "rewards"),
    ("leave_one_out", (torch.zeros(4, dtype=torch.int64),), {"group_size": 2}, TypeError, "rewards"),
    ("leave_one_out", (R,), {}, ValueError, "group_size, group_ids"),
    ("leave_one_out", (R,), {"group_size": 3}, ValueError, "group_size"),
    ("optimal_baseline", (R, torch.zeros(3)), {"group_size": 2}, ValueError, "lengths"),
    ("optimal_baseline", (R, [1, 2, 3, 4]), {"group_size": 2}, TypeError, "lengths"),
    ("optimal_baseline", (R, -torch.ones(4)), {"group_size": 2}, ValueError, "lengths"),
    ("gdpo", (R,), {"group_size": 2}, ValueError, "rewards"),
    ("gdpo", (torch.zeros(4, 2),), {"group_size": 2, "weights": torch.zeros(3)}, ValueError, "weights"),
    ("gdpo", (torch.zeros(4, 2),), {"group_size": 2, "eps": -1.0}, ValueError, "eps"),
    ("gdpo", (torch.zeros(4, 2),), {"group_size": 2, "lengths": torch.ones(4, 2)}, ValueError, "lengths"),
    ("gdpo", (torch.zeros(4, 2),), {"group_size": 2, "lengths": -torch.ones(4)}, ValueError, "lengths"),
    ("reinforce_plus_plus", (torch.zeros(2, 2),), {}, ValueError, "rewards"),
    ("reinforce_plus_plus", (R,), {"group_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "group_ids"),
    ("reinforce_plus_plus", (R,), {"lengths": torch.ones(3)}, ValueError, "lengths"),
    ("turn_normalized", (R, TURNS), {"group_size": 2}, ValueError, "rewards"),
    ("turn_normalized", (torch.zeros(3, 2), TURNS), {"group_size": 3}, ValueError, "rewards"),
    ("turn_normalized", (torch.zeros(4, 2), TURNS.float()), {"group_size": 2}, TypeError, "turn_ids"),
    ("turn_normalized", (torch.zeros(4, 2), TURNS + 2), {"group_size": 2}, ValueError, "turn_ids"),
    ("turn_normalized", (torch.zeros(4, 2), TURNS - 2), {"group_size": 2}, ValueError, "turn_ids"),
    ("turn_normalized", (torch.zeros(4, 2), TURNS), {"group_size": 2, "scale": "all"}, ValueError, "scale"),
    ("class_normalized", (R,), {}, ValueError, "rewards"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "kind", "named"), WRONG)
def test_errors_name_the_argument(name, arguments, options, kind, named):
    with pytest.raises(kind, match=f"^{named}: "):
        getattr(gk.advantages, name)(*arguments, **options)
