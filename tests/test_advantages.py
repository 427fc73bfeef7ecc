"""Advantages against plain loops, and against verl's own code where it is."""

import collections
import math
from types import SimpleNamespace

import numpy
import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.advantages import class_normalized, gdpo, group_normalized, turn_normalized
from tests.cases import generator, offsets
from tests.integrations import peers

NAN = math.nan
SCALES = ("group", "batch", "none")


# --- the formula sheet, one group after the other in Python's floats; NaN is left out and gets 0


def mean_and_variance(values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    return mean, squares / max(total - 1, 1)


def members_of(ids, rewards):
    """Indices of each group's rewards that are there."""
    return [[i for i, g in enumerate(ids) if g == group and not math.isnan(rewards[i])] for group in set(ids)]


def by_groups(rewards, ids, advantage):
    """``advantage`` takes the indices of a group's rewards, of two at least, and one of them."""
    out = [NAN if math.isnan(reward) else 0.0 for reward in rewards]
    for members in members_of(ids, rewards):
        if len(members) > 1:
            for i in members:
                out[i] = advantage(members, i)
    return out


def normalized_loop(rewards, ids, scale="group", eps=1e-4):
    everything = [reward for reward in rewards if not math.isnan(reward)]

    def advantage(members, i):
        mean, variance = mean_and_variance([rewards[j] for j in members])
        if scale == "batch":
            variance = mean_and_variance(everything)[1]
        return (rewards[i] - mean) / (1.0 if scale == "none" else math.sqrt(variance) + eps)

    return by_groups(rewards, ids, advantage)


def leave_one_out_loop(rewards, ids):
    def advantage(members, i):
        return rewards[i] - sum(rewards[j] for j in members if j != i) / (len(members) - 1)

    return by_groups(rewards, ids, advantage)


def optimal_baseline_loop(rewards, ids, lengths):
    def advantage(members, i):
        return rewards[i] - sum(lengths[j] * rewards[j] for j in members) / sum(lengths[j] for j in members)

    return by_groups(rewards, ids, advantage)


def whitened(values, divisor, weights=None):
    there = [i for i, value in enumerate(values) if not math.isnan(value)]
    weights = None if weights is None else [weights[i] for i in there]
    mean, variance = mean_and_variance([values[i] for i in there], weights)
    return [(value - mean) / divisor(variance) for value in values]


def gdpo_loop(columns, ids, weights, eps=1e-4, lengths=None):
    total = [0.0] * len(ids)
    for weight, rewards in zip(weights, columns, strict=True):
        each = normalized_loop(rewards, ids, "group", eps)
        total = [a + (0.0 if math.isnan(b) else weight * b) for a, b in zip(total, each, strict=True)]
    for i, rewards in enumerate(zip(*columns, strict=True)):
        total[i] = NAN if all(map(math.isnan, rewards)) else total[i]
    if lengths is not None:
        return whitened(total, lambda variance: math.sqrt(variance + 1e-8), lengths)
    return whitened(total, lambda variance: math.sqrt(variance) + eps)


def reinforce_loop(rewards, ids, lengths=None):
    if ids is not None:
        rewards = by_groups(
            rewards, ids, lambda members, i: rewards[i] - sum(rewards[j] for j in members) / len(members)
        )
    return whitened(rewards, lambda variance: math.sqrt(variance + 1e-8), lengths)


def assert_equal(got, loop):
    assert got.dtype == torch.float64
    expected = [0.0 if math.isnan(value) else value for value in loop]
    assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_group_normalized(size, scale):
    rewards = torch.randn(20, generator=generator(size), dtype=torch.float64)
    rewards[3], rewards[7] = NAN, NAN
    ids = [i // size for i in range(20)]
    for eps in (1e-4, 0.0, 0.5):
        got = group_normalized(rewards, group_size=size, scale=scale, eps=eps)
        assert_equal(got, normalized_loop(rewards.tolist(), ids, scale, eps))
    assert torch.equal(
        got,
        group_normalized(torch.stack([rewards, -rewards], 1)[:, 0], group_size=size, scale=scale, eps=eps),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_the_other_estimators(size):
    rng = generator(0)
    rewards = torch.randn(12, 3, generator=rng, dtype=torch.float64)
    rewards[5, 0] = rewards[2, 1] = NAN
    rewards[7] = NAN
    lengths = torch.randint(1, 50, (12,), generator=rng)
    first, columns, counts = rewards[:, 0], rewards.T.tolist(), lengths.tolist()
    values, ids, groups = first.tolist(), [i // size for i in range(12)], {"group_size": size}
    assert_equal(gk.advantages.leave_one_out(first, **groups), leave_one_out_loop(values, ids))
    got = gk.advantages.optimal_baseline(first, lengths, **groups)
    assert_equal(got, optimal_baseline_loop(values, ids, counts))
    for weights, eps in (([1.0] * 3, 1e-4), ([0.5, 2.0, -1.0], 0.3)):
        options = groups | {"eps": eps, "weights": None if eps == 1e-4 else torch.tensor(weights)}
        assert_equal(gdpo(rewards, **options), gdpo_loop(columns, ids, weights, eps))
        got = gdpo(rewards, **options, lengths=lengths)
        assert_equal(got, gdpo_loop(columns, ids, weights, eps, counts))
    for baseline in (None, ids):
        options = {} if baseline is None else groups
        got = gk.advantages.reinforce_plus_plus(first, **options)
        assert_equal(got, reinforce_loop(values, baseline))
        got = gk.advantages.reinforce_plus_plus(first, lengths=lengths, **options)
        assert_equal(got, reinforce_loop(values, baseline, counts))


@pytest.mark.parametrize("scale", SCALES)
def test_turn_normalized(scale):
    rewards = torch.randn(6, 3, generator=generator(0), dtype=torch.float64)
    rewards[1, 2] = rewards[4, 1] = rewards[4, 2] = NAN
    ids = [0, 0, 0, 1, 1, 1]
    turn_ids = torch.tensor([[-1, 0, 0, -1, 1, 2], [0, 0, 1, -1, -1, -1], [2, 1, 0, -1, 0, 1]] * 2)
    within, divisor = ("none" if scale == "batch" else scale), 1.0
    if scale == "batch":
        there = [value for value in rewards.flatten().tolist() if not math.isnan(value)]
        divisor = math.sqrt(mean_and_variance(there)[1]) + 1e-4
    columns = [normalized_loop(column, ids, within) for column in rewards.T.tolist()]
    expected = [
        0.0 if turn < 0 else columns[turn][i] / divisor
        for i, row in enumerate(turn_ids.tolist())
        for turn in row
    ]
    got = turn_normalized(rewards, turn_ids, group_size=3, scale=scale)
    assert got.shape == turn_ids.shape
    assert_equal(got.flatten(), expected)
    # packed: the same tokens without the last two columns of every other sequence
    lengths = (6, 4, 6, 4, 6, 4)
    tokens = torch.cat([turn_ids[i, :n] for i, n in enumerate(lengths)])
    packed = turn_normalized(rewards, tokens, group_size=3, scale=scale, cu_seqlens=offsets(lengths))
    assert torch.equal(packed, torch.cat([got[i, :n] for i, n in enumerate(lengths)]))


def test_class_normalized_takes_the_classes_for_a_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, NAN, 1.0]], dtype=torch.float64)
    for options in ({"eps": 0.0}, {"scale": "batch"}):
        expected = group_normalized(rewards.flatten(), group_size=3, **options).view(2, 3)
        assert torch.equal(class_normalized(rewards, **options), expected)


def test_gdpo_over_tokens_is_verls_own_code():
    """verl's functions themselves, in fp32 as it runs them, each judged by fp64."""
    means = peers.source("verl", "utils/torch_functional.py")
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    verl = peers.extract(
        peers.source("verl", "trainer/ppo/core_algos.py"), "compute_grpo_outcome_advantage",
        "compute_gdpo_outcome_advantage", np=numpy, defaultdict=collections.defaultdict, AlgoConfig=dict,
        verl_F=SimpleNamespace(**peers.extract(means, *names)),
    )  # fmt: skip
    rng, weights = generator(5), [0.5, 2.0, 1.0]
    rewards = torch.randn(12, 3, generator=rng) * torch.tensor([1.0, 30.0, 0.01])
    lengths = torch.randint(1, 50, (12,), generator=rng)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    got = gdpo(rewards, group_size=4, weights=torch.tensor(weights), lengths=lengths, eps=1e-6)
    theirs = verl["compute_gdpo_outcome_advantage"](
        torch.zeros(mask.shape), mask.float(), numpy.arange(12) // 4,
        config={"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": weights},
        non_tensor_batch={name: rewards[:, k].numpy() for k, name in enumerate("abc")},
        batch={"prompts": torch.zeros(12, 0), "attention_mask": mask.long()},
    )[0]  # fmt: skip
    columns, ids = rewards.double().T.tolist(), [i // 4 for i in range(12)]
    expected = torch.tensor(gdpo_loop(columns, ids, weights, 1e-6, lengths.tolist()))
    assert (theirs - expected.unsqueeze(1) * mask).norm() / (expected.unsqueeze(1) * mask).norm() < 1e-5
    assert (got - expected).norm() / expected.norm() <= 2**-23


# --- what all of them promise

ESTIMATORS = {
    "by its group": lambda r, w, **g: group_normalized(r, **g),
    "by the batch": lambda r, w, **g: group_normalized(r, scale="batch", **g),
    "centred": lambda r, w, **g: group_normalized(r, scale="none", **g),
    "leave_one_out": lambda r, w, **g: gk.advantages.leave_one_out(r, **g),
    "optimal_baseline": lambda r, w, **g: gk.advantages.optimal_baseline(r, w, **g),
    "gdpo": lambda r, w, **g: gdpo(r.unsqueeze(1), **g),
    "reinforce_plus_plus": lambda r, w, **g: gk.advantages.reinforce_plus_plus(r, **g),
}
"""Of rewards, lengths and groups."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nan_loners_and_equal_rewards_have_no_advantage(name):
    def estimate(rewards, **groups):
        return ESTIMATORS[name](rewards, torch.arange(1.0, len(rewards) + 1), **groups)

    got = estimate(
        torch.tensor([1.0, NAN, 3.0, 2.0, NAN, 7.0, 0.0, 1.0]),
        group_ids=torch.tensor([0, 0, 0, 1, 2, 1, 2, 3]),
    )
    assert got.isfinite().all() and got[1] == 0 and got[4] == 0 and (got[[0, 2, 3, 5]] != 0).all()
    if name not in ("gdpo", "reinforce_plus_plus"):  # whitening moves loners
        assert got[6] == 0 and got[7] == 0
    assert estimate(torch.tensor([3.0]), group_size=1).tolist() == [0.0]
    for value in (NAN, 0.0, 0.1, 1.0, -3.3, 1e30):
        same = torch.full((14,), value, dtype=torch.float64)  # whose sums round
        assert (estimate(same, group_size=7) == 0).all()
        if name not in ("gdpo", "reinforce_plus_plus"):
            mixed = estimate(torch.cat([same[:7], torch.arange(7.0)]), group_size=7)
            assert (mixed[:7] == 0).all() and mixed.isfinite().all()
    assert estimate(torch.zeros(0), group_size=2).shape == (0,)
    assert estimate(torch.zeros(0), group_ids=torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_of_sequences_and_dtypes(name):
    estimate, rng = ESTIMATORS[name], generator(3)
    ids, lengths = torch.tensor([5, -2, 5, 9, -2, 5, 9, 7], dtype=torch.int32), torch.arange(1.0, 9.0)
    rewards, order = torch.randn(8, generator=rng, dtype=torch.float64), torch.randperm(8, generator=rng)
    got = estimate(rewards, lengths, group_ids=ids)
    moved = estimate(rewards[order], lengths[order], group_ids=ids[order].long())
    torch.testing.assert_close(moved, got[order], rtol=1e-12, atol=1e-15)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = estimate(rewards.to(dtype).requires_grad_(), lengths, group_ids=ids)
        assert low.dtype == torch.float32 and not low.requires_grad
        torch.testing.assert_close(low, estimate(rewards.to(dtype).double(), lengths, group_ids=ids).float())


R, RK, TURNS = torch.zeros(4), torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.int64)
PAIRS = {"group_size": 2}
WRONG = [
    ("leave_one_out", (RK,), PAIRS, ValueError, "rewards"),
    ("leave_one_out", (R.long(),), PAIRS, TypeError, "rewards"),
    ("leave_one_out", (R,), {}, ValueError, "group_size, group_ids"),
    ("leave_one_out", (R,), {"group_size": 3}, ValueError, "group_size"),
    ("optimal_baseline", (R, torch.zeros(3)), PAIRS, ValueError, "lengths"),
    ("optimal_baseline", (R, [1, 2, 3, 4]), PAIRS, TypeError, "lengths"),
    ("optimal_baseline", (R, R - 1), PAIRS, ValueError, "lengths"),
    ("gdpo", (R,), PAIRS, ValueError, "rewards"),
    ("gdpo", (RK,), PAIRS | {"weights": torch.zeros(3)}, ValueError, "weights"),
    ("gdpo", (RK,), PAIRS | {"eps": -1.0}, ValueError, "eps"),
    ("gdpo", (RK,), PAIRS | {"lengths": RK}, ValueError, "lengths"),
    ("gdpo", (RK,), PAIRS | {"lengths": R - 1}, ValueError, "lengths"),
    ("reinforce_plus_plus", (RK,), {}, ValueError, "rewards"),
    ("reinforce_plus_plus", (R,), {"group_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "group_ids"),
    ("reinforce_plus_plus", (R,), {"lengths": torch.ones(3)}, ValueError, "lengths"),
    ("turn_normalized", (R, TURNS), PAIRS, ValueError, "rewards"),
    ("turn_normalized", (torch.zeros(3, 2), TURNS), {"group_size": 3}, ValueError, "rewards"),
    ("turn_normalized", (RK, TURNS.float()), PAIRS, TypeError, "turn_ids"),
    ("turn_normalized", (RK, TURNS + 2), PAIRS, ValueError, "turn_ids"),
    ("turn_normalized", (RK, TURNS - 2), PAIRS, ValueError, "turn_ids"),
    ("turn_normalized", (RK, TURNS), PAIRS | {"scale": "all"}, ValueError, "scale"),
    ("class_normalized", (R,), {}, ValueError, "rewards"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "kind", "named"), WRONG)
def test_errors_name_the_argument(name, arguments, options, kind, named):
    with pytest.raises(kind, match=f"^{named}: "):
        getattr(gk.advantages, name)(*arguments, **options)
