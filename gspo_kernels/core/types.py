"""Types that every layer shares: the logit transform, rows and their statistics, named outputs.

Shape letters: B sequences, T padded length, N tokens, V vocabulary, H width. Inside the package rows are
[B, T] (padded) or [1, N] with ``cu_seqlens`` (packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Recheck = Callable[[], object] | None
"""A check of callers' values, which raises an error; None where values aren't checked."""

METRICS = (
    "ratio/mean",
    "ratio/min",
    "ratio/max",
    "clip_fraction/low",
    "clip_fraction/high",
    "clip_fraction/tokens",
    "kl/old",
    "active_fraction",
)
"""Metrics of every loss, in the order in which kernels and operators store them."""


MASK_DTYPES = (torch.bool, torch.float32, torch.float64, torch.int32, torch.int64)
"""Mask dtypes that backends read directly."""


class LoRAHead(NamedTuple):
    """An lm_head with a low-rank adapter, ``weight + scale * B @ A``, accepted as ``weight``.

    Only A and B have gradients. B has a separate matmul, which allocates nothing of the size of ``weight``.
    With a 16-bit weight the adapter's matmuls and gradients are in fp32.

    Attributes:
        weight: [V, H], frozen; hidden's dtype, or any under autocast.
        A: [r, H], any float dtype: PEFT's ``lora_A``.
        B: [V, r], any float dtype: PEFT's ``lora_B``.
        scale: PEFT's ``scaling``, lora_alpha / r.
    """

    weight: Tensor
    A: Tensor
    B: Tensor
    scale: float


class TokenLogprobs(NamedTuple):
    """Per-token log-probabilities.

    Attributes:
        logprobs: log pi(label) in nats, the labels' shape, fp32 (fp64 for fp64 inputs), 0.0 if ignored.
        entropy: entropy in nats, same shape and dtype, 0.0 if ignored, or None without ``return_entropy``.
    """

    logprobs: Tensor
    entropy: Tensor | None


class LossOutput(NamedTuple):
    """Output of a policy loss.

    Attributes:
        loss: 0-d tensor that carries the gradient, fp32 (fp64 for fp64 inputs).
        logprobs: detached log-probabilities in nats, the labels' shape.
        entropy: detached entropy in nats, the labels' shape, or None if not computed.
        metrics: detached 0-d tensors by name.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


class DistillationOutput(NamedTuple):
    """Output of a distillation loss.

    Attributes:
        loss: 0-d tensor that carries the student's gradient, fp32 (fp64 for fp64 inputs).
        divergence: detached divergence of each token in nats, the tokens' shape, same dtype; 0.0 if masked.
    """

    loss: Tensor
    divergence: Tensor


class SelectedLogprobs(NamedTuple):
    """Log-probabilities of several ids per token, and of all remaining ids together.

    Attributes:
        logprobs: log pi(id) in nats, the ids' shape, fp32 (fp64 for fp64 inputs), 0.0 for padding.
        tail: log-probability of all remaining ids, the ids' shape without K, same dtype; 0.0 for tokens
            without ids, -inf if no ids remain, None with ``normalize_within``.
    """

    logprobs: Tensor
    tail: Tensor | None


class RowStats(NamedTuple):
    """Statistics of logit rows, each [B, T]; zeros for ignored rows.

    Attributes:
        logprobs: log-probability of the label, never above 0; NaN where the label is out of range.
            Statistics' dtype, like the entropy.
        lse: log-sum-exp of the transformed logits, fp64 where the device has it, because the gradient's
            exp(z - lse) is sensitive to the rounding of a large lse.
        entropy: entropy in nats, or None if not requested.
    """

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> RowStats:
        """Apply ``change``, which reshapes or selects rows, to each tensor."""
        entropy = None if self.entropy is None else change(self.entropy)
        return RowStats(change(self.logprobs), change(self.lse), entropy)


class PairStats(NamedTuple):
    """Statistics of a student's rows and a teacher's, each [B, T]; zeros for ignored rows.

    Attributes:
        lse: as in ``RowStats``, of the student's rows.
        teacher_lse: the same of the teacher's rows.
        divergences: of the student's rows from the teacher's in nats, statistics' dtype.
        centers: the number that the gradient subtracts from each column's log-ratio, the same dtype: the
            divergence for the reverse KL, KL(p || m) for Jensen-Shannon, 0.0 for the forward KL, which
            subtracts none; see ``divergences``.
    """

    lse: Tensor
    teacher_lse: Tensor
    divergences: Tensor
    centers: Tensor


class Normalizers(NamedTuple):
    """The first two fields of ``PairStats``, passed to compute the others."""

    lse: Tensor
    teacher_lse: Tensor


class LogitTransform(NamedTuple):
    """Transform of raw logits x to the input z of the softmax.

    ``z = logit_scale * x; z = softcap * tanh(z / softcap); z = z / temperature``

    Attributes:
        logit_scale: factor on the raw logits.
        softcap: bound of the tanh soft-capping, or 0.0.
        temperature: temperature of all rows; 1.0 with ``row_temperature``.
        row_temperature: [B, T] in the statistics' dtype, any strides, or None.
        kept: the sampling mask, int32 [B, T, ceil(V / 32)] with a vocabulary stride of 1, or None. Bit v % 32
            of word v // 32 is set if column v is in the softmax. Other columns have no effect, regardless of
            their logit, and a gradient of exactly 0.
    """

    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    row_temperature: Tensor | None = None
    kept: Tensor | None = None

    def rows(self, change: Callable[[Tensor], Tensor]) -> LogitTransform:
        """Return the transform of the rows that ``change`` reshapes or selects."""
        temperature, kept = (x if x is None else change(x) for x in (self.row_temperature, self.kept))
        return self._replace(row_temperature=temperature, kept=kept)

    def apply(self, x: Tensor) -> Tensor:
        """Return z of raw logits [B, T, columns] in their dtype, ignoring ``kept``; differentiable."""
        z = x * self.logit_scale
        if self.softcap:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self._divisor()

    def slope(self, x: Tensor) -> Tensor:
        """Return dz/dx of ``apply``, relatively accurate even where the softcap saturates."""
        slope = torch.full_like(x, self.logit_scale)
        if self.softcap:
            tanh_x = torch.tanh(x * self.logit_scale / self.softcap)
            slope = slope * (1 - tanh_x) * (1 + tanh_x)
        return slope / self._divisor()

    def _divisor(self) -> Tensor | float:
        return self.temperature if self.row_temperature is None else self.row_temperature.unsqueeze(-1)


class LogitRows(NamedTuple):
    """Rows of logits with their labels, the input of backends; see ``protocol.RowBackend``.

    Attributes:
        logits: [B, T, V] or packed [1, N, V] with any strides, including 0 and overlapping ones; fp16, bf16,
            fp32 or fp64.
        labels: int64 or int32 [B, T], any strides.
        transform: from the logits to z.
        ignore_index: the label of *ignored* rows, whose logits are never read.
    """

    logits: Tensor
    labels: Tensor
    transform: LogitTransform
    ignore_index: int


class RowGradients(NamedTuple):
    """Upstream gradients of the log-prob and entropy of each row.

    Attributes:
        grad_logprobs: [B, T], any float dtype and strides.
        grad_entropy: the same, or None.
        grad_scale: 0-d factor on both, or None.
    """

    grad_logprobs: Tensor
    grad_entropy: Tensor | None = None
    grad_scale: Tensor | None = None


class RowPair(NamedTuple):
    """Rows of a student and of a teacher over the same columns, to compute their divergences.

    Attributes:
        logits, teacher_logits: [B, T, V]; strides and dtypes of the two may differ.
        labels: [B, T]; ``ignore_index`` marks ignored rows, other values don't matter.
        transform, teacher_transform: of the student's and the teacher's logits; columns that
            ``transform.kept`` cuts are cut on both sides.
        beta: selects the divergence: see ``divergences``.
        ignore_index: the label of ignored rows.
    """

    logits: Tensor
    teacher_logits: Tensor
    labels: Tensor
    transform: LogitTransform
    teacher_transform: LogitTransform
    beta: float
    ignore_index: int


class Shard(NamedTuple):
    """The shard of logit columns of a process.

    Attributes:
        group: the name of the process group whose ranks share the columns, or "" without sharding.
        start: the token id of this process's first column; -1 for shards of equal size in the order of ranks.
    """

    group: str = ""
    start: int = -1


class RowOptions(NamedTuple):
    """The checked options of all functions with labels.

    Attributes:
        transform: from raw logits to z.
        ignore_index: the label of rows that are skipped.
        backend: the name of a backend that supports the tensors' device.
        shard: the columns of this process; labels are ids of the whole vocabulary.
    """

    transform: LogitTransform
    ignore_index: int
    backend: str
    shard: Shard = Shard()


class RatioClip(NamedTuple):
    """PPO's clip on importance ratios, the loss that fused kernels support.

    ``loss = -w min(r A, clip(r, low, high) A)``, for A < 0 at most ``-w dual A``. There is one ratio per
    sequence, ``log r = sum_t (logp_t - old_t) / L``, or one per token, ``log r = logp - old``. The bounds are
    log-ratios, because clip decisions are taken on log r.

    Attributes:
        log_low: log of the lower clip bound, <= 0.
        log_high: log of the upper clip bound, >= 0.
        log_dual: log of the dual clip's bound, above ``log_high``, or +inf.
        count_tokens: weigh a sequence's loss by L and a token's by 1 ("token_mean" and similar) if True, a
            sequence's by 1 and a token's by 1 / L otherwise.
        divisor: the outer divisor without a normalizer: "sequences" with a counted token, "tokens" (the sum
            of L over these sequences), "one", or "prompts", which ``sum_over_prompts`` turns into "one" for
            backends.
        divisor_scale: constant factor on that divisor, or on the normalizer.
        level: "sequence" or "token", one ratio and one loss for each.
    """

    log_low: float
    log_high: float
    log_dual: float
    count_tokens: bool
    divisor: str
    divisor_scale: float
    level: str = "sequence"


NO_RATIO = RatioClip(0.0, 0.0, 0.0, False, "", 0.0, "")
"""The value for losses that are not a clipped ratio; its ``level`` is empty."""


class _RatioWeight(NamedTuple):
    low: float
    high: float
    outside: str
    eps: float


