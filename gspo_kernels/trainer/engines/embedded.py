"""The embedded engine: the model that is trained samples by itself, through transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from gspo_kernels.trainer.engines.decoding import Decoding, packed_head
from gspo_kernels.trainer.rollout import Completion, Sampling, seeds_of


@dataclass
class TransformersEngine:
    """The model's own ``generate``, with `Decoding` for its loop.

    Only the `Sampling` decides how tokens are drawn: the defaults in the model's generation config (a top-k,
    a repetition penalty) would sample from another policy than the one that is trained, and are set aside.
    Prompts of similar length are batched together. Each completion has random numbers of its own, so that it
    does not depend on its batch, beyond the rounding of a forward pass.

    Attributes:
        model: the model that is trained, so that completions always come from its current weights.
        end_ids: tokens that end a completion.
        pad_id: token that fills rows.
        batch_size: completions generated at once; changes memory and speed only.
    """

    model: Any
    end_ids: list[int]
    pad_id: int
    batch_size: int

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; a `ModelError` says that probabilities are not numbers."""
        model, device = self.model, self.model.device
        B, C = len(prompts), sampling.max_new_tokens
        end_ids = torch.tensor(self.end_ids, device=device)
        uniforms = None if sampling.temperature == 0 else torch.from_numpy(_uniforms(seeds, B, C)).to(device)
        options = {"max_new_tokens": C, "do_sample": False, "pad_token_id": self.pad_id}
        longest_first = sorted(range(B), key=lambda row: -len(prompts[row]))
        found: dict[int, Completion] = {}
        with _own_generation_defaults_set_aside(model), packed_head(model):
            for start in range(0, B, self.batch_size):
                chosen = longest_first[start : start + self.batch_size]
                given = [prompts[row] for row in chosen]
                decoding = Decoding(given, sampling, None if uniforms is None else uniforms[chosen], end_ids)
                prompt_ids, prompt_mask = left_padded(given, self.pad_id, device)
                model.generate(
                    input_ids=prompt_ids,
                    attention_mask=prompt_mask,
                    generation_config=GenerationConfig(**options),
                    custom_generate=decoding,
                )
                found |= dict(zip(chosen, decoding.completions(), strict=True))
        return [found[row] for row in range(B)]


def left_padded(
    token_lists: Sequence[list[int]], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return ids, and a mask that is 1 where they are no padding, both [B, P] int64."""
    longest = max(map(len, token_lists))
    ids = [[pad_id] * (longest - len(tokens)) + list(tokens) for tokens in token_lists]
    mask = [[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in token_lists]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _uniforms(seeds: Sequence[int] | None, rows: int, steps: int) -> np.ndarray:
    """Return [rows, steps] numbers in [0, 1), each row from its seed alone and begun alike for any length."""
    seeds = seeds_of(seeds, rows)
    return np.stack([np.random.Generator(np.random.Philox(key=seed)).random(steps) for seed in seeds])


@contextmanager
def _own_generation_defaults_set_aside(model: Any) -> Iterator[None]:
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
