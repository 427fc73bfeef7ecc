"""A teacher behind a server: log-probs of the ids that it finds likeliest at every token of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.bits import NO_ID
from gspo_kernels.trainer.engines.server import Scored, VLLMServer
from gspo_kernels.trainer.input_errors import EngineError, ModelError
from gspo_kernels.trainer.recipes.options import DistillationConfig

_PROBE = "2 + 2 is 4. Is it? Yes!\n"
"""A text that tokenizers cut in different ways."""


@dataclass
class ServedTeacher:
    """Asks a server, and refuses answers that don't fit.

    Attributes:
        server: who answers.
        options: how many ids it is asked about, and what is learned of them.
        vocabulary: how many tokens the trained model embeds.
    """

    server: VLLMServer
    options: DistillationConfig
    vocabulary: int

    def check(self, tokenizer: Any) -> None:
        """Raise an `EngineError` unless the server serves, a `ModelError` unless it cuts texts into the same
        tokens.
        """
        self.server.check()
        own, theirs = tokenizer.encode(_PROBE, add_special_tokens=False), self.server.tokenize(_PROBE)
        if own != theirs:
            raise ModelError(
                f"distillation.url: {self.server.name} has another tokenizer than the model that is trained: "
                f"{_PROBE!r} is {theirs[:8]} to it, and {own[:8]} here"
            )

    def score(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Ask what the teacher says of the completions' N tokens, one completion after the other.

        Returns:
            The ids that it finds likeliest, int64 [N, K], `NO_ID` where there are fewer, and their log-probs
            over its whole vocabulary, fp32 [N, K], in nats.

        Raises:
            EngineError: the server cannot be reached, refuses, or its answer does not fit the request.
        """
        sequences = [[*p.tolist(), *c.tolist()] for p, c in zip(prompts, completions, strict=True)]
        answers = self.server.score(sequences, self.options.top_k)
        rows: list[list[tuple[int, float]]] = []
        for sequence, completion, answer in zip(sequences, completions, answers, strict=True):
            if len(answer) != len(sequence) - 1:
                raise self._error(
                    f"gave log-probs of {len(answer)} tokens, where {len(sequence) - 1} were asked for"
                )
            rows += map(self._likeliest, completion.tolist(), answer[-len(completion) :])
        shape = len(rows), self.options.top_k
        ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64).view(shape)
        return ids, torch.tensor([[value for _, value in row] for row in rows]).view(shape)

    def _likeliest(self, token: int, scored: Scored) -> list[tuple[int, float]]:
        """Return the K likeliest ids and their log-probs, the likeliest first; `NO_ID` fills them up."""
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
        likeliest = sorted(finite, key=lambda each: (-each[1], each[0]))[: self.options.top_k]
        return likeliest + [(NO_ID, 0.0)] * (self.options.top_k - len(likeliest))

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.server.name} {what}")
