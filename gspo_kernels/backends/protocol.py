"""Interfaces of backends: functions of rows of logits, operations on hidden states, clipped ratios."""

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
    """Functions of rows of logits, which run without autograd and modify no inputs except ``out``.

    The statistics of an ignored row are 0.0, its gradient row is zero. Any other label outside [0, V), or of
    a column masked by ``transform.kept``, makes the row's log-prob NaN, without out-of-bounds accesses.
    Statistics are fp32, fp64 for fp64 logits; for the log-sum-exp see ``RowStats``.
    """

    def logprobs_forward(self, rows: LogitRows, entropy: bool) -> RowStats:
        """Return each row's log-prob of the label, log-sum-exp and, if ``entropy``, entropy."""

    def logprobs_backward(
        self, rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
    ) -> None:
        """Write d/dlogits of ``grad_scale * sum(grad_logprobs * logprobs + grad_entropy * entropy)`` into
        ``out``.

        ``out`` is [B, T, V] of any float dtype with vocabulary stride 1. It may be the logits, or a narrower
        dtype in their memory, with each row at the address of the logits' row. All elements are written; rows
        that are ignored or whose gradients are zero are set to zero without being read.

        With ``sharded`` the logits are a range of columns of wider rows, ``stats`` are those of whole rows,
        and labels outside [0, V) are in other columns.
        """

    def logprobs_and_grad(self, rows: LogitRows, coefficients: Tensor, out: Tensor) -> RowStats:
        """Compute forward and backward for known coefficients dLoss/dlogprobs [B, T]."""

    def divergence(
        self, rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
    ) -> PairStats:
        """Return the divergence of each row's softmax from the teacher's, in nats, or NaN if one of them has
        no softmax.

        ``known`` statistics, all or ``Normalizers``, are returned unchanged. Normalizers may be of wider
        rows; divergences and centers are then sums over the columns of ``rows``.

        With ``grad``, [B, T] floats of any strides, d/dlogits of ``sum(grad * divergences)`` is written to
        ``out``, see ``logprobs_backward``. The gradient of an infinite divergence is NaN unless ``rows.beta``
        is 0.
        """

    def one_pass_pays(self, rows: LogitRows, *, all_rows_active: bool, has_ratio: bool) -> bool:
        """Return whether to use ``logprobs_and_rows`` instead of separate passes, for contiguous logits.

        Args:
            rows: the logits.
            all_rows_active: whether all rows have a gradient. Otherwise one pass is faster only if rows are
                almost free.
            has_ratio: whether a ratio needs log-probs that are bitwise identical to those of
                ``logprobs_forward``.
        """


class Backend(RowBackend, Protocol):
    """The functions of a backend module."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return None if the backend supports tensors on ``device``, otherwise the reason."""

    def merge_mask(
        self, mask: Tensor, labels: Tensor | None, ignore_index: int
    ) -> tuple[Tensor, Tensor | None, bool | None]:
        """Merge a mask of any dtype with labels.

        Returns:
            The tokens that count, bool [B, T] (a nonzero mask and a label that is not ``ignore_index``); the
            labels, ``ignore_index`` where ``mask`` is 0, or None without labels; and whether the mask holds
            only 0 and 1, or None if unknown. Both tensors are contiguous.
        """

    def scale_(self, values: Tensor, factor: Tensor) -> None:
        """Multiply contiguous ``values`` in place by a 0-d tensor; do nothing for a factor of 1."""


class OnePassBackend(RowBackend, Protocol):
    """A backend that can write the rows of gradient matmuls along with the statistics."""

    def logprobs_and_rows(self, rows: LogitRows, out: Tensor) -> tuple[RowStats, Tensor | None]:
        """Return statistics and a factor per row, [B, T] or None for 1; write d logprob/dlogits, up to these
        factors, into ``out``. Requires ``one_pass_pays``.

        ``out`` is as in ``logprobs_backward``; with factors its dtype is the statistics' or bf16, and its
        elements can be the exponentials of the log-sum-exp.
        """


class HiddenKernels(Protocol):
    """Operations on hidden states before and after the gradient matmuls, which read no logits.

    Arguments [n] have a value for each of a chunk's n rows; coefficients may have any stride, and are
    multiplied by ``factors`` [n]. The product of 0 and inf is 0.
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
        of two, in ``dtype``. Rows with a coefficient of 0 and rows that are not ``active`` [n] are zero, even
        if their hidden states are NaN.
        """

    def sum_unit(
        self,
        coefficients: Tensor,
        factors: Tensor | None,
        before: Tensor | None,
        bound: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the unit of an accumulator, and ``before`` over this unit, 0-d in ``dtype``, the
        statistics'. The unit is the largest power of two up to the largest coefficient, clamped to
        +-``bound``, or ``before`` if that is larger.
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
        """Write ``values`` [n, H], in the statistics' dtype, times coefficients into the n rows ``where`` of
        ``hidden`` [N, H]. With ``scales`` [N] rows are normalized, and the result is ``scales * hidden``.
        With ``whole_last`` the scale is the whole coefficient instead of its power of two.
        """

    def lengths(
        self, labels: Tensor, ignore_index: int, cu_seqlens: Tensor | None, advantages: Tensor | None
    ) -> Tensor:
        """Return the number of tokens of each sequence whose label is not ``ignore_index``, and whether all
        of these have an advantage of 0, int64 [2, B]. Labels are [B, T], or [1, N] with ``cu_seqlens``;
        advantages are [B] or like the labels, or None for zeros in the second row.
        """

    def scale_rows_(self, values: Tensor, scales: Tensor, factor: Tensor) -> None:
        """Multiply rows of contiguous ``values`` [..., H] in place by ``scales`` [...] times a 0-d tensor."""


class RatioBackend(Backend, Protocol):
    """A backend that also evaluates clipped ratios in one launch, from logits or from log-probs."""

    def sequence_ratio_forward(
        self,
        rows: LogitRows,
        mask: Tensor | None,
        operands: RatioOperands,
        ratio_clip: RatioClip,
        recheck: Recheck = None,
    ) -> SequenceRatioStats:
        """Return loss, coefficients and metrics of a clipped sequence ratio from logits. Old log-probs are
        required, advantages and weights are one per sequence.

        ``mask`` is as in ``merge_mask``; by default tokens count unless their label is ``ignore_index``.

        ``recheck`` checks the caller's values, and raises an error if one is wrong. The backend calls it at
        the end, unless it has checked that no counted log-prob of any policy is above 1 nat, and that no
        advantage, log-ratio or penalty is NaN.
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
        strides, and is nonzero for tokens that count. ``recheck`` also checks the mask; a backend that finds
        values other than 0 and 1 raises ValueError.
        """
