"""A log-prob provider for vime: `provider` and `batch_invariant_provider`.

Read at vime's pull requests #423 and #424, which publish the request. Tested on a CPU with its fields, over
two ranks that share the vocabulary and two that share rows; not run inside vime, nor on a GPU.

    --selected-logprob-provider my_package.vime.provider
    --selected-logprob-provider-mode strict

vime builds a rank's rows and keeps its loss and metrics. The provider gives the log-probs of the rows'
tokens and their entropies. Where vime passes the lm_head's inputs (`hidden`, `lm_head_weight`) no logits are
written; dHidden is summed over `tensor_parallel_group`. `chunk_size` and `context_parallel` are not needed: a
rank's rows are its own. A request that can't be served raises `ProviderUnavailableError`: mode "auto" then
takes vime's own log-probs, and mode "strict" ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gspo_kernels as gk


class SelectedLogprobResult(NamedTuple):
    """What vime reads: log-probs [T, 1] and entropies [T] or None, in nats, and who computed them."""

    selected_logprobs: Tensor
    entropy: Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, Any]


class ProviderUnavailableError(ValueError):
    """A request that the provider can't serve."""

    selected_logprob_provider_unavailable = True


def provider(request: Any, *, batch_invariant: bool = False) -> SelectedLogprobResult:
    """Return the log-probs of vime's request, differentiable, and its entropies.

    Args:
        request: `target_ids` [T] of the whole vocabulary; `logits` [T, V of the rank], divided by the
            sampling temperature already; or `hidden` [T, H], `lm_head_weight` and `lm_head_bias` with the
            rank's ids from `vocab_start_index` on, of which those from `real_vocab_size` on have no
            probability, and a `temperature`: a number, a tensor of one element or [T], or None for 1.
            `log_prob_keep_mask`: bool [T, V of the rank] of the ids that could be drawn, or None.
        batch_invariant: give bits that don't depend on the other rows of the request.
    """
    group, hidden = request.tensor_parallel_group, getattr(request, "hidden", None)
    group = None if group is None or group.size() == 1 else group
    if group is not None and batch_invariant:
        raise ProviderUnavailableError(
            f"tensor_parallel_group: got {group.size()} ranks, but batch-invariant log-probs need the whole "
            "vocabulary on each"
        )
    kept = request.log_prob_keep_mask
    if kept is not None and group is not None:
        parts = [torch.empty_like(kept) for _ in range(group.size())]
        torch.distributed.all_gather(parts, kept.contiguous(), group)
        kept = torch.cat(parts, -1)
    options: dict[str, Any] = {"return_entropy": request.with_entropy}
    if hidden is None:
        options["kept_mask"] = None if kept is None else packed(kept)
        logprobs, entropy = gk.token_logprobs(
            request.logits, request.target_ids, parallel=gk.Parallel(tp_group=group), **options
        )
    else:
        first, weight, bias = request.vocab_start_index, request.lm_head_weight, request.lm_head_bias
        real, temperature = request.real_vocab_size, getattr(request, "temperature", None)
        size = len(weight) if real is None else min(len(weight), real - first)
        if size <= 0:
            raise ProviderUnavailableError(
                f"real_vocab_size: got {real}, but this rank's ids begin at {first}"
            )
        if isinstance(temperature, Tensor):
            temperature = temperature.flatten().expand(request.target_ids.shape)
        options["kept_mask"] = None if kept is None else packed(kept[:, :real])
        options["temperature"] = 1.0 if temperature is None else temperature
        options["bias"] = None if bias is None else bias[:size]
        if group is not None:
            options["parallel"] = gk.Parallel(tp_group=group, vocab_range=(first, first + size))
        logprobs, entropy = gk.linear_token_logprobs(
            hidden, weight[:size], request.target_ids, batch_invariant=batch_invariant, **options
        )
    if entropy is not None and not request.with_entropy_grad:
        entropy = entropy.detach()
    contract = "batch_invariant" if batch_invariant else "fp32"
    provenance = {"logits_materialized": hidden is None, "device": str(logprobs.device)}
    return SelectedLogprobResult(logprobs.unsqueeze(-1), entropy, "gspo_kernels", contract, provenance)


def batch_invariant_provider(request: Any) -> SelectedLogprobResult:
    """Do what `provider` does, with bits that don't depend on the other rows of the request."""
    return provider(request, batch_invariant=True)


def packed(kept: Tensor) -> Tensor:
    """Return a mask bool [T, V] as 32-bit words, as `gk.kept_mask` packs it."""
    words = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    return (words << torch.arange(32, device=kept.device)).sum(-1).to(torch.int32)
