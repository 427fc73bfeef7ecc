"""Rollouts: completions sampled from the current policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; greedy where ``temperature`` is 0.

    Attributes:
        max_new_tokens: the longest completion.
        temperature: logits are divided by it.
        top_p: then only the most likely tokens whose probabilities reach this sum are drawn; 1: all.
        top_k: and before that, only this many of the most likely; 0: all.
    """

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
        logprobs: [B, C] fp32, the log-prob of each token under the distribution that it was drawn from, so
            after temperature, top-k and top-p; 0 outside ``completion_mask``. None where the engine gives
            none, and for greedy completions.
        sampled: [B, C] bool, which tokens the policy wrote: false for what a tool or an environment put
            between them. None: all of ``completion_mask``.
        turn_ids: [B, C] int64, which turn, from 0, a token belongs to; -1: none. None: all is one turn.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    finished: Tensor
    logprobs: Tensor | None = None
    sampled: Tensor | None = None
    turn_ids: Tensor | None = None

    def loss_mask(self, truncated: str = "keep") -> Tensor:
        """Return [B, C] bool, the tokens that a loss counts: those that the policy wrote.

        Args:
            truncated: what completions without an end token do: "keep" trains on them, "mask" leaves them out
                of the loss (their rewards still count in their group's mean).
        """
        if truncated not in ("keep", "mask"):
            raise ValueError(f"truncated: got {truncated!r}, expected 'keep' or 'mask'")
        mask = self.completion_mask if self.sampled is None else self.completion_mask & self.sampled
        return mask & self.finished.unsqueeze(1) if truncated == "mask" else mask

    def token_lists(self) -> list[list[int]]:
        """Return the ids of each completion, with the end token and without padding."""
        return [ids.tolist() for ids, *_ in self.by_token()]

    def by_token(self, truncated: str = "keep") -> list[list[Any]]:
        """Return ids, loss mask, log-probs and turns of each completion, [C_i] on the CPU or None."""
        tables = (self.completion_ids, self.loss_mask(truncated), self.logprobs, self.turn_ids)
        masks = self.completion_mask.cpu()
        found = [None if table is None else table.cpu() for table in tables]
        return [[None if t is None else t[i][mask] for t in found] for i, mask in enumerate(masks)]


class RolloutEngine(Protocol):
    """What completes prompts for the trainer."""

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> Completions:
        """Complete every prompt once, with the policy's current weights.

        Args:
            prompts: B lists of token ids, none empty; a prompt with several completions is there as often.
            sampling: how tokens are drawn.
            seeds: one for each prompt, which alone decides its random numbers; None: taken from torch's
                default generator.

        Returns:
            B completions in the order of the prompts.
        """
        ...


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


@dataclass(frozen=True)
class Segment:
    """A part of a completion over several turns.

    Attributes:
        tokens: its token ids.
        logprobs: what `Completions.logprobs` says of them; None where unknown.
        sampled: whether the policy wrote it, and so it is a turn; false for the output of a tool.
    """

    tokens: list[int]
    logprobs: list[float] | None = None
    sampled: bool = True

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"logprobs: got {len(self.logprobs)} for {len(self.tokens)} tokens")


def join_segments(
    prompts: list[list[int]], segments: Sequence[Sequence[Segment]], finished: Sequence[bool], pad_id: int
) -> Completions:
    """Lay out completions over several turns, for an engine that lets the policy meet an environment.

    Args:
        prompts: B lists of token ids.
        segments: of each completion, in order, at least one token in all.
        finished: whether each completion came to its end.
        pad_id: token that fills rows.

    Returns:
        Completions with ``sampled`` and ``turn_ids``; with ``logprobs`` if every sampled segment has them.
    """
    known = all(part.logprobs is not None for parts in segments for part in parts if part.sampled)

    def padded(values: Callable[[Segment, int], Sequence[float]], filling: int) -> Tensor:
        rows = []
        for parts in segments:
            turns = accumulate(part.sampled for part in parts)
            each = [values(part, turn - 1) for part, turn in zip(parts, turns, strict=True)]
            rows.append(torch.tensor([value for part in each for value in part]))
        return pad_sequence(rows, batch_first=True, padding_value=filling)

    turn_ids = padded(lambda part, turn: [turn if part.sampled else -1] * len(part.tokens), -1)
    logprobs = padded(lambda part, _: (part.sampled and part.logprobs) or [0.0] * len(part.tokens), 0)
    return Completions(
        *left_pad(prompts, pad_id),
        completion_ids=padded(lambda part, _: part.tokens, pad_id),
        completion_mask=padded(lambda part, _: [1] * len(part.tokens), 0).bool(),
        finished=torch.tensor(finished),
        logprobs=logprobs if known else None,
        sampled=turn_ids >= 0,
        turn_ids=turn_ids,
    )


def seeds_of(seeds: Sequence[int] | None, rows: int) -> Sequence[int]:
    """Return the seeds of as many prompts; None: taken from torch's default generator."""
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (rows,)).tolist()
    if len(seeds) != rows:
        raise ValueError(f"seeds: got {len(seeds)}, expected one for each of the {rows} prompts")
    return seeds


def sampling_mismatch(logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare log-probs of the same tokens from training and from sampling.

    They differ by rounding where both take the same weights, temperature and vocabulary; with top-k or top-p
    also by the log of the probability that was cut off, as training takes the whole vocabulary.

    Args:
        logprobs: [B, C] or [N], from training, before the first update.
        sampling_logprobs: the same shape, `Completions.logprobs`.
        mask: the same shape, bool, the tokens that were scored and count.

    Returns:
        "mismatch/mean" and "mismatch/max": of the absolute differences, in nats; "mismatch/ratio": the mean
        over tokens of exp(training - sampling), 1 where both agree. NaN where no token counts.
    """
    difference = logprobs[mask].double() - sampling_logprobs[mask].double()
    if difference.numel() == 0:
        return dict.fromkeys(("mismatch/mean", "mismatch/max", "mismatch/ratio"), float("nan"))
    return {
        "mismatch/mean": float(difference.abs().mean()),
        "mismatch/max": float(difference.abs().max()),
        "mismatch/ratio": float(difference.exp().mean()),
    }
