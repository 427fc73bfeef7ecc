"""Operators: log-probs of hidden states and their gradient, and log-probs without written logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import LINEAR, Call
from gspo_kernels.linear.gradients import Gradients, recompute
from gspo_kernels.linear.scores import Scores
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import fake_stats, restore_options, save_options
from gspo_kernels.types import RowStats


@operator(f"linear_token_logprobs({LINEAR}, bool entropy) -> (Tensor, Tensor, Tensor)")
def linear_token_logprobs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exp and entropy (empty unless asked for) of hidden [B, T, H] at labels [B, T]."""
    call, (entropy,) = Call.split(args)
    scores = Scores(call, entropy)
    for chunk in call.chunks(call.index(call.counted if call.compact else None)):
        scores.add_forward(chunk)
    scores.close()
    missing = scores.logprobs.new_empty(0)
    return scores.logprobs, scores.lse, missing if scores.entropy is None else scores.entropy


@linear_token_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_stats(labels, hidden.dtype, args[-1])


@operator(f"unwritten_token_logprobs({LINEAR}, bool entropy) -> (Tensor, Tensor)")
def unwritten_token_logprobs(*args: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of hidden [B, T, H] at labels [B, T]; no logits are written. Triton only."""
    from gspo_kernels.kernels import linear_logprobs_forward

    call, (entropy,) = Call.split(args)
    rows = call.chunk(call.index(call.counted))
    stats = linear_logprobs_forward(
        rows.hidden,
        call.head.weight,
        call.head.bias,
        rows.labels.squeeze(0),
        rows.transform,
        ignore_index=call.ignore_index,
        entropy=entropy,
    )
    logprobs, entropies = call.new_rows(), call.new_rows() if entropy else stats.logprobs.new_empty(0)
    logprobs.view(-1)[rows.where] = stats.logprobs
    if stats.entropy is not None:
        entropies.view(-1)[rows.where] = stats.entropy
    return logprobs, entropies


@unwritten_token_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    logprobs, _, entropy = fake_stats(labels, hidden.dtype, args[-1])
    return logprobs, entropy


def check_unwritten(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logits_dtype: str, backend: str
) -> None:
    """Refuse what can't be scored without writing logits."""
    trained = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    reason: str | None
    if trained and torch.is_grad_enabled():
        reason = "there is no gradient; call it under torch.no_grad()"
    elif logits_dtype != "float32":
        reason = f"logits_dtype={logits_dtype!r} rounds what is not written"
    elif backend != "triton":
        reason = f"it takes the Triton backend, and this call's is {backend!r}"
    else:
        from gspo_kernels.kernels import linear_logprobs_unavailable

        reason = linear_logprobs_unavailable(hidden, weight)
    if reason is not None:
        raise ValueError(f"max_chunk_bytes: got 0 (logits are never written), but {reason}")


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of what is needed."""
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        hidden.new_empty(0) if bias is None or not needs[2] else bias.new_empty(bias.shape),
    )


@operator(
    f"linear_token_logprobs_backward({LINEAR}, Tensor logprobs, Tensor lse, Tensor entropy, "
    "Tensor grad_logprobs, Tensor? grad_entropy, bool need_hidden, bool need_weight, "
    "bool need_bias, bool skip) -> (Tensor, Tensor, Tensor)"
)
def linear_token_logprobs_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (empty where not needed), recomputing logits chunk by chunk.

    ``skip`` leaves rows without gradient out of every product.
    """
    call, rest = Call.split(args)
    logprobs, lse, entropy, grad_logprobs, grad_entropy, *needs, skip = rest
    keep = call.counted if call.compact else None
    if skip:
        keep = grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0)
        keep = keep & call.counted
    anew = skip and call.head.exact and keep is not None and not torch.equal(keep, call.counted)
    known = RowStats(logprobs, lse, entropy if entropy.numel() == lse.numel() else None)
    scores = Scores(call, False, known)
    gradients = Gradients(call, tuple(needs), normalised=False)
    grad_entropy = None if grad_entropy is None else grad_entropy.flatten()
    recompute(scores, gradients, call.index(keep), anew, grad_logprobs.flatten(), grad_entropy)
    scores.close()
    return gradients.result()


@linear_token_logprobs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, args[-4:-1])


class LinearTokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy of hidden states; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        entropy: bool,
        skip: bool,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs, lse, entropies = linear_token_logprobs(hidden, weight, bias, labels, *options, entropy)
        ctx.has_bias = bias is not None
        tensors = (hidden, weight, *(() if bias is None else (bias,)), labels, logprobs, lse, entropies)
        save_options(ctx, options, *tensors)
        ctx.entropy, ctx.skip = entropy, skip
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        saved, options = restore_options(ctx)
        hidden, weight = saved[:2]
        bias = saved[2] if ctx.has_bias else None
        labels, logprobs, lse, entropies = saved[-4:]
        nothing = (None,) * (3 + len(options))
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None, None, None, *nothing)
            grad_logprobs = torch.zeros_like(grad_entropy)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2])
        gradients = linear_token_logprobs_backward(
            hidden,
            weight,
            bias,
            labels,
            *options,
            logprobs,
            lse,
            entropies,
            grad_logprobs,
            grad_entropy,
            *needs,
            ctx.skip,
        )
        return (*(grad if need else None for grad, need in zip(gradients, needs, strict=True)), *nothing)
