"""Completions with their rewards, sampled by all processes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    rewards = [part.rewards for part in parts]
    by_name = {name: torch.cat([r.by_name[name] for r in rewards]) for name in rewards[0].by_name}
    total = torch.cat([r.total for r in rewards])
    return Samples(
        [sample for part in parts for sample in part.each], Rewards(total, by_name, rewards[0].weights)
    )


@dataclass
class Sampler:
    """Completes prompts and scores the completions; each process does its share and gets all of them.

    Where the engine needs several processes ``together``, they complete the same prompts alike, and score
    other ones.
    """

    accelerator: Any
    weights: Callable[[], AbstractContextManager[None]]  # inside, the engine has those of the policy
    engine: RolloutEngine
    tokenizer: Any
    rewards: RewardSet
    truncated: str  # as in `Completion.counted`
    seed: int
    together: int = 1

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

        A completion's random numbers come from the run's seed, the step (0 for evaluations), the stage of a
        step that samples several times, and its place, so they are the same in any number of processes and
        after a restart. ``tokens`` are completed in place of the prompts; rewards see these all the same.
        """
        if tokens is None:
            tokens = [prompts.tokens[row] for row in picked]
        places = np.random.SeedSequence([self.seed, step, stage])
        seeds = places.generate_state(len(picked) * group_size, np.uint64).reshape(-1, group_size)

        def completed(own: Sequence[int]) -> list[Sample]:
            rows = [picked[place] for place in own for _ in range(group_size)]
            given = [tokens[place] for place in own for _ in range(group_size)]
            found = self.engine.generate(given, sampling, seeds=seeds[list(own)].flatten().tolist())
            if sampling.return_mask and any(each.mask is None for each in found):
                raise EngineError(
                    f"rollout.keep_sampling_mask: {type(self.engine).__name__} does not say what it could "
                    "have drawn; its completions must come with a mask"
                )
            ids = [each.ids.tolist() for each in found]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            counted = [each.counted(self.truncated) for each in found]
            return [Sample(*each) for each in zip(rows, given, texts, found, counted, strict=True)]

        def scored(samples: list[Sample]) -> Samples:
            return Samples(samples, score(self.rewards, prompts, samples))

        with self.weights(), self.accelerator.autocast():
            if self.together == 1:
                shares = in_shares(self.accelerator, len(picked), lambda own: scored(completed(own)))
                return joined(shares)
            parts = in_shares(self.accelerator, len(picked), completed, self.together)
        every = [sample for part in parts for sample in part]

        def share(own: list[int]) -> Samples:
            return scored(every[own[0] * group_size : (own[-1] + 1) * group_size])

        return joined(in_shares(self.accelerator, len(picked), share))


def score(rewards: RewardSet, prompts: Prompts, samples: Sequence[Sample]) -> Rewards:
    """Call reward functions on completions, with their prompts and columns as the dataset has them."""
    data = [prompts.rows[sample.row] for sample in samples]
    return rewards(
        [row["prompt"] for row in data],
        [sample.text for sample in samples],
        [sample.ids.tolist() for sample in samples],
        columns_of(data, prompts.columns),
    )


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
    means = {f"reward/{name}": float(values.nanmean()) for name, values in rewards.by_name.items()}
    return {
        "reward/mean": float(rewards.total.nanmean()),
        **means,
        "groups_without_variance": float((~differing(rewards.total, group_size)).float().mean()),
        "completions/length": sum(len(sample.ids) for sample in samples.each) / count,
        "completions/finished": sum(sample.completion.finished for sample in samples.each) / count,
    }
