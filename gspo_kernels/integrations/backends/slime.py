"""Our kernels behind slime: log-probs and entropy of its Megatron workers, from a rank's packed logits.

slime's workers call ``install`` where ``--custom-megatron-init-path`` names it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gspo_kernels.integrations.backends.replacing import NotServedError, Replacements
from gspo_kernels.integrations.backends.scoring import scores

SUPPORTED = ">=0.3,<0.4"


def _calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if log_prob_keep_mask is not None:
        raise NotServedError("a sampling mask cuts log-probs, but not the entropy")
    logprobs, entropy = scores(logits, tokens, entropy=with_entropy, group=tp_group)
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return logprobs.unsqueeze(-1), entropy


REPLACEMENTS = Replacements(
    "slime",
    SUPPORTED,
    {"slime.utils.ppo_utils:calculate_log_probs_and_entropy": _calculate_log_probs_and_entropy},
)
remove = REPLACEMENTS.remove


def install(args: Any = None) -> None:
    """Replace slime's function; slime passes its arguments, which are not needed."""
    REPLACEMENTS.install()
