"""DAPO (arXiv 2503.14476): groups that something can be learned from, and a soft penalty on length.

    python -m examples.recipes.dapo config.yaml --recipe.batches 3 --recipe.overlong_buffer 64

**Dynamic sampling.** A group whose rewards are all equal has no gradient. So batches of
``rollout.prompts_per_rollout`` prompts are sampled until that many groups have differing rewards, at most
``recipe.batches`` batches. The first of these groups are trained on. If they are too few, the first other
groups fill the rollout up, so that its size never changes. The next rollout starts after the last sampled
prompt. The paper samples until the batch is full, however long that takes.

**The soft penalty.** A completion loses nothing up to ``rollout.max_new_tokens - recipe.overlong_buffer``
tokens, then linearly more, up to ``recipe.overlong_penalty`` at ``max_new_tokens``. The penalty is a separate
reward, ``overlong``. Groups are compared before it. The paper's hard form is ``rollout.truncated: mask``.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor

from gspo_kernels.cli import run
from gspo_kernels.trainer.config import InputError, Section, TrainConfig, option
from gspo_kernels.trainer.loop import GSPOTrainer
from gspo_kernels.trainer.rewards import Rewards, differing
from gspo_kernels.trainer.rollout import Rollout, rollout_metrics

OVERLONG = "overlong"
"""The penalty's name among the rewards."""


class Options(Section):
    """Options of DAPO."""

    batches: int = option(3, "most batches of prompts that a rollout samples; 1: no dynamic sampling", ge=1)
    metric: str | None = option(None, "reward that must differ within a group; else the weighted sum")
    overlong_buffer: int = option(0, "last tokens over which the reward falls linearly; 0: no penalty", ge=0)
    overlong_penalty: float = option(1.0, "what a completion of rollout.max_new_tokens loses", gt=0)

    @model_validator(mode="after")
    def _check(self) -> Options:
        self.require(
            self.metric is None or self.batches > 1, "batches", "above 1 where there is a recipe.metric"
        )
        return self


class Config(TrainConfig):
    """A run of DAPO."""

    recipe: Options = Options()

    @model_validator(mode="after")
    def _check_buffer(self) -> Config:
        room, buffer = self.rollout.max_new_tokens, self.recipe.overlong_buffer
        if buffer == 0:
            self.require_defaults(["recipe.overlong_penalty"], "without recipe.overlong_buffer")
        if buffer > room:
            raise ValueError(
                f"recipe.overlong_buffer must be at most rollout.max_new_tokens ({room}), got {buffer}"
            )
        return self


class DAPO(GSPOTrainer):
    """A trainer that samples until enough groups differ; an unknown ``recipe.metric`` is an `InputError`."""

    config: Config

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        names, recipe = self.rewards.names, self.config.recipe
        if recipe.metric is not None and recipe.metric not in names:
            raise InputError(f"recipe.metric: no reward {recipe.metric!r}; there are {', '.join(names)}")
        if recipe.overlong_buffer > 0 and OVERLONG in names:
            raise InputError(f"recipe.overlong_buffer: the penalty is a reward {OVERLONG!r}; rename yours")

    def rollout(self) -> Rollout:
        """Sample, choose groups and shape their rewards.

        ``reward/mean`` and ``groups_without_variance`` cover all sampled groups, before the penalty.
        """
        recipe, size = self.config.recipe, self.config.rollout.group_size
        count = self.config.rollout.prompts_per_rollout
        batches: list[Rollout] = []
        differs = torch.zeros(0, dtype=torch.bool)
        while len(batches) < recipe.batches and int(differs.sum()) < count:
            batches.append(super().rollout())
            rewards = batches[-1].rewards
            compared = rewards.total if recipe.metric is None else rewards.by_name[recipe.metric]
            differs = torch.cat([differs, differing(compared, size)])
        samples = [sample for batch in batches for sample in batch.samples]
        whole = Rollout(samples, Rewards.concatenate([batch.rewards for batch in batches]), size)
        metrics = rollout_metrics(whole) | {
            "dapo/batches": float(len(batches)),
            "dapo/groups_that_differ": min(int(differs.sum()), count) / count,
        }
        rollout = groups_of(whole, chosen_groups(differs, count))
        if recipe.overlong_buffer > 0:
            longest = self.config.rollout.max_new_tokens
            rollout = penalized(rollout, longest, recipe.overlong_buffer, recipe.overlong_penalty)
            metrics[f"reward/{OVERLONG}"] = float(rollout.rewards.by_name[OVERLONG].nanmean())
        return rollout._replace(metrics=metrics)


def chosen_groups(differs: Tensor, count: int) -> list[int]:
    """Return ``count`` groups, ascending: the first that differ; if these are too few, the first others."""
    order = torch.sort(differs.to(torch.int8), descending=True, stable=True).indices[:count]
    return sorted(order.tolist())


def groups_of(rollout: Rollout, groups: list[int]) -> Rollout:
    """Return these groups of a rollout."""
    size, rewards = rollout.group_size, rollout.rewards
    rows = [group * size + place for group in groups for place in range(size)]
    by_name = {name: values[rows] for name, values in rewards.by_name.items()}
    taken = Rewards(rewards.total[rows], by_name, rewards.weights)
    return Rollout([rollout.samples[row] for row in rows], taken, size)


def penalized(rollout: Rollout, longest: int, buffer: int, penalty: float) -> Rollout:
    """Add the paper's soft overlong punishment, in the form that verl has, as a reward.

    It is 0 up to ``longest - buffer`` tokens, falls linearly to -1 at ``longest``, and has the weight
    ``penalty``. A completion without a reward has no penalty either.
    """
    rewards = rollout.rewards
    lengths = torch.tensor([len(sample.ids) for sample in rollout.samples], dtype=torch.float32)
    value = ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
    value = torch.where(rewards.total.isnan(), torch.nan, value)
    shaped = Rewards(
        rewards.total + penalty * value,
        rewards.by_name | {OVERLONG: value},
        {**rewards.weights, OVERLONG: penalty},
    )
    return rollout._replace(rewards=shaped)


if __name__ == "__main__":
    raise SystemExit(run(DAPO, Config))
