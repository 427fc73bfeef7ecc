"""Per-token log-probabilities, from logits and from hidden states."""

from __future__ import annotations

from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.arguments import (
    check_inplace,
    check_linear,
    check_logits,
    chunking,
    from_rows,
    logit_options,
    row_temperature,
)
from gspo_kernels.linear.logprobs import (
    LinearTokenLogprobsFunction,
    check_unwritten,
    unwritten_token_logprobs,
)
from gspo_kernels.ops.logprobs import TokenLogprobsFunction
from gspo_kernels.types import TokenLogprobs


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probability of each label, differentiable, without keeping anything of the logits' size.

    Equivalent to ``log_softmax(z, -1).gather(-1, labels)`` in fp32, with ``z = logit_scale * logits;
    z = softcap * tanh(z / softcap); z = z / temperature``.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed logits: one per token).
        logit_scale: factor on the logits.
        softcap: bound of the tanh soft-capping, or None.
        ignore_index: positions with this label are left out: 0.0, no gradient, their logits are never read.
        return_entropy: also return the differentiable entropy.
        inplace_backward: the backward overwrites the logits with their gradient instead of allocating one.
            They must not be needed afterwards; a second backward raises.
        backend: "auto", "triton", "cpp" or "reference".

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    check_logits(logits, labels)
    packed = labels.ndim == 1
    options = logit_options(
        logits, labels, labels.shape[0], temperature, logit_scale, softcap, ignore_index, backend
    )
    checks.flag("return_entropy", return_entropy)
    check_inplace(logits, inplace_backward)
    rows, row_labels = (logits.unsqueeze(0), labels.unsqueeze(0)) if packed else (logits, labels)
    temperatures = row_temperature(temperature, row_labels, packed, None, logits.dtype)
    logprobs, entropy = TokenLogprobsFunction.apply(
        rows, row_labels, return_entropy, inplace_backward, *options.positional(temperatures)
    )
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probability of each label from hidden states: the logits exist only a chunk at a time.

    Equivalent to ``token_logprobs(hidden @ weight.T + bias, labels)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H], the lm_head's; hidden's dtype, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        bias: [V] or None.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed hidden states: one per
            token).
        logit_scale: factor on the logits, bias included.
        softcap: bound of the tanh soft-capping, or None.
        ignore_index: positions with this label are left out: 0.0, no gradient, never projected.
        return_entropy: also return the differentiable entropy.
        logits_dtype: "float32": products of 16-bit inputs leave the matrix product in fp32. "input": they are
            rounded to the inputs' dtype, as other trainers do.
        max_chunk_bytes: bytes of logits that exist at once, at least a row; by default 4,096 rows on a
            GPU and 1,024 to 2,048 on the CPU, as many as fit 256 MiB; at least 64 MiB, at most 1/16 of the
            memory. 0: logits are never written at all; for scoring without a gradient, by a Triton kernel.
            Never chosen by itself: its sums have another order, so that ratios with the losses' log-probs
            are 1 to rounding instead of exactly.
        backend: "auto", "triton", "cpp" or "reference".

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    hidden, weight, bias = check_linear(hidden, weight, bias, labels)
    packed = labels.ndim == 1
    options = logit_options(
        hidden, labels, labels.shape[0], temperature, logit_scale, softcap, ignore_index, backend
    )
    checks.flag("return_entropy", return_entropy)
    unwritten = max_chunk_bytes == 0 and not isinstance(max_chunk_bytes, bool)
    if unwritten:
        check_unwritten(hidden, weight, bias, logits_dtype, options.backend)
    chunked = chunking(logits_dtype, None if unwritten else max_chunk_bytes, compact=True)
    rows, row_labels = (hidden.unsqueeze(0), labels.unsqueeze(0)) if packed else (hidden, labels)
    temperatures = row_temperature(temperature, row_labels, packed, None, hidden.dtype)
    operands = (*options.positional(temperatures), *chunked)
    if unwritten:
        logprobs, entropy = unwritten_token_logprobs(
            rows, weight, bias, row_labels, *operands, return_entropy
        )
    else:
        logprobs, entropy = LinearTokenLogprobsFunction.apply(
            rows, weight, bias, row_labels, return_entropy, True, *operands
        )
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)
