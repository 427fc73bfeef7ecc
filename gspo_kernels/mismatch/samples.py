"""Completions with the log-probs that their sampler gave, from an engine or from the files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.integrations.layouts import offsets_of
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.data import load_prompts
from gspo_kernels.trainer.rollout import RolloutEngine, Sampling, SamplingMask


@dataclass(frozen=True)
class Samples:
    """B completions of N tokens in all, one after the other.

    Attributes:
        prompts: B tensors of token ids, [P_i]; None where files of log-probs are compared without a model.
        completions: B tensors of token ids, [C_i], C_i > 0.
        logprobs: [N] fp64, by the sampler, in nats; -inf is a token that it calls impossible.
        masks: B, what the sampler could have drawn at each token; None where that isn't known.
    """

    prompts: list[Tensor] | None
    completions: list[Tensor]
    logprobs: Tensor
    masks: list[SamplingMask] | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [B + 1], where each completion begins among the N tokens."""
        return offsets_of(torch.tensor([len(each) for each in self.completions], dtype=torch.int64))


def draw_samples(engine: RolloutEngine, prompts: list[list[int]], sampling: Sampling) -> Samples:
    """Sample one completion of each prompt; an `InputError` says that the engine gives no log-probs."""
    drawn = engine.generate(prompts, sampling)
    logprobs = [each.logprobs for each in drawn if each.logprobs is not None]
    if len(logprobs) < len(drawn):
        raise InputError("the sampler gives no log-probs; greedy completions (temperature 0) have none")
    tokens = [torch.tensor(prompt) for prompt in prompts]
    return Samples(tokens, [each.ids for each in drawn], torch.cat(logprobs).double())


def read_samples(path: Path, tokenizer: Any, most: int) -> Samples:
    """Read completions as a run keeps them (``save_rollouts``).

    Of its columns "token_ids" and "logprobs" are needed, and with a tokenizer "prompt"; "sampling_mask" is
    taken where every completion has it.

    Args:
        path: the file.
        tokenizer: encodes prompts, as in training; None leaves them out.
        most: how many completions to take, from the first.

    Raises:
        InputError: the file isn't of this kind; names the row.
    """
    rows = load_prompts(path)
    taken = [rows[i] for i in range(min(most, len(rows)))]
    for number, row in enumerate(taken, start=1):
        _check(row, f"{path}, row {number}")
        if tokenizer is not None and not isinstance(row["prompt"], str):
            raise InputError(f"{path}, row {number}: the prompt is no text, as a run would have kept it")
    prompts = None
    if tokenizer is not None:
        # They were written with the special tokens that the tokenizer had added.
        ids = tokenizer([row["prompt"] for row in taken], add_special_tokens=False)["input_ids"]
        prompts = [torch.tensor(each) for each in ids]
        for number, each in enumerate(ids, start=1):
            if not each:
                raise InputError(f"{path}, row {number}: the tokenizer makes no token of the prompt")
    completions = [torch.tensor(row["token_ids"], dtype=torch.int64) for row in taken]
    logprobs = torch.tensor([value for row in taken for value in row["logprobs"]], dtype=torch.float64)
    masks = [SamplingMask.of(each) for row in taken if (each := row.get("sampling_mask")) is not None]
    return Samples(prompts, completions, logprobs, masks if len(masks) == len(taken) else None)


def _check(row: Mapping[str, Any], where: str) -> None:
    for column in ("token_ids", "logprobs"):
        if not isinstance(row.get(column), list) or not row[column]:
            expected = "expected a list with a value per token"
            raise InputError(f"{where}: {column} is {row.get(column)!r}, {expected}")
    tokens, sets = row["token_ids"], row.get("sampling_mask")
    if len(row["logprobs"]) != len(tokens):
        raise InputError(f"{where}: {len(row['logprobs'])} logprobs for {len(tokens)} token_ids")
    if not all(isinstance(value, int | float) and value <= 1e-3 for value in row["logprobs"]):
        raise InputError(f"{where}: logprobs must be numbers of at most 0, as they are in nats")
    if sets is None:
        return
    if not isinstance(sets, list) or not all(isinstance(each, list) for each in sets):
        raise InputError(f"{where}: sampling_mask is {sets!r}, expected a list of token ids per token")
    if len(sets) != len(tokens):
        raise InputError(f"{where}: a sampling_mask of {len(sets)} tokens for {len(tokens)} token_ids")
    for place, (token, ids) in enumerate(zip(tokens, sets, strict=True)):
        if ids and token not in ids:
            raise InputError(f"{where}: token {token} at {place} isn't in its sampling_mask")


def check_vocabulary(samples: Samples, embedded: int, where: str) -> None:
    """Raise an `InputError` where tokens are none of the ``embedded`` that the model has."""
    masks = samples.masks or [SamplingMask.of([])] * len(samples.completions)
    rows = zip(samples.prompts or (), samples.completions, (mask.ids for mask in masks), strict=True)
    for number, tokens in enumerate(rows, start=1):
        strange = [int(token) for ids in tokens for token in ids if not 0 <= token < embedded]
        if strange:
            raise InputError(
                f"{where}, row {number}: has token {strange[0]}, but the model embeds only {embedded}; the "
                "tokens are of another one"
            )


def other_logprobs(path: Path, samples: Samples) -> Tensor:
    """Read [N] log-probs of the same tokens from another file of that kind."""
    other = read_samples(path, None, len(samples.completions))
    for number, (one, two) in enumerate(zip(samples.completions, other.completions, strict=False), start=1):
        if not torch.equal(one, two):
            raise InputError(f"{path}, row {number}: its token_ids are not those of the first file")
    if len(other.completions) < len(samples.completions):
        raise InputError(f"{path}: has {len(other.completions)} rows for {len(samples.completions)}")
    return other.logprobs
