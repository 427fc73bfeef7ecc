"""What each backend implements: functions over rows of logits, steps around products, clipped ratios."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gspo_kernels.core.types import (
    KLPenalty,
    LogitRows,
    Normalizers,
    PairStats,
    RatioClip,
    RatioOperands,
    RatioStep,
    Recheck,
    RowGradients,
    RowPair,
    RowStats,
    SequenceRatioStats,
)


class RowBackend(Protocol):
    """The functions of a backend module. All run without autograd and never modify inputs but ``out``.

    The statistics of an ignored row are 0.0, its gradient row is zero. Any other label outside [0, V), or of
    a column that ``transform.kept`` cuts, makes the row's log-prob NaN. A label outside is never used as an
    address. Statistics are fp32, fp64 for fp64 logits; for the log-sum-exp see ``RowStats``.
    """

    def unavailable(self, device: torch.device) -> str | None:
        """Return None if the backend can serve tensors on ``device``, otherwise the reason why not."""

    def logprobs_forward(self, rows: LogitRows, entropy: bool) -> RowStats:
        """Return each row's log-prob of the label, log-sum-exp and, if ``entropy``, entropy."""

    def logprobs_backward(
        self, rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
    ) -> None:
        """Write d/dlogits of ``grad_scale * sum(grad_logprobs * logprobs + grad_entropy * entropy)`` into
        ``out``.

        ``out`` is [B, T, V], a float dtype of its own, vocabulary stride 1; it may be the logits themselves,
        or a narrower dtype in their memory, each row from its row's address. Every element is written; a row
        whose gradients are zero, or that is ignored, gets zeros without being read.

        ``sharded``: the logits are some columns of wider rows, ``stats`` those of the whole rows, and a label
        outside [0, V) lies among the other columns.
        """

    def logprobs_and_grad(self, rows: LogitRows, coefficients: Tensor, out: Tensor) -> RowStats:
        """Do forward and backward at once, for coefficients dLoss/dlogprobs [B, T] known beforehand."""

    def divergence(
        self, rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
    ) -> PairStats:
        """Return the divergence of each row's softmax from the teacher's, in nats. It is NaN for a row that
        has no softmax on one of the two sides.

        ``known`` statistics, all or ``Normalizers``, are returned unchanged and not computed again.
        Normalizers may be of wider rows; divergences and centres are then sums over the columns of ``rows``.

        ``grad``, [B, T] floats with any strides, and ``out`` are passed together or not at all. ``out``, as
        in ``logprobs_backward``, becomes d/dlogits of ``sum(grad * divergences)``. A divergence of +inf, from
        a column that one side rules out, has a gradient of NaN unless ``rows.beta`` is 0.
        """

    def merge_mask(
        self, mask: Tensor, labels: Tensor | None, ignore_index: int
    ) -> tuple[Tensor, Tensor | None, bool | None]:
        """Return which tokens count, bool [B, T]: ``mask``, of any dtype, isn't 0 and the label isn't
        ``ignore_index``; the labels, ``ignore_index`` where ``mask`` is 0, or None without labels; and
        whether the mask holds only 0 and 1, or None if that is unknown. Both tensors are contiguous.
        """

    def scale_(self, values: Tensor, factor: Tensor) -> None:
        """Multiply contiguous ``values`` in place by a 0-d tensor; a factor of 1 leaves them untouched."""

    def one_pass_pays(self, rows: LogitRows, *, all_rows_active: bool, logprobs_compared: bool) -> bool:
        """Return whether ``logprobs_and_rows`` serves, and is less work than statistics first, rows later,
        for contiguous logits.

        Args:
            rows: the logits.
            all_rows_active: every row will enter the products. Otherwise one pass pays only where rows cost
                next to nothing.
            logprobs_compared: a ratio will compare the log-probs with others, so that one pass serves only
                where it gives the bits of ``logprobs_forward``.
        """


class OnePassBackend(RowBackend, Protocol):
    """A backend that can write the rows of gradient products along with the statistics."""

    def logprobs_and_rows(self, rows: LogitRows, out: Tensor) -> tuple[RowStats, Tensor | None]:
        """Return statistics and a factor per row, [B, T] or None for 1; write d logprob/dlogits, up to these
        factors, into ``out``. Only where ``one_pass_pays``.

        ``out`` is as in ``logprobs_backward``; with factors its dtype is the statistics' or bf16, and its
        elements can be the exponentials that the log-sum-exp needs anyway, each computed once.
        """


