"""From rewards to advantages: completions of one prompt compared with each other."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.rewards.reward_set import Rewards

Method = Literal[
    "group_normalized",
    "leave_one_out",
    "optimal_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
]
ADVANTAGES: tuple[str, ...] = get_args(Method)
"""What `advantages_of` can do, by name."""


def advantages_of(
    rewards: Rewards,
    *,
    group_size: int,
    method: str = "group_normalized",
    scale: str = "group",
    lengths: Tensor | None = None,
) -> Tensor:
    """Return [B] fp32 advantages by a formula of `gk.advantages`; 0 where no reward applies.

    Args:
        rewards: of B completions, the rows of a group consecutive.
        group_size: completions of one prompt.
        method: one of `ADVANTAGES`. All but "gdpo" take the weighted sum of the rewards; "gdpo" normalizes
            each reward on its own and sums then. "reinforce_plus_plus_baseline" subtracts the group's mean
            before it whitens over the batch, "reinforce_plus_plus" only whitens.
        scale: "group", "batch" or "none": what "group_normalized" divides by; no other method has one.
        lengths: [B], counted tokens, for "optimal_baseline".
    """
    total = rewards.total
    if method == "group_normalized":
        return gk.advantages.group_normalized(total, group_size=group_size, scale=scale)
    if method not in ADVANTAGES:
        raise ConfigError(f"advantages must be one of {', '.join(ADVANTAGES)}, got {method!r}")
    if scale != "group":
        raise ConfigError(f"advantage_scale {scale!r} is for group_normalized; {method} has no such choice")
    if method == "gdpo":
        table_BK = torch.stack(list(rewards.by_name.values()), 1)
        weights = table_BK.new_tensor([rewards.weights.get(name, 1.0) for name in rewards.by_name])
        return gk.advantages.gdpo(table_BK, group_size=group_size, weights=weights)
    if method == "optimal_baseline":
        if lengths is None:
            raise ConfigError("optimal_baseline needs lengths")
        return gk.advantages.optimal_baseline(total, lengths, group_size=group_size)
    if method == "leave_one_out":
        return gk.advantages.leave_one_out(total, group_size=group_size)
    groups = group_size if method == "reinforce_plus_plus_baseline" else None
    return gk.advantages.reinforce_plus_plus(total, group_size=groups)


def levels(rewards: Tensor, group_size: int) -> Tensor:
    """Return ranks within groups of this size, 1 for the highest reward and equal for equal ones, [B]."""
    groups = [torch.unique(-group, return_inverse=True)[1] + 1 for group in rewards.split(group_size)]
    return torch.cat(groups).to(rewards.dtype)


def differing(rewards: Tensor, group_size: int) -> Tensor:
    """Return for each group whether its rewards differ, [groups] bool; NaN, no reward, doesn't count."""
    groups = rewards.view(-1, group_size)
    return groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)


def best_of(rewards: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Find the highest of [B] rewards in each group, the first of equals; NaN, no reward, is below all.

    Returns:
        Places among the B, [groups], the group's first where all are NaN; and whether there is a reward.
    """
    groups = rewards.view(-1, group_size)
    within = groups.nan_to_num(-torch.inf).argmax(1)
    return torch.arange(len(groups)) * group_size + within, ~groups.isnan().all(1)
