"""What adapters to a loss hook share: which objectives fit it, and its values in the form that losses take.

Such a hook sees one micro-batch, with log-probs (or logits) that the framework has made. What it passes is
fixed, and so is the number that the framework divides by: both decide which objectives it can serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import Objective
from gspo_kernels.off_policy import rollout_weights

ROUNDING = 16
"""Advantages of one sequence count as equal where they differ by at most so many roundings of their dtype."""


def refuse_other_versions(distribution: str, specifier: str) -> None:
    """Raise IntegrationError if the framework is installed at a version outside ``specifier``.

    Not being installed is no error: nothing of the framework is imported.
    """
    try:
        version(distribution)
    except PackageNotFoundError:
        return
    require_package(distribution, specifier)


def check_objective(
    objective: Objective, hook: str, *, divides_by: tuple[str, ...], passes: tuple[str, ...] = ()
) -> Objective:
    """Return ``objective`` if a hook can serve it.

    Args:
        objective: an instance.
        hook: its name, for the message.
        divides_by: what the hook can divide by over the whole batch: "sequences", "tokens".
        passes: the optional arguments of the losses that the hook has values for.

    Raises:
        TypeError: not an instance of an objective.
        IntegrationError: it needs what the hook doesn't pass, looks at more than a micro-batch, or divides by
            what the hook can't count.
    """
    checks.objective(objective, Objective)
    name = type(objective).__name__
    missing = [each for each in objective.needs if each not in passes]
    if missing:
        raise IntegrationError(
            f"objective: {name} needs {' and '.join(missing)}, which {hook} does not pass to a loss"
        )
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
    """Per-token advantages as the objective takes them: as they are, or one per sequence.

    Args:
        objective: says whether it takes one per token.
        advantages: [B, T], or [N] with ``cu_seqlens``.
        mask: the same shape, tokens that count; None: all.
        cu_seqlens: [B + 1].
        average: where one per sequence is needed, take the mean over its counted tokens; otherwise they must
            be equal. Looking at them waits for the device.

    Returns:
        ``advantages``, or [B].

    Raises:
        ValueError: they differ within a sequence, and the objective takes one per sequence.
    """
    if objective.takes_token_advantages:
        return advantages
    packed = cu_seqlens is not None
    values = advantages.detach().unsqueeze(0) if packed else advantages.detach()
    layout = layout_of(values, cu_seqlens)
    counts = torch.ones_like(values, dtype=torch.bool) if mask is None else (mask != 0).view(values.shape)
    exact = torch.where(counts, values.to(torch.float64), 0.0)
    means = layout.sum(exact) / layout.sum(counts.to(torch.float64)).clamp(min=1.0)
    if not average:
        spread = torch.where(counts, exact - layout.expand(means), 0.0).abs()
        if bool((spread > ROUNDING * torch.finfo(advantages.dtype).eps * exact.abs().max()).any()):
            raise ValueError(
                f"advantages: differ within a sequence, but {type(objective).__name__} takes one per "
                "sequence; keep a KL penalty out of the reward, or take one with token advantages, such as "
                "GSPOToken()"
            )
    return means.to(advantages.dtype)


def count(counted: str, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The number of "tokens", or of "sequences" with a token, that a mask has; 0-d, fp64.

    Args:
        counted: which.
        mask: [B, T], or [N] with ``cu_seqlens``.
        cu_seqlens: [B + 1].
    """
    tokens = (mask != 0).to(torch.float64)
    if counted == "tokens":
        return tokens.sum()
    tokens = tokens if cu_seqlens is None else tokens.unsqueeze(0)
    return (layout_of(tokens, cu_seqlens).sum(tokens) > 0).sum().to(torch.float64)


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
        self.weights(torch.zeros(1, 1), torch.zeros(1, 1))

    def weights(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The weights, by ``gspo_kernels.rollout_weights`` with these options."""
        return rollout_weights(
            old_logprobs,
            rollout_logprobs,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            level=self.level,
            reduce=self.reduce,
            mode=self.mode,
            low=self.low,
            high=self.high,
        )


def check_correction(correction: RolloutCorrection | None) -> RolloutCorrection | None:
    """A correction or None."""
    if correction is not None and not isinstance(correction, RolloutCorrection):
        raise TypeError(
            f"correction: got {type(correction).__name__}, expected a RolloutCorrection(...) or None"
        )
    return correction
