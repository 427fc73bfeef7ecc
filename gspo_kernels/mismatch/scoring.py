"""Training's log-probs of sampled tokens, as they are and with one thing switched at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.bits import columns
from gspo_kernels.integrations.lm_head import LMHead
from gspo_kernels.mismatch.measure import Comparison, mean
from gspo_kernels.mismatch.samples import Samples
from gspo_kernels.trainer.batch import last_hidden_states, packed_hidden_states, token_budget_batches
from gspo_kernels.trainer.model import head_of, load_model
from gspo_kernels.trainer.rollout import Sampling, SamplingMask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOGIT_BYTES = 64 << 20
"""Of fp32 logits that exist at once where the head isn't fused."""
_FEW_ROWS = 16
"""Rows of logits in a chunk, for the switch of the chunk."""

Load = Callable[[torch.dtype, str | None], Any]
"""The model in a precision of its weights, with an implementation of attention or the default one."""


class Models:
    """Loads a directory's model in a precision, keeping only the last one."""

    def __init__(self, path: str, device: torch.device) -> None:
        self.path, self.device = path, device
        self._last: tuple[tuple[torch.dtype, str | None], Any] | None = None

    def __call__(self, dtype: torch.dtype, attention: str | None) -> Any:
        """Return the model with its weights in ``dtype``."""
        if self._last is None or self._last[0] != (dtype, attention):
            self._last = None
            gc.collect()
            model = load_model(self.path, half=dtype == torch.bfloat16, attention=attention)
            self._last = (dtype, attention), model.to(self.device, dtype).eval()
        return self._last[1]


@dataclass(frozen=True)
class Setting:
    """How training computes log-probs; by default as the bundled trainer does in fp32.

    Attributes:
        weights: of the whole model: "fp32", "bf16" or "fp16".
        head: precision in which logits leave the head's product. With fp32 weights a 16-bit head takes hidden
            states and weight in 16 bits as well, as autocast does.
        softmax: precision of the log-softmax.
        attention: transformers' implementation; None: its default.
        packed: whether sequences share the rows of the model; else one at a time.
        temperature: logits are divided by it.
        top_p, top_k: the sampling mask, outside of which a log-prob is -inf; 1.0 and 0 for none.
        recorded: among the tokens that the sampler could have drawn, as with ``keep_sampling_mask``.
        max_chunk_bytes: of logits in one chunk of the fused head; None: its default.
    """

    weights: str = "fp32"
    head: str = "fp32"
    softmax: str = "fp32"
    attention: str | None = None
    packed: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    recorded: bool = False
    max_chunk_bytes: int | None = None


@dataclass(frozen=True)
class Switched:
    """What one switch does.

    Attributes:
        name: what was switched.
        change: the fields of `Setting` that differ from the baseline.
        comparison: training switched, next to the sampler.
        moved: mean absolute change of training's log-probs, in nats.
    """

    name: str
    change: dict[str, Any]
    comparison: Comparison
    moved: float


@torch.no_grad()
def score(load: Load, samples: Samples, setting: Setting, budget: int) -> Tensor:
    """Return log-probs of the N completion tokens, fp64 on the CPU.

    Args:
        load: gives the model.
        samples: the completions; their prompts must be known, and for a ``recorded`` mask their masks.
        setting: how to compute.
        budget: tokens in one pass of the model.
    """
    assert samples.prompts is not None
    model = load(DTYPES[setting.weights], setting.attention)
    head, device = head_of(model), model.device
    pairs = list(zip(samples.prompts, samples.completions, strict=True))
    batches = [[row] for row in range(len(pairs))]
    if setting.packed:
        batches = token_budget_batches([len(p) + len(c) for p, c in pairs], budget)
    logprobs: dict[int, Tensor] = {}
    for rows in batches:
        prompts, completions = ([pairs[row][side].to(device) for row in rows] for side in (0, 1))
        if setting.packed:
            hidden = packed_hidden_states(model, prompts, completions).hidden
        else:  # with any attention, as there is nothing to keep apart
            ids = torch.cat([*prompts, *completions]).unsqueeze(0)
            hidden = last_hidden_states(model, {"input_ids": ids})[0, len(prompts[0]) - 1 : -1]
        kept = None
        if setting.recorded:
            assert samples.masks is not None
            masks = SamplingMask.joined([samples.masks[row] for row in rows]).to(device)
            kept = masks.bitmask(head.weight.shape[0])
        scored = _head_logprobs(hidden, head, torch.cat(completions), setting, kept).double().cpu()
        logprobs |= dict(zip(rows, scored.split([len(c) for c in completions]), strict=True))
    return torch.cat([logprobs[row] for row in range(len(pairs))])


def _head_logprobs(
    hidden: Tensor, head: LMHead, labels: Tensor, setting: Setting, kept: Tensor | None
) -> Tensor:
    half = setting.head != "fp32"
    weight, bias = head.weight, head.bias
    if half:
        dtype = DTYPES[setting.head]
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if setting.softmax == "fp32" and setting.top_p == 1.0 and setting.top_k == 0:
        return gk.linear_token_logprobs(
            hidden,
            weight,
            labels,
            **head.options() | {"bias": bias},
            temperature=setting.temperature,
            kept_mask=kept,
            logits_dtype="input" if half else "float32",
            max_chunk_bytes=setting.max_chunk_bytes,
        ).logprobs
    if not half:  # products of 16-bit numbers, kept in fp32
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    parts = []
    for rows in torch.arange(len(labels)).split(max(1, _LOGIT_BYTES // (4 * weight.shape[0]))):
        logits = head.transform(torch.nn.functional.linear(hidden[rows], weight, bias).float())
        if kept is not None:
            logits = logits.masked_fill(~columns(kept[rows], logits.shape[-1]), -torch.inf)
        logits = _masked(logits / setting.temperature, setting).to(DTYPES[setting.softmax])
        parts.append(logits.log_softmax(-1).gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1).float())
    return torch.cat(parts)


def _masked(logits: Tensor, setting: Setting) -> Tensor:
    """-inf outside of the sampling mask, which transformers' warpers find."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if setting.top_k > 0:
        logits = TopKLogitsWarper(setting.top_k)(None, logits)
    return logits if setting.top_p == 1.0 else TopPLogitsWarper(setting.top_p)(None, logits)


def switches(
    baseline: Setting, sampling: Sampling, attention: str, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Return what can be switched, by name, as changes of the baseline.

    Args:
        baseline: how training computes.
        sampling: how the sampler drew.
        attention: the implementation that the baseline resolves to.
        vocabulary: V, which says how many bytes a chunk of a few rows has.
    """
    half = baseline.weights if baseline.weights != "fp32" else "bf16"
    other_half = "fp16" if half == "bf16" else "bf16"
    changes: dict[str, dict[str, Any]] = {}
    if baseline.weights == "fp32":
        changes[f"weights in {half}"] = {"weights": half}
        changes[f"weights and head in {half}"] = {"weights": half, "head": half}
        changes[f"weights and head in {other_half}"] = {"weights": other_half, "head": other_half}
    else:
        changes["weights in fp32"] = {"weights": "fp32", "head": "fp32"}
    head = half if baseline.head == "fp32" else "fp32"
    changes[f"head in {head}"] = {"head": head}
    changes[f"softmax in {half}"] = {"softmax": half}
    other = "eager" if attention != "eager" else "sdpa"
    changes[f"{other} attention"] = {"attention": other, "packed": False}
    changes["one sequence at a time"] = {"packed": False}
    changes[f"chunks of {_FEW_ROWS} rows"] = {"max_chunk_bytes": 4 * _FEW_ROWS * vocabulary}
    if baseline.temperature != 1.0:
        changes["log-probs before temperature"] = {"temperature": 1.0}
    if baseline.recorded:
        changes["sampling mask off"] = {"recorded": False}
    elif sampling.top_p < 1.0 or sampling.top_k > 0:
        changes["sampling mask on"] = {"top_p": sampling.top_p, "top_k": sampling.top_k}
    return changes


def attribute(
    load: Load,
    samples: Samples,
    baseline: Setting,
    comparison: Comparison,
    named: dict[str, dict[str, Any]],
    budget: int,
    tell: Callable[[str], None],
) -> list[Switched]:
    """Score the samples once per switch, those that need the same model one after the other."""

    def model_of(name: str) -> tuple[str, str]:
        setting = replace(baseline, **named[name])
        return setting.weights, str(setting.attention)

    done: dict[str, Switched] = {}
    for name in sorted(named, key=model_of):
        tell(f"switching: {name}")
        logprobs = score(load, samples, replace(baseline, **named[name]), budget)
        both = logprobs.isfinite() & comparison.possible
        moved = mean((logprobs - comparison.training)[both].abs())
        done[name] = Switched(name, named[name], replace(comparison, training=logprobs), moved)
    return [done[name] for name in named]
