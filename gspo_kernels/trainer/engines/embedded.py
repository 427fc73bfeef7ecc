"""The embedded engine: the model that is trained samples by itself, through transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from gspo_kernels.trainer.engines.decoding import Decoding, quick_head
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rollout import Completions, Sampling, completion_mask, left_pad, seeds_of


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
    ) -> Completions:
        """See `RolloutEngine.generate`; a `ModelError` says that probabilities are not numbers."""
        model, device = self.model, self.model.device
        B, C = len(prompts), sampling.max_new_tokens
        prompt_ids, prompt_mask = (each.to(device) for each in left_pad(prompts, self.pad_id))
        completion_ids = torch.full((B, C), self.pad_id, device=device)
        logprobs = torch.zeros(B, C, device=device)
        greedy = sampling.temperature == 0.0
        uniforms = None if greedy else torch.from_numpy(_uniforms(seeds, B, C)).to(device)
        options = {"max_new_tokens": C, "do_sample": False, "pad_token_id": self.pad_id}
        longest_first = sorted(range(B), key=lambda row: -len(prompts[row]))
        with _own_generation_defaults_set_aside(model), quick_head(model):
            for start in range(0, B, self.batch_size):
                chosen = longest_first[start : start + self.batch_size]
                rows, P = torch.tensor(chosen, device=device), len(prompts[chosen[0]])
                ids = prompt_ids.new_full((len(chosen), C), self.pad_id)
                own = logprobs.new_zeros(len(chosen), C)
                decoding = Decoding(
                    [prompts[row] for row in chosen],
                    sampling,
                    None if uniforms is None else uniforms[rows],
                    torch.tensor(self.end_ids, device=device),
                    ids,
                    own,
                )
                model.generate(
                    input_ids=prompt_ids[rows, -P:],
                    attention_mask=prompt_mask[rows, -P:],
                    generation_config=GenerationConfig(**options),
                    custom_generate=decoding,
                )
                completion_ids[rows], logprobs[rows] = ids, own
        mask, finished = completion_mask(completion_ids, self.end_ids)
        completion_ids = completion_ids.masked_fill(~mask, self.pad_id)
        logprobs = torch.where(mask, logprobs, 0.0)
        if bool(logprobs.isnan().any()):
            raise ModelError(
                "the model's probabilities are not numbers (NaN): its weights or its logits are not finite"
            )
        return Completions(
            prompt_ids, prompt_mask, completion_ids, mask, finished, None if greedy else logprobs
        )


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
