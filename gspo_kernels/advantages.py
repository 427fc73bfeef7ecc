"""Advantages from rewards.

NaN rewards are excluded from every mean and std, and their advantage is 0. Infinite rewards raise an error on
the CPU, and elsewhere with GSPO_KERNELS_VALIDATE=1. Groups of one reward or of equal rewards have advantages
of exactly 0. Results are detached, and computed in fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_kernels.arguments.values import check_cu_seqlens, check_mask, checked_rows
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact, exact_dtype, segment_reduce
from gspo_kernels.core.layout import as_rows, copy_async, from_rows, layout_of
from gspo_kernels.core.operators import must_check_values, operator
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.objectives.finite import difference

SCALES = ("group", "batch", "mean", "none")


def group_normalized(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    scale: str = "group",
    eps: float = 1e-4,
) -> Tensor:
    """``A_i = (R_i - mean_group) / (std + eps)``, GSPO's Eq. 6 (arXiv 2507.18071) with TRL's eps.

    The std is unbiased. NaN rewards are excluded from every mean and std, and their advantage is 0. Groups of
    one reward or of equal rewards have advantages of exactly 0.

    Args:
        rewards: [B], floating point.
        group_size: number of consecutive rewards in a group. Pass either this or ``group_ids``.
        group_ids: [B], integers: rewards with equal ids form a group.
        scale: "group": divide by the group's std. "batch": divide by the std over all rewards. "mean": divide
            by the group's mean, for rewards of at least 0 (MaxRL, arXiv 2602.02710, after prime-rl);
            advantages are 0 if it is not positive. "none": don't divide (Dr. GRPO).
        eps: added to the divisor; verl and SkyRL use 1e-6, prime-rl's MaxRL 0.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values = _rewards_fp64(rewards, "[B]")
    checks.choice("scale", scale, SCALES)
    eps = checks.number("eps", eps, minimum=0.0)
    groups = _Groups(len(rewards), rewards.device, group_size, group_ids)
    return _normalized(values, groups, scale, eps).to(stats_dtype(rewards.dtype))


def leave_one_out(
    rewards: Tensor, *, group_size: int | None = None, group_ids: Tensor | None = None
) -> Tensor:
    """RLOO: each reward minus the mean of the other rewards of its group, ``A_i = G / (G - 1) (R_i -
    mean_group)``, from the paper (arXiv 2402.14740).

    Args:
        rewards: [B], floating point.
        group_size, group_ids: as in ``group_normalized``.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values = _rewards_fp64(rewards, "[B]")
    groups = _Groups(len(rewards), rewards.device, group_size, group_ids)
    count = groups.count(values)
    advantages = groups.centered(values) * count / (count - 1.0).clamp(min=1.0)
    return advantages.to(stats_dtype(rewards.dtype))


def optimal_baseline(
    rewards: Tensor, lengths: Tensor, *, group_size: int | None = None, group_ids: Tensor | None = None
) -> Tensor:
    """OPO: each reward minus its group's length-weighted mean, ``A_i = R_i - sum_j |y_j| R_j / sum_j |y_j|``,
    not divided by a std. From the paper (arXiv 2505.23585), which trains exactly on-policy.

    Args:
        rewards: [B], floating point.
        lengths: [B], numbers of counted tokens, not negative.
        group_size, group_ids: as in ``group_normalized``.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values, weights = _rewards_fp64(rewards, "[B]"), _lengths_fp64(lengths, rewards)
    groups = _Groups(len(rewards), rewards.device, group_size, group_ids)
    return groups.centered(values, weights).to(stats_dtype(rewards.dtype))


