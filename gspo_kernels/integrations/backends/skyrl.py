"""Our kernels behind SkyRL: log-probs and entropy of its workers with a transformers model (FSDP).

Ray's workers call ``install`` if ``runtime_env`` names it as ``worker_process_setup_hook``.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from gspo_kernels.integrations.backends.shared import Replacements, entropy_of, scores


def _logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    # SkyRL may take the entropy of the same logits afterwards, so they must not be overwritten
    return scores(logits, labels).logprobs


def _chunked_entropy_from_logits(
    logits: Tensor, requires_grad: bool = False, attention_mask: Tensor | None = None, chunk_size: int = 1024
) -> Tensor:
    if attention_mask is not None and attention_mask.shape != logits.shape[:2]:
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, expected {tuple(logits.shape[:2])}"
        )
    with contextlib.nullcontext() if requires_grad else torch.no_grad():
        entropy = entropy_of(logits)
        return entropy if attention_mask is None else entropy * attention_mask


_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
REPLACEMENTS = Replacements(
    "skyrl",
    {
        f"{_UTILS}:logprobs_from_logits": _logprobs_from_logits,
        f"{_UTILS}:chunked_entropy_from_logits": _chunked_entropy_from_logits,
    },
)
install, remove = REPLACEMENTS.install, REPLACEMENTS.remove
