"""Corrections for rollouts from a different policy than that of ``old_logprobs``, and sampling masks.

A sampling mask is a bitmask of the tokens that a sampler could have drawn, from ids, or from logits by the
rules of top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.arguments.logit_options import check_labels_match, zero_labels
from gspo_kernels.arguments.values import (
    check_cu_seqlens,
    check_ids,
    check_mask,
    check_temperature,
    checked_rows,
)
from gspo_kernels.core import bits, checks
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.layout import Layout, as_rows, copy_async, layout_of
from gspo_kernels.core.operators import must_check_values
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.kl import kl_penalty


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
    """Return weights that correct for a sampler that is not the trainer, for the losses' ``rollout_weights``.

    Let ``l_t = old_t - rollout_t`` be a token's log-ratio and ``r_t = exp(l_t)`` its ratio. A sequence's
    ratio is the geometric mean of its tokens' ratios, ``exp(mean_t l_t)`` (``reduce="mean"``), or their
    product, ``exp(sum_t l_t)`` ("sum"). The mean does not depend on the length, like GSPO's ratio. The
    product is that of importance sampling, but decreases to 0 with the length for any mismatch; see
    docs/off_policy.md. The modes are:

    - "truncate": the ratio of the token or the sequence, clamped to [low, high]. Known as TIS.
    - "mask": the same ratio if it is in [low, high], else 0. Known as MIS; for products as Seq-MIS.
    - "icepop": "mask" for tokens, with both bounds. This is IcePop of Ring-1T's report (arXiv 2510.18855),
      known to us from text about it; NeMo-RL's and OpenRLHF's code agree.
    - "sequence_mask": the ratio of each token, but 0 in sequences whose ratio is outside [low, high]. Known
      as "seq-mask-tis" in NeMo-RL and OpenRLHF, which use the mean.
    - "k1", "k2", "k3": 1 if an estimate of KL(sampler, trainer) is in [low, high], else 0 (rejected). The
      estimate of a token is ``k1 = -l``, ``k2 = l^2 / 2`` or ``k3 = r - 1 - l``; that of a sequence is their
      mean, sum or maximum. In verl this is ``rollout_rs``: its "token_k3" is ``mode="k3"``, its "seq_max_k2"
      is ``level="sequence", reduce="max", mode="k2"``. verl clamps l to +-20, this function does not.

    k1 is minus the log-ratio, in nats. Ratios from a to b (Geo-Mask) are ``low=-log(b), high=-log(a)``. A
    veto of sequences with a ratio below c is ``reduce="max", high=-log(c)``. verl's "a_b" bounds k1 itself:
    ``low=log(a), high=log(b)``.

    Weights multiply the policy term only: tokens and sequences of weight 0 count in divisors. To remove them
    from the mask and the divisor, as verl and slime do, use ``without_rejected``. Multiply weights to combine
    corrections.

    Args:
        old_logprobs: [B, T], or [N] with ``cu_seqlens``: log-probs by the trainer, nats.
        rollout_logprobs: the same shape: log-probs by the engine that sampled.
        loss_mask: the same shape: tokens that count; all by default.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences. Mask and offsets may be on the CPU.
        level: "token" or "sequence", one weight for each. The modes "icepop" and "sequence_mask" need
            "token".
        reduce: reduction over the tokens of a sequence, "mean", "sum" or "max". Only for
            ``level="sequence"`` and ``mode="sequence_mask"``; "max" only for k1, k2 and k3.
        mode: see above.
        low, high: bounds, at least one of them. The defaults of "icepop" are OpenRLHF's, 0.5 and 5.0.

    Returns:
        [B] or the shape of ``old_logprobs``, fp32 (fp64 for fp64 inputs), without gradient; 1.0 for tokens
        and sequences that don't count.

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
    measured = weights  # compared with the bounds
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
    """Remove tokens of weight 0 from a mask, and thereby from every divisor.

    As a ``loss_mask`` the result also removes these tokens from KL terms and entropy bonuses. With the
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
    """Return metrics of weights: their effective sample size and their effect on the norm of the gradient.

    The metrics cover the sequences with a counted token or, for weights per token, the counted tokens:

    - "weights/mean", "weights/min", "weights/max": a mean of 1/17 scales the gradient by 1/17,
    - "weights/zero": the fraction of weights that are 0 (rejected),
    - "weights/ess": the effective sample size ``(sum w)^2 / (n sum w^2)`` as a fraction of n (Kish, like
      verl), which is invariant to a common factor,
    - "weights/gradient_norm": the norm of the policy gradient's coefficients ``w_t A_t / |y_i|`` (at a ratio
      of 1, in a mean over sequences) divided by their norm without weights; 1 if all advantages are 0.

    ``GSPO`` averages weights per token over a sequence; pass that mean, [B], to measure its gradient.

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
    kept = kept if kept.numel() else kept.new_ones(1)  # nothing is counted
    squares = kept.square().sum()
    plain = tokens(advantages) / layout.expand(counts.clamp(min=1.0))
    # an unbounded weight may be inf
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
    """Return weights that reject off-policy sequences with negative advantages.

    The weight is 0 if ``A < 0`` and ``mean_t(old_t - logp_t) > delta``, else 1. From DeepSeek-V3.2's report
    and TRL's code.

    Pass the result as ``rollout_weights`` (multiplied by other weights), not as ``loss_mask``: dropped
    sequences count in every divisor, and in a KL term or entropy bonus. From logits or hidden states, compute
    the current log-probs by ``token_logprobs`` or ``linear_token_logprobs`` without gradient.

    Args:
        logprobs: [B, T], or [N] with ``cu_seqlens``: current log-probs, nats.
        old_logprobs: the same shape: log-probs under the policy that sampled.
        advantages: [B], or per token in the shape of ``logprobs`` (packed with N == B: [B]), to drop single
            tokens by their advantage and their sequence's mean.
        delta: bound of the mean log-ratio, in nats per token.
        loss_mask: the shape of ``logprobs``: tokens that count; all by default.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences. Mask and offsets may be on the CPU.

    Returns:
        The shape of ``advantages``, 0.0 or 1.0 in fp32 (fp64 for fp64 log-probs), without gradient; 1.0 for
        tokens and sequences that don't count.

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
        raise ValueError(f"reduce: got {reduce!r}, expected 'mean' with level='token', which ignores it")
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
    packed, loss_mask = cu_seqlens is not None, copy_async(check_mask(loss_mask), device, "loss_mask")
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
    """Expand values [B] to tokens in rows; return tokens in rows unchanged."""
    return layout.expand(values) if values.ndim == 1 else values


ENGINES = ("transformers", "vllm")
_CANDIDATES = 1024
"""Number of most likely tokens that top-p reads first."""
_GROWTH = 16
"""Growth factor of that number if these do not reach ``top_p``."""
_ELEMENTS = 2**24
"""Logits per chunk of rows."""


class SamplingMask(NamedTuple):
    """The tokens that a sampler could have drawn at each of C positions."""

    ids: Tensor  # int32 [S], the concatenated ids of all positions
    counts: Tensor  # int64 [C], number of ids at each position; 0 means any id, as for tool output

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """Create from one list of ids per position, unordered and possibly repeated."""
        ids = [token for each in sets for token in each]
        counts = [len(each) for each in sets]
        return cls(
            torch.tensor(ids, dtype=torch.int32, device="cpu"),
            torch.tensor(counts, dtype=torch.int64, device="cpu"),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate one or more masks."""
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def to_lists(self) -> list[list[int]]:
        """Return one list of ids per position, the inverse of `of`."""
        ids, ends = self.ids.tolist(), self.counts.cumsum(0).tolist()
        return [ids[end - count : end] for count, end in zip(self.counts.tolist(), ends, strict=True)]

    def to(self, device: torch.device) -> SamplingMask:
        """Return the same mask on another device."""
        return SamplingMask(self.ids.to(device), self.counts.to(device))

    def bitmask(self, vocabulary: int) -> Tensor:
        """Check the ids and return the ``kept_mask`` of the losses, int32 [C, ceil(V / 32)]."""
        check_ids("ids", self.ids, vocabulary)
        whole = bits.packed_columns(torch.ones(vocabulary, dtype=torch.bool, device=self.ids.device))
        kept = bits.packed_rows(self.ids, self.counts, vocabulary)
        return torch.where(self.counts.unsqueeze(1) > 0, kept, whole)


