"""Rollout recipes: how the prompts of a step become scored completions in groups.

A plain rollout completes each prompt several times. iGRPO does so with the best of earlier drafts in view.
TL-GRPO asks again after an environment's feedback, and every turn is a group of its own. What follows, the
advantages within groups and the update, is the same for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import Prompts, columns_of
from gspo_kernels.trainer.recipes.samples import Sampler, Samples, joined, own_share
from gspo_kernels.trainer.rewards.calls import OutOfTimeError, call_within, is_async
from gspo_kernels.trainer.rewards.loading import name_of, place_of
from gspo_kernels.trainer.rewards.process import ProcessReward
from gspo_kernels.trainer.rewards.reward_set import check_call, load_reward
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.run.input_errors import ConfigError, DataError, RewardError
from gspo_kernels.trainer.run.processes import on_all

Metrics = dict[str, float]


@dataclass
class Recipe:
    """A plain rollout: every prompt is completed ``rollout.group_size`` times.

    Attributes:
        config: of the run.
        sampler: completes prompts and scores the completions.
        sampling: how tokens are drawn in rollouts.
        prompts: what is trained on.
        encode: turns prompts, text or conversations, into token ids.
        longest: tokens that a prompt may have beside its completion; None for any number.
    """

    config: TrainConfig
    sampler: Sampler
    sampling: Sampling
    prompts: Prompts
    encode: Callable[[Sequence[Any]], list[list[int]]]
    longest: int | None

    def rollout(self, picked: Sequence[int], step: int) -> tuple[Samples, Metrics]:
        """Return groups of ``rollout.group_size`` completions for the update, and metrics of its own."""
        return self.sampler(self.prompts, picked, self.config.rollout.group_size, self.sampling, step), {}

    def evaluate(self, prompts: Prompts, sampling: Sampling) -> tuple[Samples, Metrics]:
        """Return one completion of every prompt as it is, and metrics of its own."""
        return self.sampler(prompts, range(len(prompts.tokens)), 1, sampling, 0), {}

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves room for its completion in the context."""
        return self.longest is None or len(tokens) <= self.longest


@dataclass
class IGRPO(Recipe):
    """iGRPO (arXiv 2602.09000): the best of several drafts goes into the prompt, refinements are trained.

    A prompt keeps its plain form where no draft has a reward, and where the draft leaves no room in the
    context.

    Raises:
        DataError: a conversation has no message of the user, which the template would fill.
    """

    def __post_init__(self) -> None:
        """Check the conversations."""
        for number, row in enumerate(self.prompts.rows, start=1):
            prompt = row["prompt"]
            if not isinstance(prompt, str) and all(message["role"] != "user" for message in prompt):
                raise DataError(
                    f"the training dataset, row {number}: igrpo puts the draft into the last message of the "
                    "user, and this conversation has none"
                )

    def rollout(self, picked: Sequence[int], step: int) -> tuple[Samples, Metrics]:
        """Return refinements; drafts only show in the metrics."""
        options, prompts = self.config.igrpo, self.prompts
        drafts = self.sampler(prompts, picked, options.drafts, self.sampling, step)
        best, scored = best_of(drafts.rewards.total, options.drafts)
        refined = self.encode(
            [
                refined_prompt(prompts.rows[row]["prompt"], drafts.each[draft].text, options.template)
                for row, draft in zip(picked, best.tolist(), strict=True)
            ]
        )
        used = [known and self.fits(ids) for known, ids in zip(scored.tolist(), refined, strict=True)]
        tokens = [
            ids if use else prompts.tokens[row] for row, ids, use in zip(picked, refined, used, strict=True)
        ]
        size = self.config.rollout.group_size
        samples = self.sampler(prompts, picked, size, self.sampling, step, tokens=tokens, stage=1)
        return samples, {
            "reward/drafts": float(drafts.rewards.total.nanmean()),
            "reward/best_drafts": float(drafts.rewards.total[best].nanmean()),
            "reward/refinements": float(samples.rewards.total.nanmean()),
            "igrpo/without_draft": used.count(False) / len(used),
        }


