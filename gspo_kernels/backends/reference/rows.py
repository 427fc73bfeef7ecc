"""Row operations in plain PyTorch, by ``log_softmax`` and autograd, which materialize transformed logits."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.core import bits, divergences
from gspo_kernels.core.exact import exact
from gspo_kernels.core.torch_internals import constant_of, inner_autograd
from gspo_kernels.core.types import (
    LogitRows,
    LogitTransform,
    Normalizers,
    PairStats,
    RowGradients,
    RowPair,
    RowStats,
    stats_dtype,
)


def unavailable(device: torch.device) -> str | None:
    """Return None: the reference runs wherever PyTorch does."""
    return None


def _counted_columns(logits: Tensor, ignored: Tensor, transform: LogitTransform) -> Tensor:
    """Return z in the statistics' dtype, 0 in ignored rows and -inf in masked columns; differentiable."""
    ignored, wide = ignored.unsqueeze(-1), stats_dtype(logits.dtype)
    if transform.kept is None:
        return transform.apply(logits.masked_fill(ignored, 0.0).to(wide))
    cut = ~bits.columns(transform.kept, logits.shape[-1])
    z = transform.apply(logits.masked_fill(ignored | cut, 0.0).to(wide))
    return z.masked_fill(cut & ~ignored, -torch.inf)


def token_statistics(rows: LogitRows) -> RowStats:
    """Return log-prob, log-sum-exp and entropy of each row; all but the log-sum-exp are differentiable."""
    logits, labels, transform, ignore_index = rows
    vocabulary = logits.shape[-1]
    ignored = labels == ignore_index
    in_range = (labels >= 0) & (labels < vocabulary)
    index = labels.to(torch.int64).clamp(0, max(vocabulary - 1, 0)).unsqueeze(-1)
    if transform.kept is not None:
        in_range = in_range & bits.holds(transform.kept, index.squeeze(-1))
    z = _counted_columns(logits, ignored, transform)
    logp = torch.log_softmax(z, dim=-1)
    logprobs = logp.gather(-1, index).squeeze(-1).masked_fill(~in_range, float("nan"))
    p = logp.exp()
    # select before the product, whose gradient would be 0 * inf
    entropy = -(p * torch.where(p > 0, logp, 0.0)).sum(-1)
    lse = torch.logsumexp(exact(z.detach()), dim=-1)
    return RowStats(*(stat.masked_fill(ignored, 0.0) for stat in (logprobs, lse, entropy)))


def logprobs_forward(rows: LogitRows, entropy: bool) -> RowStats:
    """See ``protocol.RowBackend.logprobs_forward``."""
    stats = token_statistics(rows)
    return stats if entropy else stats._replace(entropy=None)


def logprobs_backward(
    rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
) -> None:
    """See ``protocol.RowBackend.logprobs_backward``."""
    grad_logprobs, grad_entropy, grad_scale = grads
    with inner_autograd():
        leaf = constant_of(rows.logits).to(stats_dtype(rows.logits.dtype)).requires_grad_()
        rows = rows._replace(logits=leaf, transform=rows.transform.rows(constant_of))
        outputs = _surrogates(rows, stats) if sharded else token_statistics(rows)
        assert outputs.entropy is not None
        pairs = [(outputs.logprobs, grad_logprobs)]
        if grad_entropy is not None:
            pairs.append((outputs.entropy, grad_entropy))
        inactive = rows.labels == rows.ignore_index
        inactive = inactive | torch.stack([grad == 0 for _, grad in pairs]).all(0)
        grad_logits = torch.zeros_like(leaf)
        for output, grad in pairs:
            (slope,) = torch.autograd.grad(output.sum(), leaf, retain_graph=True)
            weight = grad.to(leaf.dtype) * (1.0 if grad_scale is None else grad_scale)
            # an infinite weight must not turn zeros into NaN
            grad_logits = grad_logits + torch.where(slope == 0, 0.0, slope * weight.unsqueeze(-1))
    out.copy_(grad_logits.masked_fill(inactive.unsqueeze(-1), 0.0))


