"""Our kernels behind verl: log-probs and entropy from logits, and the forward of ``use_fused_kernels``.

verl's workers import the modules that ``VERL_USE_EXTERNAL_MODULES`` names. If
``gspo_kernels.integrations.backends.verl_workers`` is one of them, every worker calls ``install``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.backends.shared import (
    NotServedError,
    Replacements,
    entropy_of,
    linear_scores,
    scores,
)


def _logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    return scores(logits, labels, inplace=inplace_backward).logprobs


def _fused_linear_for_ppo(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    options: dict[str, Any] = {"temperature": temperature, "return_entropy": True}
    return linear_scores(hidden_states, vocab_weights, input_ids, **options)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [N] with the arguments of verl's kernel for Megatron's head."""
    if reduction != "none":
        raise NotServedError(f"reduction is {reduction!r}")
    # as in verl, a rank gets its own part of dHidden: where Megatron gathers hidden states, it sums the parts
    parallel = gk.Parallel()
    if dist_process_group is not None and dist_process_group.size() > 1:
        parallel = gk.Parallel(tp_group=dist_process_group, reduce_hidden_grad=False)
    options: dict[str, Any] = {"temperature": temperature, "return_entropy": True, "parallel": parallel}
    return linear_scores(hidden, weight, labels.reshape(-1), **options)


REPLACEMENTS = Replacements(
    "verl",
    {
        "verl.utils.torch_functional:logprobs_from_logits": _logprobs_from_logits,
        "verl.utils.torch_functional:entropy_from_logits": entropy_of,
        "verl.utils.torch_functional:entropy_from_logits_with_chunking": entropy_of,
        "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward": _fused_linear_for_ppo,
        "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy": linear_cross_entropy,
    },
)
install, remove = REPLACEMENTS.install, REPLACEMENTS.remove
