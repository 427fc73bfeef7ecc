"""Rollouts: completions sampled from the current policy, and their layout for training.

Rows are [B, P + C]: prompts padded on the left, completions on the right, so that position P - 1 predicts
the first completion token of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.trainer.models import IGNORED


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; greedy where ``temperature`` is 0."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Completions:
    """Prompts and their completions, B rows.

    Attributes:
        prompt_ids: [B, P], left-padded.
        prompt_mask: [B, P] int64, 1 for real tokens.
        completion_ids: [B, C], right-padded.
        completion_mask: [B, C] bool, true up to and including the first end token.
        finished: [B] bool, whether there is an end token.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    finished: Tensor

    def token_lists(self) -> list[list[int]]:
        """Return the ids of each completion, with the end token and without padding."""
        return [
            ids[mask].tolist() for ids, mask in zip(self.completion_ids, self.completion_mask, strict=True)
        ]

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (input_ids [b, P + C], attention_mask [b, P + C], labels [b, C]) of some rows.

        ``labels[:, t]`` is the token that position P - 1 + t predicts, `IGNORED` outside the completion.
        Columns that are padding in all these rows are cut off on both sides.
        """
        prompt_mask, completion_mask = self.prompt_mask[rows], self.completion_mask[rows]
        P = int(prompt_mask.sum(1).max())
        C = max(int(completion_mask.sum(1).max()), 1)
        prompt_mask, completion_mask = prompt_mask[:, -P:], completion_mask[:, :C]
        completion_ids = self.completion_ids[rows, :C]
        input_ids = torch.cat([self.prompt_ids[rows, -P:], completion_ids], dim=1)
        attention_mask = torch.cat([prompt_mask, completion_mask.to(prompt_mask.dtype)], dim=1)
        return input_ids, attention_mask, completion_ids.masked_fill(~completion_mask, IGNORED)


def left_pad(token_lists: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both [B, P], of token lists of any length."""
    width = max(len(tokens) for tokens in token_lists)
    ids = torch.tensor([[pad_id] * (width - len(tokens)) + tokens for tokens in token_lists])
    mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in token_lists])
    return ids, mask


def completion_mask(completion_ids: Tensor, end_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return ([B, C] bool, true up to and including the first end token; [B] bool, whether there is one)."""
    is_end = torch.isin(completion_ids, torch.tensor(end_ids, device=completion_ids.device))
    ends_before = is_end.cumsum(1) - is_end.to(torch.int64)
    return ends_before == 0, is_end.any(1)


@torch.no_grad()
def sample_completions(
    model: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    end_ids: list[int],
    pad_id: int,
    batch_size: int,
) -> Completions:
    """Complete every prompt once, ``batch_size`` at a time, with the model's own generation.

    Only ``sampling`` decides how tokens are drawn: the defaults in the model's generation config (a top-k, a
    repetition penalty) would sample from another policy than the one that is trained, and are set aside.
    """
    from transformers import GenerationConfig

    prompt_ids, prompt_mask = left_pad(prompts, pad_id)
    prompt_ids, prompt_mask = prompt_ids.to(model.device), prompt_mask.to(model.device)
    greedy = sampling.temperature == 0.0
    draws = (
        {}
        if greedy
        else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    )
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=not greedy,
        pad_token_id=pad_id,
        eos_token_id=end_ids,
        **draws,
    )
    B, C = len(prompts), sampling.max_new_tokens
    completion_ids = torch.full((B, C), pad_id, device=model.device)
    with _own_generation_defaults_set_aside(model):
        for start in range(0, B, batch_size):
            rows = slice(start, min(start + batch_size, B))
            P = int(prompt_mask[rows].sum(1).max())
            ids, mask = prompt_ids[rows, -P:], prompt_mask[rows, -P:]
            produced = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, P:]
            completion_ids[rows, : produced.shape[1]] = produced
    mask, finished = completion_mask(completion_ids, end_ids)
    return Completions(prompt_ids, prompt_mask, completion_ids, mask, finished)


@contextmanager
def _own_generation_defaults_set_aside(model: Any) -> Iterator[None]:
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
