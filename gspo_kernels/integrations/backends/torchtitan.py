"""Our kernels behind torchtitan: cross-entropy of whole rows of logits, and per-token log-probs of RL losses.

Logits that are cut over tensor-parallel ranks run torchtitan's own code. 16-bit logits are never copied to
fp32.
"""

from __future__ import annotations

import importlib

from torch import Tensor

from gspo_kernels.integrations.backends.shared import (
    IGNORED,
    NotServedError,
    Replacements,
    refuse_other_tensors,
    scores,
)


def _refuse_shards(logits: Tensor, labels: Tensor) -> None:
    """Raise NotServedError for shards, also for plain tensors if torchtitan's mesh has tensor parallelism."""
    refuse_other_tensors(logits, labels)
    utils = importlib.import_module("torchtitan.distributed.utils")
    spmd_types = importlib.import_module("torchtitan.distributed.spmd_types")
    if utils.get_spmd_backend() == "spmd_types" and spmd_types.spmd_mesh_size("tp") > 1:
        raise NotServedError("the vocabulary is cut over tensor-parallel ranks")


def _cross_entropy_loss(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    _refuse_shards(pred, labels)
    return -scores(pred, labels).logprobs.sum()


def _compute_logprobs(
    logits: Tensor, labels: Tensor, *, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    _refuse_shards(logits, labels)
    if not return_entropy:
        return scores(logits, labels).logprobs
    # rows of ignored labels have an entropy
    logprobs, entropy = scores(logits, labels.clamp(min=0), return_entropy=True)
    return logprobs.masked_fill(labels == IGNORED, 0.0), entropy.detach()  # type: ignore[union-attr]


REPLACEMENTS = Replacements(
    "torchtitan",
    {
        "torchtitan.components.loss:cross_entropy_loss": _cross_entropy_loss,
        "torchtitan.components.loss:compute_logprobs": _compute_logprobs,
    },
)
install, remove = REPLACEMENTS.install, REPLACEMENTS.remove