class HiddenKernels(Protocol):
    """The steps around the matrix products of a call over hidden states. They read no columns of logits, so
    they also serve ranks that share the vocabulary.

    Arguments [n] have a value for each of a chunk's n rows; coefficients may have any stride. ``factors`` [n]
    multiply along with the coefficients. An exact zero of either beats an overflow of the other.
    """

    def product_operand(
        self,
        hidden: Tensor,
        coefficients: Tensor,
        factors: Tensor | None,
        active: Tensor | None,
        unit: Tensor | None,
        bound: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return hidden states [n, H] times coefficients, clamped to +-``bound``, over ``unit``, a 0-d power
        of two, in ``dtype``. Rows whose coefficient is 0, or that aren't ``active`` [n], become zeros,
        whatever their hidden states are.
        """

    def sum_unit(
        self,
        coefficients: Tensor,
        factors: Tensor | None,
        before: Tensor | None,
        bound: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the unit of a sum, and ``before`` over this unit. The unit is the power of two at or below
        the largest coefficient, clamped to +-``bound``, or ``before`` if that is larger. Both are 0-d and of
        ``dtype``, the statistics'.
        """

    def store_hidden(
        self,
        values: Tensor,
        coefficients: Tensor,
        factors: Tensor | None,
        where: slice | Tensor,
        hidden: Tensor,
        scales: Tensor | None,
        whole_last: bool,
    ) -> None:
        """Write ``values`` [n, H], in the statistics' dtype, times coefficients into the n lines ``where`` of
        ``hidden`` [N, H]. With ``scales`` [N] lines are normalised, and ``scales * hidden`` is the result.
        ``whole_last``: the whole coefficient multiplies last, not only the power of two in it.
        """

    def lengths(
        self, labels: Tensor, ignore_index: int, cu_seqlens: Tensor | None, advantages: Tensor | None
    ) -> Tensor:
        """Return how many tokens of each sequence have a label other than ``ignore_index``, and whether all
        of these have an advantage of 0, int64 [2, B]. Labels are [B, T], or [1, N] with ``cu_seqlens``;
        advantages are [B] or like the labels, or None: the second row is then 0.
        """

    def scale_rows_(self, values: Tensor, scales: Tensor, factor: Tensor) -> None:
        """Multiply rows of contiguous ``values`` [..., H] in place by ``scales`` [...] times a 0-d tensor."""


class RatioBackend(RowBackend, Protocol):
    """A backend that also evaluates clipped ratios in one launch, from logits or from log-probs."""

    def sequence_ratio_forward(
        self,
        rows: LogitRows,
        mask: Tensor | None,
        operands: RatioOperands,
        ratio_clip: RatioClip,
        recheck: Recheck = None,
    ) -> SequenceRatioStats:
        """Return loss, coefficients and metrics of a clipped sequence ratio, straight from the logits. Old
        log-probs are required, advantages and weights are one per sequence, ``cu_seqlens`` is int32.

        ``mask`` is as in ``merge_mask``; None: the labels tell which tokens count.

        ``recheck`` checks the values that callers pass, and raises if one is wrong. A backend calls it at the
        end. It may skip the call if it has itself seen that no counted log-prob, of any policy, is above 1
        nat, and that no advantage, log-ratio or penalty is NaN.
        """

    def ratio_step(
        self,
        logprobs: Tensor,
        mask: Tensor,
        operands: RatioOperands,
        ratio_clip: RatioClip,
        kl: KLPenalty | None = None,
        recheck: Recheck = None,
    ) -> RatioStep:
        """Return the same from log-probs [B, T] or [1, N], fp32 or fp64, contiguous, per sequence or token.

        Everything is computed in fp64. ``mask`` has the same shape, a dtype of ``types.MASK_DTYPES`` and any
        strides, and is not 0 for tokens that count. ``recheck`` checks the mask as well; a backend that
        itself sees other values than 0 and 1 raises ValueError.
        """
