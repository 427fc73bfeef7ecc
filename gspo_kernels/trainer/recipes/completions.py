"""Completions and their layout for training.

Rows are [B, P + C]: prompts padded on the left, completions on the right, so that position P - 1 predicts
the first completion token of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.trainer.run.models import IGNORED


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
        """Check the lengths."""
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
