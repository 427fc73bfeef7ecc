"""Completions by vLLM: what is asked for one of them, and what an answer must be to be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gspo_kernels.trainer.engines.server import Answer, VLLMServer
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.rollout import Completion, Sampling, SamplingMask, seeds_of

_PROBED = 8
"""Tokens that show which distribution log-probs are taken from."""
_TIED = 8
"""Equally likely tokens of which none is the single most likely one: a few, as logits have few bits."""


@dataclass
class VLLMEngine:
    """Samples by a vLLM server, whose weights `weights.WeightTransfer` keeps those of the policy.

    Every option that shapes the distribution is stated in every request, because vLLM takes those that are
    missing from the served model's generation config. A seed gives a completion random numbers of its own;
    vLLM's kernels round by the batch, so a token may still depend on what else is sampled.

    Attributes:
        server: who answers.
        end_ids: tokens that end a completion, and no others do.
        vocabulary: how many tokens the trained model embeds.
    """

    server: VLLMServer
    end_ids: list[int]
    vocabulary: int
    _probed: bool = field(default=False, init=False)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            EngineError: the server cannot be reached, refuses, or its answer does not fit the request.
        """
        greedy = sampling.temperature == 0.0
        if greedy:  # what the others cut off is never the most likely token
            sampling = Sampling(sampling.max_new_tokens, temperature=0.0)
        own = [None] * len(prompts) if greedy else seeds_of(seeds, len(prompts))
        # The model's own distribution is the same before and after all options.
        plain = sampling.temperature == 1.0 and not sampling.cuts
        if not (greedy or plain or self._probed):
            self._require_the_distribution_that_is_drawn_from(prompts[0], sampling.max_new_tokens)
        return self._sampled(prompts, sampling, own)

    def _sampled(
        self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int | None]
    ) -> list[Completion]:
        options: dict[str, Any] = {
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
        # vLLM's seeds have 64 bits with a sign; 0: no log-probs but the sampled token's.
        each = [options if s is None else options | {"seed": s % 2**63, "logprobs": 0} for s in seeds]
        answers = self.server.complete(prompts, each, masks=sampling.return_mask)
        return [self._completion(answer, sampling) for answer in answers]

    def _require_the_distribution_that_is_drawn_from(self, prompt: list[int], longest: int) -> None:
        """Refuse log-probs that are taken before temperature, top-k and top-p.

        Among the one most likely token its probability is 1, or 1 / n where n are equally likely. Before
        top-k it is so only of a policy that is sure of every token, where the difference is nothing.
        """
        (found,) = self._sampled([prompt], Sampling(min(longest, _PROBED), top_k=1), [0])
        assert found.logprobs is not None
        possible = torch.tensor([-math.log(n) for n in range(1, _TIED + 1)])
        if bool(((found.logprobs.unsqueeze(1) - possible).abs().amin(1) > 1e-5).any()):
            raise self._error(
                "takes log-probs before temperature, top-k and top-p; start vLLM with --logprobs-mode "
                "processed_logprobs, or sample with temperature 1 and without top-k and top-p"
            )
        self._probed = True

    def _completion(self, answer: Answer, sampling: Sampling) -> Completion:
        """Return what an answer holds, or raise an `EngineError` that says why it cannot be trained on."""
        tokens, logprobs, reason, mask = answer
        longest, greedy = sampling.max_new_tokens, sampling.temperature == 0.0
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
        if not greedy:
            if logprobs is None or len(logprobs) != len(tokens):
                count = "none" if logprobs is None else len(logprobs)
                raise self._error(f"gave {count} log-probs for {len(tokens)} tokens")
            if not all(map(math.isfinite, logprobs)):
                raise self._error("gave log-probs that are not finite: the model's logits are not")
        if sampling.return_mask:
            if mask is None:
                raise self._error(
                    "gave no sampling mask; start vLLM (0.28 or later) with --return-sampling-mask, or leave "
                    "rollout.keep_sampling_mask alone"
                )
            if len(mask) != len(tokens) or any(t not in kept for t, kept in zip(tokens, mask, strict=True)):
                raise self._error("gave a sampling mask that does not hold the tokens that it sampled")
        return Completion(
            torch.tensor(tokens),
            bool(ends),
            None if greedy else torch.tensor(logprobs),
            mask=SamplingMask.of(mask or ()) if sampling.return_mask else None,
        )

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.server.name} {what}")
