"""Warnings in plain words when a run cannot be learning anything."""

from __future__ import annotations

from collections.abc import Mapping

PATIENCE = 5
"""Steps in a row after which a symptom is worth a warning."""


class Health:
    """Counts symptoms over consecutive steps and says what they mean, once each time that they set in."""

    def __init__(self, patience: int = PATIENCE) -> None:
        """Start with no symptom seen."""
        self.patience = patience
        self.streaks: dict[str, int] = {}

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that are due after a step with these metrics."""
        clipped = _at_least(metrics.get("clip_fraction/after_first"), 0.95)
        finished = metrics.get("completions/finished")
        symptoms = {
            "all rewards are equal within every group, so all advantages are 0 and nothing can be learned. "
            "Make the task easier or harder, add a reward with partial credit, or raise rollout.group_size "
            "or rollout.temperature": (_at_least(metrics.get("groups_without_variance"), 1.0)),
            "nearly every sequence is clipped after the first minibatch, so the later ones hardly learn. "
            "Lower update.learning_rate, use fewer minibatches, or widen the objective's clip range": clipped,
            "no completion ends by itself: all are truncated at rollout.max_new_tokens. Raise it, or check "
            "that the model knows its end token": finished is not None and finished <= 0.0,
            "no reward applies to any completion (every value is None)": metrics.get("reward/mean") is None,
            "gradients are not finite, the optimizer updates were left out": _at_least(
                metrics.get("updates_left_out"), 1.0
            ),
        }
        due = []
        for message, present in symptoms.items():
            self.streaks[message] = self.streaks.get(message, 0) + 1 if present else 0
            if self.streaks[message] == self.patience:
                due.append(f"for {self.patience} steps in a row {message}.")
        return due


def _at_least(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound
