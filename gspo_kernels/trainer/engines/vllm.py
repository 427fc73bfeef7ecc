"""Completions by vLLM: what is asked for one of them, and what an answer must be to be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.rollout import Completion, Sampling, SamplingMask, seeds_of

_PROBED = 8
"""Tokens that show which distribution log-probs are taken from."""
_TIED = 8
"""Equally likely tokens of which none is the single most likely one: a few, as logits have few bits."""


class Answer(NamedTuple):
    """One completion as vLLM gives it."""

    tokens: list[int]  # with the token that ended it
    logprobs: list[float] | None  # of these tokens, in nats
    reason: str | None  # why it ended: "stop" or "length"
    mask: list[list[int]] | None = None  # ids that each token could have been drawn as


class Service(Protocol):
    """A vLLM that answers.

    Attributes:
        name: what it is called in messages.
    """

    name: str

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], *, masks: bool = False
    ) -> list[Answer]:
        """Complete each prompt under its own options, which are fields of vLLM's ``SamplingParams``.

        With ``masks`` the answers say what could have been drawn.
        """
        ...

    def reload(self, path: Path) -> None:
        """Take the weights of a directory that ``from_pretrained`` could load, and forget cached prefixes."""
        ...


@dataclass
class VLLMEngine:
    """Samples by a vLLM service, whose weights `weights.WeightTransfer` keeps those of the policy.

    Every option that shapes the distribution is stated in every request, because vLLM takes those that are
    missing from the served model's generation config. A seed gives a completion random numbers of its own;
    vLLM's kernels round by the batch, so a token may still depend on what else is sampled.

    Attributes:
        service: who answers.
        end_ids: tokens that end a completion, and no others do.
        vocabulary: how many tokens the trained model embeds.
    """

    service: Service
    end_ids: list[int]
    vocabulary: int
    _probed: bool = field(default=False, init=False)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            EngineError: the service cannot be reached, refuses, or its answer does not fit the request.
        """
        greedy = sampling.temperature == 0.0
        own = [None] * len(prompts) if greedy else seeds_of(seeds, len(prompts))
        if not (greedy or self._probed or _is_plain(sampling)):
            self._require_the_distribution_that_is_drawn_from(prompts[0], sampling.max_new_tokens)
        masked = sampling.return_mask and not greedy
        options = [self._options(sampling, seed) for seed in own]
        answers = self.service.complete(prompts, options, masks=masked)
        for answer in answers:
            self._check(answer, sampling.max_new_tokens, with_logprobs=not greedy, with_mask=masked)
        return [
            Completion(
                torch.tensor(answer.tokens),
                answer.tokens[-1] in self.end_ids,
                None if greedy else torch.tensor(answer.logprobs),
                mask=SamplingMask.of(answer.mask or ()) if masked else None,
            )
            for answer in answers
        ]

    def _options(self, sampling: Sampling, seed: int | None) -> dict[str, Any]:
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # what the served model calls its end may be another token
        }
        if seed is None:
            return options | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        # vLLM's seeds have 64 bits with a sign; 0: no log-probs but the sampled token's.
        return options | {"seed": seed % 2**63, "logprobs": 0}

    def _require_the_distribution_that_is_drawn_from(self, prompt: list[int], longest: int) -> None:
        """Refuse log-probs that are taken before temperature, top-k and top-p.

        Among the one most likely token its probability is 1, or 1 / n where n are equally likely. Before
        top-k it is so only of a policy that is sure of every token, where the difference is nothing.
        """
        length = min(longest, _PROBED)
        (answer,) = self.service.complete([prompt], [self._options(Sampling(length, top_k=1), seed=0)])
        self._check(answer, length, with_logprobs=True)
        possible = [-math.log(n) for n in range(1, _TIED + 1)]
        if any(min(abs(value - one) for one in possible) > 1e-5 for value in answer.logprobs or ()):
            raise self._error(
                "takes log-probs before temperature, top-k and top-p; start vLLM with --logprobs-mode "
                "processed_logprobs, or sample with temperature 1 and without top-k and top-p"
            )
        self._probed = True

    def _check(self, answer: Answer, longest: int, *, with_logprobs: bool, with_mask: bool = False) -> None:
        tokens, logprobs, reason, mask = answer
        if not tokens or reason not in ("stop", "length"):
            raise self._error(f"ended a completion after {len(tokens)} tokens for the reason {reason!r}")
        strange = [token for token in tokens if not 0 <= token < self.vocabulary]
        if strange:
            raise self._error(
                f"sampled token {strange[0]}, and the trained model embeds {self.vocabulary}: it serves "
                "another model"
            )
        ends = [place for place, token in enumerate(tokens) if token in self.end_ids]
        if ends not in ([], [len(tokens) - 1]) or (reason == "stop" and not ends):
            raise self._error(
                f"ended a completion at token {tokens[-1]}, where {self.end_ids} were asked to end it"
            )
        if len(tokens) > longest:
            raise self._error(f"sampled {len(tokens)} tokens, where {longest} were asked for")
        if not ends and len(tokens) < longest:
            raise self._error(
                f"ended a completion after {len(tokens)} of {longest} tokens; its --max-model-len must hold "
                "the longest prompt and rollout.max_new_tokens"
            )
        if with_logprobs:
            if logprobs is None or len(logprobs) != len(tokens):
                count = "none" if logprobs is None else len(logprobs)
                raise self._error(f"gave {count} log-probs for {len(tokens)} tokens")
            if not all(map(math.isfinite, logprobs)):
                raise self._error("gave log-probs that are not finite: the model's logits are not")

        if with_mask:
            if mask is None:
                raise self._error(
                    "gave no sampling mask; start vLLM (0.28 or later) with --return-sampling-mask, or leave "
                    "rollout.keep_sampling_mask alone"
                )
            if len(mask) != len(tokens) or any(t not in kept for t, kept in zip(tokens, mask, strict=True)):
                raise self._error("gave a sampling mask that does not hold the tokens that it sampled")

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.service.name} {what}")


def _is_plain(sampling: Sampling) -> bool:
    """Whether the distribution is the model's own, so that it is the same before and after all options."""
    return sampling.temperature == 1.0 and not sampling.cuts
