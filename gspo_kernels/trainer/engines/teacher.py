"""A teacher behind a server: log-probs of the ids that it finds likeliest at every token of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gspo_kernels.bits import NO_ID
from gspo_kernels.trainer.input_errors import EngineError, ModelError

Scored: TypeAlias = dict[int, float]
"""Log-probs in nats by token id, of one place."""


class Scorer(Protocol):
    """A server that scores given tokens.

    Attributes:
        name: what it is called in messages.
    """

    name: str

    def score(self, sequences: Sequence[list[int]], top_k: int) -> list[list[Scored]]:
        """Of every token but the first of each sequence, what its likeliest ids, and itself, had as
        log-probs.
        """
        ...

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special ones around it."""
        ...


class TeacherLogprobs(NamedTuple):
    """What a teacher says of N tokens.

    Attributes:
        ids: int64 [N, K], `NO_ID` where there are fewer.
        logprobs: fp32 [N, K], in nats, over the teacher's whole vocabulary.
    """

    ids: Tensor
    logprobs: Tensor


@dataclass
class ServedTeacher:
    """Asks a server, and refuses answers that don't fit.

    Attributes:
        scorer: who answers.
        top_k: K.
        vocabulary: how many tokens the trained model embeds.
    """

    scorer: Scorer
    top_k: int
    vocabulary: int

    def check(self, tokenizer: Any, text: str) -> None:
        """Raise a `ModelError` unless the server cuts a text into the same tokens."""
        own, theirs = tokenizer.encode(text, add_special_tokens=False), self.scorer.tokenize(text)
        if own != theirs:
            raise ModelError(
                f"distillation.url: {self.scorer.name} has another tokenizer than the model that is trained: "
                f"{text[:40]!r} is {theirs[:8]} to it, and {own[:8]} here"
            )

    def score(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> TeacherLogprobs:
        """Return what the teacher says of the completions' tokens, one completion after the other.

        Raises:
            EngineError: the server cannot be reached, refuses, or its answer does not fit the request.
        """
        sequences = [[*p.tolist(), *c.tolist()] for p, c in zip(prompts, completions, strict=True)]
        answers = self.scorer.score(sequences, self.top_k)
        N = sum(map(len, completions))
        ids = torch.full((N, self.top_k), NO_ID)
        logprobs = torch.zeros(N, self.top_k)
        place = 0
        for sequence, completion, answer in zip(sequences, completions, answers, strict=True):
            if len(answer) != len(sequence) - 1:
                raise self._error(
                    f"gave log-probs of {len(answer)} tokens, where {len(sequence) - 1} were asked for"
                )
            for token, scored in zip(completion.tolist(), answer[-len(completion) :], strict=True):
                chosen = self._likeliest(token, scored)
                ids[place, : len(chosen)] = torch.tensor([each for each, _ in chosen])
                logprobs[place, : len(chosen)] = torch.tensor([value for _, value in chosen])
                place += 1
        return TeacherLogprobs(ids, logprobs)

    def _likeliest(self, token: int, scored: Scored) -> list[tuple[int, float]]:
        if token not in scored:
            raise self._error(
                f"gave no log-prob of token {token}, which it was asked about: has it cut the sequence?"
            )
        strange = [each for each in scored if not 0 <= each < self.vocabulary]
        if strange:
            raise self._error(
                f"gave a log-prob of token {strange[0]}, and the trained model embeds {self.vocabulary}: "
                "it serves another model"
            )
        # -inf: a token that cannot come, which no JSON says in numbers
        if not all(value <= 0.0 for value in scored.values()):
            raise self._error(
                "gave log-probs that are not numbers of at most 0: the model's logits are not finite"
            )
        finite = [each for each in scored.items() if math.isfinite(each[1])]
        return sorted(finite, key=lambda each: (-each[1], each[0]))[: self.top_k]

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.scorer.name} {what}")
