"""Corrections for rollouts from a policy other than the one that computed ``old_logprobs``."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gspo_kernels.arguments.values import check_cu_seqlens, check_mask, checked_rows
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import Layout, as_rows, layout_of, queued
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.evaluate import kl_penalty


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
    """Importance weights pi_old / mu, or 0/1 weights that reject, for the ``rollout_weights`` of the losses.

    Let ``l_t = old_t - rollout_t`` and ``r_t = exp(l_t)``. A sequence's ratio is ``exp(mean_t l_t)``, the
    geometric mean of its tokens' ratios (``reduce="mean"``), or ``exp(sum_t l_t)``, its likelihood ratio
    ("sum"). The mean does not depend on the length, and GSPO's own ratio is such a mean. Importance sampling
    asks for the sum, but that ratio falls to 0 with the length whatever the mismatch: at thousands of tokens
    it weakens whole batches (docs/off_policy.md). Trainers disagree about it. The modes, by the names in use:

    - "truncate": the ratio of the token or the sequence, clamped to [low, high]. Known as TIS.
    - "mask": the same ratio where it lies in [low, high], else 0. Known as MIS, with a sequence's sum as
      Seq-MIS.
    - "icepop": "mask" for tokens, bounded on both sides. This is IcePop of Ring-1T's report (arXiv
      2510.18855), known to us from text about it; NeMo-RL's and OpenRLHF's code agree.
    - "sequence_mask": every token's own ratio, but 0 for all tokens of a sequence whose ratio lies outside
      [low, high]. This is sequence-masked importance sampling, "seq-mask-tis" in NeMo-RL and OpenRLHF, which
      take the mean.
    - "k1", "k2", "k3": a rejection instead of a ratio, 1 where an estimate of KL(mu, pi_old) lies in
      [low, high] and 0 elsewhere: ``k1 = -l``, ``k2 = l^2 / 2``, ``k3 = r - 1 - l``. The estimate is that of
      a token, or of a sequence: the mean, the sum or the largest over its tokens. verl calls this
      ``rollout_rs``: its "token_k3" is ``mode="k3"``, its "seq_max_k2" is ``level="sequence", reduce="max",
      mode="k2"``. The bounds of k1 are in nats: verl's "a_b" is ``low=log(a), high=log(b)``. verl clamps l to
      +-20, this function does not. The mean of a sequence's k1 is minus the log of its geometric mean:
      Geo-Mask between a and b is ``low=-log(b), high=-log(a)``. The largest k1 is that of the token with the
      smallest ratio: slime's veto at c is ``high=-log(c)``.

    Weights multiply the policy term and leave divisors alone: tokens and sequences of weight 0 still count
    there. verl and slime take rejected tokens out of the mask, and so out of the divisor:
    ``without_rejected`` does that. To combine corrections, multiply them, such as a rejection and truncated
    ratios.

    Args:
        old_logprobs: [B, T], or [N] with ``cu_seqlens``: log-probs by the trainer, nats.
        rollout_logprobs: the same shape: log-probs by the engine that sampled.
        loss_mask: the same shape: tokens that count; None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences; like the mask
            it may lie on the CPU, whatever the other tensors' device.
        level: "token": one weight per token. "sequence": one per sequence. The modes "icepop" and
            "sequence_mask" need "token".
        reduce: how the tokens of a sequence become one number: "mean", "sum" or "max". Only for
            ``level="sequence"`` and ``mode="sequence_mask"``; "max" only for k1, k2 and k3.
        mode: see above.
        low, high: bounds; None: no bound, or for "icepop" OpenRLHF's bounds, 0.5 and 5.0. At least one is
            needed.

    Returns:
        [B] or the shape of ``old_logprobs``, fp32 (fp64 for fp64 inputs), without gradient; 1.0 where nothing
        is counted.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    low, high = _validate_options(level, reduce, mode, low, high)
    log_ratio, counted, layout = _log_ratio(
        "old_logprobs", old_logprobs, "rollout_logprobs", rollout_logprobs, loss_mask, cu_seqlens
    )
    by_token, divergence = level == "token", mode in _DIVERGENCES
    # from log(mu / pi_old) of tokens that mu sampled: estimates of KL(mu, pi_old)
    weights = kl_penalty(-log_ratio, mode) if divergence else log_ratio.exp()
    measured = weights  # what must lie between the bounds
    if not by_token or mode == "sequence_mask":
        if divergence:
            measured = _reduced(layout, measured, counted, reduce)
        else:
            measured = _reduced(layout, log_ratio, counted, reduce).exp()
        if by_token:
            measured = layout.expand(measured)
        else:
            weights, counted = measured, layout.sum(exact(counted)) > 0
    if mode == "truncate":
        weights = weights.clamp(min=low, max=high)
    else:
        inside = torch.ones_like(measured, dtype=torch.bool)
        inside = inside if low is None else inside & (measured >= low)
        inside = inside if high is None else inside & (measured <= high)
        weights = torch.where(inside, torch.ones_like(weights) if divergence else weights, 0.0)
    weights = torch.where(counted, weights, 1.0).to(stats_dtype(old_logprobs.dtype))
    return weights.view_as(old_logprobs) if by_token else weights


