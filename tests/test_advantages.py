"""Group advantages against plain loops."""

import math

import pytest
import torch
from cases import generator

import gspo_kernels as gk

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


def test_group_size_and_group_ids_agree():
    rewards = torch.randn(12, generator=generator(0))
    ids = torch.arange(12) // 4
    assert torch.equal(normalized(rewards, group_size=4), normalized(rewards, group_ids=ids))


def test_by_hand():
    # mean 2, unbiased std 1
    got = normalized(torch.tensor([1.0, 2.0, 3.0]), group_size=3, eps=0.0)
    assert got.tolist() == [-1.0, 0.0, 1.0]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=dtype).requires_grad_()
    got = normalized(rewards, group_size=4)
    assert got.dtype == torch.float32 and not got.requires_grad
    assert got.tolist() == pytest.approx(by_loop([1.0, 0.0, 1.0, 1.0], [0] * 4), rel=1e-6)


def test_strided_and_empty():
    rewards = torch.randn(6, 2, generator=generator(0))[:, 1]
    assert torch.equal(normalized(rewards, group_size=3), normalized(rewards.clone(), group_size=3))
    assert normalized(torch.zeros(0), group_size=4).shape == (0,)
    assert normalized(torch.zeros(0), group_ids=torch.zeros(0, dtype=torch.int64)).shape == (0,)
