"""VerIPO (arXiv 2505.19000): phases of the configured objective and phases of DPO in turn.

    python -m examples.recipes.veripo config.yaml --recipe.verifier verifier.py:form --recipe.dpo_steps 5

1. ``recipe.grpo_steps`` steps with the configured objective.
2. The completions of the last ``recipe.dpo_steps`` of these rollouts are scored by the verifier, a reward
   function. The score is the verifier's plus ``recipe.reward_weight`` times the run's rewards.
3. ``recipe.dpo_steps`` steps of DPO, each on one of these rollouts, the oldest first, without sampling.
   Completions of a prompt whose scores differ by more than ``recipe.min_gap`` are a pair.

DPO's reference is the policy that its phase begins with. Of that policy only the log-probs of the kept
completions are needed, so they are taken at that moment, and there is no second copy of any weight. Only
summaries of the paper were read: which rollouts, which pairs and how long the phases are is our choice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gspo_kernels.cli import run
from gspo_kernels.trainer.config import (
    InputError,
    ObjectiveConfig,
    OffPolicyConfig,
    Section,
    TrainConfig,
    option,
)
from gspo_kernels.trainer.data import columns_of
from gspo_kernels.trainer.loop import GSPOTrainer
from gspo_kernels.trainer.processes import on_main
from gspo_kernels.trainer.rewards import Rewards, RewardSet, load_reward
from gspo_kernels.trainer.rollout import Rollout, Sample
from gspo_kernels.trainer.update import Batch, make_objective


class Options(Section):
    """Options of VerIPO."""

    grpo_steps: int = option(20, "steps with the configured objective before each phase of DPO", ge=1)
    dpo_steps: int = option(5, "steps of DPO then, each on one of the last rollouts", ge=1)
    verifier: str | None = option(None, "reward function that ranks completions for DPO; else the run's")
    reward_weight: float = option(1.0, "weight of the run's reward next to the verifier's", ge=0)
    min_gap: float = option(0.0, "scores of a pair differ by more than this", ge=0)
    beta: float = option(0.1, "DPO's beta: how firmly it stays near its reference", gt=0)

    @model_validator(mode="after")
    def _check(self) -> Options:
        most = f"at most recipe.grpo_steps ({self.grpo_steps}): each takes one rollout of that phase"
        self.require(self.dpo_steps <= self.grpo_steps, "dpo_steps", most)
        ranked = self.reward_weight > 0 or self.verifier is not None
        self.require(ranked, "reward_weight", "above 0 where there is no recipe.verifier")
        return self


class Config(TrainConfig):
    """A run of VerIPO."""

    recipe: Options = Options()

    @model_validator(mode="after")
    def _check_dpo(self) -> Config:
        if self.kl.beta > 0:
            raise ValueError(f"kl.beta must be 0, as DPO has another reference, got {self.kl.beta:g}")
        prompts, parts = self.rollout.prompts_per_rollout, self.update.minibatches
        if parts > prompts:
            raise ValueError(
                f"update.minibatches must be at most the {prompts} prompts of a rollout, got {parts}"
            )
        return self


class VeriPO(GSPOTrainer):
    """A trainer by the configured objective and by DPO in turn.

    It raises an `InputError` if the verifier can't be loaded or called, or the objective needs a reference.
    """

    config: Config

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        recipe, objective = self.config.recipe, self.config.objective.name
        if "ref_logprobs" in self.updater.objective.needs:
            raise InputError(
                f"objective.name: {objective} has a reference, and so has DPO; expected one without"
            )
        dpo = ObjectiveConfig(name="DPO", beta=recipe.beta, min_gap=recipe.min_gap)
        update = {"objective": dpo, "off_policy": OffPolicyConfig()}
        self.dpo = copy.copy(self.updater)  # the same weights and optimizer, with another loss
        self.dpo.config = self.config.model_copy(update=update)
        self.dpo.objective = make_objective(self.dpo.config)
        self.kept: list[Batch] = []
        self.verifier: RewardSet | None = None
        if recipe.verifier is not None:
            self.verifier = RewardSet([load_reward(recipe.verifier)])
            self.verifier.check(self.train_prompts.columns)

    def place(self) -> int:
        """Return the position of this step in its period; the steps of DPO come last."""
        return (self.step - 1) % (self.config.recipe.grpo_steps + self.config.recipe.dpo_steps)

    def rollout(self) -> Rollout:
        """Sample a rollout; a step of DPO returns one without samples."""
        if self.place() < self.config.recipe.grpo_steps:
            return super().rollout()._replace(metrics={"phase": 0.0})
        return Rollout([], Rewards(torch.zeros(0), {}), self.config.rollout.group_size, {"phase": 1.0})

    def compare(self, rollout: Rollout) -> Batch:
        """Return the batch of this step, and keep the last rollouts of a phase for DPO."""
        recipe, place = self.config.recipe, self.place()
        if place >= recipe.grpo_steps:
            return self.next_pairs(rollout.metrics)
        batch = super().compare(rollout)
        if place >= recipe.grpo_steps - recipe.dpo_steps:
            scores = recipe.reward_weight * rollout.rewards.total
            if self.verifier is not None:
                judged = self.judge(rollout.samples)
                rollout.metrics["verifier/mean"] = float(judged.nanmean())
                scores = judged if recipe.reward_weight == 0 else scores + judged
            self.kept.append(in_pairs(self.dpo.objective, batch, scores))
        return batch

    def next_pairs(self, metrics: dict[str, float]) -> Batch:
        """Return the oldest kept rollout; metrics get its number of pairs and share of groups with pairs."""
        if self.kept[0].ref_logprobs is None:  # a phase of DPO begins: its reference is the current policy
            self.kept = [
                replace(batch, ref_logprobs=self.dpo.score(self.dpo.policy, batch, self.step).logprobs)
                for batch in self.kept
            ]
        batch = self.kept.pop(0)
        present = (batch.counted > 0).to(batch.advantages.device)
        pairs = self.dpo.objective.count_pairs(batch.advantages.double(), batch.group_ids, present)
        metrics["pairs"] = float(pairs)
        groups = batch.group_ids.unique()
        metrics["groups_with_pairs"] = len(batch.group_ids[present].unique()) / len(groups)
        return batch

    def update(self, batch: Batch) -> dict[str, float]:
        """Learn by DPO or by the configured objective."""
        updater = self.dpo if self.place() >= self.config.recipe.grpo_steps else self.updater
        return updater.update(batch, self.step)

    def judge(self, samples: list[Sample]) -> Tensor:
        """Return the verifier's scores, [B]; the first process calls it; NaN where it gives none."""
        verifier, rows = self.verifier, [self.train_prompts.rows[sample.row] for sample in samples]
        assert verifier is not None
        return on_main(
            lambda: (
                verifier(
                    [row["prompt"] for row in rows],
                    [sample.text for sample in samples],
                    [sample.ids.tolist() for sample in samples],
                    columns_of(rows, self.train_prompts.columns),
                ).total
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run and the rollouts that are kept for steps of DPO."""
        kept = [{each.name: getattr(batch, each.name) for each in fields(batch)} for batch in self.kept]
        return super().state_dict() | {"kept": tree_map_only(Tensor, Tensor.cpu, kept)}

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state, checkpoint)
        device = self.accelerator.device
        kept = tree_map_only(Tensor, lambda tensor: tensor.to(device), state["kept"])
        self.kept = [Batch(**values) for values in kept]


def in_pairs(dpo: Any, batch: Batch, scores: Tensor) -> Batch:
    """Return a batch for DPO: the advantages are minus the scores, and only completions in a pair count.

    ``scores`` is [B], the higher the better; a completion with NaN is in no pair.
    """
    scores = scores.to(batch.advantages.device)
    present = (batch.counted > 0).to(scores.device) & ~scores.isnan()
    levels = -scores.nan_to_num(0.0)
    paired = dpo.paired(levels.double(), batch.group_ids, present)
    return replace(
        batch,
        advantages=levels,
        loss_mask=batch.loss_mask & batch.by_token(paired),
        rollout_logprobs=None,  # these are of the weights that sampled, which say nothing about pairs
        masks=None,
    )


if __name__ == "__main__":
    raise SystemExit(run(VeriPO, Config))