def without_rejected(loss_mask: Tensor, weights: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """The mask without tokens of weight 0, so that rejected tokens leave every divisor.

    As a ``loss_mask`` the result takes these tokens out of KL terms and entropy bonuses, too. With the
    original mask rejected tokens and sequences count as zeros, and the gradient is smaller by their share.

    Args:
        loss_mask: [B, T], or [N] with ``cu_seqlens``: tokens that count.
        weights: [B], or per token in the shape of ``loss_mask``, as ``rollout_weights`` returns them; packed
            with N == B, [B].
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.

    Returns:
        Bool, the shape of ``loss_mask``.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    counted, layout = _counted(loss_mask, cu_seqlens)
    weights = _checked("weights", weights, counted, layout, "loss_mask", loss_mask)
    return (counted & (_per_token(weights, layout) != 0)).view_as(loss_mask)


def weight_metrics(
    weights: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """Measure what weights do to a batch: how many samples it is still worth, how long its gradient still is.

    The metrics cover the sequences with a counted token or, for weights per token, the counted tokens:

    - "weights/mean", "weights/min", "weights/max": a mean of 1/17 weakens the batch 17-fold,
    - "weights/zero": the share of weights that are 0, the rejected ones,
    - "weights/ess": the effective sample size ``(sum w)^2 / (n sum w^2)`` as a share of n (Kish, as verl has
      it); blind to a common factor, which the mean and the norm show,
    - "weights/gradient_norm": the norm of the policy gradient's coefficients ``w_t A_t / |y_i|`` (at a ratio
      of 1, in a mean over sequences) divided by their norm without weights; 1 if all advantages are 0.

    ``GSPO`` takes the mean of a sequence's weights per token: pass that mean, [B], to measure its gradient.

    Args:
        weights: [B], or per token in the shape of ``loss_mask``, as ``rollout_weights`` returns them.
        advantages: [B], or per token in the shape of ``loss_mask``; packed with N == B, [B], as weights are.
        loss_mask: [B, T], or [N] with ``cu_seqlens``: tokens that count.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.

    Returns:
        Detached 0-d fp64 tensors by name.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    counted, layout = _counted(loss_mask, cu_seqlens)
    weights = _checked("weights", weights, counted, layout, "loss_mask", loss_mask)
    advantages = _checked("advantages", advantages, counted, layout, "loss_mask", loss_mask)
    counts = layout.sum(exact(counted))

    def tokens(values: Tensor) -> Tensor:
        return torch.where(counted, _per_token(values, layout), 0.0)

    kept = weights[counts > 0] if weights.ndim == 1 else weights[counted]
    kept = kept if kept.numel() else kept.new_ones(1)  # nothing is counted, and nothing changed
    squares = kept.square().sum()
    plain = tokens(advantages) / layout.expand(counts.clamp(min=1.0))
    # torch.where, as multiplying by 0 is not enough: a weight without a bound may be inf
    norm, weighted = plain.norm(), torch.where(plain != 0, tokens(weights) * plain, 0.0).norm()
    return {
        "weights/mean": kept.mean(),
        "weights/min": kept.min(),
        "weights/max": kept.max(),
        "weights/zero": exact(kept == 0).mean(),
        "weights/ess": torch.where(
            squares > 0, kept.sum().square() / (kept.numel() * torch.where(squares > 0, squares, 1.0)), 0.0
        ),
        "weights/gradient_norm": torch.where(norm > 0, weighted / torch.where(norm > 0, norm, 1.0), 1.0),
    }


