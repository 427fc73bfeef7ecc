"""Log-probs and entropy for functions that take logits or hidden states of any leading shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.backends.replacing import NotServedError

IGNORED = -100


def scores(logits: Tensor, labels: Tensor, *, inplace: bool = False, **options: Any) -> gk.TokenLogprobs:
    """Return log-probs [...], and entropy where asked for, in fp32, from logits [..., V] and labels [...].

    Args:
        logits: [..., V].
        labels: [...], column indices; values are 0 where they are ``IGNORED``.
        inplace: the backward may overwrite the logits with their gradient; never done with leaves.
        options: those of ``token_logprobs``.

    Raises:
        NotServedError: logits or labels that aren't plain tensors.
    """
    refuse_other_tensors(logits, labels)
    # token_logprobs takes two and three dimensions with any strides; a reshape would copy the logits
    rows = logits if logits.ndim in (2, 3) else logits.reshape(-1, logits.shape[-1])
    overwrite = inplace and torch.is_grad_enabled() and logits.requires_grad and not logits.is_leaf
    options["inplace_backward"] = overwrite and rows is logits
    return _as(labels, gk.token_logprobs(rows, labels.reshape(rows.shape[:-1]), **options))


def entropy_of(logits: Tensor, chunk_size: int = 0) -> Tensor:
    """Return the entropy [...] of logits [..., V] in fp32. Frameworks pass ``chunk_size``; it is unused."""
    labels = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    return scores(logits, labels, return_entropy=True).entropy  # type: ignore[return-value]


def linear_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
) -> gk.TokenLogprobs:
    """Return the same from hidden states [..., H] and a head's weight [V, H], without making all logits.

    ``options`` are those of ``linear_token_logprobs``.

    Raises:
        NotServedError: a weight that DeepSpeed gathers for each use, or arguments that aren't plain tensors.
    """
    refuse_other_tensors(labels)
    weight, bias = head_of(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _as(labels, gk.linear_token_logprobs(rows, weight, labels.reshape(-1), bias=bias, **options))


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the weight [V, H] and bias of a head in the dtype in which they multiply hidden states.

    Raises:
        NotServedError: a weight that DeepSpeed gathers for each use, or arguments that aren't plain tensors.
    """
    refuse_other_tensors(hidden, weight)
    if hasattr(weight, "ds_id"):
        raise NotServedError("DeepSpeed's ZeRO-3 has the head in pieces between forward and backward")
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
    return weight, None if bias is None else bias.to(hidden.dtype)


def refuse_other_tensors(*tensors: Tensor) -> None:
    """Raise NotServedError for tensors that aren't plain: each framework shards DTensors in its own way."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise NotServedError(f"it gets a {type(tensor).__name__}")


def _as(labels: Tensor, result: gk.TokenLogprobs) -> gk.TokenLogprobs:
    logprobs, entropy = result
    return gk.TokenLogprobs(
        logprobs.view(labels.shape), None if entropy is None else entropy.view(labels.shape)
    )
