"""Code that adapters to a loss hook share: checks of objectives, conversions of arguments, and options.

A loss hook gets one micro-batch, with log-probs (or logits) that the framework has computed. The framework
decides what it passes and which number it divides by; both limit the objectives that the hook can serve. verl
and SkyRL keep losses in a registry, and their configs have some of the objectives' options.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import checks, objectives
from gspo_kernels.exact import exact
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.layout import layout_of, queued
from gspo_kernels.objectives.base import Objective
from gspo_kernels.off_policy import rollout_weights

ROUNDING = 16
"""Equal advantages of a sequence may differ from their mean by this many roundings of their dtype."""


def check_objective(objective: Objective, hook: str, *, divides_by: tuple[str, ...]) -> Objective:
    """Return ``objective`` if a hook can serve it.

    Args:
        objective: an instance.
        hook: the hook's name, for the message.
        divides_by: what the hook can divide by over the whole batch: "sequences", "tokens".

    Raises:
        TypeError: ``objective`` is not an instance of an objective.
        IntegrationError: the objective needs values that the hook doesn't pass, looks at more than a
            micro-batch, or divides by something that the hook doesn't count.
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
    if counted not in divides_by:
        raise IntegrationError(
            f"objective: aggregation={objective.aggregation!r} divides by "
            f"{'nothing' if counted == 'one' else 'the number of ' + counted}, but {hook} divides by the "
            f"number of {' or '.join(divides_by)} in the whole batch"
        )
    return objective


def fitting_advantages(
    objective: Objective,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    average: bool = False,
) -> Tensor:
    """Return per-token advantages unchanged, or one per sequence if the objective takes these.

    Args:
        objective: its ``takes_token_advantages`` says whether it takes one per token.
        advantages: [B, T], or [N] with ``cu_seqlens``.
        mask: the same shape, tokens that count; None: all.
        cu_seqlens: [B + 1].
        average: one advantage per sequence is the mean over its counted tokens. If False, a sequence's
            advantages must be equal; this check waits for the device.

    Returns:
        ``advantages``, or [B].

    Raises:
        ValueError: advantages differ within a sequence, and the objective takes one per sequence.
    """
    if objective.takes_token_advantages:
        return advantages
    packed = cu_seqlens is not None
    values = advantages.detach().unsqueeze(0) if packed else advantages.detach()
    layout = layout_of(values, cu_seqlens)
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask != 0
    counts = queued(counted, values.device).view(values.shape)
    counted = torch.where(counts, exact(values), 0.0)
    means = layout.sum(counted) / layout.sum(exact(counts)).clamp(min=1.0)
    if not average:
        deviations = torch.where(counts, counted - layout.expand(means), 0.0).abs()
        if bool((deviations > ROUNDING * torch.finfo(advantages.dtype).eps * counted.abs().max()).any()):
            raise ValueError(
                f"advantages: differ within a sequence, but {type(objective).__name__} takes one per "
                "sequence; keep a KL penalty out of the reward, or take one with token advantages, such as "
                "GSPOToken()"
            )
    return means.to(advantages.dtype)


def count(counted: str, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return how many "tokens", or "sequences" with a token, a mask counts; 0-d, fp64.

    Args:
        counted: "tokens" or "sequences".
        mask: [B, T], or [N] with ``cu_seqlens``.
        cu_seqlens: [B + 1].
    """
    tokens = exact(mask != 0)
    if counted == "tokens":
        return tokens.sum()
    tokens = tokens if cu_seqlens is None else tokens.unsqueeze(0)
    return exact((layout_of(tokens, cu_seqlens).sum(tokens) > 0).sum())


@dataclass(frozen=True)
class RolloutCorrection:
    """Off-policy weights pi_old / mu from the log-probs of the engine that sampled: TIS, MIS, IcePop, ...

    Args:
        level, reduce, mode, low, high: as in ``gspo_kernels.rollout_weights``.

    Raises:
        TypeError, ValueError: a wrong option, named in the message.
    """

    level: str = "token"
    reduce: str = "mean"
    mode: str = "truncate"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        zero = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
        self.weights(zero, zero)

    def weights(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the weights that ``gspo_kernels.rollout_weights`` computes with these options."""
        return rollout_weights(
            old_logprobs, rollout_logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens, **vars(self)
        )


def check_correction(correction: RolloutCorrection | None) -> RolloutCorrection | None:
    """Return ``correction`` if it is a RolloutCorrection or None."""
    if correction is not None and not isinstance(correction, RolloutCorrection):
        raise TypeError(
            f"correction: got {type(correction).__name__}, expected a RolloutCorrection(...) or None"
        )
    return correction


# Objectives by name, with options from a framework's config.

Reader = Callable[[Any], Any]
Readers = dict[str, Reader]
"""For each option of an objective, a function that reads it from a config."""

SEQUENCE_RANGE = 0.01
"""The widest clip range for ratios of sequences. A wider one is meant for tokens, and hardly ever clips."""


def named_objectives() -> dict[str, type[Objective]]:
    """Return all objectives, named like their file with a prefix: ``gk_gspo``, ``gk_dr_grpo``, ..."""
    classes = [getattr(objectives, name) for name in objectives.__all__]
    return {"gk_" + cls.__module__.rpartition(".")[2]: cls for cls in classes}


def shared_options(
    low: Reader, high: Reader, tau_positive: Reader, tau_negative: Reader
) -> dict[type[Objective], Readers]:
    """Return readers for objectives that clip a ratio at 1 - ``low`` and 1 + ``high``, or gate it softly."""
    clip: Readers = {"clip_low": low, "clip_high": high}
    by_sign: Readers = {"positive_low": low, "positive_high": high}
    by_sign |= {"negative_low": low, "negative_high": high}
    clipped = (objectives.DHPO, objectives.GRPO, objectives.GSPO, objectives.GSPOToken)
    gate: Readers = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    return {
        **dict.fromkeys(clipped, clip),
        objectives.SAPO: gate,
        objectives.SSPO: gate,
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
    """Create an objective with the options that ``table`` has for its class and for its base classes.

    Warn if an objective of sequence ratios gets a clip range that is meant for token ratios.

    Args:
        name: the loss's name, for messages.
        objective: the class of the objective.
        table: by objective, how its options are read from the config.
        config: the framework's config.
        range_names: the framework's names for the clip range below and above 1.
        more: options that do not come from the config.

    Raises:
        IntegrationError: the objective refuses an option; the message has the values of all options.
    """
    readers: Readers = {}
    for cls in reversed(objective.__mro__):
        readers.update(table.get(cls, {}))
    options = {option: reader(config) for option, reader in readers.items()}
    defaults: Any = objective  # a dataclass: defaults are attributes of the class
    if "clip_high" in options and defaults.clip_high <= SEQUENCE_RANGE:
        widest = max(options["clip_low"], options["clip_high"])
        if widest > SEQUENCE_RANGE:
            low, high = range_names
            warn_once(
                f"{name}: a clip range of {widest:g} hardly ever clips a sequence's ratio; its paper has "
                f"{low}={defaults.clip_low}, {high}={defaults.clip_high}"
            )
    options = {**more, **options}
    try:
        return objective(**options)
    except (TypeError, ValueError) as error:
        values = ", ".join(f"{option}={value}" for option, value in options.items())
        raise IntegrationError(f"{name}: {error} (the config has {values})") from None


def floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return 0-d tensors as numbers, with one copy from the device."""
    return dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))


@functools.cache
def warn_once(message: str) -> None:
    """Warn, at most once in a process with the same message."""
    warnings.warn(message, stacklevel=2)
