"""The plain rollout: every prompt is completed several times, and its completions are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import PromptOrder, Prompts
from gspo_kernels.trainer.recipes.samples import Sample, Sampler, Samples, experience_of, metrics_of
from gspo_kernels.trainer.rewards.comparing import advantages_of, levels
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.metrics import finite
from gspo_kernels.trainer.updates import PolicyUpdater

Metrics = dict[str, float]


@dataclass
class Recipe:
    """What a step learns from, and how: the plain one, which others change in parts."""

    config: TrainConfig
    sampler: Sampler
    updater: PolicyUpdater
    prompts: Prompts
    encode: Callable[[Sequence[Any]], list[list[int]]]  # prompts, text or conversations, into token ids
    longest: int | None  # tokens that a prompt may have beside its completion; None: any number
    last: Samples | None = None  # of the last step, where it sampled

    def __post_init__(self) -> None:
        self.order = PromptOrder(len(self.prompts.tokens), self.config.seed)

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn in rollouts."""
        config = self.config.rollout
        return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)

    def experience(self, step: int) -> tuple[Experience, Metrics]:
        """Sample, score and compare: return what the update of this step, from 1, learns from."""
        samples, metrics = self.sampled(step, step - 1)
        return self.compared(samples), metrics

    def update(self, experience: Experience, step: int) -> Metrics:
        """Learn from it."""
        return self.updater.update(experience, step)

    def sampled(self, step: int, earlier: int) -> tuple[Samples, Metrics]:
        """Complete and score the prompts that come after those of so many earlier rollouts."""
        count = self.config.rollout.prompts_per_rollout
        samples, metrics = self.rollout(self.order.indices(earlier * count, count), step)
        self.last = samples
        return samples, metrics_of(samples, self.config.rollout.group_size) | metrics

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

    def rollout(self, picked: Sequence[int], step: int) -> tuple[Samples, Metrics]:
        """Return groups of ``rollout.group_size`` completions for the update, and metrics of its own."""
        return self.sampler(self.prompts, picked, self.config.rollout.group_size, self.sampling, step), {}

    def evaluate(self, prompts: Prompts, sampling: Sampling) -> tuple[Samples, Metrics]:
        """Return one completion of every prompt as it is, and metrics of its own."""
        return self.sampler(prompts, range(len(prompts.tokens)), 1, sampling, 0), {}

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves room for its completion in the context."""
        return self.longest is None or len(tokens) <= self.longest

    @property
    def shown(self) -> list[tuple[Any, str, float]]:
        """Completions of the last step to show: prompt, completion, reward."""
        each, rewards = (
            ([], torch.zeros(0)) if self.last is None else (self.last.each, self.last.rewards.total)
        )
        pairs = list(zip(each, rewards.tolist(), strict=True))
        last = pairs[max(len(pairs) - self.config.show_samples, 0) :]
        return [(self._shown_prompt(sample), sample.text, reward) for sample, reward in last]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield what is worth keeping of every completion of the last step, as JSON takes it."""
        if self.last is None:
            return
        rewards = self.last.rewards
        for index, sample in enumerate(self.last.each):
            yield {
                "row": sample.row,
                "prompt": self.sampler.tokenizer.decode(sample.prompt),
                "completion": sample.text,
                **finite({"reward": rewards.total[index].item()}),
                "rewards": finite({name: values[index].item() for name, values in rewards.by_name.items()}),
                "token_ids": sample.ids.tolist(),
                "logprobs": None if sample.logprobs is None else sample.logprobs.tolist(),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the recipe."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def _shown_prompt(self, sample: Sample) -> Any:
        """Return the prompt as the dataset has it, or what a recipe made of it."""
        if sample.prompt == self.prompts.tokens[sample.row]:
            return self.prompts.rows[sample.row]["prompt"]
        return self.sampler.tokenizer.decode(sample.prompt)
