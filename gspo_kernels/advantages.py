"""Rewards to advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks

SCALES = ("group", "batch", "none")


def group_normalized(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    scale: str = "group",
    eps: float = 1e-4,
) -> Tensor:
    """``A_i = (R_i - mean_group) / (std + eps)``, GSPO's Eq. 6 (arXiv 2507.18071) with TRL's eps.

    The std is the unbiased one. Rewards that are NaN are left out of every mean and std and get 0. A group
    with one reward, or with all rewards equal, gets exactly 0.

    Args:
        rewards: [B], floating point.
        group_size: groups are runs of this many consecutive rewards. Give this or ``group_ids``.
        group_ids: [B], integers: rewards with equal ids form a group.
        scale: "group": divide by the group's std. "batch": by the std over all rewards. "none": don't divide
            (Dr. GRPO).
        eps: added to the std; verl uses 1e-6.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.floats("rewards", rewards, None, "[B]", None)
    if rewards.ndim != 1:
        raise ValueError(f"rewards: got shape {tuple(rewards.shape)}, expected [B]")
    checks.choice("scale", scale, SCALES)
    checks.number("eps", eps, minimum=0.0)
    order, offsets = _groups(rewards, group_size, group_ids)

    values = rewards.detach().to(torch.float64)[order]
    present = ~values.isnan()
    values = torch.where(present, values, 0.0)
    members = torch.repeat_interleave(offsets.diff(), output_size=values.numel())

    def group_sum(x: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", offsets=offsets, unsafe=True, initial=0)[members]

    if values.numel() == 0:
        return torch.zeros_like(
            rewards, dtype=torch.float64 if rewards.dtype == torch.float64 else torch.float32
        )
    count = group_sum(present.to(torch.float64))
    centred = values - group_sum(values) / count.clamp(min=1.0)
    # equal rewards have no advantage, whatever their mean rounds to
    high = torch.segment_reduce(
        torch.where(present, values, -torch.inf), "max", offsets=offsets, unsafe=True
    )[members]
    low = torch.segment_reduce(torch.where(present, values, torch.inf), "min", offsets=offsets, unsafe=True)[
        members
    ]
    advantages = torch.where(present & (high > low), centred, 0.0)
    if scale == "group":
        variance = group_sum(advantages.square()) / (count - 1.0).clamp(min=1.0)
        advantages = advantages / (variance.sqrt() + eps)
    elif scale == "batch":
        kept = values[present]
        std = kept.std() if kept.numel() > 1 else kept.new_zeros(())
        advantages = advantages / (std + eps)
    result = torch.empty_like(advantages)
    result[order] = torch.nan_to_num(advantages, nan=0.0)
    return result.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def _groups(rewards: Tensor, group_size: int | None, group_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """A permutation that makes groups contiguous, and their offsets [groups + 1]."""
    if (group_size is None) == (group_ids is None):
        raise ValueError("group_size, group_ids: expected exactly one of the two")
    count = rewards.numel()
    if group_size is not None:
        if checks.integer("group_size", group_size) < 1 or count % group_size:
            raise ValueError(
                f"group_size: got {group_size}, expected a positive divisor of the {count} rewards"
            )
        return (
            torch.arange(count, device=rewards.device),
            torch.arange(0, count + 1, group_size, device=rewards.device),
        )
    ids = checks.tensor("group_ids", group_ids, tuple(rewards.shape), "the rewards' shape", rewards.device)
    checks.dtype("group_ids", ids, checks.INTEGERS)
    ordered, order = torch.sort(ids, stable=True)
    _, sizes = torch.unique_consecutive(ordered, return_counts=True)
    return order, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
