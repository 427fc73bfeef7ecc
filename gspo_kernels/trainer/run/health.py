"""Warnings in plain words when a run cannot be learning, or learns from wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspo_kernels.trainer.config import TrainConfig

PATIENCE = 5
"""Steps in a row after which a symptom is worth a warning."""

MISMATCH = {"fp32": 1e-3, "bf16": 0.1}
"""By ``update.precision``: a gap between sampling and training that rounding does not explain, in nats per
token. Rounding makes about 1e-6 in fp32, and 0.01 in bf16, where the engine rounds its logits."""


@dataclass
class Health:
    """Counts symptoms over consecutive steps and says what they mean, once each time that they set in.

    A step that does not measure what shows a symptom (a DPO step has no rollout) leaves its count alone.
    """

    patience: int = PATIENCE
    mismatch: float | None = None  # bounds mismatch/mean, and the distance of mismatch/ratio from 1
    cuts: bool = False  # sampling cuts tokens off which training counts, and this is to be told once
    streaks: dict[str, int] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: TrainConfig) -> Health:
        """Return what fits a run; what sampling alone cuts off is a mismatch that has no bound."""
        cuts = config.rollout.sampling().cuts and not config.rollout.keep_sampling_mask
        return cls(mismatch=None if cuts else MISMATCH[config.update.precision], cuts=cuts)

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that are due after a step with these metrics."""
        due = []
        ratio = metrics.get("mismatch/ratio")
        if self.cuts and ratio is not None and "cut" not in self.streaks:
            self.streaks["cut"] = 1
            due.append(
                f"sampling cuts off {1.0 - ratio:.1%} of the probability that training counts, in the mean "
                "over tokens, so their log-probs are of two distributions. rollout.keep_sampling_mask trains "
                "on the one that was sampled from"
            )
        for metric, (present, message) in self._symptoms(metrics).items():
            if metric in metrics:
                self.streaks[metric] = self.streaks.get(metric, 0) + 1 if present else 0
                if self.streaks[metric] == self.patience:
                    due.append(f"for {self.patience} steps in a row {message}.")
        return due

    def _symptoms(self, metrics: Mapping[str, float | None]) -> dict[str, tuple[bool, str]]:
        """Return by the metric that shows it: whether a symptom is there, what it means and what helps."""
        finished, ratio = metrics.get("completions/finished"), metrics.get("mismatch/ratio")
        gaps = (metrics.get("mismatch/mean"), None if ratio is None else abs(ratio - 1.0))
        equal = _at_least(metrics.get("groups_without_variance"), 1.0)
        return {
            "groups_without_variance": (
                equal,
                "all rewards are equal within every group, so all advantages are 0 and nothing can be "
                "learned. Make the task easier or harder, add a reward with partial credit, or raise "
                "rollout.group_size or rollout.temperature",
            ),
            "clip_fraction/after_first": (
                _at_least(metrics.get("clip_fraction/after_first"), 0.95),
                "nearly every sequence is clipped after the first minibatch, so the later ones hardly learn. "
                "Lower update.learning_rate, use fewer minibatches, or widen the objective's clip range",
            ),
            "minibatch_2/ratio/max": (
                metrics.get("ratio/min") == metrics.get("ratio/max") == 1.0 and not equal,
                "every ratio is exactly 1, also after the first minibatch: the updates do not change the "
                "policy. Raise update.learning_rate",
            ),
            "completions/finished": (
                finished is not None and finished <= 0.05,
                "hardly a completion ends by itself: nearly all are truncated at rollout.max_new_tokens. "
                "Raise it, or check that the model knows its end token",
            ),
            "reward/mean": (
                metrics.get("reward/mean") is None,
                "no reward applies to any completion (every value is None)",
            ),
            "updates_left_out": (
                _at_least(metrics.get("updates_left_out"), 1.0),
                "gradients are not finite, the optimizer updates were left out",
            ),
            "mismatch/mean": (
                self.mismatch is not None and any(_at_least(gap, self.mismatch) for gap in gaps),
                "sampling and training disagree about the probability of the same tokens: mismatch/mean, or "
                f"the distance of mismatch/ratio from 1, is at least {self.mismatch or 0.0:g}, which "
                "rounding does not explain. Look whether sampling uses older weights, another temperature or "
                "other tokens than training; off_policy can weigh the difference",
            ),
        }


def _at_least(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound
