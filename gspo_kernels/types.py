"""Words that every layer shares: shape letters, the logit transform, the row statistics, the two named
outputs.

Shape letters: B sequences, T padded length, N tokens, V vocabulary, H width. Inside the package rows are
always laid out as [B, T] (padded) or as [1, N] with ``cu_seqlens`` (packed); a suffix such as ``logits_BTV``
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Doubt = Callable[[], None] | None
"""A look at values that callers pass, which raises where one is wrong; None where values aren't looked at."""

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
"""Names of the metrics that every loss reports, in the order in which kernels and ops store them."""


MASK_VALUES = "loss_mask: expected only 0 and 1 (or bool)"
"""The error message for a mask that holds anything else."""


class LoRAHead(NamedTuple):
    """An lm_head with a low-rank adapter, to be passed as ``weight``: ``weight + scale * B @ A``.

    ``weight`` has no gradient; A and B have. The product with B is one of its own, and nothing of the size of
    ``weight`` is made.

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
        logprobs: log pi(label) in nats, the labels' shape, fp32 (fp64 for fp64 inputs); 0.0 where ignored.
        entropy: entropy of the distribution in nats, same shape and dtype, 0.0 where ignored; None unless
            asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


class LossOutput(NamedTuple):
    """What every loss returns.

    Attributes:
        loss: 0-d tensor that carries the gradient, fp32 (fp64 for fp64 inputs).
        logprobs: detached log-probabilities in nats, the labels' shape.
        entropy: detached entropy in nats, the labels' shape; None where it was not computed.
        metrics: detached 0-d tensors by name.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


class DistillationOutput(NamedTuple):
    """What a distillation loss returns.

    Attributes:
        loss: 0-d tensor that carries the student's gradient, fp32 (fp64 for fp64 inputs).
        divergence: detached, of each token in nats, the tokens' shape, same dtype; 0.0 where not counted.
    """

    loss: Tensor
    divergence: Tensor


class SelectedLogprobs(NamedTuple):
    """Log-probabilities of several ids per token, and what they leave.

    Attributes:
        logprobs: log pi(id) in nats, the ids' shape, fp32 (fp64 for fp64 inputs); 0.0 where there is no id.
        tail: log of the probability of all other ids, the ids' shape without K, same dtype: 0.0 where there
            is no id, -inf where there is no other. None where log-probs are normalised within the set.
    """

    logprobs: Tensor
    tail: Tensor | None


class RowStats(NamedTuple):
    """Statistics of logit rows, each [B, T]; zeros for ignored rows.

    Attributes:
        logprobs: log-probability of the label, never above 0; NaN where the label is out of range.
            Statistics' dtype, like the entropy.
        lse: log-sum-exp of the transformed logits, always fp64: a gradient's exp(z - lse) would show the
            rounding of a large lse to fp32.
        entropy: entropy in nats, or None where it was not asked for.
    """

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> RowStats:
        """The same statistics, reshaped or selected."""
        entropy = None if self.entropy is None else change(self.entropy)
        return RowStats(change(self.logprobs), change(self.lse), entropy)


class PairStats(NamedTuple):
    """Statistics of a student's rows and a teacher's, each [B, T]; zeros for ignored rows.

    Attributes:
        lse: as in ``RowStats``, of the student's rows.
        teacher_lse: of the teacher's.
        divergences: of the student's rows from the teacher's in nats, statistics' dtype.
        centres: what the slope of each column is relative to in the gradient, the same dtype: of the reverse
            KL the divergence, of Jensen-Shannon KL(p || m), of the forward KL nothing, 0.0.
    """

    lse: Tensor
    teacher_lse: Tensor
    divergences: Tensor
    centres: Tensor


class Normalizers(NamedTuple):
    """The first two of ``PairStats``, where the rest is wanted."""

    lse: Tensor
    teacher_lse: Tensor


class LogitTransform(NamedTuple):
    """From raw logits x to the z that enters the softmax.

    ``z = logit_scale * x; z = softcap * tanh(z / softcap); z = z / temperature``

    Attributes:
        logit_scale: factor on the raw logits.
        softcap: bound of the tanh soft-capping; 0.0 means none.
        temperature: the same for all rows; 1.0 where ``row_temperature`` is given.
        row_temperature: [B, T] in the statistics' dtype, any strides, or None.
        kept: the sampling mask, int32 [B, T, ceil(V / 32)] with a vocabulary stride of 1, or None: bit v % 32
            of word v // 32 says whether column v is in the softmax. A column that is cut has no part in
            anything, whatever its logit holds, and a gradient of exactly 0.
    """

    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    row_temperature: Tensor | None = None
    kept: Tensor | None = None

    def rows(self, change: Callable[[Tensor], Tensor]) -> LogitTransform:
        """The same transform of rows that are reshaped or selected."""
        temperature, kept = (x if x is None else change(x) for x in (self.row_temperature, self.kept))
        return self._replace(row_temperature=temperature, kept=kept)


class LogitRows(NamedTuple):
    """Rows of logits with their labels, as backends take them: see ``ops.backends.RowBackend``.

    Attributes:
        logits: [B, T, V] with any strides (0 and overlapping included), fp16, bf16, fp32 or fp64; packed rows
            come as [1, N, V].
        labels: int64 or int32 [B, T], any strides.
        transform: from the logits to z.
        ignore_index: the label of *ignored* rows: their logits are never read.
    """

    logits: Tensor
    labels: Tensor
    transform: LogitTransform
    ignore_index: int


class RowGradients(NamedTuple):
    """What multiplies d logprob/dlogits and d entropy/dlogits of each row.

    Attributes:
        grad_logprobs: [B, T], any float dtype and strides.
        grad_entropy: the same, or None.
        grad_scale: 0-d factor on both, or None for 1.
    """

    grad_logprobs: Tensor
    grad_entropy: Tensor | None = None
    grad_scale: Tensor | None = None


class RowPair(NamedTuple):
    """Rows of a student and of a teacher over the same columns, whose divergences are asked for.

    Attributes:
        logits, teacher_logits: [B, T, V], each with strides and a dtype of its own.
        labels: [B, T], which only say by ``ignore_index`` which rows are ignored.
        transform, teacher_transform: of either side; what ``transform.kept`` cuts is cut on both.
        beta: which divergence: see ``divergences``.
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
    """Which columns of the whole logits a process has.

    Attributes:
        group: the name of the process group whose ranks have them all together; "" where they are here.
        start: the token id of the first of them; -1: every rank has as many, in the order of ranks.
    """

    group: str = ""
    start: int = -1


class RowOptions(NamedTuple):
    """How logits become log-probs and who computes them: the options of every entry that has labels, checked.

    Attributes:
        transform: from raw logits to z.
        ignore_index: the label of rows that are left out.
        backend: the name of one that can serve the tensors' device.
        shard: which columns there are; labels are ids of the whole vocabulary.
    """

    transform: LogitTransform
    ignore_index: int
    backend: str
    shard: Shard = Shard()


class RatioClip(NamedTuple):
    """A form that fused forwards and steps can serve: PPO's clip on importance ratios.

    ``loss = -w min(r A, clip(r, low, high) A)``, for A < 0 bounded above by ``-w dual A``, of each sequence
    with ``log r = sum_t (logp_t - old_t) / L``, or of each token with ``log r = logp - old``. The bounds are
    log-ratios, because clip decisions are taken on log r.

    Attributes:
        log_low: log of the lower clip bound, <= 0.
        log_high: log of the upper clip bound, >= 0.
        log_dual: log of the dual clip's bound, above ``log_high``; +inf means none.
        count_tokens: a sequence's loss enters L times, and a token's once ("token_mean" and its kin), instead
            of once and 1 / L times.
        divisor: what the outer divisor counts where no normalizer is given: "sequences" with a counted token,
            "tokens" (the sum of L over them) or "one".
        divisor_scale: constant factor on that divisor, or on the normalizer.
        level: whose ratio and loss it is, "sequence" or "token".
    """

    log_low: float
    log_high: float
    log_dual: float
    count_tokens: bool
    divisor: str
    divisor_scale: float
    level: str = "sequence"


NO_RATIO = RatioClip(0.0, 0.0, 0.0, False, "", 0.0, "")
"""Says that a loss has no such form; its ``level`` is empty."""


class RatioOperands(NamedTuple):
    """What a clipped ratio takes besides log-probs and the tokens that count.

    Attributes:
        old_logprobs: like the log-probs, any strides and float dtype; None where they are the log-probs
            themselves.
        advantages: [B], or like the log-probs for ratios of tokens.
        weights: of policy terms, the same shapes, or None for 1.
        lengths: [B], L of each sequence; None: its number of counted tokens.
        normalizer: 0-d on the device, replaces what ``RatioClip.divisor`` counts, or None.
        cu_seqlens: int32 or int64 [B + 1] of packed tokens, or None.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor | None = None
    lengths: Tensor | None = None
    normalizer: Tensor | None = None
    cu_seqlens: Tensor | None = None


class KLPenalty(NamedTuple):
    """A KL penalty to a reference, added to a clipped ratio; each token's enters like a token's loss.

    Attributes:
        ref_logprobs: like the log-probs, any strides and float dtype.
        beta: its weight, broadcast to the shape of the log-probs; None: only the metric is wanted.
        estimator: "k1", "k2" or "k3".
    """

    ref_logprobs: Tensor
    beta: Tensor | None
    estimator: str


class RatioStep(NamedTuple):
    """A clipped ratio's loss and what follows from it, in the statistics' dtype.

    Attributes:
        loss: 0-d.
        metrics: [len(METRICS)], in the order of ``METRICS``, and after them "kl/ref" where there is a
            ``KLPenalty``.
        grad_logprobs: like the log-probs: dLoss/dlogprobs, 0.0 where tokens don't count; exactly 0.0 without
            a penalty where the ratio is clipped, or advantage or weight are zero.
    """

    loss: Tensor
    metrics: Tensor
    grad_logprobs: Tensor


class SequenceRatioStats(NamedTuple):
    """What the fused sequence-ratio forward returns: a step's scalars, and statistics of the rows.

    Attributes:
        loss, metrics: as in ``RatioStep``.
        logprobs: [B, T] (or [1, N]); zeros where ignored.
        lse: the same shape, fp64.
        coefficients: [B], dLoss/dlogprobs of each counted token of a sequence times the divisor; exactly 0.0
            for clipped and empty sequences and for those with zero advantage or weight.
        divisor: 0-d, what the coefficients are still to be divided by (already times ``divisor_scale``).
    """

    loss: Tensor
    logprobs: Tensor
    lse: Tensor
    coefficients: Tensor
    divisor: Tensor
    metrics: Tensor


STATS_DTYPES = (torch.float32, torch.float64)


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, ratios and losses for inputs of ``dtype``: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pair_dtypes(dtype: torch.dtype, exact: torch.dtype = torch.float64) -> tuple[torch.dtype, ...]:
    """Of the fields of ``PairStats``, where statistics are of ``dtype``."""
    return exact, exact, dtype, dtype


def allocate_pair_stats(logits: Tensor, known: Normalizers | PairStats | None = None) -> PairStats:
    """What is known of rows of logits [B, T, V], contiguous and in its dtypes, and memory for the rest."""
    given = () if known is None else known
    kinds = pair_dtypes(stats_dtype(logits.dtype))
    return PairStats(
        *(each.to(kind).contiguous() for each, kind in zip(given, kinds, strict=False)),
        *(torch.empty(logits.shape[:2], dtype=kind, device=logits.device) for kind in kinds[len(given) :]),
    )
