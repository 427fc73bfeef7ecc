"""iGRPO (arXiv 2602.09000): refinements of the best of several drafts are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_kernels.trainer.input_errors import DataError
from gspo_kernels.trainer.recipes.plain import Metrics, Recipe
from gspo_kernels.trainer.recipes.samples import Samples, Stages
from gspo_kernels.trainer.rewards.comparing import best_of


@dataclass
class IGRPO(Recipe):
    """The best of several drafts goes into the prompt.

    A prompt keeps its plain form where no draft has a reward, and where the draft leaves no room in the
    context. A `DataError` says that a conversation has no message of the user, which the template would fill.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, row in enumerate(self.prompts.rows, start=1):
            prompt = row["prompt"]
            if not isinstance(prompt, str) and all(message["role"] != "user" for message in prompt):
                raise DataError(
                    f"the training dataset, row {number}: igrpo puts the draft into the last message of the "
                    "user, and this conversation has none"
                )

    def rollout(self, picked: Sequence[int], stages: Stages) -> tuple[Samples, Metrics]:
        """Return refinements; drafts only show in the metrics."""
        options, prompts = self.config.igrpo, self.prompts
        alone = replace(self.sampling, return_mask=False)  # no loss counts drafts
        drafts = self.sampler(prompts, picked, options.drafts, alone, stages)
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
        samples = self.sampler(prompts, picked, size, self.sampling, stages, tokens)
        return samples, {
            "reward/drafts": float(drafts.rewards.total.nanmean()),
            "reward/best_drafts": float(drafts.rewards.total[best].nanmean()),
            "reward/refinements": float(samples.rewards.total.nanmean()),
            "igrpo/without_draft": used.count(False) / len(used),
        }


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
