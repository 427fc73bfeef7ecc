"""Log-probs of given tokens, computed in one of many ways that differ in a single thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.bits import columns
from gspo_kernels.integrations.lm_head import LMHead
from gspo_kernels.mismatch.samples import Samples
from gspo_kernels.trainer.rollout import SamplingMask
from gspo_kernels.trainer.rows.packing import packed_hidden_states, padded_hidden_states, token_budget_batches
from gspo_kernels.trainer.rows.policy import head_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORDERS = ("temperature, mask", "mask, temperature", "before temperature")
_LOGIT_BYTES = 64 << 20
"""Of fp32 logits that exist at once where the head isn't fused."""

Load = Callable[[torch.dtype, str | None], Any]
"""The model in a precision of its weights, with an implementation of attention or the default one."""


@dataclass(frozen=True)
class Setting:
    """How training computes log-probs; by default as the bundled trainer does in fp32.

    Attributes:
        weights: of the whole model: "fp32", "bf16" or "fp16".
        head: precision in which logits leave the head's product. With fp32 weights a 16-bit head takes hidden
            states and weight in 16 bits as well, as autocast does.
        softmax: precision of the log-softmax.
        attention: transformers' implementation; None: its default.
        layout: rows of the backbone: "packed", "padded" or "alone".
        temperature: logits are divided by it.
        order: "temperature, mask", "mask, temperature", or "before temperature", which ignores it.
        top_p, top_k: the sampling mask, outside of which a log-prob is -inf; 1.0 and 0 for none.
        recorded: among the tokens that the sampler says it could have drawn, as with ``keep_sampling_mask``.
        max_chunk_bytes: of logits in one chunk of the fused head; None: its default.
    """

    weights: str = "fp32"
    head: str = "fp32"
    softmax: str = "fp32"
    attention: str | None = None
    layout: str = "packed"
    temperature: float = 1.0
    order: str = ORDERS[0]
    top_p: float = 1.0
    top_k: int = 0
    recorded: bool = False
    max_chunk_bytes: int | None = None

    @property
    def masked(self) -> bool:
        """Whether the sampling mask leaves tokens out."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def fused(self) -> bool:
        """Whether the fused head can compute it."""
        return not self.masked and self.softmax == "fp32"

    @property
    def applied_temperature(self) -> float:
        """What logits are divided by in the end."""
        return 1.0 if self.order == "before temperature" else self.temperature


@torch.no_grad()
def score(load: Load, samples: Samples, setting: Setting, budget: int) -> gk.TokenLogprobs:
    """Return log-probs and entropies of the N completion tokens, fp64 on the CPU.

    Args:
        load: gives the model.
        samples: the completions; their prompts must be known, and for a ``recorded`` mask their masks.
        setting: how to compute.
        budget: tokens in one pass of the backbone.
    """
    assert samples.prompts is not None
    model = load(DTYPES[setting.weights], setting.attention)
    head, device = head_of(model), model.device
    pairs = list(zip(samples.prompts, samples.completions, strict=True))
    sizes = [len(prompt) + len(completion) for prompt, completion in pairs]
    batches = token_budget_batches(sizes, budget)
    if setting.layout == "alone":
        batches = [[row] for row in range(len(pairs))]
    states = packed_hidden_states if setting.layout == "packed" else padded_hidden_states
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for rows in batches:
        prompts, completions = ([pairs[row][side].to(device) for row in rows] for side in (0, 1))
        inputs = states(model, prompts, completions)
        kept = None
        if setting.recorded:
            assert samples.masks is not None
            masks = SamplingMask.joined([samples.masks[row] for row in rows]).to(device)
            kept = masks.bitmask(head.weight.shape[0])
        out = _head_logprobs(inputs.hidden, head, inputs.labels, setting, kept)
        parts = (each.double().cpu().split([len(c) for c in completions]) for each in out)
        found |= dict(zip(rows, zip(*parts, strict=True), strict=True))
    logprobs, entropy = (torch.cat([found[row][side] for row in range(len(pairs))]) for side in (0, 1))
    return gk.TokenLogprobs(logprobs, entropy)


def _head_logprobs(
    hidden: Tensor, head: LMHead, labels: Tensor, setting: Setting, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    half = setting.head != "fp32"
    weight, bias = head.weight, head.bias
    if half:
        dtype = DTYPES[setting.head]
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if setting.fused:
        out = gk.linear_token_logprobs(
            hidden,
            weight,
            labels,
            **head.options() | {"bias": bias},
            temperature=setting.applied_temperature,
            kept_mask=kept,
            return_entropy=True,
            logits_dtype="input" if half else "float32",
            max_chunk_bytes=setting.max_chunk_bytes,
        )
        assert out.entropy is not None
        return out.logprobs, out.entropy
    if not half:  # products of 16-bit numbers, kept in fp32
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    rows = max(1, _LOGIT_BYTES // (4 * weight.shape[0]))
    parts = []
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        logits = head.transform(torch.nn.functional.linear(hidden[part], weight, bias).float())
        if kept is not None:
            logits = logits.masked_fill(~columns(kept[part], logits.shape[-1]), -torch.inf)
        parts.append(_row_logprobs(logits, labels[part], setting))
    logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, entropy


def _row_logprobs(logits: Tensor, labels: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    for step in setting.order.split(", "):
        if step == "temperature":
            logits = logits / setting.temperature
        elif step == "mask":
            logits = _masked(logits, setting)
    if setting.softmax == "fp32":
        out = gk.token_logprobs(logits.unsqueeze(0), labels.unsqueeze(0), return_entropy=True)
        assert out.entropy is not None
        return out.logprobs[0], out.entropy[0]
    logp = logits.to(DTYPES[setting.softmax]).log_softmax(-1)
    chosen = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    full = logp.float()
    return chosen.float(), -(full.exp() * full.clamp(min=-1e30)).sum(-1)


def _masked(logits: Tensor, setting: Setting) -> Tensor:
    """-inf outside of the sampling mask, which transformers' own warpers find."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = [TopKLogitsWarper(setting.top_k)] if setting.top_k > 0 else []
    if setting.top_p < 1.0:
        warpers.append(TopPLogitsWarper(setting.top_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits
