"""Sampled completions, and training's log-probs of them with the baseline and with switched settings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.core.bits import columns
from gspo_kernels.mismatch.measure import Comparison, mean
from gspo_kernels.models import IntegrationError
from gspo_kernels.models.layouts import offsets_of
from gspo_kernels.models.lm_head import LMHead, lm_head_of
from gspo_kernels.models.rope import own_frequencies, varying_ropes
from gspo_kernels.models.rows import hidden_states, last_hidden_states, token_budget_batches
from gspo_kernels.off_policy import SamplingMask
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.data import load_prompts
from gspo_kernels.trainer.model import load_model
from gspo_kernels.trainer.rollout import Sampling, new_cache


@dataclass(frozen=True)
class Samples:
    """B sampled completions with N tokens in total, packed."""

    prompts: list[Tensor] | None  # B of token ids, [P_i]; None if files are compared without a model
    completions: list[Tensor]  # B of token ids, [C_i], C_i > 0
    logprobs: Tensor  # [N] fp64, by the sampler, in nats; -inf for tokens that it could not draw
    masks: list[SamplingMask] | None = None  # B, tokens that the sampler could have drawn; None if unknown
    steps: Mapping[str, int] = field(default_factory=dict)  # of a run, by the digest of its weights

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets of the completions among the N tokens, int32 [B + 1]."""
        lengths = [len(each) for each in self.completions]
        return offsets_of(torch.tensor(lengths, dtype=torch.int64, device="cpu"))


def read_samples(path: Path, tokenizer: Any, max_count: int, tell: Callable[[str], None]) -> Samples:
    """Read at most the first ``max_count`` completions of a file that a run has kept (``save_rollouts``).

    The columns "token_ids" and "logprobs" are needed, and with a tokenizer "prompt_ids". Files of older
    releases have "prompt" in its place; ``tell`` then gets a sentence. "sampling_mask" is used if every
    completion has one, and "step" with "weights_digest" if they are there. An `InputError` names a row that
    does not fit.
    """
    stored = load_prompts(path)
    rows = [stored[i] for i in range(min(max_count, len(stored)))]
    for number, row in enumerate(rows, start=1):
        _check_row(row, f"{path}, row {number}")
    prompts = None
    if tokenizer is not None:
        if any(row.get("prompt_ids") is None for row in rows):
            again = "its prompts are tokenized again, and may become other tokens than the sampler had"
            tell(f"{path} has no prompt_ids: {again}")
        prompts = [_prompt_of(row, tokenizer, f"{path}, row {n}") for n, row in enumerate(rows, start=1)]
    completions = [torch.tensor(row["token_ids"], dtype=torch.int64, device="cpu") for row in rows]
    values = [value for row in rows for value in row["logprobs"]]
    logprobs = torch.tensor(values, dtype=torch.float64, device="cpu")
    masks = [SamplingMask.of(each) for row in rows if (each := row.get("sampling_mask")) is not None]
    by_weights = {row.get("weights_digest"): row.get("step") for row in rows}
    steps = {str(digest): step for digest, step in by_weights.items() if digest and type(step) is int}
    return Samples(prompts, completions, logprobs, masks if len(masks) == len(rows) else None, steps)


def _prompt_of(row: Mapping[str, Any], tokenizer: Any, where: str) -> Tensor:
    ids = row.get("prompt_ids")
    if ids is None and not isinstance(row["prompt"], str):
        raise InputError(f"{where}: the prompt is not text, as a run saves it")
    if ids is None:  # the text already includes special tokens
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"{where}: the prompt tokenizes to nothing")
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _check_row(row: Mapping[str, Any], where: str) -> None:
    for column in ("prompt_ids", "token_ids", "logprobs"):
        values = row.get(column)
        if column == "prompt_ids" and values is None:
            continue
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: {column}: got {values!r}, expected a list, a value per token")
        if column != "logprobs" and not all(type(value) is int for value in values):
            raise InputError(f"{where}: {column}: got {values!r:.80}, expected whole numbers")
    tokens, sets = row["token_ids"], row.get("sampling_mask")
    if len(row["logprobs"]) != len(tokens):
        raise InputError(f"{where}: {len(row['logprobs'])} logprobs for {len(tokens)} token_ids")
    if not all(isinstance(value, int | float) and value <= 1e-3 for value in row["logprobs"]):
        raise InputError(f"{where}: logprobs must be numbers of at most 0, as they are in nats")
    sets = [[]] * len(tokens) if sets is None else sets
    if not isinstance(sets, list) or not all(isinstance(each, list) for each in sets):
        raise InputError(f"{where}: sampling_mask: got {sets!r}, expected a list of token ids per token")
    if len(sets) != len(tokens):
        raise InputError(f"{where}: a sampling_mask of {len(sets)} tokens for {len(tokens)} token_ids")
    for place, (token, ids) in enumerate(zip(tokens, sets, strict=True)):
        if ids and token not in ids:
            raise InputError(f"{where}: token {token} at {place} isn't in its sampling_mask")


def check_vocabulary(samples: Samples, embedded: int, where: str) -> None:
    """Raise an `InputError` if a token id is not below ``embedded``, the number that the model embeds."""
    masks = samples.masks or [SamplingMask.of([])] * len(samples.completions)
    rows = zip(samples.prompts or (), samples.completions, (mask.ids for mask in masks), strict=True)
    for number, (prompt, completion, drawable) in enumerate(rows, start=1):
        tokens = (*prompt, *completion, *drawable)
        unknown = [int(token) for token in tokens if not 0 <= token < embedded]
        if unknown:
            known = f"the model embeds only {embedded}; the tokens are of another one"
            raise InputError(f"{where}, row {number}: has token {unknown[0]}, but {known}")


def other_logprobs(path: Path, samples: Samples) -> Tensor:
    """Read log-probs [N] of the samples' tokens from another file; `read_samples` describes its form."""
    other = read_samples(path, None, len(samples.completions), print)
    for number, (one, two) in enumerate(zip(samples.completions, other.completions, strict=False), start=1):
        if not torch.equal(one, two):
            raise InputError(f"{path}, row {number}: its token_ids are not those of the first file")
    if len(other.completions) < len(samples.completions):
        raise InputError(f"{path}: has {len(other.completions)} rows for {len(samples.completions)}")
    return other.logprobs


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DECODED = 64  # sequences to sample or decode at a time
_LOGIT_BYTES = 64 << 20  # bytes of fp32 logits at a time if the head isn't fused
_FEW_ROWS = 16  # rows of logits in a chunk, for the switch of the chunk's size

# Loads the model with weights in a dtype and an attention implementation (None: its default).
Load = Callable[[torch.dtype, str | None], Any]


class Models:
    """A loader of one model in any precision, which caches the last one."""

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
    """Settings of training's log-probs; the defaults are the bundled trainer's in fp32."""

    weights: str = "fp32"  # precision of the whole model
    # Precision in which logits leave the head's product. With fp32 weights a 16-bit head takes hidden states
    # and weight in 16 bits as well, as autocast does.
    head: str = "fp32"
    softmax: str = "fp32"  # precision of the log-softmax
    attention: str | None = None  # transformers' implementation; None: its default
    packed: bool = True  # whether sequences share a row; else the model runs one sequence at a time
    decode: bool = False  # decode token by token with a cache, like a sampler, instead of one pass
    temperature: float = 1.0  # logits are divided by it
    top_p: float = 1.0  # tokens that top_p or top_k cut off have a log-prob of -inf
    top_k: int = 0
    recorded: bool = False  # softmax over the tokens that the sampler could have drawn, as keep_sampling_mask
    max_chunk_bytes: int | None = None  # bytes of logits in a chunk of the fused head; None: its default


@dataclass(frozen=True)
class Switched:
    """Training's log-probs with one setting switched, compared with the sampler's."""

    name: str
    change: dict[str, Any]  # the fields of `Setting` that differ from the baseline
    comparison: Comparison  # with the sampler's log-probs
    moved: float  # mean absolute change of training's log-probs, in nats


@torch.no_grad()
def score(load: Load, samples: Samples, setting: Setting, budget: int) -> Tensor:
    """Return log-probs of the N completion tokens, fp64 on the CPU; packed passes have ``budget`` tokens.

    The samples must have prompts, and masks if ``setting.recorded`` is true.
    """
    assert samples.prompts is not None
    model = load(DTYPES[setting.weights], setting.attention)
    head, device = lm_head_of(model), model.device
    if isinstance(head.weight, gk.LoRAHead):
        raise IntegrationError(
            "model: its lm_head carries LoRA, expected a plain weight; save what PEFT's merge_and_unload() "
            "returns, and pass that"
        )
    pairs = list(zip(samples.prompts, samples.completions, strict=True))
    batches = [[row] for row in range(len(pairs))]
    if setting.decode:
        longest_first = sorted(range(len(pairs)), key=lambda row: -len(pairs[row][0]))
        batches = [longest_first[start : start + DECODED] for start in range(0, len(pairs), DECODED)]
    elif setting.packed:
        batches = token_budget_batches([len(p) + len(c) for p, c in pairs], budget)
    logprobs: dict[int, Tensor] = {}
    for rows in batches:
        prompts, completions = ([pairs[row][side].to(device) for row in rows] for side in (0, 1))
        if setting.decode:
            hidden = _decoded_hidden_states(model, prompts, completions)
        elif setting.packed:
            hidden = hidden_states(model, prompts, completions)
        else:  # single sequences work with any attention
            ids = torch.cat([*prompts, *completions]).unsqueeze(0)
            hidden = last_hidden_states(model, {"input_ids": ids})[0, len(prompts[0]) - 1 : -1]
        kept = None
        if setting.recorded:
            assert samples.masks is not None
            masks = SamplingMask.concatenate([samples.masks[row] for row in rows]).to(device)
            kept = masks.bitmask(head.matrix.shape[0])
        scored = _head_logprobs(hidden, head, torch.cat(completions), setting, kept).cpu().double()
        logprobs |= dict(zip(rows, scored.split([len(c) for c in completions]), strict=True))
    return torch.cat([logprobs[row] for row in range(len(pairs))])


def _decoded_hidden_states(model: Any, prompts: list[Tensor], completions: list[Tensor]) -> Tensor:
    """Return the head's input for each of N completion tokens, [N, H], by decoding with a cache."""
    following = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
    tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], dtype=torch.int64, device=model.device)
    places = torch.arange(tokens.shape[1], dtype=torch.int64, device=model.device)
    mask = (places >= tokens.shape[1] - lengths).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    _, options = new_cache(model)
    states: list[Tensor] = []
    head, ropes = model.get_output_embeddings(), varying_ropes(model)
    handle = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][:, -1]))
    try:
        for place in range(following.shape[1]):
            with own_frequencies(ropes, (positions[:, -1:] + 1).expand_as(positions)):
                model(input_ids=tokens, attention_mask=mask, position_ids=positions, **options)
            tokens, positions = following[:, place : place + 1], positions[:, -1:] + 1
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    finally:
        handle.remove()
    rows = torch.stack(states, 1)
    return torch.cat([row[: len(each)] for row, each in zip(rows, completions, strict=True)])


def _head_logprobs(
    hidden: Tensor, head: LMHead, labels: Tensor, setting: Setting, kept: Tensor | None
) -> Tensor:
    half = setting.head != "fp32"
    weight, bias = head.matrix, head.bias
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
    if not half:  # fp32 logits even with 16-bit weights
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    parts = []
    max_rows = max(1, _LOGIT_BYTES // (4 * weight.shape[0]))
    for rows in torch.arange(len(labels), device=labels.device).split(max_rows):
        logits = head.transform(torch.nn.functional.linear(hidden[rows], weight, bias).float())
        logits = logits / setting.temperature
        mask = None if kept is None else kept[rows]
        if setting.top_p < 1.0 or setting.top_k > 0:
            mask = gk.sampling_mask(logits, top_k=setting.top_k, top_p=setting.top_p)
        if mask is not None:
            logits = logits.masked_fill(~columns(mask, logits.shape[-1]), -torch.inf)
        logits = logits.to(DTYPES[setting.softmax])
        parts.append(logits.log_softmax(-1).gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1).float())
    return torch.cat(parts)


def switches(
    baseline: Setting, sampling: Sampling, attention: str, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Return the possible switches by name, each with the fields of the baseline that it changes.

    ``attention`` is the implementation that the baseline resolves to. ``vocabulary`` is the number of logits
    in a row, which gives the bytes of a small chunk.
    """
    half = baseline.weights if baseline.weights != "fp32" else "bf16"
    other_half = "fp16" if half == "bf16" else "bf16"
    changes: dict[str, dict[str, Any]] = {}
    if baseline.weights == "fp32":
        changes[f"weights in {half}"] = {"weights": half}
        changes[f"weights and head in {half}"] = {"weights": half, "head": half}
        changes[f"decoding in {half} with a cache"] = {"weights": half, "head": half, "decode": True}
        changes[f"weights and head in {other_half}"] = {"weights": other_half, "head": other_half}
    else:
        changes["weights in fp32"] = {"weights": "fp32", "head": "fp32"}
        changes[f"decoding in {half} with a cache"] = {"head": half, "decode": True}
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
    """Compute log-probs once per switch, grouped by the model that switches need."""
    settings = {name: replace(baseline, **change) for name, change in named.items()}
    done: dict[str, Switched] = {}
    for name in sorted(named, key=lambda name: (settings[name].weights, str(settings[name].attention))):
        tell(f"switching: {name}")
        logprobs = score(load, samples, settings[name], budget)
        both = logprobs.isfinite() & comparison.possible
        moved = mean((logprobs - comparison.training)[both].abs())
        done[name] = Switched(name, named[name], replace(comparison, training=logprobs), moved)
    return [done[name] for name in named]
