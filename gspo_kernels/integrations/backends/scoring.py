"""Log-probs and entropy for functions that take logits or hidden states of any leading shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.backends.replacing import NotServedError

IGNORED = -100


def scores(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    keep: Tensor | None = None,
    entropy: bool = False,
    inplace: bool = False,
) -> gk.TokenLogprobs:
    """Return the log-probs, and the entropy, in fp32; both are 0 where ``keep`` is 0.

    Args:
        logits: [..., V].
        labels: [...], column indices.
        temperature: a divisor of the logits.
        keep: the labels' shape; rows at 0 do not count; None: all count.
        entropy: also return the entropy.
        inplace: the backward may overwrite the logits with their gradient; never done with leaves.

    Raises:
        NotServedError: logits or labels that aren't plain tensors.
    """
    refuse_other_tensors(logits, labels)
    if keep is not None:
        labels = labels.masked_fill(keep == 0, IGNORED)
    # token_logprobs takes two and three dimensions with any strides; a reshape would copy the logits
    rows = logits if logits.ndim in (2, 3) else logits.reshape(-1, logits.shape[-1])
    overwrite = inplace and torch.is_grad_enabled() and logits.requires_grad and not logits.is_leaf
    scored = gk.token_logprobs(
        rows,
        labels.reshape(rows.shape[:-1]),
        temperature=temperature,
        return_entropy=entropy,
        inplace_backward=overwrite and rows is logits,
    )
    return gk.TokenLogprobs(
        scored.logprobs.view(labels.shape),
        None if scored.entropy is None else scored.entropy.view(labels.shape),
    )


def entropy_of(logits: Tensor, chunk_size: int = 0) -> Tensor:
    """Return the entropy [...] of logits [..., V] in fp32. Frameworks pass ``chunk_size``; it is unused."""
    scored = scores(logits, logits.new_zeros(logits.shape[:-1], dtype=torch.int64), entropy=True).entropy
    assert scored is not None
    return scored


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


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    entropy: bool = True,
    **options: Any,
) -> gk.TokenLogprobs:
    """Return the same from hidden states [..., H] and a head's weight [V, H], without making all logits.

    ``options`` are those of ``linear_token_logprobs``.

    Raises:
        NotServedError: a weight that DeepSpeed gathers for each use, or arguments that aren't plain tensors.
    """
    refuse_other_tensors(labels)
    weight, options["bias"] = head_of(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    scored = gk.linear_token_logprobs(rows, weight, labels.reshape(-1), return_entropy=entropy, **options)
    shape = labels.shape
    return gk.TokenLogprobs(
        scored.logprobs.view(shape), None if scored.entropy is None else scored.entropy.view(shape)
    )


def refuse_other_tensors(*tensors: Tensor) -> None:
    """Raise NotServedError for tensors that aren't plain: each framework shards DTensors in its own way."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise NotServedError(f"it gets a {type(tensor).__name__}")
