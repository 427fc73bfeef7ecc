"""What loss hooks of frameworks share: checks of objectives, advantages per sequence, options from configs.

A framework calls a hook with the log-probs of one micro-batch. What it passes and which number it divides by
limit the objectives that the hook can serve.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import objectives
from gspo_kernels.core import checks
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.objectives.base import Objective

ROUNDING = 16
"""Equal advantages of a sequence may differ by this many roundings of the largest one."""

SEQUENCE_RANGE = 0.01
"""The widest clip range for ratios of sequences. A wider one is meant for tokens, and hardly ever clips."""


def check_objective(objective: Objective, hook: str) -> Objective:
    """Return ``objective`` if a framework can serve it; ``hook`` is the framework's name, for messages.

    Raises:
        TypeError: ``objective`` is not an instance of an objective.
        IntegrationError: the objective needs values that the framework doesn't pass, looks at more than a
            micro-batch, or divides by something that the framework doesn't count.
    """
    checks.objective(objective, Objective)
    name = type(objective).__name__
    if objective.needs:
        needs = " and ".join(objective.needs)
        raise IntegrationError(f"objective: {name} needs {needs}, which {hook} does not pass to a loss")
    if objective.advantages_are != "advantages":
        raise IntegrationError(
            f"objective: {name} takes {objective.advantages_are} in the place of advantages, which {hook} "
            "does not pass to a loss"
        )
    if objective.coefficient_scope in ("group", "batch"):
        raise IntegrationError(
            f"objective: {name} looks at a whole {objective.coefficient_scope}, but {hook} calls a loss with "
            "one micro-batch at a time"
        )
    counted, _ = objective.outer_divisor()
    if counted not in ("sequences", "tokens", "one"):
        raise IntegrationError(
            f"objective: aggregation={objective.aggregation!r} divides by the number of {counted}, but "
            f"{hook} divides by the number of sequences or tokens in the whole batch"
        )
    return objective


def fitting_advantages(objective: Objective, advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Return per-token advantages [B, T] unchanged, or one per sequence, [B], if the objective takes these.

    ``mask`` [B, T] says which tokens count; None: all.

    Raises:
        ValueError: advantages differ within a sequence, and the objective takes one per sequence. This check
            syncs with the device.
    """
    if objective.takes_token_advantages:
        return advantages
    counts = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask != 0
    most = torch.where(counts, advantages.detach(), -torch.inf).amax(1).masked_fill(~counts.any(1), 0.0)
    deviation = torch.where(counts, most.unsqueeze(1) - advantages.detach(), 0.0)
    if bool((deviation > ROUNDING * torch.finfo(advantages.dtype).eps * most.abs().max()).any()):
        raise ValueError(
            f"advantages: differ within a sequence, but {type(objective).__name__} takes one per sequence; "
            "keep a KL penalty out of the reward, or take one with token advantages, such as GSPOToken()"
        )
    return most


# Objectives by name, with options from a framework's config.

Reader = Callable[[Any], Any]
Readers = dict[str, Reader]
"""For each option of an objective, a function that reads it from a config."""


def named_objectives() -> dict[str, type[Objective]]:
    """Return all objectives, named like their file with a prefix: ``gk_gspo``, ``gk_dr_grpo``, ..."""
    classes = [getattr(objectives, name) for name in objectives.__all__]
    return {"gk_" + cls.__module__.rpartition(".")[2]: cls for cls in classes}


def shared_options(
    low: Reader, high: Reader, tau_positive: Reader, tau_negative: Reader
) -> dict[type[Objective], Readers]:
    """Return readers for objectives that clip a ratio at 1 - ``low`` and 1 + ``high``, or gate it softly."""
    clip: Readers = {"clip_low": low, "clip_high": high}
    gate: Readers = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    by_sign: Readers = {"positive_low": low, "positive_high": high}
    by_sign |= {"negative_low": low, "negative_high": high}
    clipped = (objectives.DHPO, objectives.GRPO, objectives.GSPO, objectives.GSPOToken)
    return {
        **dict.fromkeys(clipped, clip),
        **dict.fromkeys((objectives.SAPO, objectives.SSPO), gate),
        objectives.ABCGRPO: by_sign,
        objectives.GMPO: {"log_clip_low": low, "log_clip_high": high},
    }


def read(config: Any, path: str, default: Any = None) -> Any:
    """Return the attribute of ``config`` at a dotted path, else ``default``; raise an error if it is None."""
    value = config
    for name in path.split("."):
        value = getattr(value, name, None)
    value = default if value is None else value
    if value is None:
        raise IntegrationError(f"config.{path}: missing in the config, expected a value")
    return value


def from_config(
    name: str,
    objective: type[Objective],
    table: Mapping[type[Objective], Readers],
    config: Any,
    range_names: tuple[str, str],
    **more: Any,
) -> Objective:
    """Create an objective with ``more`` options, and those that ``table`` has for its class and base classes.

    Warn if an objective of sequence ratios gets a clip range that is meant for token ratios. ``name`` is the
    loss's name for messages, and ``range_names`` are the framework's of the clip range below and above 1.

    Raises:
        IntegrationError: the objective refuses an option; the message has the values of all options.
    """
    readers: Readers = {}
    for cls in reversed(objective.__mro__):
        readers.update(table.get(cls, {}))
    options = {**more, **{option: reader(config) for option, reader in readers.items()}}
    defaults: Any = objective  # a dataclass: defaults are attributes of the class
    if "clip_high" in options and defaults.clip_high <= SEQUENCE_RANGE:
        widest = max(options["clip_low"], options["clip_high"])
        if widest > SEQUENCE_RANGE:
            low, high = range_names
            warn_once(
                f"{name}: a clip range of {widest:g} hardly ever clips a sequence's ratio; its paper has "
                f"{low}={defaults.clip_low}, {high}={defaults.clip_high}"
            )
    try:
        return objective(**options)
    except (TypeError, ValueError) as error:
        values = ", ".join(f"{option}={value}" for option, value in options.items())
        raise IntegrationError(f"{name}: {error} (the config has {values})") from None


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return 0-d tensors as numbers, with one copy from the device."""
    return dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))


@functools.cache
def warn_once(message: str) -> None:
    """Warn, at most once in a process with the same message."""
    warnings.warn(message, stacklevel=2)
