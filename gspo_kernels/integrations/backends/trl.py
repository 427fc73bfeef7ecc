"""Our kernels behind TRL: trainers that score by ``trl.trainer.utils`` keep their loss and use our log-probs.

From logits this works with every trainer of TRL. From hidden states (``add_fused_lm_head``) it works with
those that need only log-probs and entropy: GRPO, RLOO and DPO. SFT and KTO need values that we don't compute.
The divergence from hidden states is that of ``DistillationTrainer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.backends.shared import (
    IGNORED,
    NotServedError,
    Replacements,
    entropy_of,
    head_of,
    linear_scores,
    scores,
)


def _selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    if index.ndim < logits.ndim:
        return scores(logits, _kept(index, row_mask), temperature=temperature).logprobs
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
    labels = _kept(index, row_mask)
    logprobs, entropy = scores(logits, labels, temperature=temperature, return_entropy=True)
    assert entropy is not None
    return logprobs, entropy if entropy_requires_grad else entropy.detach()


def _kept(labels: Tensor, row_mask: Tensor | None) -> Tensor:
    return labels if row_mask is None else labels.masked_fill(row_mask == 0, IGNORED)


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
    logprobs, entropy = linear_scores(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        return_entropy="entropy" in outputs,
    )
    return logprobs, entropy, None, None, None


def _chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, teacher, mask = student_hidden_states, teacher_hidden_states, completion_mask != 0
    options: dict[str, Any] = {
        "temperature": temperature,
        "logit_scale": student_logit_scale,
        "softcap": student_final_logit_softcapping,
    }
    weight, options["bias"] = head_of(hidden, student_lm_head_weight, student_lm_head_bias)
    teacher_weight, teacher_bias = head_of(teacher, teacher_lm_head_weight, teacher_lm_head_bias)
    output = gk.fused_linear_distillation_loss(
        hidden, weight, teacher, teacher_weight, teacher_bias=teacher_bias, beta=beta, loss_mask=mask,
        aggregation="sum", teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_final_logit_softcapping, **options,
    )  # fmt: skip
    with torch.no_grad():  # TRL logs the entropy
        labels = mask.long().masked_fill(~mask, IGNORED)
        entropy = gk.linear_token_logprobs(hidden, weight, labels, return_entropy=True, **options).entropy
    assert entropy is not None
    count = mask.sum()
    items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    items = items.to(hidden.device) if isinstance(items, Tensor) else items
    return output.loss / items, entropy.sum(), count


REPLACEMENTS = Replacements(
    "trl",
    {
        "trl.trainer.utils:selective_log_softmax": _selective_log_softmax,
        "trl.trainer.utils:selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
        "trl.trainer.utils:entropy_from_logits": entropy_of,
        "trl.kernels.chunked_logprob:ChunkedLogProbFunction.apply": _chunked_logprobs,
        # the caller of trl.kernels.chunked_divergence: with its mask the gradient comes along with the loss
        "trl.trainer.distillation_trainer:_chunked_divergence_loss": _chunked_divergence_loss,
    },
)
install, remove = REPLACEMENTS.install, REPLACEMENTS.remove