def gdpo(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """GDPO: several rewards, each normalized over its group before they are added, from the paper (arXiv
    2601.05242).

    ``A_i = sum_n w_n (R_in - mean_group,n) / (std_group,n + eps)``, then whitened over the batch:
    ``(A_i - mean) / (std + eps)``. A sequence whose rewards are all NaN gets 0 and is excluded from both
    steps.

    With ``lengths``, whitening is over tokens as in verl, ``(A_i - mean) / sqrt(var + 1e-8)``, where a
    sequence has the weight of its length. With ``eps=1e-6`` the result is that of verl's code, except for
    groups of one, which get 0 before whitening, while verl keeps their reward.

    Args:
        rewards: [B, K], floating point: K rewards per sequence.
        group_size, group_ids: as in ``group_normalized``.
        weights: [K], the weight of each reward; None: all are 1.
        lengths: [B], numbers of counted tokens, not negative, to whiten over tokens; None: over sequences.
        eps: added to every std, except in whitening over tokens, which always adds 1e-8 to the variance.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values = _rewards_fp64(rewards, "[B, K]")
    eps = checks.number("eps", eps, minimum=0.0)
    if weights is not None:
        checks.floats("weights", weights, (rewards.shape[1],), "[K], one per reward", rewards.device)
        _refuse("weights", weights, lambda x: ~x.isfinite(), "finite numbers")
    groups = _Groups(len(rewards), rewards.device, group_size, group_ids)
    tokens = None if lengths is None else _lengths_fp64(lengths, rewards)
    total = values.new_zeros(len(values))
    for kind, column in enumerate(values.unbind(1)):
        each = _normalized(column, groups, "group", eps)
        total += each if weights is None else exact(weights[kind].detach()) * each
    total = total.masked_fill(values.isnan().all(1), torch.nan)
    whitened = _whitened(total, eps) if tokens is None else _whitened(total, 1e-8, tokens, squared=True)
    return whitened.to(stats_dtype(rewards.dtype))


def reinforce_plus_plus(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++: returns whitened over the whole batch, ``A_i = (R_i - mean) / sqrt(var + eps)``. With
    groups this is the baseline form, which first subtracts the group's mean. After verl's code for the paper
    (arXiv 2501.03262).

    Rewards are outcome rewards without discount: every token's return is its sequence's reward. Pass
    ``lengths`` to whiten over tokens, as verl and OpenRLHF do. A group of one gets 0 before whitening, while
    verl keeps its reward. A KL penalty in the reward must be added by the caller.

    Args:
        rewards: [B], floating point.
        group_size, group_ids: as in ``group_normalized``, for the baseline form; by default no groups.
        lengths: [B], weights of sequences in mean and variance; 1 by default.
        eps: added to the (unbiased) variance.

    Returns:
        [B], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values = _rewards_fp64(rewards, "[B]")
    eps = checks.number("eps", eps, minimum=0.0)
    weights = None if lengths is None else _lengths_fp64(lengths, rewards)
    if group_size is not None or group_ids is not None:
        centered = _Groups(len(rewards), rewards.device, group_size, group_ids).centered(values)
        values = centered.masked_fill(values.isnan(), torch.nan)
    return _whitened(values, eps, weights, squared=True).to(stats_dtype(rewards.dtype))


def turn_normalized(
    rewards: Tensor,
    turn_ids: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: str = "group",
    eps: float = 1e-4,
) -> Tensor:
    """TL-GRPO: ``A_t`` is the reward of the token's turn, normalized over turn k of all sequences of a group.

    The structure is the paper's (arXiv 2601.16480), whose exact advantage we have not read.

    Args:
        rewards: [B, K], floating point: the reward of each turn, NaN for turns that a sequence does not have.
        turn_ids: [B, T], or [N] with ``cu_seqlens``, integers: the turn of each token, 0 to K - 1, or -1
            outside turns (prompts, tool output).
        group_size, group_ids, eps: as in ``group_normalized``.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences; on the CPU or the others' device.
        scale: "group": divide by the std of the group's turn. "batch": divide by the std over all rewards.
            "mean": divide by the mean of the group's turn. "none": don't divide.

    Returns:
        The shape of ``turn_ids``, fp32 (fp64 for fp64 rewards): per-token advantages; 0 outside turns.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    values = _rewards_fp64(rewards, "[B, K]")
    checks.choice("scale", scale, SCALES)
    eps = checks.number("eps", eps, minimum=0.0)
    shape = "[B, T], or [N] with cu_seqlens"
    checks.tensor("turn_ids", turn_ids, None, shape, rewards.device, checks.INTEGERS)
    checks.layout("turn_ids", turn_ids, cu_seqlens)
    sequences, turns = rewards.shape
    expected = turn_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences != expected:
        raise ValueError(f"rewards: got shape {tuple(rewards.shape)}, expected [B, K] with B = {expected}")
    check_cu_seqlens(cu_seqlens, turn_ids)
    expected_ids = f"-1 or a turn from 0 to K - 1 = {turns - 1}"
    _refuse("turn_ids", turn_ids, lambda x: (x < -1) | (x >= turns), expected_ids)

    groups = _Groups(sequences, rewards.device, group_size, group_ids)
    within = "none" if scale == "batch" else scale
    columns = [_normalized(column, groups, within, eps) for column in values.unbind(1)]
    if scale == "batch":
        columns = [column / (_std(values.flatten()) + eps) for column in columns]
    table = torch.stack([*columns, values.new_zeros(sequences)], 1)

    ids = as_rows(turn_ids, cu_seqlens is not None).to(torch.int64)
    rows = layout_of(ids, cu_seqlens).expand(torch.arange(sequences, device=ids.device))
    advantages = table[rows, torch.where((ids < 0) | (ids >= turns), turns, ids)]
    return advantages.view(turn_ids.shape).to(stats_dtype(rewards.dtype))


def class_normalized(rewards: Tensor, *, scale: str = "group", eps: float = 1e-4) -> Tensor:
    """GRPO-RM: ``group_normalized`` over the classes of each example, which are responses of one token.

    Flattened, the result has the shape of advantages for labels [P * C, 1] with one sequence per class, for
    any objective; as returned, of per-token advantages for labels [P, C]. After text about the paper (arXiv
    2511.15256).

    Args:
        rewards: [P, C], floating point: the reward of each class for each example.
        scale, eps: as in ``group_normalized``.

    Returns:
        [P, C], fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    _rewards_fp64(rewards, "[P, C]")
    size = max(1, rewards.shape[1])
    return group_normalized(rewards.flatten(), group_size=size, scale=scale, eps=eps).view(rewards.shape)


def reverse_kl(
    logprobs: Tensor, teacher_logprobs: Tensor, *, loss_mask: Tensor | None = None, coef: float = 1.0
) -> Tensor:
    """On-policy distillation's advantages: ``A_t = coef (log q(y_t) - log p(y_t))``, teacher minus student.

    If p is the policy that sampled, the expected policy gradient of these per-token advantages is minus the
    gradient of each token's reverse KL(p || q), without discount. Used by "On-Policy Distillation" (Thinking
    Machines, 2025).

    Args:
        logprobs: [B, T] or [N], floating point, nats: the sampled tokens under the student that sampled them.
        teacher_logprobs: the same shape and device: the same tokens under the teacher.
        loss_mask: the same shape, bool or 0/1: tokens that count; others get 0. It may be on the CPU.
        coef: factor, positive.

    Returns:
        The shape of ``logprobs``, detached, fp32 (fp64 for fp64 log-probs). 0 where both log-probs are -inf.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.floats("logprobs", logprobs, None, "[B, T] or [N]", None)
    shape, device = tuple(logprobs.shape), logprobs.device
    if logprobs.ndim not in (1, 2):
        raise ValueError(f"logprobs: got shape {shape}, expected [B, T] or [N]")
    checks.floats("teacher_logprobs", teacher_logprobs, shape, "the shape of logprobs", device)
    coef = checks.number("coef", coef, positive=True)
    mask, packed = torch.ones_like(logprobs, dtype=torch.bool), logprobs.ndim == 1
    if loss_mask is not None:
        checks.tensor("loss_mask", loss_mask, shape, "the shape of logprobs", device, host=True)
        mask = copy_async(check_mask(loss_mask), device, "loss_mask")
    counted = as_rows(mask, packed)
    student, teacher = (
        checked_rows(as_rows(each.detach(), packed), counted, packed, name, True)
        for name, each in (("logprobs", logprobs), ("teacher_logprobs", teacher_logprobs))
    )
    advantages = torch.where(counted, coef * difference(teacher, student), 0.0)
    return from_rows(advantages, packed).to(stats_dtype(logprobs.dtype))


