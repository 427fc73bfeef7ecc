"""A wrapper of backends for rows whose columns are sharded over the ranks of a process group.

Each rank works on its columns. A few numbers per row are all-gathered and combined in the order of ranks,
with bitwise identical results on all ranks:

    lse = log sum_r exp(lse_r)
    log p(label) = log p_o(label) - log(1 + exp(lse_others - lse_o)),    o the rank that has the label
    H = sum_r w_r (H_r + lse - lse_r),    w_r = exp(lse_r - lse)

These avoid cancellation: log p is relatively accurate near 0. The gradient of a shard depends only on its
columns and the statistics of the whole row.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import load
from gspo_kernels.backends.protocol import RowBackend
from gspo_kernels.core import bits
from gspo_kernels.core.types import (
    LogitRows,
    Normalizers,
    PairStats,
    RowGradients,
    RowOptions,
    RowPair,
    RowStats,
    Shard,
)
from gspo_kernels.distributed.groups import gathered, rank_and_size, sum_

Rows = TypeVar("Rows", LogitRows, RowPair)
IGNORED, ELSEWHERE = -1, -2
"""Labels within a shard for ignored rows, and for rows whose label is in a different shard or in none."""
LOWEST = torch.finfo(torch.float64).min
_NOT_HERE = 1.0
"""Marks a log-prob (at most 0) of a label that is not in this shard."""


def first_column(shard: Shard, width: int) -> int:
    """Return the token id of the first of a shard's ``width`` columns."""
    return shard.start if shard.start >= 0 else rank_and_size(shard.group)[0] * width


def columns_of(shard: Shard, width: int) -> tuple[int, int]:
    """Return the token id of the first of a process's ``width`` columns, and the size of the whole
    vocabulary, or 0 if the shard alone doesn't determine it.
    """
    if not shard.group:
        return 0, width
    total = 0 if shard.start >= 0 else width * rank_and_size(shard.group)[1]
    return first_column(shard, width), total


def vocabulary_of(shard: Shard, width: int, device: torch.device) -> int | Tensor:
    """Return the size of the whole vocabulary, with an all-reduce of one number if necessary."""
    total = columns_of(shard, width)[1]
    return total or sum_(shard.group, torch.full((), width, dtype=torch.int64, device=device))


