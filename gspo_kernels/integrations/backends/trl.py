"""Our kernels behind TRL: trainers that score by ``trl.trainer.utils`` keep their loss and use our log-probs.

From logits this works with every trainer of TRL. From hidden states (``add_fused_lm_head``) it works with
those that need only log-probs and entropy: GRPO, RLOO and DPO. SFT and KTO need values that we don't compute.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.backends.replacing import NotServedError, Replacements
from gspo_kernels.integrations.backends.scoring import entropy_of, linear_scores, scores

SUPPORTED = ">=1.16,<1.17"


def _selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    if index.ndim < logits.ndim:
        return scores(logits, index, temperature=temperature, keep=row_mask).logprobs
    if row_mask is not None:
        raise NotServedError("several ids of a row have a mask")
    rows, ids = logits.reshape(-1, logits.shape[-1]), index.reshape(-1, index.shape[-1])
    return gk.selected_logprobs(rows, ids, temperature=temperature).logprobs.view(index.shape)


def _selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scored = scores(logits, index, temperature=temperature, keep=row_mask, entropy=True)
    assert scored.entropy is not None
    return scored.logprobs, scored.entropy if entropy_requires_grad else scored.entropy.detach()


def _chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> tuple[Tensor | None, ...]:
    others = [name for name in outputs if name not in ("log_probs", "entropy")]
    if others:
        raise NotServedError(f"{', '.join(others)} is asked for")
    options: dict[str, Any] = {"temperature": temperature, "logit_scale": logit_scale}
    if bias is not None:
        options["bias"] = bias.to(hidden.dtype)
    options["softcap"] = final_logit_softcapping
    scored = linear_scores(hidden, weight, targets, entropy="entropy" in outputs, **options)
    return scored.logprobs, scored.entropy, None, None, None


REPLACEMENTS = Replacements(
    "trl",
    SUPPORTED,
    {
        "trl.trainer.utils:selective_log_softmax": _selective_log_softmax,
        "trl.trainer.utils:selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
        "trl.trainer.utils:entropy_from_logits": entropy_of,
        "trl.kernels.chunked_logprob:ChunkedLogProbFunction.apply": _chunked_logprobs,
    },
)
install, remove = REPLACEMENTS.install, REPLACEMENTS.remove
