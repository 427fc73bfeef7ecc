"""Operators over logits for log-probs of K ids per row, the log of the remaining mass, and their gradient.

With z_k the logits of the ids, and U the log-sum-exp of all *other* columns, from one pass over the row,

    tail = U - L,   logp_k = z_k - L,   L = logaddexp(U, logsumexp over the set of z_k).

This keeps the relative accuracy of a remaining mass of 1e-8. With G = sum_k g_k + g_tail, columns of the set
have the gradient g_k - G p_k and the others

    d/dz_j = (g_tail - G exp(tail)) exp(z_j - U),

the gradient of a row with log-sum-exp U and no label. The K numbers are in fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.values import check_ids, check_logprobs
from gspo_kernels.backends.dispatch import load
from gspo_kernels.core import bits
from gspo_kernels.core.exact import exact, exact_dtype, segment_reduce
from gspo_kernels.core.memory import reused_memory
from gspo_kernels.core.operators import inplace_operator, must_check_values, operator
from gspo_kernels.core.types import LogitRows, LogitTransform, RowGradients, RowOptions, RowStats, stats_dtype
from gspo_kernels.distributed.shards import columns_of, selected_of_all
from gspo_kernels.logits.logprobs import check_rows, overwritten, save_rows, saved_rows


class SelectedRows(NamedTuple):
    """Log-probs [B, T, K] and tail [B, T] in the statistics' dtype, U [B, T] in fp64; 0.0 for padding. U and
    tail are -inf if log-probs are normalized within the set.
    """

    logprobs: Tensor
    tail: Tensor
    lse_others: Tensor


class SelectedGradients(NamedTuple):
    """DLoss/dlogprobs [B, T, K], and dLoss/dtail [B, T] or None."""

    logprobs: Tensor
    tail: Tensor | None


@operator
def checked_ids(
    ids: Tensor,
    teacher_logprobs: Tensor | None,
    labels: Tensor | None,
    vocabulary: int,
    options: RowOptions,
    packed: bool,
    ids_name: str,
    logprobs_name: str,
) -> Tensor:
    """Check ids [B, T, K] and a teacher's log-probs of them; return an int64 copy padded with ``bits.NO_ID``.

    Ids must be in the vocabulary and the row's sampling mask, or -1 or ``bits.NO_ID`` for padding. Rows whose
    label is ``ignore_index`` are not checked, and have no ids in the copy; without labels all rows count.
    ``vocabulary`` is the number of columns of a shard. Error messages begin with the names.
    """
    first, total = columns_of(options.shard, vocabulary)
    ids = torch.where(ids == -1, bits.NO_ID, ids).to(torch.int64)
    if labels is not None:
        ids.masked_fill_((labels == options.ignore_index).unsqueeze(-1), bits.NO_ID)
    check_ids(ids_name, ids, total)
    if teacher_logprobs is not None and must_check_values(ids.device):
        check_logprobs(logprobs_name, teacher_logprobs, ids != bits.NO_ID, packed)
    kept = options.transform.kept
    if kept is not None and must_check_values(ids.device):
        local = (ids >= first) & (ids < first + vocabulary)
        cut = local & ~_are_kept(kept, torch.where(local, ids - first, 0))
        if bool(cut.any()):
            b, t, k = cut.nonzero()[0].tolist()
            place = [t] if packed else [b, t]
            raise ValueError(
                f"{ids_name}: got {int(ids[b, t, k])} at position {place}, expected ids in the sampling mask"
            )
    return ids


@checked_ids.register_fake
def _(ids: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(ids, dtype=torch.int64)


def _are_kept(kept: Tensor, ids: Tensor) -> Tensor:
    return bits.holds(kept.unsqueeze(-2).expand(*ids.shape, -1), ids)


class _IdSet:
    """The ids of rows, [B, T, K], possibly repeated.

    Attributes:
        ids: the ids where ``present``, -1 elsewhere.
        present: bool, places of ids that are columns of the whole row and not masked.
        first: bool, the first place of each id.
    """

    def __init__(self, ids: Tensor, present: Tensor):
        self.ids, self.present = torch.where(present, ids, -1), present
        ordered, self._order = self.ids.sort(dim=-1, stable=True)
        new = torch.ones_like(self.present)
        new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
        self.first = torch.zeros_like(new).scatter_(-1, self._order, new) & self.present
        self._group = new.cumsum(-1) - 1

    def sums(self, values: Tensor) -> Tensor:
        """Return for each place the sum over all places with the same id, in a fixed order."""
        if values.numel() == 0:
            return values
        K = values.shape[-1]
        group, ordered = self._group.flatten(0, -2), values.gather(-1, self._order)
        groups = torch.arange(K, device=values.device).expand_as(group).contiguous()
        starts = torch.searchsorted(group.contiguous(), groups)
        starts += K * torch.arange(len(group), device=values.device).unsqueeze(1)
        offsets = torch.nn.functional.pad(starts.flatten(), (0, 1), value=values.numel())
        totals = segment_reduce(ordered.flatten(), "sum", offsets)
        return torch.zeros_like(values).scatter_(
            -1, self._order, totals.view(values.shape).gather(-1, self._group)
        )


class _LocalIds:
    """The ids of rows that are among ``width`` columns.

    Attributes:
        present: bool, places of such ids that are not masked.
        index: int64, the column of the id, or any column in other places.
    """

    def __init__(self, ids: Tensor, width: int, kept: Tensor | None, first: int = 0):
        columns = ids - first
        self.present = (ids >= 0) & (columns >= 0) & (columns < width)
        self.index = torch.where(self.present, columns, 0)
        if kept is not None:
            self.present = self.present & _are_kept(kept, self.index)


def first_places(ids: Tensor, vocabulary: int | None) -> Tensor:
    """Mark the first place of each id in the vocabulary (None: of each id >= 0), bool [B, T, K]."""
    present = ids >= 0 if vocabulary is None else _LocalIds(ids, vocabulary, None).present
    return _IdSet(ids, present).first


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) with full relative accuracy."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _others(logits: Tensor, ids: Tensor, local: _LocalIds, transform: LogitTransform) -> LogitRows:
    """Return the rows with the selected columns masked; rows without ids are ignored."""
    width = logits.shape[-1]
    others = bits.packed_ids(torch.where(local.present, local.index, bits.NO_ID), width).bitwise_not_()
    if transform.kept is not None:
        others &= transform.kept
    labels = torch.where((ids != bits.NO_ID).any(-1), width, -1)
    return LogitRows(logits, labels, transform._replace(kept=others), -1)


def selected_rows(logits: Tensor, ids: Tensor, options: RowOptions, within: bool) -> SelectedRows:
    """Return log-probs of ids [B, T, K] and the log of the remaining mass, reading each logit once.

    ``within`` the set, only the ids' logits are read. With vocabulary shards 2 K + 1 numbers per row are
    all-gathered.
    """
    V, transform, shard = logits.shape[-1], options.transform, options.shard
    local = _LocalIds(ids, V, transform.kept, columns_of(shard, V)[0])
    if within:
        lse_others = torch.full(ids.shape[:-1], -torch.inf, dtype=exact_dtype(ids.device), device=ids.device)
    else:
        lse_others = load(options.backend).logprobs_forward(_others(logits, ids, local, transform), False).lse
    z = transform.apply(exact(logits.gather(-1, local.index)))
    present = local.present
    if shard.group:
        z, present, lse_others = selected_of_all(shard, z, present, lse_others)
    unique = _IdSet(ids, present)
    z = torch.where(present, z, -torch.inf)
    # relative to the most likely id, whose log-prob may be near 0: log p = -log(1 + other mass / its own)
    top, at = z.max(-1, keepdim=True)
    is_top = unique.present & (unique.ids == unique.ids.gather(-1, at))
    each = torch.where(unique.first, z, -torch.inf)
    remaining = torch.logaddexp(each.masked_fill(is_top, -torch.inf).logsumexp(-1), lse_others).unsqueeze(-1)
    logp_top = -_softplus(remaining - top)
    logprobs = torch.where(is_top, logp_top, torch.where(z == -torch.inf, z, (z - top) + logp_top))
    tail = -_softplus(each.logsumexp(-1) - lse_others)
    # rows with +inf or NaN, or with only -inf, have no softmax
    none = ~torch.maximum(top.squeeze(-1), lse_others).isfinite()
    logprobs, tail = logprobs.masked_fill(none.unsqueeze(-1), torch.nan), tail.masked_fill(none, torch.nan)
    dtype = stats_dtype(logits.dtype)
    return SelectedRows(
        torch.where(unique.present, logprobs, torch.nan).masked_fill(ids == bits.NO_ID, 0.0).to(dtype),
        torch.where(unique.present.any(-1), tail, 0.0).to(dtype),
        lse_others,
    )


def write_gradient(
    out: Tensor,
    logits: Tensor,
    ids: Tensor,
    rows: SelectedRows,
    grads: SelectedGradients,
    options: RowOptions,
    within: bool,
) -> None:
    """Write d/dlogits of ``sum(grads * (log-probs, tail))`` into ``out``.

    For ``out`` see ``RowBackend.logprobs_backward``.
    """
    V, transform = logits.shape[-1], options.transform
    local = _LocalIds(ids, V, transform.kept, columns_of(options.shard, V)[0])
    present = local.present
    if options.shard.group:
        # ids out of range or masked have NaN log-probs in a row with a softmax
        absent = rows.logprobs.isnan() & ~rows.tail.isnan().unsqueeze(-1)
        present = (ids != bits.NO_ID) & ~absent
    unique = _IdSet(ids, present)
    slope = transform.slope(exact(logits.gather(-1, local.index)))
    logp, g = exact(rows.logprobs), exact(torch.where(unique.present, grads.logprobs, 0.0))
    g_tail = g.new_zeros(()) if grads.tail is None else exact(grads.tail)
    inactive = (g == 0).all(-1) & (g_tail == 0)
    if within:
        out.zero_()
    else:
        tail, lse_others = exact(rows.tail), rows.lse_others
        outside = g_tail * -torch.expm1(tail) - g.sum(-1) * tail.exp()
        # if the set is the whole row, no other column has a gradient
        outside = torch.where((lse_others == -torch.inf) & ~tail.isnan(), 0.0, outside)
        outside = outside.masked_fill(inactive, 0.0).to(rows.tail.dtype)
        others = _others(logits, ids, local, transform)
        stats = RowStats(torch.zeros_like(rows.tail), lse_others, None)
        load(options.backend).logprobs_backward(others, stats, RowGradients(-outside), out, sharded=True)
    every, per_id = g.sum(-1, keepdim=True) + g_tail.unsqueeze(-1), unique.sums(g)
    at_ids = (per_id * -torch.expm1(logp) - (every - per_id) * logp.exp()) * slope
    at_ids = at_ids.masked_fill(inactive.unsqueeze(-1), 0.0)
    # Padding repeats a place with an id: all writes to a column have the same value, in any order.
    places = torch.arange(ids.shape[-1], device=ids.device)
    place = torch.where(local.present, places, local.present.byte().argmax(-1, keepdim=True))
    B, T, _ = ids.shape
    sequences, tokens = (torch.arange(n, device=ids.device) for n in (B, T))
    # scatter_ would copy all of a bf16 tensor on the CPU
    columns = (sequences.view(-1, 1, 1), tokens.view(-1, 1), local.index.gather(-1, place))
    # rows without an id in these columns are unchanged
    some, at_columns = local.present.any(-1, keepdim=True), at_ids.gather(-1, place)
    out[columns] = torch.where(some, at_columns, out[columns]).to(out.dtype)


@operator
def selected_forward(logits: Tensor, ids: Tensor, options: RowOptions, within: bool) -> SelectedRows:
    """See ``selected_rows``."""
    check_rows(ids.amax(-1), logits.shape[-1], options._replace(ignore_index=bits.NO_ID))
    return selected_rows(logits, ids, options, within)


def fake_rows(ids: Tensor, dtype: torch.dtype) -> SelectedRows:
    """Return uninitialized results for inputs of ``dtype``."""
    kind, rows = stats_dtype(dtype), ids.shape[:-1]
    return SelectedRows(
        ids.new_empty(ids.shape, dtype=kind),
        ids.new_empty(rows, dtype=kind),
        ids.new_empty(rows, dtype=exact_dtype(ids.device)),
    )


@selected_forward.register_fake
def _(logits: Tensor, ids: Tensor, options: RowOptions, within: bool) -> SelectedRows:
    return fake_rows(ids, logits.dtype)


class SelectedOperands(NamedTuple):
    """The operands of the logits' gradient besides logits; see ``selected_rows`` and ``write_gradient``."""

    ids: Tensor
    rows: SelectedRows
    grads: SelectedGradients
    options: RowOptions
    within: bool


