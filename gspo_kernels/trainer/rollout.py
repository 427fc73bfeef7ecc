"""Rollouts: completions sampled from the current policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gspo_kernels import bits


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; greedy where ``temperature`` is 0.

    Attributes:
        max_new_tokens: the longest completion.
        temperature: logits are divided by it.
        top_p: then only the most likely tokens whose probabilities reach this sum are drawn; 1: all.
        top_k: and before that, only this many of the most likely; 0: all.
        min_p: and after both, only those with at least this share of the likeliest one's probability; 0: all.
        return_mask: whether the completions are to say what could have been drawn.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    return_mask: bool = False

    @property
    def cuts(self) -> bool:
        """Whether there are tokens that cannot be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class SamplingMask(NamedTuple):
    """What a sampler could have drawn at each of C tokens.

    Attributes:
        ids: int32 [S], the ids of the first token's set, then those of the second one's, and so on.
        counts: [C] int64, how many a token has; 0: any id, as for what a tool wrote.
    """

    ids: Tensor
    counts: Tensor

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """Return that of one list of ids for each token, as vLLM gives it."""
        ids = [token for each in sets for token in each]
        return cls(torch.tensor(ids, dtype=torch.int32), torch.tensor([len(each) for each in sets]))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Put the tokens of several one after the other; at least one part."""
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def to_lists(self) -> list[list[int]]:
        """Return what `of` takes."""
        return [each.tolist() for each in self.ids.split(self.counts.tolist())]

    def to(self, device: torch.device) -> SamplingMask:
        """Return the same on another device."""
        return SamplingMask(self.ids.to(device), self.counts.to(device))

    def first(self, tokens: int) -> SamplingMask:
        """Return a copy of what it says of the first tokens."""
        counts = self.counts[:tokens].clone()
        return SamplingMask(self.ids[: int(counts.sum())].clone(), counts)

    def bitmask(self, vocabulary: int) -> Tensor:
        """Return what the losses take as ``kept_mask``, int32 [C, ceil(V / 32)]."""
        whole = bits.packed_columns(torch.ones(vocabulary, dtype=torch.bool, device=self.ids.device))
        kept = bits.packed_rows(self.ids, self.counts, vocabulary)
        return torch.where(self.counts.unsqueeze(1) > 0, kept, whole)


@dataclass(frozen=True)
class Completion:
    """What completes a prompt: C > 0 tokens, on the CPU.

    Attributes:
        ids: [C] int64, up to and including the first end token.
        finished: whether there is an end token.
        logprobs: [C] fp32, of each token under the distribution that it was drawn from, so after temperature,
            top-k, top-p and min-p. None where the engine gives none, and for greedy completions.
        turn_ids: [C] int64, which turn, from 0, a token belongs to; -1: none, as a tool or an environment
            wrote it, and no loss counts it. None: all is one turn.
        mask: what could have been drawn. None: not asked for, or the engine does not say it.
    """

    ids: Tensor
    finished: bool
    logprobs: Tensor | None = None
    turn_ids: Tensor | None = None
    mask: SamplingMask | None = None

    def counted(self, truncated: str = "keep") -> Tensor:
        """Return [C] bool, the tokens that a loss counts: those that the policy wrote.

        Args:
            truncated: what a completion without an end token does: "keep" trains on it, "mask" leaves it out
                of the loss (its reward still counts in its group's mean).
        """
        if truncated not in ("keep", "mask"):
            raise ValueError(f"truncated: got {truncated!r}, expected 'keep' or 'mask'")
        written = torch.ones_like(self.ids) if self.turn_ids is None else self.turn_ids + 1
        return (written > 0) & (self.finished or truncated == "keep")


class RolloutEngine(Protocol):
    """What completes prompts for the trainer."""

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
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


@dataclass(frozen=True)
class Segment:
    """A part of a completion over several turns.

    Attributes:
        tokens: its token ids.
        logprobs: what `Completion.logprobs` says of them; None where unknown.
        sampled: whether the policy wrote it, and so it is a turn; false for the output of a tool.
        mask: what could have been drawn; None where unknown.
    """

    tokens: list[int]
    logprobs: list[float] | None = None
    sampled: bool = True
    mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        counts = {
            "logprobs": None if self.logprobs is None else len(self.logprobs),
            "mask": None if self.mask is None else len(self.mask.counts),
        }
        for name, count in counts.items():
            if count is not None and count != len(self.tokens):
                raise ValueError(f"{name}: got {count} for {len(self.tokens)} tokens")


def join_segments(segments: Sequence[Segment], finished: bool) -> Completion:
    """Return a completion over several turns, for an engine that lets the policy meet an environment.

    Args:
        segments: in order, at least one token in all.
        finished: whether it came to its end.

    Returns:
        The completion with ``turn_ids``; with ``logprobs``, and ``mask``, if every sampled segment has them.
    """
    turn_ids, logprobs, masks = [], [], []
    for part, number in zip(segments, accumulate(part.sampled for part in segments), strict=True):
        length = len(part.tokens)
        turn_ids += [number - 1 if part.sampled else -1] * length
        logprobs += (part.sampled and part.logprobs) or [0.0] * length
        masks.append((part.sampled and part.mask) or SamplingMask.of([[]] * length))
    sampled = [part for part in segments if part.sampled]
    return Completion(
        torch.tensor([token for part in segments for token in part.tokens]),
        finished,
        torch.tensor(logprobs) if all(part.logprobs is not None for part in sampled) else None,
        torch.tensor(turn_ids),
        SamplingMask.joined(masks) if all(part.mask is not None for part in sampled) else None,
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
        sampling_logprobs: the same shape, `Completion.logprobs`.
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