class _Groups:
    """Reductions of [B] over groups, expanded back to [B]."""

    def __init__(self, count: int, device: torch.device, group_size: int | None, group_ids: Tensor | None):
        if (group_size is None) == (group_ids is None):
            got = "neither" if group_size is None else "both"
            raise ValueError(f"group_size, group_ids: got {got}, expected exactly one of the two")
        if group_size is not None:
            if checks.integer("group_size", group_size) < 1 or count % group_size:
                raise ValueError(
                    f"group_size: got {group_size}, expected a positive divisor of the {count} rewards"
                )
            self.order = torch.arange(count, device=device)
            self.offsets = torch.arange(0, count + 1, group_size, device=device)
        else:
            meaning = "[B], one per sequence"
            ids = checks.tensor("group_ids", group_ids, (count,), meaning, device, checks.INTEGERS)
            ordered, self.order = torch.sort(ids, stable=True)
            _, sizes = torch.unique_consecutive(ordered, return_counts=True)
            self.offsets = pad(sizes.cumsum(0), (1, 0))
        self.members = torch.repeat_interleave(self.offsets.diff(), output_size=count)

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        if values.numel() == 0:
            return values
        sums = segment_reduce(values[self.order], operation, self.offsets)
        result = torch.empty_like(values)
        result[self.order] = sums[self.members]
        return result

    def count(self, values: Tensor) -> Tensor:
        """Return for each value the number of values in its group that are not NaN."""
        return self.reduce(exact(~values.isnan()), "sum")

    def mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of each value's group, or 0 if the weights are 0."""
        total = self.reduce(weights, "sum")
        return self.reduce(weights * values, "sum") / torch.where(total == 0, 1.0, total)

    def centered(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Subtract the group's (weighted) mean; 0 for NaN, and exactly 0 for groups of equal values."""
        present = ~values.isnan()
        kept = torch.where(present, values, 0.0)
        share = exact(present)
        if weights is not None:
            share = torch.where(present, weights, 0.0)
        mean = self.mean(kept, share)
        # equal rewards have advantages of exactly 0 despite rounding
        high = self.reduce(torch.where(present, values, -torch.inf), "max")
        low = self.reduce(torch.where(present, values, torch.inf), "min")
        return torch.nan_to_num(torch.where(present & (high > low), kept - mean, 0.0), nan=0.0)


def _normalized(values: Tensor, groups: _Groups, scale: str, eps: float) -> Tensor:
    advantages = groups.centered(values)
    if scale == "group":
        variance = groups.reduce(advantages.square(), "sum") / (groups.count(values) - 1.0).clamp(min=1.0)
        advantages = advantages / (variance.sqrt() + eps)
    elif scale == "batch":
        advantages = advantages / (_std(values) + eps)
    elif scale == "mean":
        mean = groups.mean(values.nan_to_num(nan=0.0), exact(~values.isnan()))
        advantages = torch.where(mean > 0, advantages / (mean + eps), 0.0)
    return torch.nan_to_num(advantages, nan=0.0)


def _std(values: Tensor) -> Tensor:
    """Return the unbiased std of the values that are not NaN, or 0 for fewer than two."""
    kept = values[~values.isnan()]
    return kept.std() if kept.numel() > 1 else kept.new_zeros(())


def _whitened(values: Tensor, eps: float, weights: Tensor | None = None, squared: bool = False) -> Tensor:
    """Subtract the mean and divide by the unbiased std; return 0 for NaN.

    ``eps`` is added to the std or, if ``squared``, to the variance.
    """
    present = ~values.isnan()
    kept = values[present]
    if kept.numel() == 0 or bool((kept == kept[0]).all()):
        return torch.zeros_like(values)
    share = torch.ones_like(kept) if weights is None else weights[present]
    total = share.sum()
    mean = (share * kept).sum() / torch.where(total == 0, 1.0, total)
    variance = (share * (kept - mean).square()).sum() / (total - 1.0).clamp(min=1.0)
    divisor = (variance + eps).sqrt() if squared else variance.sqrt() + eps
    result = torch.zeros_like(values)
    result[present] = (kept - mean) / divisor
    return torch.nan_to_num(result, nan=0.0)


def _rewards_fp64(rewards: Tensor, shape: str) -> Tensor:
    """Check dtype and shape of rewards; return them detached, in fp64."""
    checks.floats("rewards", rewards, None, shape, None)
    if rewards.ndim != shape.count(",") + 1:
        raise ValueError(f"rewards: got shape {tuple(rewards.shape)}, expected {shape}")
    result: Tensor = checked_rewards(rewards.detach())
    return result


@operator
def checked_rewards(rewards: Tensor) -> Tensor:
    """Reject infinite rewards; return a copy in ``exact_dtype``."""
    _refuse("rewards", rewards, torch.isinf, "finite numbers, or NaN for no reward")
    return rewards.to(exact_dtype(rewards.device), copy=True)


@checked_rewards.register_fake
def _(rewards: Tensor) -> Tensor:
    return torch.empty_like(rewards, dtype=exact_dtype(rewards.device))


def _lengths_fp64(lengths: Tensor, rewards: Tensor) -> Tensor:
    """Check lengths [B]; return them detached, in fp64."""
    numbers = (*checks.FLOATS, *checks.INTEGERS)
    checks.tensor("lengths", lengths, (len(rewards),), "[B], one per sequence", rewards.device, numbers)
    _refuse("lengths", lengths, lambda x: ~((x >= 0) & (x < torch.inf)), "finite numbers of at least 0")
    return exact(lengths.detach())


def _refuse(name: str, values: Tensor, is_wrong: Callable[[Tensor], Tensor], expected: str) -> None:
    """Reject wrong values on devices whose values are checked."""
    if must_check_values(values.device) and bool((wrong := is_wrong(values)).any()):
        raise ValueError(f"{name}: got {values[wrong][0].item()}, expected {expected}")