def off_policy_mask(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    delta: float,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Weights that drop negative advantages of sequences far off policy: 0 where ``A < 0`` and
    ``mean_t(old_t - logp_t) > delta``, else 1. From DeepSeek-V3.2's report and TRL's code.

    Pass the result as ``rollout_weights`` (times other weights, if there are any), not as ``loss_mask``: a
    dropped sequence still counts in every divisor. The weights multiply the policy term only, so a KL term or
    an entropy bonus still applies to dropped sequences. All policy losses take them. If you have logits or
    hidden states, compute the current log-probs by ``token_logprobs`` or ``linear_token_logprobs`` without
    gradient.

    Args:
        logprobs: [B, T], or [N] with ``cu_seqlens``: current log-probs, nats.
        old_logprobs: the same shape: log-probs under the policy that sampled.
        advantages: [B], or per token in the shape of ``logprobs`` (packed with N == B: [B]): then tokens are
            dropped one by one, by their own advantage and their sequence's mean.
        delta: how far off policy a sequence may be, in nats per token.
        loss_mask: the shape of ``logprobs``: tokens that count; None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences; like the mask
            it may lie on the CPU, whatever the other tensors' device.

    Returns:
        The shape of ``advantages``, 0.0 or 1.0 in fp32 (fp64 for fp64 log-probs), without gradient; 1.0 where
        nothing is counted.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    delta = checks.number("delta", delta)
    log_ratio, counted, layout = _log_ratio(
        "logprobs", logprobs, "old_logprobs", old_logprobs, loss_mask, cu_seqlens
    )
    counts = layout.sum(exact(counted))
    far = (layout.sum(log_ratio) / counts.clamp(min=1.0) < -delta) & (counts > 0)
    rows = _checked("advantages", advantages, counted, layout, "logprobs", logprobs)
    far = far if rows.ndim == 1 else layout.expand(far) & counted
    return (~(far & (rows < 0))).to(stats_dtype(logprobs.dtype)).view_as(advantages)


_DIVERGENCES = ("k1", "k2", "k3")
_MODES = ("truncate", "mask", "icepop", "sequence_mask", *_DIVERGENCES)


def _validate_options(
    level: str, reduce: str, mode: str, low: float | None, high: float | None
) -> tuple[float | None, float | None]:
    """Check the options; return the bounds."""
    checks.choice("level", level, ("token", "sequence"))
    checks.choice("reduce", reduce, ("mean", "sum", "max"))
    checks.choice("mode", mode, _MODES)
    if level == "sequence" and mode in ("icepop", "sequence_mask"):
        raise ValueError(f"level: got 'sequence', expected 'token': mode={mode!r} has one weight per token")
    if level == "token" and mode != "sequence_mask" and reduce != "mean":
        raise ValueError(f"reduce: got {reduce!r}, expected 'mean': level='token' reduces nothing")
    if reduce == "max" and mode not in _DIVERGENCES:
        raise ValueError(
            f"reduce: got 'max' with mode={mode!r}, expected 'mean' or 'sum': 'max' is for 'k1', 'k2', 'k3'"
        )
    if mode == "icepop":
        low, high = 0.5 if low is None else low, 5.0 if high is None else high
    if low is None and high is None:
        raise ValueError(f"low, high: got None for both, but mode={mode!r} needs at least one bound")
    minimum = None if mode == "k1" else 0.0
    low = None if low is None else checks.number("low", low, minimum=minimum)
    high = None if high is None else checks.number("high", high, minimum=minimum)
    if low is not None and high is not None and low > high:
        raise ValueError(f"low: got {low}, expected at most high = {high}")
    return low, high


def _reduced(layout: Layout, values: Tensor, counted: Tensor, reduce: str) -> Tensor:
    """Reduce tokens to sequences; values must be 0 for tokens that don't count."""
    if reduce == "max":
        rows = layout.expand(torch.arange(layout.sequences, device=values.device)).flatten()
        values = torch.where(counted, values, -torch.inf).flatten()
        return values.new_full((layout.sequences,), -torch.inf).scatter_reduce(0, rows, values, "amax")
    total = layout.sum(values)
    return total if reduce == "sum" else total / layout.sum(exact(counted)).clamp(min=1.0)


def _log_ratio(
    name: str,
    tokens: Tensor,
    other_name: str,
    other: Tensor,
    loss_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Layout]:
    """Check log-probs, their mask and offsets.

    Returns:
        ``tokens - other`` in fp64, 0 where not counted, and the mask of counted tokens, both [B, T] or
        [1, N]; and their layout.
    """
    checks.floats(name, tokens, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout(name, tokens, cu_seqlens)
    checks.floats(other_name, other, tuple(tokens.shape), f"the shape of {name}", tokens.device)
    if loss_mask is None:
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
    shape, device = tuple(tokens.shape), tokens.device
    checks.tensor("loss_mask", loss_mask, shape, f"the shape of {name}", device, host=True)
    packed, loss_mask = cu_seqlens is not None, queued(check_mask(loss_mask), device, "loss_mask")
    counted, layout = _counted(loss_mask, cu_seqlens)
    first, second = (
        checked_rows(as_rows(value.detach(), packed), counted, packed, each, True)
        for each, value in ((name, tokens), (other_name, other))
    )
    return torch.where(counted, finite.difference(first, second), 0.0), counted, layout


def _counted(loss_mask: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Layout]:
    """Check a mask and offsets; return the mask as bool [B, T] or [1, N], and its layout."""
    checks.tensor("loss_mask", loss_mask, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout("loss_mask", loss_mask, cu_seqlens)
    check_cu_seqlens(cu_seqlens, loss_mask)
    counted = as_rows(check_mask(loss_mask.detach()), cu_seqlens is not None)
    return counted, layout_of(counted, cu_seqlens)


def _checked(
    name: str, values: Tensor, counted: Tensor, layout: Layout, tokens_name: str, tokens: Tensor
) -> Tensor:
    """Check values, [B] or in the shape of the tokens; return them in fp64, [B] or in rows."""
    checks.floats(name, values, None, f"[B] or the shape of {tokens_name}", tokens.device)
    shape = tuple(values.shape)
    if shape not in ((layout.sequences,), tuple(tokens.shape)):
        raise ValueError(
            f"{name}: got shape {shape}, expected [B] = ({layout.sequences},) or the shape of {tokens_name} "
            f"{tuple(tokens.shape)}"
        )
    packed, rows = tokens.ndim == 1, values.detach()
    if shape == (layout.sequences,):
        counted = layout.sum(exact(counted)) > 0
    else:
        rows = as_rows(rows, packed)
    return cast(Tensor, checked_rows(rows, counted, packed, name, False))


def _per_token(values: Tensor, layout: Layout) -> Tensor:
    """Return values, [B] or tokens in rows, as tokens in rows."""
    return layout.expand(values) if values.ndim == 1 else values
