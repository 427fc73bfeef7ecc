"""VerIPO: phases of the configured objective and phases of DPO in turn.

The last rollouts of a phase are kept, and a verifier scores their completions. DPO then takes them one by
one, without sampling: completions of a prompt with different scores are pairs. Its reference is the policy
that its phase begins with. Of that policy only the log-probs of the kept completions are needed, so they are
taken at this moment, and there is no second copy of any weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import Prompts, columns_of
from gspo_kernels.trainer.recipes.samples import Samples, own_share
from gspo_kernels.trainer.rewards import RewardSet, load_reward
from gspo_kernels.trainer.run.processes import on_all
from gspo_kernels.trainer.updates import Experience, PolicyUpdater


class VeriPO:
    """Keeps rollouts for DPO, and hands them out with pairs and reference when its steps come.

    Args:
        config: of the run; without ``veripo.dpo_steps`` nothing is ever kept.
        updater: of the run, whose weights and optimizer DPO shares.
        prompts: the training data, whose columns the verifier gets.

    Attributes:
        updater: takes the DPO steps.

    Raises:
        RewardError: the verifier cannot be found, or called with the columns of the data.
    """

    def __init__(self, config: TrainConfig, updater: PolicyUpdater, prompts: Prompts) -> None:
        self.config = config.veripo
        self.accelerator = updater.accelerator
        self.group_size = config.rollout.group_size
        self.updater = updater.under(config.of_dpo()) if self.config.dpo_steps > 0 else updater
        self.prompts = prompts
        self.kept: list[Experience] = []
        self.verifier = None
        if self.config.verifier is not None:
            function = load_reward(self.config.verifier, own_process=config.reward_process)
            self.verifier = RewardSet([function], timeouts=config.reward_timeout)
            self.verifier.check(prompts.columns)

    def keep(self, step: int, samples: Samples, experience: Experience) -> dict[str, float]:
        """Take note of a rollout, if DPO will need it; return what the verifier says of it on average."""
        if self.config.dpo_steps == 0:
            return {}
        metrics = {"phase": 0.0}
        if self.config.keeps(step):
            judged = self._judged(samples)
            if judged is not None:
                metrics["verifier/mean"] = float(judged.nanmean())
            scores = combined(samples.rewards.total, judged, self.config.reward_weight)
            self.kept.append(in_pairs(self.updater.objective, experience, scores))
        return metrics

    def pairs(self, step: int) -> tuple[Experience, dict[str, float]]:
        """Return the rollout of a DPO step, as DPO takes it, and how much there is to learn from."""
        if self.kept[0].ref_logprobs is None:  # a phase begins: its reference is the policy of now
            self.kept = [
                replace(each, ref_logprobs=self.updater.current_logprobs(each, step + number))
                for number, each in enumerate(self.kept)
            ]
        experience = self.kept.pop(0)
        present = experience.loss_mask.any(1)
        count = self.updater.objective.count_pairs(
            experience.advantages.double(), experience.group_ids, present
        )
        groups = len(experience.group_ids[present].unique()) / len(experience.group_ids.unique())
        return experience, {"phase": 1.0, "pairs": float(count), "groups_with_pairs": groups}

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts that wait for their step."""
        return {"kept": [vars(experience) for experience in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        device = self.accelerator.device
        self.kept = [
            Experience(**{name: _moved(value, device) for name, value in values.items()})
            for values in state["kept"]
        ]

    def _judged(self, samples: Samples) -> Tensor | None:
        """Return the verifier's scores, [B]: each process asks for its share of the groups, all get all."""
        verifier = self.verifier
        if verifier is None:
            return None

        def share() -> Tensor:
            size = self.group_size
            groups = own_share(self.accelerator, len(samples.each) // size)
            own = [sample for group in groups for sample in samples.each[group * size : (group + 1) * size]]
            if not own:
                return torch.zeros(0)
            data = [self.prompts.rows[sample.row] for sample in own]
            return verifier(
                [row["prompt"] for row in data],
                [sample.text for sample in own],
                [sample.ids.tolist() for sample in own],
                columns_of(data, self.prompts.columns),
            ).total

        return torch.cat(on_all(self.accelerator, share))


def combined(rewards: Tensor, judged: Tensor | None, reward_weight: float) -> Tensor:
    """Return the scores that pairs are made of, [B]; NaN where a part of them does not apply."""
    if judged is None:
        return reward_weight * rewards
    return judged if reward_weight == 0 else reward_weight * rewards + judged


def in_pairs(dpo: Any, experience: Experience, scores: Tensor) -> Experience:
    """Return a rollout as DPO takes it: scores as levels, and only completions that are in a pair count.

    Args:
        dpo: the objective, which says what a pair is.
        experience: the scored rollout.
        scores: [B], the higher the better; NaN: in no pair.
    """
    scores = scores.to(experience.advantages.device)
    present = experience.loss_mask.any(1) & ~scores.isnan()
    levels = -scores.nan_to_num(0.0)
    paired = dpo.paired(levels.double(), experience.group_ids, present)
    return replace(
        experience,
        advantages=levels,
        loss_mask=experience.loss_mask & paired.unsqueeze(1),
        rollout_logprobs=None,  # they belong to the weights that sampled
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [item.to(device) for item in value] if isinstance(value, list) else value
