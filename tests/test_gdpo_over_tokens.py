"""GDPO whitened over tokens, as verl has it: against the formula, and against verl's own code where it is."""

import collections
import typing
from types import SimpleNamespace

import numpy
import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.integrations import peers


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
