"""Completions with their rewards, sampled by all processes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.trainer.data import Prompts, columns_of
from gspo_kernels.trainer.rewards import Rewards, RewardSet
from gspo_kernels.trainer.rollout import Completions, RolloutEngine, Sampling
from gspo_kernels.trainer.run.processes import on_all, whole_weights
from gspo_kernels.trainer.updates import Experience


@dataclass(frozen=True)
class Sample:
    """One completion, on the CPU.

    Attributes:
        row: which row of the data it belongs to.
        prompt: the token ids that it completes.
        text: what the reward functions saw.
        ids: [C] int64, with the end token if there is one.
        counted: [C] bool, tokens that a loss may count.
        finished: whether there is an end token.
        logprobs: [C] fp32, by the engine, or None.
        turn_ids: [C] int64, or None.
    """

    row: int
    prompt: list[int]
    text: str
    ids: Tensor
    counted: Tensor
    finished: bool
    logprobs: Tensor | None
    turn_ids: Tensor | None


class Samples(NamedTuple):
    """B completions and their rewards; the completions of a group are consecutive."""

    each: list[Sample]
    rewards: Rewards


def joined(parts: Sequence[Samples]) -> Samples:
    """Put samples one after the other; at least one part."""
    rewards = [part.rewards for part in parts]
    by_name = {name: torch.cat([r.by_name[name] for r in rewards]) for name in rewards[0].by_name}
    total = torch.cat([r.total for r in rewards])
    return Samples(
        [sample for part in parts for sample in part.each], Rewards(total, by_name, rewards[0].weights)
    )


def own_share(accelerator: Any, count: int) -> list[int]:
    """Return which of ``count`` things this process works on; all shares make up the whole, in order."""
    shares = np.array_split(np.arange(count), accelerator.num_processes)
    own: list[int] = shares[accelerator.process_index].tolist()
    return own


class Sampler:
    """Completes prompts and scores the completions, each process its share; every process gets all of them.

    Args:
        accelerator: accelerate's.
        policy: the prepared policy, whose weights are whole while the engine runs.
        engine: what completes prompts.
        tokenizer: turns completions into text.
        rewards: the reward functions.
        truncated: what completions without an end token do, as in `Completions.loss_mask`.
        seed: of the run.
    """

    def __init__(
        self,
        accelerator: Any,
        policy: Any,
        engine: RolloutEngine,
        tokenizer: Any,
        rewards: RewardSet,
        *,
        truncated: str,
        seed: int,
    ) -> None:
        self.accelerator = accelerator
        self.policy = policy
        self.engine = engine
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.truncated = truncated
        self.seed = seed

    @torch.no_grad()
    def __call__(
        self,
        prompts: Prompts,
        picked: Sequence[int],
        group_size: int,
        sampling: Sampling,
        step: int,
        *,
        tokens: Sequence[list[int]] | None = None,
        stage: int = 0,
    ) -> Samples:
        """Complete each of the picked prompts ``group_size`` times.

        A completion's random numbers come from the run's seed, the step, the stage and its place, so they are
        the same in any number of processes and after a restart.

        Args:
            prompts: the data.
            picked: rows of it.
            group_size: completions of each.
            sampling: how tokens are drawn.
            step: of the run; 0 for evaluations.
            tokens: what is completed in place of each picked prompt. The reward functions see the prompt of
                the data all the same.
            stage: which part of the step it is, where a step samples several times.
        """
        if tokens is None:
            tokens = [prompts.tokens[row] for row in picked]
        places = np.random.SeedSequence([self.seed, step, stage])
        seeds = places.generate_state(len(picked) * group_size, np.uint64).reshape(-1, group_size)

        def share() -> Samples:
            own = own_share(self.accelerator, len(picked))
            if not own:
                return Samples([], Rewards(torch.zeros(0), {}))
            rows = [picked[place] for place in own for _ in range(group_size)]
            given = [tokens[place] for place in own for _ in range(group_size)]
            completions = self.engine.generate(given, sampling, seeds=seeds[own].flatten().tolist())
            ids = completions.token_lists()
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            data = [prompts.rows[row] for row in rows]
            rewards = self.rewards(
                [row["prompt"] for row in data], texts, ids, columns_of(data, prompts.columns)
            )
            return Samples(_samples(rows, given, texts, completions, self.truncated), rewards)

        with whole_weights(self.accelerator, self.policy), self.accelerator.autocast():
            return joined([part for part in on_all(self.accelerator, share) if part.each])


def _samples(
    rows: list[int], prompts: list[list[int]], texts: list[str], completions: Completions, truncated: str
) -> list[Sample]:
    counted, finished = completions.loss_mask(truncated), completions.finished.tolist()
    samples = []
    for i, mask in enumerate(completions.completion_mask):
        ids, used, logprobs, turn_ids = (
            None if values is None else values[i][mask].cpu()
            for values in (completions.completion_ids, counted, completions.logprobs, completions.turn_ids)
        )
        assert ids is not None and used is not None
        samples.append(Sample(rows[i], prompts[i], texts[i], ids, used, finished[i], logprobs, turn_ids))
    return samples


def experience_of(samples: Samples, group_size: int, advantages: Tensor, device: torch.device) -> Experience:
    """Return what the update takes; completions without a reward or an advantage do not count in it."""
    applies = ~samples.rewards.total.isnan()

    def padded(name: str, filling: float) -> Tensor | None:
        values = [getattr(sample, name) for sample in samples.each]
        return None if values[0] is None else pad_sequence(values, True, filling).to(device)

    counted = padded("counted", False)
    assert counted is not None
    return Experience(
        prompts=[torch.tensor(sample.prompt, device=device) for sample in samples.each],
        completions=[sample.ids.to(device) for sample in samples.each],
        advantages=advantages.nan_to_num(0.0).to(device),
        loss_mask=counted & applies.unsqueeze(1).to(device),
        group_ids=torch.arange(len(samples.each), device=device) // group_size,
        rollout_logprobs=padded("logprobs", 0.0),
        turn_ids=padded("turn_ids", -1),
    )


def levels(rewards: Tensor, group_size: int) -> Tensor:
    """Return ranks within groups of this size, 1 for the highest reward and equal for equal ones, [B]."""
    groups = [torch.unique(-group, return_inverse=True)[1] + 1 for group in rewards.split(group_size)]
    return torch.cat(groups).to(rewards.dtype)
