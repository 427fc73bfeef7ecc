"""Reward functions for `gspo train`: plain functions on lists, one value per completion.

They get the prompts, the completions as text and as token ids, and every other column of the dataset by
name. None means that the reward does not apply to that completion. They may be async; docs/rewards.md says
more and names ready-made ones.
"""

import re


def right_number(prompts, completions, completion_ids, *, answer, **columns):
    """Return 1 if the last number in the completion is the answer, else 0; None where there is no answer."""
    rewards = []
    for text, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        rewards.append(
            None if expected is None else float(bool(numbers) and float(numbers[-1]) == float(expected))
        )
    return rewards


def brief(prompts, completions, completion_ids, **columns):
    """Return 1 for an empty completion, falling linearly to 0 for 256 tokens and more."""
    return [1.0 - min(len(ids), 256) / 256 for ids in completion_ids]


def per_digit(prompts, completions, completion_ids, *, answer, **columns):
    """Return the share of places with the right character; 0 for a completion of another length."""
    return [
        sum(a == b for a, b in zip(text, right, strict=True)) / len(right) if len(text) == len(right) else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]