class Turn(NamedTuple):
    """One turn of some trajectories.

    Attributes:
        places: which trajectories came to this turn.
        samples: their candidates, a group for each of them.
        kept: [places] int64, which of the samples the trajectories go on with.
    """

    places: list[int]
    samples: Samples
    kept: Tensor


@dataclass
class Turns(Recipe):
    """Groups by turn, after TL-GRPO (arXiv 2601.16480).

    In every turn ``rollout.group_size`` candidates are sampled from one history and compared with each other.
    One of them stays in the history, followed by the environment's feedback. A trajectory ends early where
    its history leaves no room in the context.

    Raises:
        ConfigError, RewardError: the feedback function cannot be found, or called with the columns.
        DataError: the chat template does not take a further turn.
    """

    def __post_init__(self) -> None:
        """Load the feedback function, and try a second turn."""
        try:
            function = load_reward(str(self.config.turns.feedback), own_process=self.config.reward_process)
        except RewardError as error:
            raise ConfigError(f"turns.feedback, which is loaded as rewards are: {error}") from error
        self.feedback = Feedback(function, self.prompts.columns, self.config.reward_timeout)
        prompts = (row["prompt"] for row in self.prompts.rows)
        conversation = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if conversation is not None:
            self.encode([continued(conversation, "an answer", "feedback")])

    def rollout(self, picked: Sequence[int], step: int) -> tuple[Samples, Metrics]:
        """Return the groups of all prompts' first turns, then of their second ones, and so on."""
        turns = self._turns(self.prompts, picked, self.config.rollout.group_size, self.sampling, step)
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
        turns = self._turns(prompts, range(count), 1, sampling, 0)
        names = self.sampler.rewards.names
        return turns[0].samples, {f"best_turn/{name}": best_turns(turns, count, name) for name in names}

    def _turns(
        self, prompts: Prompts, picked: Sequence[int], group_size: int, sampling: Sampling, step: int
    ) -> list[Turn]:
        histories = {place: prompts.rows[row]["prompt"] for place, row in enumerate(picked)}
        tokens = {place: prompts.tokens[row] for place, row in enumerate(picked)}
        turns: list[Turn] = []
        for stage in range(self.config.turns.count):
            if turns:
                histories = self._observe(prompts, histories, turns[-1])
                encoded = zip(histories, self.encode(list(histories.values())), strict=True)
                tokens = {place: ids for place, ids in encoded if self.fits(ids)}
            if not tokens:
                break
            samples = self.sampler(
                prompts,
                [picked[place] for place in tokens],
                group_size,
                sampling,
                step,
                tokens=list(tokens.values()),
                stage=stage,
            )
            kept, _ = best_of(samples.rewards.total, group_size)
            if self.config.turns.keep == "first":
                kept -= kept % group_size
            turns.append(Turn(list(tokens), samples, kept))
        return turns

    def _observe(self, prompts: Prompts, histories: Mapping[int, Any], turn: Turn) -> dict[int, Any]:
        """Return the histories after a turn; each process asks for the feedback of its share."""
        kept = [turn.samples.each[index] for index in turn.kept.tolist()]
        rewards = turn.samples.rewards.total[turn.kept].tolist()

        def share() -> list[str]:
            own = own_share(self.sampler.accelerator, len(kept))
            rows = [prompts.rows[kept[i].row] for i in own]
            return self.feedback(
                [row["prompt"] for row in rows],
                [kept[i].text for i in own],
                [None if math.isnan(rewards[i]) else rewards[i] for i in own],
                columns_of(rows, prompts.columns),
            )

        observations = [text for part in on_all(self.sampler.accelerator, share) for text in part]
        return {
            place: continued(histories[place], sample.text, observation)
            for place, sample, observation in zip(turn.places, kept, observations, strict=True)
        }


