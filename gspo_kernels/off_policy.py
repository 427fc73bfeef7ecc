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
    _check_tokens("old_logprobs", old_logprobs, "rollout_logprobs", rollout_logprobs, loss_mask, cu_seqlens)
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
    log_ratio, counted = _log_ratio(old_logprobs, rollout_logprobs, loss_mask, packed)
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


def off_policy_mask(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    delta: float,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Weights that drop negative advantages of sequences that went far off policy: 0 where ``A < 0`` and
    ``mean_t(old_t - logp_t) > delta``, else 1. From DeepSeek-V3.2's report and TRL's code.

    The result belongs in ``rollout_weights`` (times others, where there are any), not into ``loss_mask``:
    a dropped sequence keeps its place in every divisor. It multiplies the policy term only, so a KL term or
    an entropy bonus still holds for it. All losses take it. From logits or hidden states the current
    log-probs come from ``token_logprobs`` or ``linear_token_logprobs`` without gradient.

    Args:
        logprobs: [B, T], or [N] with ``cu_seqlens``: current log-probs, nats.
        old_logprobs: the same shape: log-probs under the policy that sampled.
        advantages: [B], or per token in the shape of ``logprobs``: then tokens are dropped one by one, by
            their own advantage and their sequence's mean.
        delta: how far off policy a sequence may be, in nats per token.
        loss_mask: labels' shape: tokens that count; None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.

    Returns:
        The shape of ``advantages``, 0.0 or 1.0 in fp32 (fp64 for fp64 log-probs), without gradient; 1.0 where
        nothing is counted.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    _check_tokens("logprobs", logprobs, "old_logprobs", old_logprobs, loss_mask, cu_seqlens)
    sequences = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.floats("advantages", advantages, None, "[B] or the shape of logprobs", logprobs.device)
    shape = tuple(advantages.shape)
    if shape not in ((sequences,), tuple(logprobs.shape)):
        raise ValueError(
            f"advantages: got shape {shape}, expected [B] = ({sequences},) or the shape of logprobs "
            f"{tuple(logprobs.shape)}"
        )
    checks.number("delta", delta)
    check_cu_seqlens(cu_seqlens, logprobs)
    check_mask(loss_mask)

    packed = cu_seqlens is not None
    gap, counted = _log_ratio(old_logprobs, logprobs, loss_mask, packed)
    layout = layout_of(gap, cu_seqlens)
    counts = layout.sum(counted.to(torch.float64))
    far = (layout.sum(gap) / counts.clamp(min=1.0) > delta) & (counts > 0)
    negative = advantages.detach() < 0
    if shape == (sequences,):
        dropped = negative & far
    else:
        dropped = _rows(negative, packed) & layout.expand(far) & counted
        dropped = dropped.squeeze(0) if packed else dropped
    return (~dropped).to(stats_dtype(logprobs.dtype))


def _check_tokens(
    name: str,
    tokens: Tensor,
    other_name: str,
    other: Tensor,
    loss_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    checks.floats(name, tokens, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout(name, tokens, cu_seqlens)
    shape, device = tuple(tokens.shape), tokens.device
    checks.floats(other_name, other, shape, f"the shape of {name}", device)
    if loss_mask is not None:
        checks.tensor("loss_mask", loss_mask, shape, f"the shape of {name}", device)


def _rows(tokens: Tensor, packed: bool) -> Tensor:
    return tokens.detach().unsqueeze(0) if packed else tokens.detach()


def _log_ratio(one: Tensor, other: Tensor, loss_mask: Tensor | None, packed: bool) -> tuple[Tensor, Tensor]:
    """``one - other`` in fp64, 0 where not counted, and the mask of what counts: [B, T] or [1, N]."""
    one, other = _rows(one, packed), _rows(other, packed)
    counted = torch.ones_like(one, dtype=torch.bool) if loss_mask is None else _rows(loss_mask, packed) != 0
    return torch.where(counted, one.to(torch.float64) - other.to(torch.float64), 0.0), counted
