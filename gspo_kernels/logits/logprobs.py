"""Operators over logits for per-token log-probs and entropy, their gradient, and both in one pass.

Rows are [B, T] (packed: [1, N]). ``protocol.RowBackend`` specifies the row operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.arguments.values import check_kept, check_temperature
from gspo_kernels.backends.dispatch import load
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.memory import reused_memory
from gspo_kernels.core.operators import inplace_operator, must_check_values, operator
from gspo_kernels.core.torch_internals import refuse_second_derivatives, tensors_to_save
from gspo_kernels.core.types import LogitRows, RowGradients, RowOptions, RowStats, stats_dtype
from gspo_kernels.distributed.groups import gathered_numbers
from gspo_kernels.distributed.shards import columns_of, row_backend


class LogprobRows(NamedTuple):
    """``RowStats`` as the output of an operator, with an empty entropy if not requested."""

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, stats: RowStats) -> LogprobRows:
        """Wrap the tensors of statistics."""
        logprobs, lse, entropy = stats
        if entropy is None:
            entropy = torch.empty(0, dtype=logprobs.dtype, device=logprobs.device)
        return cls(logprobs, lse, entropy)

    @classmethod
    def fake(cls, labels: Tensor, dtype: torch.dtype, entropy: bool) -> LogprobRows:
        """Return uninitialized tensors for inputs of ``dtype``."""
        kind = stats_dtype(dtype)
        return cls(
            labels.new_empty(labels.shape, dtype=kind),
            labels.new_empty(labels.shape, dtype=exact_dtype(labels.device)),
            labels.new_empty(labels.shape if entropy else (0,), dtype=kind),
        )


class LogitGradient(NamedTuple):
    """Log-probs, log-sum-exp [B, T] and the gradient of logits [B, T, V]."""

    logprobs: Tensor
    lse: Tensor
    grad_logits: Tensor


def check_rows(labels: Tensor, vocabulary: int, options: RowOptions) -> None:
    """Check, if values are checked, that labels are ``ignore_index`` or in the vocabulary and the sampling
    mask, and that temperatures are positive. ``vocabulary`` is the number of columns of a shard.

    Vocabulary ranges passed by the caller are all-gathered, 32 bytes per rank.
    """
    if options.shard.group:
        local_range = range_of(labels, vocabulary, options)
        if options.shard.start >= 0 and must_check_values(labels.device):
            check_ranges(gathered_numbers(options.shard.group, labels.device, local_range), options)
        return
    if options.transform.row_temperature is not None:
        check_temperature(options.transform.row_temperature, labels, options.ignore_index)
    if not must_check_values(labels.device) or not labels.numel():
        return
    lowest, highest = labels.aminmax()
    if int(lowest) < 0 or int(highest) >= vocabulary:
        wrong = (labels != options.ignore_index) & ((labels < 0) | (labels >= vocabulary))
        if bool(wrong.any()):
            raise wrong_label(int(labels[wrong][0]), vocabulary, options)
    if options.transform.kept is not None:
        check_kept(labels, options.transform.kept, labels != options.ignore_index)


def wrong_label(value: int, vocabulary: int, options: RowOptions) -> ValueError:
    """Return the error for a wrong label in a counted position; a vocabulary of 0 means an unknown size."""
    bound = vocabulary or "the vocabulary's size"
    return ValueError(
        f"labels: got {value} in a counted position, expected 0 <= label < {bound} "
        f"or ignore_index={options.ignore_index}"
    )


def range_of(labels: Tensor, width: int, options: RowOptions) -> tuple[int, int, int, int]:
    """Check temperatures, labels [B, T] and masks. Return the first of this rank's ``width`` columns, their
    number, and the lowest and highest counted label, as ids of the whole vocabulary.

    Raises:
        ValueError: a wrong value on this rank.
    """
    if options.transform.row_temperature is not None:
        check_temperature(options.transform.row_temperature, labels, options.ignore_index)
    start, total = columns_of(options.shard, width)
    counted = labels[labels != options.ignore_index] if must_check_values(labels.device) else labels[:0]
    lowest, highest = (int(x) for x in counted.aminmax()) if counted.numel() else (0, 0)
    if lowest < 0 or (total and highest >= total):
        raise wrong_label(lowest if lowest < 0 else highest, total, options)
    if options.transform.kept is not None:
        local = (labels != options.ignore_index) & (labels >= start) & (labels < start + width)
        check_kept(labels, options.transform.kept, local, start)
    return start, width, lowest, highest


def check_ranges(every: Sequence[tuple[int, ...]], options: RowOptions) -> None:
    """Check the results of ``range_of`` of all ranks.

    Raises:
        ValueError: shards that don't form one vocabulary, or labels out of range.
    """
    total = 0
    for first, columns, *_ in sorted(every):
        if first != total:
            ranges = ", ".join(f"{start} to {start + columns}" for start, columns, *_ in every)
            raise ValueError(
                f"vocab_range: the ranks have {ranges}, expected contiguous ranges that start at 0"
            )
        total += columns
    for _, _, low, high in every:
        if low < 0 or high >= total:
            raise wrong_label(low if low < 0 else high, total, options)


@operator
def logprobs_forward(logits: Tensor, labels: Tensor, options: RowOptions, entropy: bool) -> LogprobRows:
    """Return log-probs, log-sum-exp and entropy of logits [B, T, V] for labels [B, T]."""
    check_rows(labels, logits.shape[-1], options)
    rows = LogitRows(logits, labels, options.transform, options.ignore_index)
    return LogprobRows.of(row_backend(options).logprobs_forward(rows, entropy))


@logprobs_forward.register_fake
def _(logits: Tensor, labels: Tensor, options: RowOptions, entropy: bool) -> LogprobRows:
    return LogprobRows.fake(labels, logits.dtype, entropy)


@operator
def logprobs_backward(
    logits: Tensor, labels: Tensor, stats: RowStats, grads: RowGradients, options: RowOptions
) -> Tensor:
    """Return the logits' gradient in their dtype, contiguous."""
    out = reused_memory(logits.shape, logits.dtype, logits.device)
    rows = LogitRows(logits, labels, options.transform, options.ignore_index)
    row_backend(options).logprobs_backward(rows, stats, grads, out)
    return out


