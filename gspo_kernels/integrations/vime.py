"""vime: ``provider`` and ``batch_invariant_provider`` for ``--selected-logprob-provider``.

vime builds a rank's rows and the loss. In between a provider gives the log-probs of the rows' tokens, from
the lm_head's inputs or from logits, over the ranks that share the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import bits
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.logprobs import linear_token_logprobs, token_logprobs
from gspo_kernels.parallel.groups import Parallel, gathered, group_name

# The version does not tell whether vime has log-prob providers.
SUPPORTED = ">=0"


class SelectedLogprobResult(NamedTuple):
    """What vime reads: log-probs [T, 1] and entropies [T] or None, in nats, and who computed them."""

    selected_logprobs: Tensor
    entropy: Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, Any]


class ProviderUnavailableError(IntegrationError):
    """A request that the provider can't serve. In mode "auto" vime then goes on with its own log-probs."""

    selected_logprob_provider_unavailable = True


def provider(request: Any, *, batch_invariant: bool = False) -> SelectedLogprobResult:
    """Return the log-probs of vime's request, differentiable, and its entropies.

    With ``hidden`` no logits are written or read. dHidden is summed over ``tensor_parallel_group``. Ids from
    ``real_vocab_size`` on then have no probability; from logits, all columns count, as in vime's own path.

    Args:
        request: ``target_ids`` [T] of the whole vocabulary; ``logits`` [T, V of the rank], divided by the
            sampling temperature already; or ``hidden`` [T, H], ``lm_head_weight`` and ``lm_head_bias`` with
            the rank's ids from ``vocab_start_index`` on, and a ``temperature``: a number, a tensor of one
            element or [T], or None for 1. ``log_prob_keep_mask``: bool [T, V of the rank] of the ids that the
            sampler could have drawn, or None.
        batch_invariant: give bits that don't depend on the other rows of the request.

    Raises:
        ProviderUnavailableError: a rank has only padding of the vocabulary; a mask's columns don't fill
            32-bit words on each rank; or ranks share the vocabulary of a batch-invariant request.
    """
    group = request.tensor_parallel_group
    group = None if group is None or group.size() == 1 else group
    if group is not None and batch_invariant:
        raise ProviderUnavailableError(
            f"tensor_parallel_group: got {group.size()} ranks, but batch-invariant log-probs need the whole "
            "vocabulary on each"
        )
    hidden: Tensor | None = getattr(request, "hidden", None)
    options: dict[str, Any] = {
        "kept_mask": _kept_mask(request, group), "return_entropy": request.with_entropy,
    }  # fmt: skip
    if hidden is None:
        logprobs, entropy = token_logprobs(
            request.logits, request.target_ids, **options, parallel=Parallel(tp_group=group)
        )
    else:
        weight, bias, parallel = _head(request, group)
        temperature = getattr(request, "temperature", None)
        if isinstance(temperature, Tensor):
            temperature = temperature.flatten().expand(request.target_ids.shape)
        logprobs, entropy = linear_token_logprobs(
            hidden, weight, request.target_ids, **options, bias=bias, parallel=parallel,
            temperature=1.0 if temperature is None else temperature, batch_invariant=batch_invariant,
        )  # fmt: skip
    if entropy is not None and not request.with_entropy_grad:
        entropy = entropy.detach()
    return SelectedLogprobResult(
        logprobs.unsqueeze(-1),
        entropy,
        "gspo_kernels",
        "batch_invariant" if batch_invariant else "fp32",
        {"logits_materialized": hidden is None, "device": str(logprobs.device)},
    )


def batch_invariant_provider(request: Any) -> SelectedLogprobResult:
    """Do what ``provider`` does, with bits that don't depend on the other rows of the request."""
    return provider(request, batch_invariant=True)


def _head(request: Any, group: Any) -> tuple[Tensor, Tensor | None, Parallel]:
    """Return weight and bias of this rank without the padding of the vocabulary, and where they belong."""
    first, weight, bias = request.vocab_start_index, request.lm_head_weight, request.lm_head_bias
    rows = weight.shape[0]
    if request.real_vocab_size is not None:
        rows = min(rows, request.real_vocab_size - first)
    if rows <= 0:
        raise ProviderUnavailableError(
            f"real_vocab_size: got {request.real_vocab_size}, but this rank's ids begin at {first}"
        )
    bias = None if bias is None else bias[:rows]
    if group is None:
        return weight[:rows], bias, Parallel()
    return weight[:rows], bias, Parallel(tp_group=group, vocab_range=(first, first + rows))


def _kept_mask(request: Any, group: Any) -> Tensor | None:
    """Return the mask of sampled ids over the whole vocabulary, as bits, [T, ceil(V / 32)]."""
    kept = request.log_prob_keep_mask
    if kept is None:
        return None
    mask = bits.packed_columns(kept)
    if group is not None:
        if kept.shape[-1] % 32:
            raise ProviderUnavailableError(
                f"log_prob_keep_mask: got {kept.shape[-1]} columns on this rank, expected a multiple of 32"
            )
        mask = torch.cat([*gathered(group_name("tensor_parallel_group", group), mask)], -1)
    padded = getattr(request, "hidden", None) is not None and request.real_vocab_size is not None
    return mask[:, : bits.words(request.real_vocab_size)] if padded else mask
