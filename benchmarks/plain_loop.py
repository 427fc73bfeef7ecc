"""GSPO in plain PyTorch and transformers, as one writes it in an afternoon: what trainers compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Sample = Callable[[Tensor, Tensor], Tensor]
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4


def completion_logprobs(model: Any, ids: Tensor, mask: Tensor, C: int) -> Tensor:
    """Log-probs of the last ``C`` tokens of each row, [B, C]."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=C + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, -C:, None]).squeeze(-1)


def gspo_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences; the first three arguments are [B, C], [B, C] and [B]."""
    ratio = (((logprobs - old) * mask).sum(1) / mask.sum(1)).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def train(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    reward: Callable[..., list[float]],
    *,
    prompts_per_step: int,
    group: int,
    max_new_tokens: int,
    minibatches: int,
    epochs: int,
    learning_rate: float,
    max_grad_norm: float,
    turns: Any,
    sample: Sample | None = None,
) -> None:
    """Train until ``turns.begin()`` raises; ``sample`` replaces the model's own sampling."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    model.train()
    for step in itertools.count():
        turns.begin()
        with turns.rollout(), torch.no_grad():
            numbers = range(step * prompts_per_step, (step + 1) * prompts_per_step)
            texts = [prompts[number % len(prompts)] for number in numbers for _ in range(group)]
            inputs = tokenizer(texts, return_tensors="pt", padding=True)
            prompt_ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"]
            if sample is None:
                ids = model.generate(
                    input_ids=prompt_ids, attention_mask=prompt_mask, max_new_tokens=max_new_tokens,
                    do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )  # fmt: skip
            else:
                ids = sample(prompt_ids, prompt_mask)
            completions = ids[:, prompt_ids.shape[1] :]
            ended = (completions == tokenizer.eos_token_id).long()
            kept = ended.cumsum(1) == ended  # up to and including the end token
            mask, C = torch.cat([prompt_mask, kept.long()], 1), completions.shape[1]
            tokens = [row[own].tolist() for row, own in zip(completions, kept, strict=True)]
            rewards = reward(texts, tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens)
        scores = torch.tensor(rewards).view(-1, group)
        deviation = scores.std(1, keepdim=True) + 1e-4
        advantages = ((scores - scores.mean(1, keepdim=True)) / deviation).flatten()
        with torch.no_grad():
            parts = zip(ids.chunk(minibatches), mask.chunk(minibatches), strict=True)
            old = torch.cat([completion_logprobs(model, *part, C) for part in parts])
        for _ in range(epochs):
            for rows in torch.randperm(len(ids)).chunk(minibatches):
                logprobs = completion_logprobs(model, ids[rows], mask[rows], C)
                loss = gspo_loss(logprobs, old[rows], advantages[rows], kept[rows])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