class ShardedRows:
    """``protocol.RowBackend`` over a shard of the columns, with labels and statistics of whole rows."""

    def __init__(self, inner: RowBackend, shard: Shard):
        self._inner, self._shard = inner, shard

    def logprobs_forward(self, rows: LogitRows, entropy: bool) -> RowStats:
        """See ``protocol.RowBackend.logprobs_forward``; one all-gather of 12 to 16 bytes per row."""
        local = self._local(rows)
        return self._combined(self._inner.logprobs_forward(local, entropy), local.labels)

    def logprobs_backward(
        self, rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = True
    ) -> None:
        """See ``protocol.RowBackend.logprobs_backward``; no communication."""
        # labels out of range have NaN log-probs and no gradient
        constant = stats.logprobs.isnan() & stats.lse.isfinite()
        grads = grads._replace(grad_logprobs=grads.grad_logprobs.masked_fill(constant, 0.0))
        self._inner.logprobs_backward(self._local(rows), stats, grads, out, sharded)

    def one_pass_pays(self, rows: LogitRows, *, all_rows_active: bool, has_ratio: bool) -> bool:
        """Return False, because the gradient needs the statistics of all ranks."""
        return False

    def logprobs_and_grad(self, rows: LogitRows, coefficients: Tensor, out: Tensor) -> RowStats:
        """See ``protocol.RowBackend.logprobs_and_grad``; the all-gather separates its two passes."""
        stats = self.logprobs_forward(rows, False)
        self.logprobs_backward(rows, stats, RowGradients(coefficients), out)
        return stats

    def divergence(
        self, rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
    ) -> PairStats:
        """See ``protocol.RowBackend.divergence``; all-gathers twice log-sum-exps, and once the sums."""
        of_shard = self._local(rows)
        if known is None:
            student = LogitRows(rows.logits, rows.labels, rows.transform, rows.ignore_index)
            of_teacher = rows.teacher_transform._replace(kept=rows.transform.kept)
            teacher = student._replace(logits=rows.teacher_logits, transform=of_teacher)
            known = Normalizers(*(self.logprobs_forward(side, False).lse for side in (student, teacher)))
        if not isinstance(known, PairStats):
            local = self._inner.divergence(of_shard, known, None, None)
            sums = gathered(
                self._shard.group, torch.stack([local.divergences, local.centers]).to(torch.float64)
            ).sum(0)
            # outputs of an operator must not alias
            known = PairStats(*known, *(each.to(local.centers.dtype, copy=True) for each in sums))
        return known if grad is None else self._inner.divergence(of_shard, known, grad, out)

    def _local(self, rows: Rows) -> Rows:
        """Return the rows with labels that are columns of the shard, ``IGNORED`` or ``ELSEWHERE``."""
        width = rows.logits.shape[-1]
        columns = rows.labels.to(torch.int64) - first_column(self._shard, width)
        columns = torch.where((columns >= 0) & (columns < width), columns, ELSEWHERE)
        columns.masked_fill_(rows.labels == rows.ignore_index, IGNORED)
        return rows._replace(labels=columns, ignore_index=IGNORED)

    def _combined(self, stats: RowStats, labels: Tensor) -> RowStats:
        """Return the statistics of whole rows from those of all shards.

        As in one process, the log-prob is NaN in a row with +inf or with only -inf.
        """
        if not labels.numel():
            return stats
        local = [stats.lse, stats.logprobs.masked_fill(labels == ELSEWHERE, _NOT_HERE)]
        local += [] if stats.entropy is None else [stats.entropy]
        every = gathered(self._shard.group, torch.cat([each.reshape(-1).view(torch.uint8) for each in local]))
        sizes = [each.numel() * each.element_size() for each in local]
        lse, logprobs, *entropy = (
            part.clone(memory_format=torch.contiguous_format).view(like.dtype).view(-1, *like.shape)
            for part, like in zip(torch.split(every, sizes, dim=1), local, strict=True)
        )  # each [ranks, B, T]
        in_shard = ~(logprobs > 0)
        total = torch.logsumexp(lse, 0)
        others = torch.logsumexp(lse.masked_fill(in_shard, float("-inf")), 0)
        lse_in_shard = torch.where(in_shard, lse, 0.0).sum(0)
        excess = others - lse_in_shard
        softplus = torch.logaddexp(excess, torch.zeros_like(excess))
        logp = torch.where(in_shard, logprobs, 0.0).sum(0).double() - softplus
        # the label's whole shard is -inf
        logp = torch.where((lse_in_shard == float("-inf")) & (total > float("-inf")), float("-inf"), logp)
        logp = torch.where((total == float("inf")) | ~in_shard.any(0), float("nan"), logp)
        mean = None
        if entropy:
            weights = (lse - total).exp()
            parts = torch.where(weights == 0, 0.0, weights * (entropy[0] + (total - lse)))
            mean = parts.sum(0).to(logprobs.dtype)
        combined = RowStats(logp.to(logprobs.dtype), total, mean)
        return combined.each(lambda stat: stat.masked_fill(labels == IGNORED, 0.0))


def row_backend(options: RowOptions) -> RowBackend:
    """Return the backend of a call, wrapped in ``ShardedRows`` if the vocabulary is sharded."""
    rows = load(options.backend)
    return ShardedRows(rows, options.shard) if options.shard.group else rows


def selected_of_all(shard: Shard, z: Tensor, present: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the shards of selected ids: transformed logits [B, T, K] in fp64, which of the ids are present,
    and the log-sum-exp of all other columns [B, T] in fp64.
    """
    local = torch.cat([torch.where(present, z, 0.0), present.to(z.dtype), rest.unsqueeze(-1)], -1)
    every = gathered(shard.group, local)
    K = z.shape[-1]
    return every[..., :K].sum(0), every[..., K : 2 * K].sum(0) > 0, torch.logsumexp(every[..., -1], 0)


def leading_of_all(shard: Shard, width: int, values: Tensor, columns: Tensor, k: int) -> Tensor:
    """Return the ids [B, T, k] of the largest logits of whole rows from those of each shard of ``width``
    columns; all-gathers k logits and ids per row.
    """
    short = (0, k - values.shape[-1])
    padded = torch.nn.functional.pad(values.to(torch.float64), short, value=-torch.inf)
    ids = torch.nn.functional.pad(columns + first_column(shard, width), short, value=-1)
    every = gathered(shard.group, torch.stack([padded, ids.to(torch.float64)]))
    values, ids = (each.movedim(0, -2).flatten(-2) for each in every.unbind(1))
    # padding of a small shard sorts after all logits
    values = torch.where(ids < 0, -torch.inf, values.nan_to_num(torch.inf, torch.inf, LOWEST))
    leading = ids.gather(-1, values.topk(k).indices).to(torch.int64)
    return leading.masked_fill(leading < 0, bits.NO_ID)