def kept_mask(ids: Tensor, vocabulary_size: int) -> Tensor:
    """Convert the ids that a sampler could have drawn to a bitmask, to pass as ``kept_mask``.

    Args:
        ids: [B, T, K] or [N, K], int64 or int32, unordered and possibly repeated, padded with -1 or -100.
        vocabulary_size: V of the logits, of all ranks together if these share the vocabulary.

    Returns:
        int32 [B, T, ceil(V / 32)] or [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. On CPU tensors, and elsewhere with
            GSPO_KERNELS_VALIDATE=1, also an id out of range; otherwise it is ignored.
    """
    checks.tensor("ids", ids, None, "[B, T, K] or [N, K]", None, checks.INTEGERS)
    if ids.ndim not in (2, 3):
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [B, T, K] or [N, K]")
    if checks.integer("vocabulary_size", vocabulary_size) < 1:
        raise ValueError(f"vocabulary_size: got {vocabulary_size}, expected at least 1")
    check_ids("ids", ids, vocabulary_size)
    return bits.packed_ids(ids, vocabulary_size)


@torch.no_grad()
def sampling_mask(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    labels: Tensor | None = None,
    engine: str = "transformers",
) -> Tensor:
    """Compute a bitmask of the ids that a sampler could have drawn from logits, to pass as ``kept_mask``.

    The rules are those of transformers' warpers and of vLLM's sampler, after division by the temperature.
    Top-k keeps the k most likely ids and all ties of the last one. Top-p keeps an id if all more likely ids
    together have less than ``top_p`` of the probability that top-k kept. It keeps all ties, of which engines
    keep some, by the order of their sort. Min-p keeps ids with at least ``min_p`` times the probability of
    the most likely id. transformers applies min-p after top-k and top-p, vLLM before them.

    Sums are in fp64. An engine that rounds differently, or has different logits, may draw an id just outside
    of a set; pass ``labels`` to include the drawn ids.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, before the temperature: those of the policy
            that sampled.
        temperature: a positive number, or positive numbers [B] ([N] for packed logits).
        top_k: the number of ids to keep, or 0 for all.
        top_p: the fraction of probability to keep, in (0, 1].
        min_p: minimum probability relative to that of the most likely id, in [0, 1).
        labels: [B, T] or [N], int64 or int32, or None: ids that are always kept, or -100 for rows that were
            not sampled and are ignored.
        engine: "transformers" or "vllm".

    Returns:
        int32 [B, T, ceil(V / 32)] or [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v. A row with
        NaN or +inf keeps all ids.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. On CPU tensors, and elsewhere with
            GSPO_KERNELS_VALIDATE=1, also a label out of range, and, in a row whose label is not -100, NaN or
            +inf among the logits, or a temperature that is not positive.
    """
    tokens = zero_labels("logits", logits, "V")
    check_labels_match("logits", logits, tokens if labels is None else labels, "V")
    shape, vocabulary = tokens.shape, logits.shape[-1]
    checks.choice("engine", engine, ENGINES)
    if checks.integer("top_k", top_k) < 0:
        raise ValueError(f"top_k: got {top_k}, expected at least 0")
    if not 0 < checks.number("top_p", top_p) <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a share above 0 and at most 1")
    if not 0 <= checks.number("min_p", min_p) < 1:
        raise ValueError(f"min_p: got {min_p}, expected a share of at least 0 and below 1")
    top_k, log_min_p = min(top_k, vocabulary), math.log(min_p) if min_p else -math.inf
    if isinstance(temperature, Tensor):
        checks.tensor(
            "temperature", temperature, (shape[0],), "one per sequence", logits.device, checks.FLOATS
        )
        each = temperature.view(-1, *(1,) * (len(shape) - 1)).expand(shape)
        check_temperature(each, tokens if labels is None else labels, bits.NO_ID)
        divisors = each.reshape(-1, 1)
    else:
        divisors = logits.new_full(
            (), checks.number("temperature", temperature, positive=True), dtype=exact_dtype(logits.device)
        )
    rows = logits.reshape(-1, vocabulary)
    validating = must_check_values(logits.device)
    if validating and labels is not None:
        _check_labels(labels, vocabulary)
    masks = rows.new_empty((rows.shape[0], bits.words(vocabulary)), dtype=torch.int32)
    step = max(1, _ELEMENTS // vocabulary)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        z = rows[chunk].to(stats_dtype(logits.dtype))
        z = z / (divisors if divisors.ndim == 0 else divisors[chunk]).to(z.dtype)
        defined = z.amax(-1, keepdim=True) < torch.inf  # False for NaN, the largest of a row with NaN
        if validating and not bool(defined.all()):
            drawn = None if labels is None else labels.reshape(-1)[chunk] != bits.NO_ID
            _check_defined(defined.squeeze(-1), drawn, start, shape)
        least = _least_kept(z, top_k, top_p, log_min_p, engine == "vllm")
        masks[chunk] = bits.packed_columns((z >= least) | ~defined)
    if labels is not None:
        masks |= bits.packed_ids(labels.reshape(-1, 1), vocabulary)
    return masks.view(*shape, masks.shape[-1])


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    wrong = (labels != bits.NO_ID) & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        raise ValueError(
            f"labels: got {int(labels[wrong][0])} at position {wrong.nonzero()[0].tolist()}, expected "
            f"0 <= label < {vocabulary}, or {bits.NO_ID} for none"
        )


def _check_defined(defined: Tensor, drawn: Tensor | None, start: int, shape: torch.Size) -> None:
    """Check that rows [n] from ``start`` on have a softmax, if an id was ``drawn`` there (None: in all)."""
    wrong = ~defined if drawn is None else ~defined & drawn
    if bool(wrong.any()):
        place = start + int(wrong.nonzero()[0])
        position = [place] if len(shape) == 1 else list(divmod(place, shape[1]))
        raise ValueError(
            f"logits: got NaN or +inf at position {position}, expected numbers or -inf (except in rows whose "
            f"label is {bits.NO_ID})"
        )


def _least_kept(z: Tensor, top_k: int, top_p: float, log_min_p: float, min_p_first: bool) -> Tensor:
    """Return the smallest kept logit of each row of logits [n, V], [n, 1]."""
    highest = z.amax(-1, keepdim=True)
    least_by_min_p = highest + log_min_p
    bound = least_by_min_p if min_p_first else torch.full_like(highest, -math.inf)
    if top_k:
        bound = torch.maximum(bound, z.topk(top_k, sorted=True).values[:, -1:])
    if top_p < 1:
        bound = _least_by_top_p(z, bound, highest, top_k, top_p)
    return torch.maximum(bound, least_by_min_p)


def _least_by_top_p(z: Tensor, bound: Tensor, highest: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the smallest logit that top-p keeps among those of at least ``bound``, [n, 1]."""
    left = exact(torch.where(z >= bound, (z - highest).exp(), 0.0)).sum(-1, keepdim=True)
    V, mass = z.shape[-1], top_p * left
    count = top_k or min(_CANDIDATES, V)
    lowest, decided = _last_within(z.topk(count, sorted=True).values, highest, mass)
    # with top-k, logits after the first k are below the bound or ties of the k-th
    while not top_k and count < V and not bool(decided.all()):
        count = _GROWTH * count if 4 * _GROWTH * count <= V else V
        rows = (~decided).nonzero().squeeze(1)
        if count == V:  # sort is faster than topk for all
            likeliest = z[rows].sort(descending=True).values
        else:
            likeliest = z[rows].topk(count, sorted=True).values
        lowest[rows], decided[rows] = _last_within(likeliest, highest[rows], mass[rows])
    return torch.maximum(lowest, bound)


def _last_within(descending: Tensor, highest: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last of the descending logits before which there is less than ``mass``, [n, 1], and whether
    it is followed by other logits, [n]; then no more logits need to be read.
    """
    weights = exact(descending - highest).exp()
    inside = weights.cumsum(-1) - weights < mass
    count = inside.sum(-1, keepdim=True)
    return descending.gather(-1, (count - 1).clamp(min=0)), ~inside[:, -1]