@operator
def selected_backward(logits: Tensor, operands: SelectedOperands) -> Tensor:
    """Return the logits' gradient in their dtype, contiguous."""
    out = reused_memory(logits.shape, logits.dtype, logits.device)
    write_gradient(out, logits, *operands)
    return out


@selected_backward.register_fake
def _(logits: Tensor, operands: SelectedOperands) -> Tensor:
    return logits.new_empty(logits.shape)


@inplace_operator
def selected_backward_(logits: Tensor, operands: SelectedOperands) -> None:
    """Write the logits' gradient over the logits."""
    write_gradient(logits, logits, *operands)


class SelectedLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs of selected ids and log of the remaining mass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, inplace: bool, options: RowOptions, within: bool
    ) -> tuple[Tensor, Tensor]:
        rows = selected_forward(logits, ids, options, within)
        save_rows(ctx, options, logits, ids, *rows, inplace=inplace)
        ctx.within = within
        if within:
            ctx.mark_non_differentiable(rows.tail)
        return rows.logprobs, rows.tail

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_tail: Tensor | None) -> tuple[Any, ...]:
        (logits, ids, *rows), options = saved_rows(ctx)
        if grad_logprobs is None:
            if grad_tail is None:
                return (None,) * 5
            grad_logprobs = grad_tail.new_zeros(()).expand(ids.shape)
        grads = SelectedGradients(grad_logprobs, grad_tail)
        operands = SelectedOperands(ids, SelectedRows(*rows), grads, options, ctx.within)
        if not overwritten(ctx, logits):
            return (selected_backward(logits, operands), *(None,) * 4)
        selected_backward_(logits, operands)
        return (logits, *(None,) * 4)
