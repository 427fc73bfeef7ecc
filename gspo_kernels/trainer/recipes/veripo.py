"""VerIPO: phases of the configured objective and phases of DPO in turn.

The last rollouts of a phase are kept, and a verifier scores their completions. DPO then takes them one by
one, without sampling: completions of a prompt with different scores are pairs. Its reference is the policy
that its phase begins with. Of that policy only the log-probs of the kept completions are needed, so they are
taken at this moment, and there is no second copy of any weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from gspo_kernels.trainer.data import Prompts
from gspo_kernels.trainer.recipes.plain import Metrics, Recipe
from gspo_kernels.trainer.recipes.samples import Samples
from gspo_kernels.trainer.rewards import RewardSet, load_reward
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.rows.experience import Experience


class VeriPO:
    """Takes the steps of another recipe, and after some of them steps of DPO on rollouts that it kept.

    DPO shares that recipe's weights and optimizer. A `RewardError` says that the verifier cannot be found, or
    called with the columns of the data.
    """

    def __init__(self, recipe: Recipe) -> None:
        run = recipe.config
        self.recipe = recipe
        self.config = run.veripo
        self.updater = recipe.updater.under(run.of_dpo())
        self.kept: list[Experience] = []
        self.verifier = None
        if self.config.verifier is not None:
            function = load_reward(self.config.verifier, own_process=run.reward_process)
            self.verifier = RewardSet([function], timeouts=run.reward_timeout)
            self.verifier.check(recipe.prompts.columns)

    def experience(self, step: int) -> tuple[Experience, Metrics]:
        """Return what a step of either kind learns from."""
        if self.config.compares(step):
            return self.pairs(step)
        samples, metrics = self.recipe.sampled(step, self.config.rollouts_until(step - 1))
        experience = self.recipe.compared(samples)
        metrics["phase"] = 0.0
        if self.config.keeps(step):
            judged: Tensor | None = None
            if self.verifier is not None:
                size, prompts = self.recipe.config.rollout.group_size, self.recipe.prompts
                judged = self.recipe.sampler.score(self.verifier, prompts, samples.each, size).total
                metrics["verifier/mean"] = float(judged.nanmean())
            scores = combined(samples.rewards.total, judged, self.config.reward_weight)
            self.kept.append(in_pairs(self.updater.objective, experience, scores))
        return experience, metrics

    def pairs(self, step: int) -> tuple[Experience, Metrics]:
        """Return the rollout of a DPO step, as DPO takes it, and how much there is to learn from."""
        self.recipe.last = None
        if self.kept[0].ref_logprobs is None:  # a phase begins: its reference is the policy of now
            self.kept = [
                replace(each, ref_logprobs=self.updater.current_logprobs(each, step + number))
                for number, each in enumerate(self.kept)
            ]
        experience = self.kept.pop(0)
        present = experience.counted > 0
        count = self.updater.objective.count_pairs(
            experience.advantages.double(), experience.group_ids, present
        )
        groups = len(experience.group_ids[present].unique()) / len(experience.group_ids.unique())
        return experience, {"phase": 1.0, "pairs": float(count), "groups_with_pairs": groups}

    def update(self, experience: Experience, step: int) -> Metrics:
        """Learn from it, by DPO or by the configured objective."""
        updater = self.updater if self.config.compares(step) else self.recipe.updater
        return updater.update(experience, step)

    @property
    def shown(self) -> list[tuple[Any, str, float]]:
        """Completions to show; a step of DPO has none."""
        return self.recipe.shown

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the completions of the last step; one of DPO has none."""
        return self.recipe.records()

    def evaluate(self, prompts: Prompts, sampling: Sampling) -> tuple[Samples, Metrics]:
        """Evaluate as the other recipe does."""
        return self.recipe.evaluate(prompts, sampling)

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts that wait for their step, and the other recipe's state."""
        kept = [{each.name: getattr(one, each.name) for each in fields(one)} for one in self.kept]
        return {"kept": kept, "recipe": self.recipe.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.recipe.load_state_dict(state["recipe"])
        device = self.recipe.sampler.accelerator.device
        kept = tree_map_only(Tensor, lambda tensor: tensor.to(device), state["kept"])
        self.kept = [Experience(**values) for values in kept]


def combined(rewards: Tensor, judged: Tensor | None, reward_weight: float) -> Tensor:
    """Return the scores that pairs are made of, [B]; NaN where a part of them does not apply."""
    if judged is None:
        return reward_weight * rewards
    return judged if reward_weight == 0 else reward_weight * rewards + judged


def in_pairs(dpo: Any, experience: Experience, scores: Tensor) -> Experience:
    """Return a rollout as DPO takes it: scores as levels, and only completions that are in a pair count.

    The objective says what a pair is. Scores are [B], the higher the better; NaN: in no pair.
    """
    scores = scores.to(experience.advantages.device)
    present = (experience.counted > 0) & ~scores.isnan()
    levels = -scores.nan_to_num(0.0)
    paired = dpo.paired(levels.double(), experience.group_ids, present)
    return replace(
        experience,
        advantages=levels,
        loss_mask=experience.loss_mask & experience.by_token(paired),
        rollout_logprobs=None,  # they belong to the weights that sampled
        masks=None,  # which of two answers is better is no question about how they were sampled
    )
