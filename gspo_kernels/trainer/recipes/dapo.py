"""DAPO (arXiv 2503.14476): groups that something can be learned from, and a soft penalty on length."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.trainer.recipes.samples import Samples
from gspo_kernels.trainer.rewards import Rewards

OVERLONG = "overlong"
"""The penalty's name among the rewards."""


def chosen(differs: Tensor, count: int) -> list[int]:
    """Return ``count`` groups: the first that differ, and where they are too few the first others, in order.

    So a rollout has the same size in every step; groups without an advantage cost no forward pass.
    """
    order = torch.sort(differs.to(torch.int8), descending=True, stable=True).indices[:count]
    return sorted(order.tolist())


def groups_of(samples: Samples, groups: list[int], group_size: int) -> Samples:
    """Return these groups."""
    rows = [group * group_size + place for group in groups for place in range(group_size)]
    rewards = samples.rewards
    by_name = {name: values[rows] for name, values in rewards.by_name.items()}
    return Samples(
        [samples.each[row] for row in rows], Rewards(rewards.total[rows], by_name, rewards.weights)
    )


def penalised(samples: Samples, longest: int, buffer: int, penalty: float) -> Samples:
    """Add the paper's soft overlong punishment, in the form that verl's code has, as a reward of its own.

    0 up to ``longest - buffer`` tokens, from there to ``longest`` linearly to -1, and -1 beyond, times
    ``penalty``. A completion to which no reward applies has no penalty either.
    """
    rewards = samples.rewards
    lengths = torch.tensor([len(sample.ids) for sample in samples.each], dtype=torch.float32)
    value = ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
    value = torch.where(rewards.total.isnan(), torch.nan, value)
    return samples._replace(
        rewards=Rewards(
            rewards.total + penalty * value,
            rewards.by_name | {OVERLONG: value},
            {**rewards.weights, OVERLONG: penalty},
        )
    )