def _surrogates(rows: LogitRows, full: RowStats) -> RowStats:
    """Return numbers whose derivatives by some columns of wider rows equal those of the rows' statistics:
    dlogp/dz_v = onehot_v - p_v and dH/dz_v = -p_v (log p_v + H).
    """
    logits, labels, transform, ignore_index = rows
    z = _counted_columns(logits, labels == ignore_index, transform)
    log_p = (z.detach() - full.lse.unsqueeze(-1)).to(z.dtype)
    p = torch.where(full.lse.isfinite().unsqueeze(-1), log_p.exp(), float("nan"))
    columns = torch.arange(p.shape[-1], device=p.device)
    # 1 - p from log p, because 1 - p cancels where p is near 1
    at_label = -torch.expm1(full.logprobs).unsqueeze(-1)
    logprobs = (torch.where(columns == labels.unsqueeze(-1), at_label, -p) * z).sum(-1)
    if full.entropy is None:
        return RowStats(logprobs, full.lse, logprobs)
    surprise = torch.where(p > 0, log_p + full.entropy.unsqueeze(-1), 0.0)
    return RowStats(logprobs, full.lse, -(p * surprise * z).sum(-1))


def merge_mask(
    mask: Tensor, labels: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None, bool | None]:
    """See ``protocol.Backend.merge_mask``."""
    counted = (mask != 0).contiguous()
    if labels is None:
        return counted, None, None
    merged = torch.where(counted, labels, ignore_index).contiguous()
    return merged != ignore_index, merged, None


def scale_(values: Tensor, factor: Tensor) -> None:
    """See ``protocol.Backend.scale_``."""
    if factor.item() != 1.0:
        values.mul_(factor)


def one_pass_pays(rows: LogitRows, *, all_rows_active: bool, has_ratio: bool) -> bool:
    """Return False, as it is not supported."""
    return False


def logprobs_and_grad(rows: LogitRows, coefficients: Tensor, out: Tensor) -> RowStats:
    """See ``protocol.RowBackend.logprobs_and_grad``."""
    stats = logprobs_forward(rows, False)
    logprobs_backward(rows, stats, RowGradients(coefficients), out)
    return stats


def divergence(
    rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
) -> PairStats:
    """See ``protocol.RowBackend.divergence``."""
    logits, teacher_logits, labels, transform, teacher_transform, beta, ignore_index = rows
    teacher_masked = teacher_transform._replace(kept=transform.kept)
    wide, grad_logits = torch.promote_types(teacher_logits.dtype, stats_dtype(logits.dtype)), None
    with inner_autograd():
        ignored = labels == ignore_index
        leaf = constant_of(logits).to(stats_dtype(logits.dtype)).requires_grad_()
        z = _counted_columns(leaf, ignored, transform.rows(constant_of))
        teacher_z = _counted_columns(teacher_logits.detach().to(wide), ignored, teacher_masked)
        if known is None:
            sides = (exact(each.detach()).logsumexp(-1) for each in (z, teacher_z))
            known = Normalizers(*(lse.masked_fill(ignored, 0.0) for lse in sides))
        log_p, log_q = (
            _log_softmax(z.detach(), known.lse),
            _log_softmax(teacher_z, known.teacher_lse).to(z.dtype),
        )
        value, slope = divergences.of_columns(log_p, log_q, beta)
        if isinstance(known, PairStats):
            stats = known
        else:
            student = 1.0 if beta in (0, 1) else 1 - beta
            centers = torch.zeros_like(value[..., 0]) if beta == 0 else slope.sum(-1) / student
            sums = (each.masked_fill(ignored, 0.0) for each in (value.sum(-1), centers))
            stats = PairStats(*known, *sums)
        if out is not None and grad is not None:
            p = log_p.exp()
            if beta == 0:
                grad_z = p + slope
            else:
                grad_z = slope - p * (stats.centers * (1.0 if beta == 1 else 1 - beta)).unsqueeze(-1)
                # the gradient of an infinite divergence is undefined
                grad_z = torch.where(stats.divergences.isfinite().unsqueeze(-1), grad_z, torch.nan)
            weight = grad.to(leaf.dtype).masked_fill(ignored, 0.0).unsqueeze(-1)
            weighted = torch.where(weight == 0, 0.0, grad_z * weight)
            (chained,) = torch.autograd.grad(z, leaf, weighted)
            grad_logits = torch.where(weighted == 0, 0.0, chained)
    if out is not None and grad_logits is not None:
        out.copy_(grad_logits)
    return stats


def _log_softmax(z: Tensor, lse: Tensor) -> Tensor:
    """Return log p of rows, or of some columns of rows, whose log-sum-exp is known; NaN without a softmax."""
    lse = torch.where(lse.isfinite(), lse, torch.nan).unsqueeze(-1)
    return (exact(z) - lse).to(z.dtype)
