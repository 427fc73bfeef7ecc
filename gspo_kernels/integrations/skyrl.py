"""SkyRL: the objectives of this package as policy losses in SkyRL's registry.

SkyRL scales advantages by its ``loss_reduction`` beforehand, and a policy loss is a plain sum. So every loss
here aggregates by "sum", and objectives that are not proportional to their advantages don't fit.

Call ``register_all`` (or ``register``) once in the script that starts the training; SkyRL's registry brings
the losses to the workers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import objectives
from gspo_kernels.core import checks
from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import IntegrationError, check_signature, require_package
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives.base import Objective

REDUCTIONS = {
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt_mean",
}
"""This package's ``aggregation`` for each ``loss_reduction`` of SkyRL."""

UNBOUNDED = math.exp(20.0)
"""The largest ratio that SkyRL's losses let through."""


OPTIONS: dict[type[Objective], hooks.Readers] = {
    **hooks.shared_options(
        low=partial(hooks.read, path="eps_clip_low"),
        high=partial(hooks.read, path="eps_clip_high"),
        tau_positive=partial(hooks.read, path="sapo.tau_pos"),
        tau_negative=partial(hooks.read, path="sapo.tau_neg"),
    ),
    objectives.CISPO: {
        "min_ratio": lambda config: 1.0 - hooks.read(config, "cispo.cispo_eps_clip_low"),
        "max_ratio": lambda config: 1.0 + hooks.read(config, "cispo.cispo_eps_clip_high"),
    },
    objectives.DPPO: {
        "divergence": lambda config: hooks.read(config, "dppo.dppo_type").removeprefix("binary_"),
        "bound_low": partial(hooks.read, path="dppo.delta_low"),
        "bound_high": partial(hooks.read, path="dppo.delta_high"),
        "max_ratio": lambda config: UNBOUNDED,
    },
}
"""Options that an objective and its subclasses read from ``trainer.algorithm``, like SkyRL's own losses."""


@dataclass(frozen=True)
class SkyRLPolicyLoss:
    """A policy loss with the signature of SkyRL's registry.

    Args:
        name: the loss's name in the registry, for messages.
        objective: a class, whose options come from the config of each call, or an instance, of which only the
            aggregation is changed.
    """

    name: str
    objective: type[Objective] | Objective

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, a sum over the micro-batch, and metrics as floats, under SkyRL's names.

        Only ``log_probs`` receives a gradient.

        Args:
            log_probs, old_log_probs: [B, T].
            advantages: [B, T], scaled by SkyRL's ``loss_reduction``; they may differ within a sequence only
                where the objective takes one per token.
            config: SkyRL's AlgorithmConfig: clip ranges (``OPTIONS``), ``loss_reduction`` for a warning,
                ``cispo.cispo_anchor``, and ``off_policy_correction``.
            loss_mask: [B, T], bool or 0/1; None: all tokens count.
            rollout_logprobs: [B, T] or None: log-probs of the engine that sampled. SkyRL's own correction
                turns them into weights and a mask, which multiply the loss, never the ratio.

        Raises:
            IntegrationError: a config that can't be served; the message says why.
        """
        checks.tensor("old_log_probs", old_log_probs, tuple(log_probs.shape), "[B, T]", log_probs.device)
        reduction = hooks.read(config, "loss_reduction")
        if REDUCTIONS.get(reduction) != self.objective.aggregation:
            hooks.warn_once(
                f"{self.name}: SkyRL's advantages come scaled by loss_reduction={reduction!r}, while the "
                f"objective aggregates by {self.objective.aggregation!r}"
            )
        objective = self._objective(config)
        before = old_log_probs
        if isinstance(objective, objectives.CISPO):
            before = _anchor(config, old_log_probs, rollout_logprobs)
        weights, corrections = _correction(config, old_log_probs, loss_mask, rollout_logprobs)
        output = policy_loss(
            log_probs,
            before,
            hooks.fitting_advantages(objective, advantages, loss_mask),
            loss_mask=loss_mask,
            rollout_weights=weights,
            objective=objective,
        )
        metrics = {"clip_ratio": output.metrics["clip_fraction/tokens"]}
        for name in ("ratio/mean", "ratio/min", "ratio/max", "active_fraction"):
            metrics[name.replace("/", "_")] = output.metrics[name]
        return output.loss, hooks.numbers(metrics) | corrections

    def _objective(self, config: Any) -> Objective:
        if isinstance(self.objective, Objective):
            return _summing(self.objective)
        range_names = ("eps_clip_low", "eps_clip_high")
        return hooks.from_config(self.name, self.objective, OPTIONS, config, range_names, aggregation="sum")


def _summing(objective: Objective) -> Objective:
    """Return the objective as a plain sum; raise IntegrationError if it isn't proportional to advantages."""
    checks.objective(objective, Objective)
    summed: Any = dataclasses.replace(objective, aggregation="sum", aggregation_constant=None)
    hooks.check_objective(summed, "SkyRL")
    if not summed.zero_advantage_is_inactive:
        raise IntegrationError(
            f"objective: {type(summed).__name__} is not proportional to its advantages, but SkyRL's carry "
            "the divisor of the mean"
        )
    return summed  # type: ignore[no-any-return]


