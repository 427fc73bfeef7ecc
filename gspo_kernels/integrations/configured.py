"""Objectives by name, with options from a framework's config: what the adapters to verl and SkyRL share."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from gspo_kernels import objectives
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.objectives.base import Objective

Reads = dict[str, Callable[[Any], Any]]
"""An objective's options and how each is read from a config."""

SEQUENCE_RANGE = 0.01
"""A wider clip range hardly ever clips a sequence's ratio: it is meant for ratios of tokens."""


def named_objectives() -> dict[str, type[Objective]]:
    """All objectives by the name of their file with a prefix: ``gk_gspo``, ``gk_dr_grpo``, ..."""
    classes = [getattr(objectives, name) for name in objectives.__all__]
    return {"gk_" + cls.__module__.rpartition(".")[2]: cls for cls in classes}


def read(config: Any, path: str, default: Any = None) -> Any:
    """The attribute of ``config`` at a dotted path, or ``default``; an error where both are missing."""
    value = config
    for name in path.split("."):
        value = getattr(value, name, None)
    value = default if value is None else value
    if value is None:
        raise IntegrationError(f"config.{path}: missing in the config, expected a value")
    return value


def read_options(
    objective: type[Objective], table: Mapping[type[Objective], Reads], config: Any
) -> dict[str, Any]:
    """The options that ``table`` has for the objective, or for a class that it derives from."""
    reads: Reads = {}
    for cls in reversed(objective.__mro__):
        reads.update(table.get(cls, {}))
    return {name: option(config) for name, option in reads.items()}


def build(name: str, objective: type[Objective], **options: Any) -> Objective:
    """The objective; where it refuses an option, the message says what the config gave."""
    try:
        return objective(**options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option}={value}" for option, value in options.items())
        raise IntegrationError(f"{name}: {error} (the config gave {given})") from None


def warn_wide_range(
    name: str, objective: type[Objective], options: Mapping[str, Any], low: str, high: str
) -> None:
    """Warn where an objective of sequence ratios gets a clip range that is meant for token ratios.

    ``low`` and ``high`` are the framework's words for the range.
    """
    meant: Any = objective  # a dataclass: its defaults are attributes of the class
    if "clip_high" not in options or meant.clip_high > SEQUENCE_RANGE:
        return
    widest = max(options["clip_low"], options["clip_high"])
    if widest > SEQUENCE_RANGE:
        warn_once(
            f"{name}: a clip range of {widest:g} hardly ever clips a sequence's ratio; its paper has "
            f"{low}={meant.clip_low}, {high}={meant.clip_high}"
        )


@functools.cache
def warn_once(message: str) -> None:
    """Warn, at most once in a process with the same message."""
    warnings.warn(message, stacklevel=2)
