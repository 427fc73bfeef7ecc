"""Which backend serves a call: the protocol that each one implements, and the lazy table that finds it."""

from __future__ import annotations

import functools
import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from gspo_kernels.ops.shards import ShardedRows
from gspo_kernels.torch_internals import constant_when_traced
from gspo_kernels.types import (
    Doubt,
    KLPenalty,
    LogitRows,
    LogitTransform,
    Normalizers,
    PairStats,
    RatioClip,
    RatioOperands,
    RatioStep,
    RowGradients,
    RowOptions,
    RowPair,
    RowStats,
    SequenceRatioStats,
)


class RowBackend(Protocol):
    """What a backend module offers. All functions run without autograd and never modify inputs but ``out``.

    The statistics of an ignored row are 0.0, its gradient row is zero. Any other label outside [0, V), or of
    a column that ``transform.kept`` cuts, makes the row's log-prob NaN; none outside is used as an address.
    Statistics are fp32, fp64 for fp64 logits.
    """

    def unavailable(self, device: torch.device) -> str | None:
        """None where the backend can serve tensors on ``device``, otherwise the reason why not."""

    def logprobs_forward(self, rows: LogitRows, entropy: bool) -> RowStats:
        """Log-prob of the label, log-sum-exp and, where asked for, entropy of each row."""

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
        """Forward and backward in one go, for coefficients dLoss/dlogprobs [B, T] known beforehand."""

    def divergence(
        self, rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
    ) -> PairStats:
        """How far each row's softmax is from the teacher's in nats. A row whose logits have no softmax, on
        either side, has a divergence of NaN.

        What is ``known`` is returned as it is and not computed again: all of it, or ``Normalizers``. Those
        may be of wider rows; divergences and centres are then sums over the columns here.

        ``grad``, [B, T] floats with any strides, and ``out`` come together or not at all; then ``out``, as in
        ``logprobs_backward``, becomes d/dlogits of ``sum(grad * divergences)``. A divergence of +inf, from a
        column that one side rules out, has a gradient of NaN unless ``rows.beta`` is 0.
        """

    def scale_(self, values: Tensor, factor: Tensor) -> None:
        """Multiply contiguous ``values`` in place by a 0-d tensor, without touching them where that is 1."""


class OnePassBackend(RowBackend, Protocol):
    """A backend that can write the rows of gradient products along with the statistics."""

    def one_pass_pays(self, rows: LogitRows, all_rows_active: bool) -> bool:
        """Whether that is less work than first statistics, then rows, for contiguous logits.

        ``all_rows_active``: every row will enter the products, and nobody will see whether log-probs have
        the bits of ``logprobs_forward``. Otherwise rows come along only where they cost nothing and bits
        are the same.
        """

    def logprobs_and_rows(self, rows: LogitRows, out: Tensor) -> tuple[RowStats, Tensor | None]:
        """The forward, and in ``out`` d logprob/dlogits but for a factor per row, returned as [B, T]; or None
        where the factors are 1.

        ``out`` is as in ``logprobs_backward``; with factors in the statistics' dtype or bf16. With factors,
        elements can be the exponentials that the log-sum-exp takes anyway, each computed once.
        """