def _anchor(config: Any, old_log_probs: Tensor, rollout_logprobs: Tensor | None) -> Tensor:
    """Return the log-probs that ``cispo.cispo_anchor`` names: the old policy's, or the engine's."""
    if getattr(config.cispo, "cispo_anchor", "old") == "old":
        return old_log_probs
    if rollout_logprobs is None:
        raise IntegrationError("rollout_logprobs: got None, but cispo.cispo_anchor='rollout' needs them")
    corrected = getattr(getattr(config, "off_policy_correction", None), "tis_ratio_type", None)
    if corrected is not None:
        raise IntegrationError(
            f"off_policy_correction.tis_ratio_type: got {corrected!r}, expected None with "
            "cispo.cispo_anchor='rollout', whose ratio is that correction already"
        )
    return rollout_logprobs


def _correction(
    config: Any, old_log_probs: Tensor, loss_mask: Tensor | None, rollout_logprobs: Tensor | None
) -> tuple[Tensor | None, dict[str, float]]:
    """Return weights and metrics of SkyRL's off-policy correction; (None, {}) without a correction."""
    options = getattr(config, "off_policy_correction", None)
    if rollout_logprobs is None or options is None:
        return None, {}
    correction = _utilities("off_policy_correction_utils")
    if not correction.off_policy_correction_enabled(options):
        return None, {}
    ones = torch.ones_like(old_log_probs)
    mask = ones if loss_mask is None else loss_mask
    weights, kept, metrics = correction.apply_off_policy_correction(
        ones, old_log_probs, rollout_logprobs, mask, options
    )
    return torch.where(kept != 0, weights, 0.0), metrics


LOSSES: dict[str, SkyRLPolicyLoss] = {}
"""All losses that SkyRL can serve, by name."""
REFUSED: dict[str, str] = {}
"""The reasons why SkyRL can't serve the others."""

for _name, _objective in hooks.named_objectives().items():
    try:
        _summing(_objective(aggregation="sum"))
        LOSSES[_name] = SkyRLPolicyLoss(_name, _objective)
    except IntegrationError as error:
        REFUSED[_name] = str(error)


@functools.cache
def _utilities(name: str) -> Any:
    require_package("skyrl")
    return importlib.import_module(f"skyrl.backends.skyrl_train.utils.{name}")


def _registry() -> Any:
    """Return SkyRL's registry; raise IntegrationError if its functions have other parameters."""
    correction = "loss old_log_probs rollout_logprobs loss_mask off_policy_correction"
    for module, function, ours in (
        ("ppo_utils", "ppo_policy_loss", LOSSES["gk_gspo"]),
        ("off_policy_correction_utils", "apply_off_policy_correction", correction),
    ):
        original = getattr(_utilities(module), function, None)
        check_signature("skyrl", f"backends.skyrl_train.utils.{module}.{function}", original, ours)
    return _utilities("ppo_utils").PolicyLossRegistry


def register(name: str, objective: Objective) -> SkyRLPolicyLoss:
    """Register an objective of your own, or one with options that SkyRL's config doesn't have.

    Args:
        name: for ``trainer.algorithm.policy_loss_type``; SkyRL refuses a name that is taken.
        objective: an instance. Only its aggregation is changed: ``loss_reduction`` decides that.

    Raises:
        TypeError: ``objective`` is not an instance of an objective.
        IntegrationError: SkyRL is missing or too old, calls losses in another way, or can't serve the
            objective.
    """
    _summing(objective)
    loss = SkyRLPolicyLoss(name, objective)
    _registry().register(name, loss)
    return loss


def register_all() -> None:
    """Register ``LOSSES`` (``gk_gspo``, ``gk_dapo``, ...). Names that are registered already are left alone.

    Raises:
        IntegrationError: SkyRL is missing or too old, or calls losses in another way.
    """
    registry = _registry()
    registered = set(registry.list_available())
    for name, loss in LOSSES.items():
        if name not in registered:
            registry.register(name, loss)
