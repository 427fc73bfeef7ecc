"""Completions with their rewards, sampled by all processes together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gspo_kernels.trainer.data import Prompts, columns_of
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.rewards import Rewards, RewardSet
from gspo_kernels.trainer.rewards.comparing import differing
from gspo_kernels.trainer.rollout import Completion, RolloutEngine, Sampling
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.processes import in_shares

Stages = Iterator[np.random.SeedSequence]


@dataclass(frozen=True)
class Sample:
    """A completion of C tokens, and what it completes."""

    row: int  # of the data
    prompt: list[int]  # what it completes
    text: str  # what the reward functions saw
    completion: Completion
    counted: Tensor  # [C] bool, tokens that a loss may count

    @property
    def ids(self) -> Tensor:
        """[C], with the end token if there is one."""
        return self.completion.ids


class Samples(NamedTuple):
    """B completions and their rewards; the completions of a group are consecutive."""

    each: list[Sample]
    rewards: Rewards


def joined(parts: Sequence[Samples]) -> Samples:
    """Put samples one after the other; at least one part."""
    rewards = Rewards.joined([part.rewards for part in parts])
    return Samples([sample for part in parts for sample in part.each], rewards)


@dataclass
class Sampler:
    """Completes prompts and scores the completions; each process does its share and gets all of them.

    Where the engine needs several processes ``together``, they complete the same prompts alike.
    """

    accelerator: Any
    weights: Callable[[], AbstractContextManager[None]]  # inside, the engine has those of the policy
    engine: RolloutEngine
    tokenizer: Any
    rewards: RewardSet
    truncated: str  # as in `Completion.counted`
    seed: int
    together: int = 1

    def stages(self, step: int) -> Stages:
        """Yield random numbers for each time that a step, 0 for evaluations, samples.

        They come from the run's seed, the step and the stage, so they are the same in any number of processes
        and after a restart.
        """
        return (np.random.SeedSequence([self.seed, step, stage]) for stage in itertools.count())

    @torch.no_grad()
    def __call__(
        self,
        prompts: Prompts,
        picked: Sequence[int],
        group_size: int,
        sampling: Sampling,
        stages: Stages,
        tokens: Sequence[list[int]] | None = None,
    ) -> Samples:
        """Complete each of the picked prompts ``group_size`` times, with random numbers of the next stage.

        ``tokens`` are completed in place of the prompts; rewards see these all the same.
        """
        if tokens is None:
            tokens = [prompts.tokens[row] for row in picked]
        seeds = next(stages).generate_state(len(picked) * group_size, np.uint64).reshape(-1, group_size)

        def completed(own: list[int]) -> list[Sample]:
            rows = [picked[place] for place in own for _ in range(group_size)]
            given = [tokens[place] for place in own for _ in range(group_size)]
            found = self.engine.generate(given, sampling, seeds=seeds[own].flatten().tolist())
            if sampling.return_mask and any(each.mask is None for each in found):
                raise EngineError(
                    f"rollout.keep_sampling_mask: {type(self.engine).__name__} does not say what it could "
                    "have drawn; its completions must come with a mask"
                )
            ids = [each.ids.tolist() for each in found]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            counted = [each.counted(self.truncated) for each in found]
            return [Sample(*each) for each in zip(rows, given, texts, found, counted, strict=True)]

        with self.weights(), self.accelerator.autocast():
            parts = in_shares(self.accelerator, len(picked), completed, self.together)
        samples = [sample for part in parts for sample in part]
        return Samples(samples, self.score(self.rewards, prompts, samples, group_size))

    def score(
        self, rewards: RewardSet, prompts: Prompts, samples: Sequence[Sample], group_size: int
    ) -> Rewards:
        """Call reward functions on completions, with their prompts and columns as the dataset has them.

        Each process asks for its share of the groups, and gets all.
        """

        def share(groups: list[int]) -> Rewards:
            own = samples[groups[0] * group_size : (groups[-1] + 1) * group_size]
            data = [prompts.rows[sample.row] for sample in own]
            texts, ids = [sample.text for sample in own], [sample.ids.tolist() for sample in own]
            return rewards([row["prompt"] for row in data], texts, ids, columns_of(data, prompts.columns))

        return Rewards.joined(in_shares(self.accelerator, len(samples) // group_size, share))


def experience_of(samples: Samples, group_size: int, advantages: Tensor, device: torch.device) -> Experience:
    """Return what the update takes; completions without a reward or an advantage do not count in it."""
    applies = (~samples.rewards.total.isnan()).tolist()
    completions = [sample.completion for sample in samples.each]

    def packed(name: str) -> Tensor | None:
        values = [getattr(completion, name) for completion in completions]
        return None if any(value is None for value in values) else torch.cat(values).to(device)

    masks = [completion.mask for completion in completions]
    counted = [sample.counted & known for sample, known in zip(samples.each, applies, strict=True)]
    return Experience(
        prompts=[torch.tensor(sample.prompt, device=device) for sample in samples.each],
        completions=[completion.ids.to(device) for completion in completions],
        advantages=advantages.nan_to_num(0.0).to(device),
        loss_mask=torch.cat(counted).to(device),
        group_ids=torch.arange(len(samples.each), device=device) // group_size,
        rollout_logprobs=packed("logprobs"),
        turn_ids=packed("turn_ids"),
        masks=None if None in masks else [mask.to(device) for mask in masks if mask is not None],
    )


def metrics_of(samples: Samples, group_size: int) -> dict[str, float]:
    """Return what a rollout says of itself: rewards, lengths, and groups that nothing can be learned from."""
    rewards, count = samples.rewards, len(samples.each)
    return {
        "reward/mean": float(rewards.total.nanmean()),
        **{f"reward/{name}": float(values.nanmean()) for name, values in rewards.by_name.items()},
        "groups_without_variance": float((~differing(rewards.total, group_size)).float().mean()),
        "completions/length": sum(len(sample.ids) for sample in samples.each) / count,
        "completions/finished": sum(sample.completion.finished for sample in samples.each) / count,
    }