class HiddenBackend(RowBackend, Protocol):
    """A backend with a launch for each thing that a call over hidden states does around its products.

    Arguments [n] are of the n rows of a chunk; coefficients may have any stride. ``factors`` [n] multiply
    along with the coefficients. An exact zero of either beats an overflow of the other.
    """

    def product_operand(
        self,
        hidden: Tensor,
        coefficients: Tensor,
        factors: Tensor | None,
        active: Tensor | None,
        unit: Tensor | None,
        most: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Hidden states [n, H] times coefficients of at most ``most`` either way, as ``dtype``; over the
        power of two ``unit``, 0-d. Of rows whose coefficient is 0, or that aren't ``active`` [n], zeros,
        whatever the hidden states are.
        """

    def sum_unit(
        self,
        coefficients: Tensor,
        factors: Tensor | None,
        before: Tensor | None,
        most: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """The power of two at or below the largest of the coefficients, each of at most ``most`` either way,
        or ``before`` where that is larger; and ``before`` over it. Both are 0-d, of a dtype of statistics.
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
        """Put ``values`` [n, H] in the statistics' dtype times coefficients where they belong: into the lines
        ``where`` of ``hidden`` [N, H], for each of the n rows. With ``scales`` [N] a line's power of two goes
        there. ``whole_last``: the coefficient multiplies last, and not only its own power of two.
        """

    def scale_rows_(self, values: Tensor, scales: Tensor, factor: Tensor) -> None:
        """Multiply rows of contiguous ``values`` [..., H] in place by ``scales`` [...] times a 0-d tensor."""


class OnlineSoftmax(Protocol):
    """Rows whose logits come some columns at a time and are never whole."""

    def add(self, logits: Tensor, first: int) -> None:
        """Columns [n, k] from column ``first`` on; k is a multiple of 2,048, but for the last columns."""

    def add_product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """All columns, as the backend's own product of [n, H] and [V, H] computes them."""

    def statistics(self) -> RowStats:
        """Once all columns are there, [1, n] each: those of ``logprobs_forward``, with the same bits."""


class FoldingBackend(RowBackend, Protocol):
    """A backend that takes statistics of rows without having them whole."""

    def folds(
        self,
        labels: Tensor,
        transform: LogitTransform,
        ignore_index: int,
        vocabulary: int,
        dtype: torch.dtype,
        entropy: bool,
    ) -> OnlineSoftmax:
        """Begin rows [1, n], whose logits will be of ``dtype``."""


class MaskBackend(RowBackend, Protocol):
    """A backend that merges mask and labels in one operation, where PyTorch takes many."""

    def reads_mask(self, mask: Tensor) -> bool:
        """Whether ``ratio_step`` takes the mask, of whatever dtype, as the caller gave it."""

    def merge_mask(
        self, mask: Tensor, labels: Tensor | None, ignore_index: int
    ) -> tuple[Tensor, Tensor | None, bool] | None:
        """Tokens that count, as bool: where ``mask`` isn't 0, nor a label ``ignore_index``; the labels,
        ``ignore_index`` where ``mask`` is 0, or None for None; and whether the mask holds only 0 and 1.

        None for dtypes that aren't served.
        """


class RatioBackend(RowBackend, Protocol):
    """A backend that also has clipped ratios in one launch: per sequence from logits, and from log-probs."""

    def sequence_ratio_forward(
        self, rows: LogitRows, operands: RatioOperands, form: RatioClip, doubt: Doubt = None
    ) -> SequenceRatioStats:
        """Loss, coefficients and metrics of a clipped sequence ratio, straight from the logits. Old log-probs
        are given, advantages and weights are one per sequence, ``cu_seqlens`` is int32.

        ``doubt`` looks at the values that callers pass, and raises where one is wrong. A backend calls it at
        the end, but may leave that out where it has seen itself that no counted log-prob, of whichever
        policy, is above 1 nat, and no advantage, log-ratio or penalty is NaN.
        """

    def ratio_step(
        self,
        logprobs: Tensor,
        mask: Tensor,
        operands: RatioOperands,
        form: RatioClip,
        kl: KLPenalty | None = None,
        doubt: Doubt = None,
    ) -> RatioStep:
        """The same from log-probs [B, T] or [1, N], fp32 or fp64 and contiguous, per sequence or token.

        Everything is computed in fp64. ``mask`` is of the same shape: rows that are not ignored. It is bool,
        or what ``reads_mask`` says yes to, and then ValueError says where it isn't only 0 and 1.
        """


# beneath the package under whatever name that was imported
_MODULES = {"triton": "..kernels", "cpp": "..cpp", "reference": "..reference.rows"}
_AUTO = {"cuda": ("triton", "reference"), "cpu": ("cpp", "reference")}

BACKENDS = tuple(_MODULES)


@functools.cache
def load(name: str) -> RowBackend:
    """The backend module called ``name``, imported on first use."""
    return cast(RowBackend, importlib.import_module(_MODULES[name], __package__))


def rows_of(options: RowOptions) -> RowBackend:
    """What serves the rows of a call: the backend, or around it what asks the other ranks."""
    rows = load(options.backend)
    return ShardedRows(rows, options.shard) if options.shard.group else rows


@functools.cache
def launches_of(name: str) -> HiddenBackend | None:
    """The backend called ``name`` where it is a ``HiddenBackend``."""
    backend = load(name)
    return cast(HiddenBackend, backend) if hasattr(backend, "store_hidden") else None


def why_not(name: str, device: torch.device) -> str | None:
    """None where ``name`` can serve tensors on ``device``, otherwise the reason why it can't."""
    try:
        return load(name).unavailable(device)
    except ImportError as error:
        return f"it can't be imported: {error}"


@constant_when_traced
def resolve(name: str, device: torch.device) -> str:
    """Turn "auto" into the first backend that can serve ``device``; check that a named one can.

    Raises:
        ValueError: ``name`` is no backend.
        RuntimeError: the named backend can't serve ``device``; the message says why.
    """
    if name == "auto":
        candidates = _AUTO.get(device.type, ("reference",))
        return next(candidate for candidate in candidates if why_not(candidate, device) is None)
    if name not in _MODULES:
        raise ValueError(f"backend: got {name!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = why_not(name, device)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} can't serve tensors on {device}: {reason}")
    return name
