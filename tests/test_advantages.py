"""Advantages against plain loops over groups."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.advantages import class_normalized, gdpo, group_normalized, turn_normalized
from tests.cases import generator, offsets

NAN = math.nan
SCALES = ("group", "batch", "mean", "none")


# --- the formula sheet, one group after the other in Python's floats; NaN is left out and gets 0


def mean_and_variance(values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    return mean, squares / max(total - 1, 1)


def by_groups(rewards, ids, advantage):
    """Return ``advantage(members, i)`` for reward i in a group of two at least, else 0; NaN stays NaN."""
    out = [NAN if math.isnan(reward) else 0.0 for reward in rewards]
    for group in set(ids):
        members = [i for i, other in enumerate(ids) if other == group and not math.isnan(rewards[i])]
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
        if scale == "mean":
            return (rewards[i] - mean) / (mean + eps) if mean > 0 else 0.0
        return (rewards[i] - mean) / (1.0 if scale == "none" else math.sqrt(variance) + eps)

    return by_groups(rewards, ids, advantage)


def whitened(values, lengths=None, divisor=lambda variance: math.sqrt(variance + 1e-8)):
    """Subtract the mean and divide by ``divisor(variance)``; with ``lengths`` both are over tokens."""
    there = [i for i, value in enumerate(values) if not math.isnan(value)]
    lengths = None if lengths is None else [lengths[i] for i in there]
    mean, variance = mean_and_variance([values[i] for i in there], lengths)
    return [(value - mean) / divisor(variance) for value in values]


def assert_equal(got, loop):
    assert got.dtype == torch.float64
    expected = [0.0 if math.isnan(value) else value for value in loop]
    assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_group_normalized(size, scale):
    rewards = torch.randn(20, 2, generator=generator(size), dtype=torch.float64)[:, 0]
    rewards[3], rewards[7] = NAN, NAN
    ids = [i // size for i in range(20)]
    for eps in (1e-4, 0.0, 0.5):
        got = group_normalized(rewards, group_size=size, scale=scale, eps=eps)
        assert_equal(got, normalized_loop(rewards.tolist(), ids, scale, eps))


def test_divided_by_the_mean_of_binary_rewards():
    """MaxRL: of G rewards with k ones, a one gets (G - k) / k and a zero gets -1; without a one all get 0."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    got = group_normalized(rewards, group_size=4, scale="mean", eps=0.0)
    third = 1 / 3
    assert got.tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0, third, third, -1.0, third, 0, 0, 0, 0])


@pytest.mark.parametrize("size", [2, 4])
def test_estimators_with_a_baseline_of_the_group(size):
    rng = generator(0)
    first = torch.randn(12, generator=rng, dtype=torch.float64)
    first[5] = first[7] = NAN
    lengths = torch.randint(1, 50, (12,), generator=rng)
    values, counts = first.tolist(), lengths.tolist()
    ids, groups = [i // size for i in range(12)], {"group_size": size}

    def others(members, i):
        return values[i] - sum(values[j] for j in members if j != i) / (len(members) - 1)

    def by_length(members, i):
        return values[i] - sum(counts[j] * values[j] for j in members) / sum(counts[j] for j in members)

    assert_equal(gk.advantages.leave_one_out(first, **groups), by_groups(values, ids, others))
    got = gk.advantages.optimal_baseline(first, lengths, **groups)
    assert_equal(got, by_groups(values, ids, by_length))
    centered = normalized_loop(values, ids, "none")
    for expected, options in ((values, {}), (centered, groups)):
        assert_equal(gk.advantages.reinforce_plus_plus(first, **options), whitened(expected))
        got = gk.advantages.reinforce_plus_plus(first, lengths=lengths, **options)
        assert_equal(got, whitened(expected, counts))


@pytest.mark.parametrize(("weights", "eps"), [(None, 1e-4), ([0.5, 2.0, -1.0], 0.3)])
def test_gdpo(weights, eps):
    rng, ids = generator(0), [i // 4 for i in range(12)]
    rewards = torch.randn(12, 3, generator=rng, dtype=torch.float64) * torch.tensor([1.0, 30.0, 0.01])
    rewards[5, 0] = rewards[2, 1] = NAN
    rewards[7] = NAN
    lengths = torch.randint(1, 50, (12,), generator=rng)
    options = {"group_size": 4, "eps": eps, "weights": None if weights is None else torch.tensor(weights)}
    columns = [normalized_loop(column, ids, "group", eps) for column in rewards.T.tolist()]
    weighed = torch.tensor(weights or [1.0] * 3, dtype=torch.float64)
    total = torch.tensor(columns, dtype=torch.float64).nan_to_num(0.0).T @ weighed
    total = total.masked_fill(rewards.isnan().all(1), NAN).tolist()
    expected = whitened(total, divisor=lambda variance: math.sqrt(variance) + eps)
    assert_equal(gdpo(rewards, **options), expected)
    assert_equal(gdpo(rewards, **options, lengths=lengths), whitened(total, lengths.tolist()))


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


def test_class_normalized():
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, NAN, 1.0]], dtype=torch.float64)
    for options in ({"eps": 0.0}, {"scale": "batch"}):
        expected = group_normalized(rewards.flatten(), group_size=3, **options).view(2, 3)
        assert torch.equal(class_normalized(rewards, **options), expected)


# --- what holds for all estimators

ESTIMATORS = {
    "by its group": lambda r, w, **g: group_normalized(r, **g),
    "by the batch": lambda r, w, **g: group_normalized(r, scale="batch", **g),
    "by its mean": lambda r, w, **g: group_normalized(r, scale="mean", **g),
    "centered": lambda r, w, **g: group_normalized(r, scale="none", **g),
    "leave_one_out": lambda r, w, **g: gk.advantages.leave_one_out(r, **g),
    "optimal_baseline": lambda r, w, **g: gk.advantages.optimal_baseline(r, w, **g),
    "gdpo": lambda r, w, **g: gdpo(r.unsqueeze(1), **g),
    "reinforce_plus_plus": lambda r, w, **g: gk.advantages.reinforce_plus_plus(r, **g),
}
"""Estimators as functions of rewards, lengths and groups."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nan_loners_and_equal_rewards(name):
    def estimate(rewards, **groups):
        return ESTIMATORS[name](rewards, torch.arange(1.0, len(rewards) + 1), **groups)

    got = estimate(
        torch.tensor([1.0, NAN, 3.0, 2.0, NAN, 7.0, 0.0, 1.0]),
        group_ids=torch.tensor([0, 0, 0, 1, 2, 1, 2, 3]),
    )
    assert got.isfinite().all() and got[1] == 0 and got[4] == 0 and (got[[0, 2, 3, 5]] != 0).all()
    if name not in ("gdpo", "reinforce_plus_plus"):  # whitening gives an advantage to groups of one
        assert got[6] == 0 and got[7] == 0
    assert estimate(torch.tensor([3.0]), group_size=1).tolist() == [0.0]
    for value in (NAN, 0.0, 0.1, 1.0, -3.3, 1e30):
        same = torch.full((14,), value, dtype=torch.float64)  # sums of these round
        assert (estimate(same, group_size=7) == 0).all()
        assert (gk.advantages.reinforce_plus_plus(same) == 0).all()
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