@logprobs_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@inplace_operator
def logprobs_backward_(
    logits: Tensor, labels: Tensor, stats: RowStats, grads: RowGradients, options: RowOptions
) -> None:
    """Write the logits' gradient over the logits."""
    rows = LogitRows(logits, labels, options.transform, options.ignore_index)
    row_backend(options).logprobs_backward(rows, stats, grads, logits)


def gradient_of_logits(
    ctx: Any, logits: Tensor, labels: Tensor, stats: RowStats, grads: RowGradients, options: RowOptions
) -> Tensor:
    """Return the logits' gradient, in the logits' memory if it is ``overwritten``."""
    if not overwritten(ctx, logits):
        return logprobs_backward(logits, labels, stats, grads, options)
    logprobs_backward_(logits, labels, stats, grads, options)
    return logits


@operator
def logprobs_and_grad(
    logits: Tensor, labels: Tensor, coefficients: Tensor, options: RowOptions
) -> LogitGradient:
    """Return log-probs and the logits' gradient for known coefficients dLoss/dlogprobs [B, T]."""
    check_rows(labels, logits.shape[-1], options)
    out = reused_memory(logits.shape, logits.dtype, logits.device)
    rows = LogitRows(logits, labels, options.transform, options.ignore_index)
    stats = row_backend(options).logprobs_and_grad(rows, coefficients, out)
    return LogitGradient(stats.logprobs, stats.lse, out)


@logprobs_and_grad.register_fake
def _(logits: Tensor, labels: Tensor, coefficients: Tensor, options: RowOptions) -> LogitGradient:
    stats = LogprobRows.fake(labels, logits.dtype, False)
    return LogitGradient(stats.logprobs, stats.lse, logits.new_empty(logits.shape))


class TokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy of logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, entropy: bool, inplace: bool, options: RowOptions
    ) -> tuple[Tensor, Tensor]:
        stats = logprobs_forward(logits, labels, options, entropy)
        save_rows(ctx, options, logits, labels, *stats, inplace=inplace)
        ctx.entropy = entropy
        if not entropy:
            ctx.mark_non_differentiable(stats.entropy)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        (logits, labels, logprobs, lse, entropy), options = saved_rows(ctx)
        nothing = (None, None, None, None)
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None, *nothing)
            grad_logprobs = grad_entropy.new_zeros(()).expand(labels.shape)
        stats = RowStats(logprobs, lse, entropy if ctx.entropy else None)
        grads = RowGradients(grad_logprobs, grad_entropy)
        return (gradient_of_logits(ctx, logits, labels, stats, grads, options), *nothing)


def save_rows(
    ctx: Any, options: RowOptions, first: Tensor, *tensors: Tensor | None, inplace: bool = False
) -> None:
    """Save tensors and row options for a backward in which undefined upstream gradients are None.

    With ``inplace`` the backward may overwrite the first tensor, the logits; see ``overwritten``.
    """
    ctx.inplace = inplace
    if inplace and not is_compiling():
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.address, ctx.overwrote = first.data_ptr() if hooked else None, False
    *_, row_temperature, kept = options.transform
    if row_temperature is not None or kept is not None:
        transform = options.transform._replace(row_temperature=None, kept=None)
        options = options._replace(transform=transform)
    ctx.options = options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors_to_save(ctx, (first, *tensors, row_temperature, kept)))


def saved_rows(ctx: Any) -> tuple[list[Any], RowOptions]:
    """Return the tensors and options of ``save_rows``; raise an error if the backward is recorded."""
    if torch.is_grad_enabled():
        refuse_second_derivatives()
    *tensors, row_temperature, kept = ctx.saved_tensors
    options: RowOptions = ctx.options
    if row_temperature is not None or kept is not None:
        transform = options.transform._replace(row_temperature=row_temperature, kept=kept)
        options = options._replace(transform=transform)
    return tensors, options


def overwritten(ctx: Any, logits: Tensor) -> bool:
    """Return whether the backward writes the gradient over the saved logits.

    Under ``saved_tensors_hooks`` autograd does not check tensor versions, so only copies are overwritten,
    once.
    """
    if not ctx.inplace or is_compiling():
        return ctx.inplace
    if logits.data_ptr() == ctx.address:
        return False
    if ctx.overwrote:
        raise RuntimeError(
            "inplace_backward: got True, expected False for a second backward: the first one overwrote the "
            "logits with their gradient"
        )
    ctx.overwrote = True
    return True


class KnownCoefficientsFunction(torch.autograd.Function):
    """Log-probs and logit gradient in one pass, for a loss whose coefficients are known before the forward.

    The caller evaluates the loss from the log-probs; this function provides its gradient to the logits. The
    first backward returns the gradient of the forward; later ones (``retain_graph``) recompute it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, coefficients: Tensor, options: RowOptions
    ) -> tuple[Tensor, Tensor]:
        result = logprobs_and_grad(logits, labels, coefficients, options)
        save_rows(ctx, options, logits, labels, coefficients)
        ctx.grad_logits = result.grad_logits
        ctx.mark_non_differentiable(result.logprobs)
        # the caller adds this zero to its loss, for the gradient
        return result.logprobs.new_zeros(()), result.logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 4
        (logits, labels, coefficients), options = saved_rows(ctx)
        grad_logits, ctx.grad_logits = ctx.grad_logits, None
        if grad_logits is None:
            # the same operator, for bitwise identical results
            grad_logits = logprobs_and_grad(logits, labels, coefficients, options).grad_logits
        scale_(grad_logits, grad, options.backend)
        return grad_logits, None, None, None


@inplace_operator
def scale_(values: Tensor, factor: Tensor, backend: str) -> None:
    """Multiply in place by a 0-d tensor; a factor of 1 is free."""
    load(backend).scale_(values, factor)