class RatioWeight(_RatioWeight):
    """The weight f(r) of a token in a policy gradient ``-A f(r) dlog p``, with r = p / q, the policy's
    probability over the sampler's.

    Attributes:
        low, high: bounds of the ratio; f is 1 if both are 1.
        outside: f outside of the bounds: "bound", the bound that r exceeds (TIS, CISPO), or "zero" (MIS,
            IcePop).
        eps: f is 0 where ``|p - q|`` is larger (prime-rl's IPO).

    Raises:
        TypeError, ValueError: a wrong field, named in the message.
    """

    __slots__ = ()

    def __new__(
        cls, low: float = 0.0, high: float = math.inf, outside: str = "bound", eps: float = math.inf
    ) -> RatioWeight:
        """Check the fields."""
        for name, value in (("low", low), ("high", high), ("eps", eps)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
            if not value >= 0:
                raise ValueError(f"{name}: got {value}, expected at least 0")
        if low > high:
            raise ValueError(f"low: got {low}, expected at most high = {high}")
        if outside not in ("bound", "zero"):
            raise ValueError(f"outside: got {outside!r}, expected 'bound' or 'zero'")
        return super().__new__(cls, low, high, outside, eps)

    def times_q(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return q f(p / q) without computing the ratio, which may overflow."""
        log_low = math.log(self.low) if self.low else -math.inf
        log_high = math.log(self.high) if self.high < math.inf else math.inf
        below, above = log_p - log_q < log_low, log_p - log_q > log_high
        bounded = torch.where(below, log_q + log_low, torch.where(above, log_q + log_high, log_p))
        if self.outside == "zero":
            bounded = torch.where(below | above, -torch.inf, log_p)
        moved = (log_p.exp() - log_q.exp()).abs()
        return torch.where(moved > self.eps, 0.0, bounded.exp())


class RatioOperands(NamedTuple):
    """The inputs of a clipped ratio besides log-probs and the tokens that count.

    Attributes:
        old_logprobs: the shape of the log-probs, any strides and float dtype; None for the log-probs
            themselves (on-policy).
        advantages: [B], or for ratios of tokens [B] or the shape of the log-probs.
        weights: factors on policy terms, the same shapes, or None for 1.
        lengths: [B], L of each sequence, or None for its number of counted tokens.
        normalizer: 0-d on the device, replaces the count of ``RatioClip.divisor``, or None.
        cu_seqlens: int32 or int64 [B + 1] of packed tokens, or None.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor | None = None
    lengths: Tensor | None = None
    normalizer: Tensor | None = None
    cu_seqlens: Tensor | None = None


class KLPenalty(NamedTuple):
    """A KL penalty to a reference, added to the loss of a clipped ratio and aggregated like losses of tokens.

    Attributes:
        ref_logprobs: the shape of the log-probs, any strides and float dtype.
        beta: the penalty's weight, broadcast to the shape of the log-probs, or None for the metric only.
        estimator: "k1", "k2" or "k3".
    """

    ref_logprobs: Tensor
    beta: Tensor | None
    estimator: str


class RatioStep(NamedTuple):
    """Loss, metrics and gradient of a clipped ratio, in the statistics' dtype.

    Attributes:
        loss: 0-d.
        metrics: [len(METRICS)], in the order of ``METRICS``, followed by "kl/ref" with a ``KLPenalty``.
        grad_logprobs: dLoss/dlogprobs in the shape of the log-probs, 0.0 for tokens that don't count; without
            a penalty also exactly 0.0 where the ratio is clipped, or advantage or weight is zero.
    """

    loss: Tensor
    metrics: Tensor
    grad_logprobs: Tensor


class SequenceRatioStats(NamedTuple):
    """Output of the fused sequence-ratio forward.

    Attributes:
        loss, metrics: as in ``RatioStep``.
        logprobs: [B, T] (or [1, N]), 0.0 if ignored.
        lse: the same shape, fp64.
        coefficients: [B], dLoss/dlogprobs of each counted token of a sequence times the divisor; exactly 0.0
            for clipped and empty sequences and for those with zero advantage or weight.
        divisor: 0-d, the divisor of the coefficients including ``divisor_scale``, for the caller to apply.
        labels: ``ignore_index`` where a mask is 0; empty without a mask.
    """

    loss: Tensor
    logprobs: Tensor
    lse: Tensor
    coefficients: Tensor
    divisor: Tensor
    metrics: Tensor
    labels: Tensor


def wrong_mask(loss_mask: Tensor) -> ValueError:
    """Return the error for a mask with a value other than 0 and 1."""
    value = loss_mask[(loss_mask != 0) & (loss_mask != 1)][0].item()
    return ValueError(f"loss_mask: got {value}, expected only 0 and 1 (or bool)")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, ratios and losses for inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pair_dtypes(dtype: torch.dtype, exact: torch.dtype = torch.float64) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the fields of ``PairStats`` for statistics of ``dtype``."""
    return exact, exact, dtype, dtype


def allocate_pair_stats(logits: Tensor, known: Normalizers | PairStats | None = None) -> PairStats:
    """Return statistics of logits [B, T, V], known ones contiguous in their dtypes, others uninitialized."""
    existing = () if known is None else known
    kinds = pair_dtypes(stats_dtype(logits.dtype))
    return PairStats(
        *(each.to(kind).contiguous() for each, kind in zip(existing, kinds, strict=False)),
        *(torch.empty(logits.shape[:2], dtype=kind, device=logits.device) for kind in kinds[len(existing) :]),
    )
