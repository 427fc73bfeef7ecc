"""The plain rollout: every prompt is completed several times, and its completions are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import PromptOrder, Prompts
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.recipes.dapo import OVERLONG, chosen, groups_of, penalised
from gspo_kernels.trainer.recipes.samples import Sampler, Samples, Stages, experience_of, joined, metrics_of
from gspo_kernels.trainer.rewards.comparing import advantages_of, differing, levels
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.metrics import finite
from gspo_kernels.trainer.updates import PolicyUpdater

Metrics = dict[str, float]


@dataclass
class Recipe:
    """What a step learns from, and how: the plain one, which others change in parts.

    A `ConfigError` says that ``dapo.metric`` names no reward, or a reward has the name of DAPO's penalty.
    """

    config: TrainConfig
    sampler: Sampler
    updater: PolicyUpdater
    prompts: Prompts
    encode: Callable[[Sequence[Any]], list[list[int]]]  # prompts, text or conversations, into token ids
    longest: int | None  # tokens that a prompt may have beside its completion; None: any number
    last: Samples | None = None  # of the last step, where it sampled

    def __post_init__(self) -> None:
        self.sampling = self.config.rollout.sampling()
        self.order = PromptOrder(len(self.prompts.tokens), self.config.seed)
        self.resampled = 0  # prompts that dynamic sampling took beyond those of every rollout
        names, dapo = self.sampler.rewards.names, self.config.dapo
        if dapo.metric is not None and dapo.metric not in names:
            raise ConfigError(f"dapo.metric: no reward {dapo.metric!r}; there are {', '.join(names)}")
        if dapo.overlong_buffer > 0 and OVERLONG in names:
            raise ConfigError(
                f"dapo.overlong_buffer: the penalty is a reward {OVERLONG!r}, and there is one of that name"
            )

    def experience(self, step: int) -> tuple[Experience, Metrics]:
        """Sample, score and compare: return what the update of this step, from 1, learns from."""
        samples, metrics = self.sampled(step, step - 1)
        return self.compared(samples), metrics

    def update(self, experience: Experience, step: int) -> Metrics:
        """Learn from it."""
        return self.updater.update(experience, step)

    def sampled(self, step: int, earlier: int) -> tuple[Samples, Metrics]:
        """Complete and score the prompts that come after those of so many earlier rollouts.

        With dynamic sampling further ones until enough groups have rewards that differ. Rewards are compared,
        and shown in the metrics, before the penalty on length shapes them.
        """
        run, dapo = self.config.rollout, self.config.dapo
        count, size = run.prompts_per_rollout, run.group_size
        start, differs = earlier * count + self.resampled, torch.zeros(0, dtype=torch.bool)
        stages = self.sampler.stages(step)
        batches: list[tuple[Samples, Metrics]] = []
        while len(batches) < dapo.batches and int(differs.sum()) < count:
            batches.append(self.rollout(self.order.indices(start + len(batches) * count, count), stages))
            rewards = batches[-1][0].rewards
            compared = rewards.total if dapo.metric is None else rewards.by_name[dapo.metric]
            differs = torch.cat([differs, differing(compared, size)])
        self.resampled += (len(batches) - 1) * count
        samples = joined([samples for samples, _ in batches])
        metrics = metrics_of(samples, size) | means([metrics for _, metrics in batches])
        if dapo.batches > 1:
            samples = groups_of(samples, chosen(differs, count), size)
            metrics["dapo/batches"] = float(len(batches))
            metrics["dapo/groups_that_differ"] = min(int(differs.sum()), count) / count
        if dapo.overlong_buffer > 0:
            samples = penalised(samples, run.max_new_tokens, dapo.overlong_buffer, dapo.overlong_penalty)
            metrics[f"reward/{OVERLONG}"] = float(samples.rewards.by_name[OVERLONG].nanmean())
        self.last = samples
        return samples, metrics

    def compared(self, samples: Samples) -> Experience:
        """Compare the completions of each group."""
        config, size = self.config, self.config.rollout.group_size
        kind = self.updater.objective.advantages_are
        if kind == "rewards":
            advantages = samples.rewards.total
        elif kind == "levels":
            advantages = levels(samples.rewards.total, size)
        else:
            advantages = advantages_of(
                samples.rewards,
                group_size=size,
                method=config.advantages,
                scale=config.advantage_scale,
                lengths=torch.tensor([int(sample.counted.sum()) for sample in samples.each]),
            )
        return experience_of(samples, size, advantages, self.sampler.accelerator.device)

    def rollout(self, picked: Sequence[int], stages: Stages) -> tuple[Samples, Metrics]:
        """Return groups of ``rollout.group_size`` completions for the update, and metrics of its own."""
        return self.sampler(self.prompts, picked, self.config.rollout.group_size, self.sampling, stages), {}

    def evaluate(self, prompts: Prompts, sampling: Sampling) -> tuple[Samples, Metrics]:
        """Return one completion of every prompt as it is, and metrics of its own."""
        rows, stages = range(len(prompts.tokens)), self.sampler.stages(0)
        return self.sampler(prompts, rows, 1, sampling, stages), {}

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves room for its completion in the context."""
        return self.longest is None or len(tokens) <= self.longest

    @property
    def shown(self) -> list[tuple[Any, str, float]]:
        """Completions of the last step to show: prompt, completion, reward."""
        if self.last is None:
            return []
        found, rows, decode = [], self.prompts.rows, self.sampler.tokenizer.decode
        pairs = list(zip(self.last.each, self.last.rewards.total.tolist(), strict=True))
        for sample, reward in pairs[max(len(pairs) - self.config.show_samples, 0) :]:
            plain = sample.prompt == self.prompts.tokens[sample.row]  # and not what a recipe made of it
            prompt = rows[sample.row]["prompt"] if plain else decode(sample.prompt)
            found.append((prompt, sample.text, reward))
        return found

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield what is worth keeping of every completion of the last step, as JSON takes it."""
        if self.last is None:
            return
        rewards = self.last.rewards
        for index, sample in enumerate(self.last.each):
            logprobs, mask = sample.completion.logprobs, sample.completion.mask
            yield {
                "row": sample.row,
                "prompt": self.sampler.tokenizer.decode(sample.prompt),
                "completion": sample.text,
                **finite({"reward": rewards.total[index].item()}),
                "rewards": finite({name: values[index].item() for name, values in rewards.by_name.items()}),
                "token_ids": sample.ids.tolist(),
                "logprobs": None if logprobs is None else logprobs.tolist(),
                "sampling_mask": None if mask is None else mask.to_lists(),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the recipe."""
        return {"resampled": self.resampled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.resampled = state["resampled"]


def means(metrics: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric; NaN is left out."""
    return {
        name: float(torch.tensor([each[name] for each in metrics], dtype=torch.float64).nanmean())
        for name in metrics[0]
    }