class Feedback:
    """What the environment says between two turns: a function, called with lists and checked strictly.

    ``f(prompts, completions, rewards, **columns) -> list[str]``: prompts and columns as the dataset has them,
    the completions that were kept, and their weighted rewards (None where none applies).

    Args:
        function: a plain function.
        columns: of the dataset.
        timeout: seconds that a call may take; None: any number.

    Raises:
        RewardError: the function cannot be called with these columns.
    """

    def __init__(self, function: Any, columns: Sequence[str], timeout: float | None) -> None:
        self.function, self.timeout = function, timeout
        self.name = f"feedback function {name_of(function)}"
        if is_async(function.function if isinstance(function, ProcessReward) else function):
            raise RewardError(f"{self.name} is async; the feedback must be a plain function")
        if "rewards" in columns:
            raise RewardError(
                f"{self.name}: a column must not be called 'rewards', which it gets beside them"
            )
        check_call(self.name, function, ("prompts", "completions", "rewards"), columns)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: list[str],
        rewards: list[float | None],
        columns: Mapping[str, list[Any]],
    ) -> list[str]:
        """Return one text for each completion.

        Raises:
            RewardError: the function raised, took too long, or returned something else.
        """
        if not completions:
            return []
        arguments = {"prompts": prompts, "completions": completions, "rewards": rewards, **columns}
        try:
            texts = call_within(self.function, arguments, self.timeout)
        except OutOfTimeError as error:
            raise RewardError(
                f"{self.name} took more than {self.timeout:g} seconds for {len(completions)} completions"
            ) from error
        except Exception as error:
            raise RewardError(f"{self.name} raised {error!r}{place_of(error)}") from error
        if not isinstance(texts, Sequence) or isinstance(texts, str):
            raise RewardError(f"{self.name} must return a list of texts, got {type(texts).__name__}")
        if len(texts) != len(completions):
            raise RewardError(f"{self.name} returned {len(texts)} texts for {len(completions)} completions")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise RewardError(
                    f"{self.name} returned {text!r} for completion {index}; expected a text "
                    f"(prompt {prompts[index]!r:.200}, completion {completions[index]!r:.200})"
                )
        return list(texts)


def recipe_of(config: TrainConfig) -> type[Recipe]:
    """Return the class of the recipe that the configuration asks for."""
    if config.igrpo.drafts > 0:
        return IGRPO
    return Turns if config.turns.count > 1 else Recipe


def best_of(rewards: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Find the highest reward of each group, the first one of equals; NaN, no reward, is below all.

    Args:
        rewards: [B] floating point, the members of a group consecutive.
        group_size: members of each.

    Returns:
        [B / group_size] int64, places among the B, the group's first where all are NaN; and [B / group_size]
        bool, whether there is a reward.
    """
    groups = rewards.view(-1, group_size)
    within = groups.nan_to_num(-torch.inf).argmax(1)
    return torch.arange(len(groups)) * group_size + within, ~groups.isnan().all(1)


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


def refined_prompt(prompt: Any, draft: str, template: str) -> Any:
    """Fill a template's ``{prompt}`` and ``{draft}``.

    Of a conversation, the last message of the user is the prompt; where an answer had begun, its beginning is
    part of the draft.
    """
    if isinstance(prompt, str):
        return _filled(template, prompt=prompt, draft=draft)
    if prompt[-1]["role"] == "assistant":
        draft = prompt[-1]["content"] + draft
    last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
    content = _filled(template, prompt=prompt[last]["content"], draft=draft)
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :]]


def _filled(template: str, **values: str) -> str:
    # In one pass: what is filled in may hold braces.
    return re.sub(r"\{(prompt|draft)\}", lambda found: values[found[1]], template)


def continued(prompt: Any, completion: str, observation: str) -> Any:
    """Return a history with one more turn: longer text, or further messages of the assistant and the user."""
    if isinstance(prompt, str):
        return prompt + completion + observation
    before, answer = prompt, {"role": "assistant", "content": completion}
    if prompt[-1]["role"] == "assistant":  # an answer that had begun
        before, answer = prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + completion}
    return [*before, answer, {"role": "user", "content": observation}]
