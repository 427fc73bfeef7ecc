"""Groups by turn, after TL-GRPO (arXiv 2601.16480): several tries at a task, with feedback between them.

    python -m examples.recipes.turns config.yaml --recipe.count 3 --recipe.feedback feedback.py:answer

In every turn ``rollout.group_size`` candidates of one history are sampled, scored and compared with each
other. One of them stays in the history, followed by what the feedback function returns, and the next turn
begins. All candidates of all turns are trained on: each is a sequence by itself, with the history as its
prompt.

The feedback function is ``f(prompts, completions, rewards, **columns) -> list[str]``, with an entry for each
trajectory: prompts and columns as the dataset has them, the completions that stay, and their weighted rewards
(None where none applies). It takes only the arguments that it names.

Text grows by the completion and the feedback. A conversation grows by a message of the assistant and one of
the user. A trajectory whose history leaves no room in the context ends early. Which candidate the paper
keeps and what its histories contain is not known to us.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from gspo_kernels.cli import run
from gspo_kernels.trainer.config import InputError, Section, TrainConfig, option
from gspo_kernels.trainer.data import Prompts, columns_of, encode_prompt
from gspo_kernels.trainer.loop import GSPOTrainer
from gspo_kernels.trainer.processes import on_main
from gspo_kernels.trainer.rewards import Rewards, load_reward, own_copies, restored_globals
from gspo_kernels.trainer.rollout import Rollout, Sample, Sampling


class Options(Section):
    """Options of turns."""

    count: int = option(2, "turns on each prompt, each with rollout.group_size completions", ge=2)
    feedback: str = option("", "what the policy reads after a turn: 'module:function' or 'file.py:function'")
    keep: Literal["first", "best"] = option(
        "first", "completion that stays: the first, as good as a random one, or the best"
    )


class Config(TrainConfig):
    """A run with turns."""

    recipe: Options = Options()


class Turn(NamedTuple):
    """One turn of some trajectories."""

    places: list[int]  # indices of the trajectories that reached this turn
    samples: list[Sample]  # the candidates, a group for each of these trajectories
    rewards: Rewards
    kept: list[int]  # for each of these trajectories, the index of the sample that stays in its history


class Turns(GSPOTrainer):
    """A trainer for which every turn of a trajectory is a group.

    It raises an `InputError` if the feedback can't be loaded, or if the chat template takes no further
    turn.
    """

    config: Config
    serves_turns = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.config.recipe.feedback:
            raise InputError("recipe.feedback is missing; expected 'module:function' or 'file.py:function'")
        self.feedback = load_reward(self.config.recipe.feedback)
        parameters = inspect.signature(self.feedback).parameters.values()
        known = {"prompts", "completions", "rewards", *self.train_prompts.columns}
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if missing := [name for name in needed if name not in known]:
            have = ", ".join(sorted(known))
            raise InputError(f"recipe.feedback takes {', '.join(missing)!r}; it can have {have}")
        asked = self.train_prompts.asked
        conversation = next((prompt for prompt in asked if not isinstance(prompt, str)), None)
        if conversation is not None:
            self.encode([continued(conversation, "an answer", "feedback")])

    def rollout(self) -> Rollout:
        """Return the groups of all first turns, then the groups of all second turns, and so on."""
        rows, size = self.next_rows(), self.config.rollout.group_size
        turns = self.take_turns(self.train_prompts, rows, size, None)
        metrics = {
            f"reward/turn_{number}": float(turn.rewards.total.nanmean())
            for number, turn in enumerate(turns, start=1)
        }
        metrics["reward/best_turn"] = best_turn(turns, len(rows))
        finished = len(turns[-1].places) if len(turns) == self.config.recipe.count else 0
        metrics["turns/ended_early"] = 1 - finished / len(rows)
        samples = [sample for turn in turns for sample in turn.samples]
        return Rollout(samples, Rewards.concatenate([turn.rewards for turn in turns]), size, metrics)

    def evaluation(self, prompts: Prompts, sampling: Sampling) -> Rollout:
        """Return the rollout of the first turn; the mean reward of the best turns is a metric."""
        count = len(prompts.tokens)
        turns = self.take_turns(prompts, range(count), 1, sampling)
        return Rollout(turns[0].samples, turns[0].rewards, 1, {"best_turn": best_turn(turns, count)})

    def take_turns(
        self, prompts: Prompts, rows: Sequence[int], size: int, sampling: Sampling | None
    ) -> list[Turn]:
        """Play all turns of these rows with ``size`` candidates in each."""
        histories = {place: prompts.asked[row] for place, row in enumerate(rows)}
        tokens = {place: prompts.tokens[row] for place, row in enumerate(rows)}
        turns: list[Turn] = []
        while tokens and len(turns) < self.config.recipe.count:
            picked = [rows[place] for place in tokens]
            samples = self.sample(
                picked, size, prompts=prompts, sampling=sampling, tokens=list(tokens.values())
            )
            rewards = self.score(samples, prompts)
            kept = list(range(0, len(samples), size))
            if self.config.recipe.keep == "best":
                total = rewards.total.nan_to_num(-torch.inf).tolist()
                kept = [max(range(first, first + size), key=total.__getitem__) for first in kept]
            turns.append(Turn(list(tokens), samples, rewards, kept))
            histories = self.observe(prompts, histories, turns[-1])
            encoded = zip(histories, self.encode(list(histories.values())), strict=True)
            tokens = {
                p: ids for p, ids in encoded if self.longest_prompt is None or len(ids) <= self.longest_prompt
            }
        return turns

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        """Return the token ids of histories, which are texts or conversations."""
        template_options = self.config.data.template_options
        return [encode_prompt(self.tokenizer, each, "a history", template_options) for each in prompts]

    def observe(self, prompts: Prompts, histories: dict[int, Any], turn: Turn) -> dict[int, Any]:
        """Return the histories after a turn; the first process calls the feedback function for all."""
        kept = [turn.samples[index] for index in turn.kept]
        rows = [prompts.rows[sample.row] for sample in kept]
        rewards = turn.rewards.total[turn.kept].tolist()
        arguments = {
            "prompts": [row["prompt"] for row in rows],
            "completions": [sample.text for sample in kept],
            "rewards": [None if math.isnan(reward) else reward for reward in rewards],
            **columns_of(rows, prompts.columns),
        }
        observations = on_main(lambda: self.ask(arguments))
        return {
            place: continued(histories[place], sample.text, observation)
            for place, sample, observation in zip(turn.places, kept, observations, strict=True)
        }

    def ask(self, arguments: dict[str, list[Any]]) -> list[str]:
        """Call the feedback function; an `InputError` names it and what is wrong."""
        parameters = inspect.signature(self.feedback).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        what, count = f"recipe.feedback {self.config.recipe.feedback}", len(arguments["completions"])
        try:
            taken = {k: v for k, v in arguments.items() if takes_all or k in parameters}
            with restored_globals():
                texts = self.feedback(**own_copies(taken))
        except Exception as error:
            raise InputError(f"{what} raised {error!r}") from error
        if not isinstance(texts, list) or len(texts) != count or not all(isinstance(t, str) for t in texts):
            raise InputError(f"{what} returned {texts!r:.200}, expected a list of {count} texts")
        return texts


def best_turn(turns: Sequence[Turn], count: int) -> float:
    """Return the mean over ``count`` trajectories of the best reward of a kept candidate; NaN: no reward."""
    table = torch.full((len(turns), count), -torch.inf)
    for row, turn in zip(table, turns, strict=True):
        row[turn.places] = turn.rewards.total[turn.kept].nan_to_num(-torch.inf)
    best = table.amax(0)
    return float(best[best.isfinite()].mean())


def continued(prompt: Any, completion: str, observation: str) -> Any:
    """Return a history with one more turn: longer text, or further messages of the assistant and the user."""
    if isinstance(prompt, str):
        return prompt + completion + observation
    before, answer = prompt, {"role": "assistant", "content": completion}
    if prompt[-1]["role"] == "assistant":  # the prompt ends with the beginning of an answer
        before, answer = prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + completion}
    return [*before, answer, {"role": "user", "content": observation}]


if __name__ == "__main__":
    raise SystemExit(run(Turns, Config))
