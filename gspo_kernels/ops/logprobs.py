"""Operators over logits: per-token log-probs and entropy, their gradient, and both at once.

Rows are [B, T] (packed: [1, N]); see ``ops.backends.RowBackend`` for what each row operation promises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.ops.backends import load
from gspo_kernels.ops.library import checked_values, operator
from gspo_kernels.ops.memory import new_memory
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

OPTIONS = (
    "float logit_scale, float softcap, float temperature, Tensor? row_temperature, int ignore_index, "
    "str backend"
)
"""Operands that say how logits become log-probs, and who computes them."""


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Every label must be ``ignore_index`` or in the vocabulary; looked at as ``ops.values`` says."""
    if not checked_values(labels.device):
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        value = int(labels[wrong][0])
        raise ValueError(
            f"labels: got {value} in a counted position, expected 0 <= label < {vocabulary} "
            f"or ignore_index={ignore_index}"
        )


def fake_stats(labels: Tensor, dtype: torch.dtype, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty log-probs, log-sum-exp and entropy for inputs of ``dtype``."""

    def rows(shape: Any) -> Tensor:
        return labels.new_empty(shape, dtype=stats_dtype(dtype))

    lse = labels.new_empty(labels.shape, dtype=torch.float64)
    return rows(labels.shape), lse, rows(labels.shape if entropy else (0,))


@operator(
    f"token_logprobs(Tensor logits, Tensor labels, {OPTIONS}, bool entropy) -> (Tensor, Tensor, Tensor)",
)
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    logit_scale: float,
    softcap: float,
    temperature: float,
    row_temperature: Tensor | None,
    ignore_index: int,
    backend: str,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exp and entropy (empty unless asked for) of logits [B, T, V] at labels [B, T]."""
    check_labels(labels, logits.shape[-1], ignore_index)
    check_temperature(row_temperature)
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    stats = load(backend).logprobs_forward(
        logits, labels, transform, ignore_index=ignore_index, entropy=entropy
    )
    return stats.logprobs, stats.lse, stats.logprobs.new_empty(0) if stats.entropy is None else stats.entropy


@token_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_stats(labels, logits.dtype, options[-1])


_BACKWARD = (
    "Tensor labels, Tensor logprobs, Tensor lse, Tensor entropy, Tensor grad_logprobs, "
    f"Tensor? grad_entropy, Tensor? grad_scale, {OPTIONS}"
)


def _backward_into(
    out: Tensor,
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_scale: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    row_temperature: Tensor | None,
    ignore_index: int,
    backend: str,
) -> None:
    load(backend).logprobs_backward(
        logits,
        labels,
        RowStats(logprobs, lse, entropy if entropy.numel() == lse.numel() else None),
        grad_logprobs,
        grad_entropy,
        grad_scale,
        LogitTransform(logit_scale, softcap, temperature, row_temperature),
        ignore_index=ignore_index,
        out=out,
    )


@operator(f"token_logprobs_backward(Tensor logits, {_BACKWARD}) -> Tensor")
def token_logprobs_backward(logits: Tensor, *args: Any) -> Tensor:
    """The logits' gradient in their dtype, contiguous."""
    out = new_memory(logits.shape, logits.dtype, logits.device)
    _backward_into(out, logits, *args)
    return out


@token_logprobs_backward.register_fake
def _(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@operator(f"token_logprobs_backward_(Tensor(a!) logits, {_BACKWARD}) -> ()")
def token_logprobs_backward_(logits: Tensor, *args: Any) -> None:
    """The same, written over the logits."""
    _backward_into(logits, logits, *args)


@token_logprobs_backward_.register_fake
def _(logits: Tensor, *args: Any) -> None:
    return None


@operator(
    f"token_logprobs_and_grad(Tensor logits, Tensor labels, Tensor coefficients, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)
def token_logprobs_and_grad(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    logit_scale: float,
    softcap: float,
    temperature: float,
    row_temperature: Tensor | None,
    ignore_index: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exp, and the logits' gradient for coefficients dLoss/dlogprobs known beforehand."""
    check_labels(labels, logits.shape[-1], ignore_index)
    check_temperature(row_temperature)
    out = new_memory(logits.shape, logits.dtype, logits.device)
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    stats = load(backend).logprobs_and_grad(
        logits, labels, coefficients, transform, ignore_index=ignore_index, out=out
    )
    return stats.logprobs, stats.lse, out


@token_logprobs_and_grad.register_fake
def _(logits: Tensor, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, lse, _ = fake_stats(labels, logits.dtype, False)
    return logprobs, lse, logits.new_empty(logits.shape)


class TokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy of logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, entropy: bool, inplace: bool, *options: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs, lse, entropies = token_logprobs(logits, labels, *options, entropy)
        save_options(ctx, options, logits, labels, logprobs, lse, entropies)
        ctx.inplace, ctx.entropy = inplace, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        (logits, labels, logprobs, lse, entropies), options = restore_options(ctx)
        nothing = (None,) * (3 + len(options))
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None, *nothing)
            grad_logprobs = grad_entropy.new_zeros(()).expand(labels.shape)
        args = (labels, logprobs, lse, entropies, grad_logprobs, grad_entropy, None, *options)
        if ctx.inplace:
            token_logprobs_backward_(logits, *args)
            return (logits, *nothing)
        return (token_logprobs_backward(logits, *args), *nothing)


def save_options(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> None:
    """Save tensors and the logit options of ``OPTIONS``, of which the fourth is a tensor or None."""
    row_temperature = options[3]
    ctx.options = options[:3], options[4:]
    ctx.save_for_backward(*tensors, *(() if row_temperature is None else (row_temperature,)))
    ctx.tensors = len(tensors)


def restore_options(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The inverse of ``save_options``."""
    saved = ctx.saved_tensors
    before, after = ctx.options
    row_temperature = saved[ctx.tensors] if len(saved) > ctx.tensors else None
    return saved[: ctx.tensors], (*before, row_temperature, *after)


class KnownCoefficientsFunction(torch.autograd.Function):
    """Log-probs and logit gradient in one pass, for a loss whose coefficients are known before the forward.

    ``loss_of(logprobs)`` is evaluated by the caller afterwards; this function hands its gradient to the
    logits. The first backward gives away the gradient that the forward wrote; later ones (``retain_graph``)
    compute it anew.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, coefficients: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        logprobs, lse, grad_logits = token_logprobs_and_grad(logits, labels, coefficients, *options)
        save_options(ctx, options, logits, labels, logprobs, lse, coefficients)
        ctx.grad_logits = grad_logits
        ctx.mark_non_differentiable(logprobs)
        # a scalar of value 0 to carry the gradient: the caller adds it to the loss that it evaluates
        return logprobs.new_zeros(()), logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        (logits, labels, logprobs, lse, coefficients), options = restore_options(ctx)
        nothing = (None,) * (2 + len(options))
        grad_logits, ctx.grad_logits = ctx.grad_logits, None
        if grad_logits is None:
            args = (labels, logprobs, lse, logprobs.new_empty(0), coefficients, None, grad, *options)
            grad_logits = token_logprobs_backward(logits, *args)
        else:
            scale_(grad_logits, grad, options[-1])
        return (grad_logits, *nothing)


@operator("scale_(Tensor(a!) values, Tensor factor, str backend) -> ()")
def scale_(values: Tensor, factor: Tensor, backend: str) -> None:
    """Multiply in place by a 0-d tensor; costs nothing where that is 1."""
    load(backend).scale_(values, factor)


@scale_.register_fake
def _(values: Tensor, factor: Tensor, backend: str) -> None:
    return None
