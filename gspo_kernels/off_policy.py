"""Corrections for rollouts from a policy other than the one that computed ``old_logprobs``."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import layout_of
from gspo_kernels.ops.values import check_cu_seqlens, check_mask
from gspo_kernels.types import stats_dtype


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "token",
    reduce: str = "mean",
    mode: str = "truncate",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Importance weights pi_old / mu for the ``rollout_weights`` of the losses: TIS ("truncate") and MIS
    ("mask").

    Args:
        old_logprobs: [B, T], or [N] with ``cu_seqlens``: log-probs by the trainer, nats.
        rollout_logprobs: the same shape: log-probs by the engine that sampled.
        loss_mask: labels' shape: tokens that count; None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.
        level: "token": one weight per token. "sequence": one per sequence.
        reduce: how a sequence's log-ratios become one, "mean" (geometric mean of the token ratios) or "sum"
            (the sequence's likelihood ratio); trainers disagree. Only for ``level="sequence"``.
        mode: "truncate": weights are clamped to [low, high]. "mask": weights outside [low, high] become 0.
        low, high: bounds on the weight; None: no bound. At least one is needed.

    Returns:
        Labels' shape or [B], fp32 (fp64 for fp64 inputs), without gradient; 1.0 where nothing is counted.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.floats("old_logprobs", old_logprobs, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout("old_logprobs", old_logprobs, cu_seqlens)
    shape, device = tuple(old_logprobs.shape), old_logprobs.device
    checks.floats("rollout_logprobs", rollout_logprobs, shape, "the shape of old_logprobs", device)
    if loss_mask is not None:
        checks.tensor("loss_mask", loss_mask, shape, "the shape of old_logprobs", device)
    checks.choice("level", level, ("token", "sequence"))
    checks.choice("reduce", reduce, ("mean", "sum"))
    checks.choice("mode", mode, ("truncate", "mask"))
    if level == "token" and reduce == "sum":
        raise ValueError("reduce: 'sum' has no meaning with level='token', expected the default")
    if low is None and high is None:
        raise ValueError(f"low, high: mode={mode!r} needs at least one bound, got None for both")
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            checks.number(name, bound, minimum=0.0)
    if low is not None and high is not None and low > high:
        raise ValueError(f"low: got {low}, expected at most high = {high}")
    check_cu_seqlens(cu_seqlens, old_logprobs)
    check_mask(loss_mask)

    packed = cu_seqlens is not None

    def rows(tokens: Tensor) -> Tensor:
        return tokens.detach().unsqueeze(0) if packed else tokens.detach()

    counted = (
        torch.ones_like(rows(old_logprobs), dtype=torch.bool) if loss_mask is None else rows(loss_mask) != 0
    )
    log_ratio = rows(old_logprobs).to(torch.float64) - rows(rollout_logprobs).to(torch.float64)
    log_ratio = torch.where(counted, log_ratio, 0.0)
    if level == "sequence":
        layout = layout_of(log_ratio, cu_seqlens)
        log_ratio = layout.sum(log_ratio)
        counts = layout.sum(counted.to(torch.float64))
        counted = counts > 0
        if reduce == "mean":
            log_ratio = log_ratio / counts.clamp(min=1.0)
    weights = log_ratio.exp()
    if mode == "truncate":
        weights = weights.clamp(min=low, max=high)
    else:
        inside = torch.ones_like(weights, dtype=torch.bool)
        inside = inside if low is None else inside & (weights >= low)
        inside = inside if high is None else inside & (weights <= high)
        weights = torch.where(inside, weights, 0.0)
    weights = torch.where(counted, weights, 1.0).to(stats_dtype(old_logprobs.dtype))
    return weights.squeeze(0) if packed and level == "token" else weights
