"""iGRPO (arXiv 2602.09000): the best of several drafts goes into the prompt; refinements are trained on.

    python -m examples.recipes.igrpo config.yaml --recipe.drafts 4

In every step, for every prompt:

1. ``recipe.drafts`` completions are sampled and scored, without gradient.
2. The best one, the first of equals, goes into the prompt.
3. ``rollout.group_size`` refinements of this prompt are sampled, scored with the same columns, and trained
   on.

A prompt keeps its plain form if no draft has a reward, or if the draft leaves no room in the context.
Evaluations complete plain prompts once, as the trained model is used. The paper's template and its numbers of
drafts and refinements are not known to us. The paper updates by GRPO; here any objective works.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import model_validator

from gspo_kernels.cli import run
from gspo_kernels.trainer.config import InputError, Section, TrainConfig, option
from gspo_kernels.trainer.data import encode_prompt
from gspo_kernels.trainer.loop import GSPOTrainer
from gspo_kernels.trainer.rollout import Rollout, sampling_of


class Options(Section):
    """Options of iGRPO."""

    drafts: int = option(4, "completions of a prompt of which the best goes into it as a draft", ge=1)
    template: str = option(
        "{prompt}\n\nThe best of several earlier answers:\n{draft}\n\nWrite a better answer.",
        "what the policy then completes; {prompt} is the prompt, or the last message of the user",
    )

    @model_validator(mode="after")
    def _check(self) -> Options:
        for name in ("{prompt}", "{draft}"):
            self.require(name in self.template, "template", f"a text with {name} in it")
        return self


class Config(TrainConfig):
    """A run of iGRPO."""

    recipe: Options = Options()


class IGRPO(GSPOTrainer):
    """A trainer on refinements of the policy's best drafts.

    It raises an `InputError` if a conversation has no message of the user, which the template would fill.
    """

    config: Config

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for number, prompt in enumerate(self.train_prompts.asked, start=1):
            if not isinstance(prompt, str) and all(message["role"] != "user" for message in prompt):
                raise InputError(
                    f"the training dataset, row {number}: the draft goes into the last message of the user, "
                    "and this conversation has none"
                )

    def rollout(self) -> Rollout:
        """Sample drafts, then refinements of the best drafts; drafts appear in the metrics only."""
        rows, count = self.next_rows(), self.config.recipe.drafts
        drafts = self.sample(rows, count, sampling=sampling_of(self.config.rollout))  # without masks
        rewards = self.score(drafts).total
        best = [first_highest(group) + start for start, group in groups_of(rewards.tolist(), count)]

        originals = [self.train_prompts.asked[row] for row in rows]
        refined = [
            refined_prompt(prompt, drafts[place].text, self.config.recipe.template)
            for prompt, place in zip(originals, best, strict=True)
        ]
        template_options = self.config.data.template_options
        place = "a prompt with its draft"
        tokens = [encode_prompt(self.tokenizer, each, place, template_options) for each in refined]
        used = [
            not math.isnan(rewards[place])
            and (self.longest_prompt is None or len(ids) <= self.longest_prompt)
            for place, ids in zip(best, tokens, strict=True)
        ]
        plain = [self.train_prompts.tokens[row] for row in rows]
        tokens = [new if use else old for new, old, use in zip(tokens, plain, used, strict=True)]

        refinements = self.sample(rows, tokens=tokens)
        scored = self.score(refinements)
        metrics = {
            "reward/drafts": float(rewards.nanmean()),
            "reward/best_drafts": float(rewards[best].nanmean()),
            "reward/refinements": float(scored.total.nanmean()),
            "igrpo/without_draft": used.count(False) / len(used),
        }
        return Rollout(refinements, scored, self.config.rollout.group_size, metrics)


def groups_of(values: list[float], size: int) -> list[tuple[int, list[float]]]:
    """Return groups of ``size`` consecutive values, each after the index of its first value."""
    return [(start, values[start : start + size]) for start in range(0, len(values), size)]


def first_highest(rewards: list[float]) -> int:
    """Return the index of the highest reward, the first of equals; NaN (no reward) is below all others."""
    return max(range(len(rewards)), key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i])


def refined_prompt(prompt: Any, draft: str, template: str) -> Any:
    """Fill a template's ``{prompt}`` and ``{draft}``.

    In a conversation, the last message of the user is filled in as the prompt. If the conversation ends with
    the beginning of the assistant's answer, the draft starts with that beginning.
    """
    if isinstance(prompt, str):
        return _filled(template, prompt=prompt, draft=draft)
    if prompt[-1]["role"] == "assistant":
        draft = prompt[-1]["content"] + draft
    last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
    content = _filled(template, prompt=prompt[last]["content"], draft=draft)
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :]]


def _filled(template: str, **values: str) -> str:
    # In one pass, as the values may contain braces.
    return re.sub(r"\{(prompt|draft)\}", lambda match: values[match[1]], template)


if __name__ == "__main__":
    raise SystemExit(run(IGRPO, Config))
