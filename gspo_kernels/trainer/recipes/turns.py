"""Groups by turn, after TL-GRPO (arXiv 2601.16480): several tries at a task, with feedback between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.trainer.data import Prompts, columns_of
from gspo_kernels.trainer.input_errors import ConfigError, RewardError
from gspo_kernels.trainer.recipes.plain import Metrics, Recipe
from gspo_kernels.trainer.recipes.samples import Samples, Stages, joined
from gspo_kernels.trainer.rewards.calls import TEXTS, ListFunction
from gspo_kernels.trainer.rewards.comparing import best_of
from gspo_kernels.trainer.rewards.loading import name_of
from gspo_kernels.trainer.rewards.reward_set import load_reward
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.run.processes import in_shares


class Turn(NamedTuple):
    """One turn of some trajectories."""

    places: list[int]  # which trajectories came to this turn
    samples: Samples  # their candidates, a group for each of them
    kept: Tensor  # [places] int64, which of the samples the trajectories go on with


@dataclass
class Turns(Recipe):
    """In every turn ``rollout.group_size`` candidates of one history are compared with each other.

    One of them stays in the history, followed by what the feedback function says:
    ``f(prompts, completions, rewards, **columns) -> list[str]``, with prompts and columns as the dataset has
    them, the completions that were kept, and their weighted rewards (None where none applies). A trajectory
    ends early where its history leaves no room in the context.

    Raises:
        ConfigError, RewardError: the feedback function cannot be found, or called with the columns.
        DataError: the chat template does not take a further turn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.prompts.columns
        try:
            function = load_reward(str(self.config.turns.feedback), own_process=self.config.reward_process)
        except RewardError as error:
            raise ConfigError(f"turns.feedback, which is loaded as rewards are: {error}") from error
        self.feedback = ListFunction(f"feedback function {name_of(function)}", function, TEXTS)
        if self.feedback.is_async:
            raise RewardError(f"{self.feedback.what} is async; the feedback must be a plain function")
        if "rewards" in columns:
            raise RewardError(
                f"{self.feedback.what}: a column must not be called 'rewards', which it gets beside them"
            )
        self.feedback.check(("prompts", "completions", "rewards"), columns)
        prompts = (row["prompt"] for row in self.prompts.rows)
        conversation = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if conversation is not None:
            self.encode([continued(conversation, "an answer", "feedback")])

    def rollout(self, picked: Sequence[int], stages: Stages) -> tuple[Samples, Metrics]:
        """Return the groups of all prompts' first turns, then of their second ones, and so on."""
        turns = self._turns(self.prompts, picked, self.config.rollout.group_size, self.sampling, stages)
        metrics = {f"reward/turn_{number}": math.nan for number in range(1, self.config.turns.count + 1)}
        for number, turn in enumerate(turns, start=1):
            metrics[f"reward/turn_{number}"] = float(turn.samples.rewards.total.nanmean())
        metrics["reward/best_turn"] = best_turns(turns, len(picked))
        finished = len(turns[-1].places) if len(turns) == self.config.turns.count else 0
        metrics["turns/ended_early"] = 1 - finished / len(picked)
        return joined([turn.samples for turn in turns]), metrics

    def evaluate(self, prompts: Prompts, sampling: Sampling) -> tuple[Samples, Metrics]:
        """Return the first turn, and the mean over prompts of each reward's best turn."""
        count = len(prompts.tokens)
        turns = self._turns(prompts, range(count), 1, sampling, self.sampler.stages(0))
        names = self.sampler.rewards.names
        return turns[0].samples, {f"best_turn/{name}": best_turns(turns, count, name) for name in names}

    def _turns(
        self, prompts: Prompts, picked: Sequence[int], group_size: int, sampling: Sampling, stages: Stages
    ) -> list[Turn]:
        histories = {place: prompts.rows[row]["prompt"] for place, row in enumerate(picked)}
        tokens = {place: prompts.tokens[row] for place, row in enumerate(picked)}
        turns: list[Turn] = []
        for _ in range(self.config.turns.count):
            if turns:
                histories = self._observe(prompts, histories, turns[-1])
                encoded = zip(histories, self.encode(list(histories.values())), strict=True)
                tokens = {place: ids for place, ids in encoded if self.fits(ids)}
            if not tokens:
                break
            rows, given = [picked[place] for place in tokens], list(tokens.values())
            samples = self.sampler(prompts, rows, group_size, sampling, stages, given)
            kept, _ = best_of(samples.rewards.total, group_size)
            if self.config.turns.keep == "first":
                kept -= kept % group_size
            turns.append(Turn(list(tokens), samples, kept))
        return turns

    def _observe(self, prompts: Prompts, histories: Mapping[int, Any], turn: Turn) -> dict[int, Any]:
        """Return the histories after a turn; each process asks for the feedback of its share."""
        kept = [turn.samples.each[index] for index in turn.kept.tolist()]
        rewards = [None if math.isnan(r) else r for r in turn.samples.rewards.total[turn.kept].tolist()]

        def share(own: list[int]) -> list[str]:
            rows = [prompts.rows[kept[i].row] for i in own]
            arguments = {
                "prompts": [row["prompt"] for row in rows],
                "completions": [kept[i].text for i in own],
                "rewards": [rewards[i] for i in own],
            }
            columns = columns_of(rows, prompts.columns)
            return self.feedback.begin({**arguments, **columns}, self.config.reward_timeout)()

        parts = in_shares(self.sampler.accelerator, len(kept), share)
        observations = [text for part in parts for text in part]
        return {
            place: continued(histories[place], sample.text, observation)
            for place, sample, observation in zip(turn.places, kept, observations, strict=True)
        }


def best_turns(turns: Sequence[Turn], count: int, name: str | None = None) -> float:
    """Return the mean over ``count`` trajectories of the best reward that a kept candidate has.

    Of the reward with that name, or of the weighted sum; NaN where no reward applies at all.
    """
    table = torch.full((len(turns), count), -torch.inf)
    for row, turn in zip(table, turns, strict=True):
        rewards = turn.samples.rewards
        values = rewards.total if name is None else rewards.by_name[name]
        row[turn.places] = values[turn.kept].nan_to_num(-torch.inf)
    best = table.amax(0)
    return float(best[best.isfinite()].mean())


def continued(prompt: Any, completion: str, observation: str) -> Any:
    """Return a history with one more turn: longer text, or further messages of the assistant and the user."""
    if isinstance(prompt, str):
        return prompt + completion + observation
    before, answer = prompt, {"role": "assistant", "content": completion}
    if prompt[-1]["role"] == "assistant":  # an answer that had begun
        before, answer = prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + completion}
    return [*before, answer, {"role": "user", "content": observation}]
