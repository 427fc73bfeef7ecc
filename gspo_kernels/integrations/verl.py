"""verl: the objectives of this package as policy losses in verl's registry.

Importing this module registers them, and verl imports it by itself through the entry-point group
``verl.plugins``. Each objective has two names, and ``register`` adds your own losses:

- ``gk_<objective>`` (``gk_gspo``, ``gk_dapo``, ...) aggregates as the objective's source does,
- ``gk_<objective>_config`` aggregates as the actor's ``loss_agg_mode`` says.

Options that the actor's config has (``OPTIONS``) come from there. All others are the objective's defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from gspo_kernels import objectives
from gspo_kernels.core import checks
from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import IntegrationError, check_signature, require_package
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives.base import Objective

AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""This package's ``aggregation`` for each ``loss_agg_mode`` of verl."""


def _bound(config: Any, name: str) -> float:
    return float(hooks.read(config, name, getattr(config, "clip_ratio", None)))


_low, _high = partial(_bound, name="clip_ratio_low"), partial(_bound, name="clip_ratio_high")
_dual = partial(hooks.read, path="clip_ratio_c", default=3.0)

OPTIONS: dict[type[Objective], hooks.Readers] = {
    **hooks.shared_options(
        low=_low,
        high=_high,
        tau_positive=partial(hooks.read, path="tau_pos", default=1.0),
        tau_negative=partial(hooks.read, path="tau_neg", default=1.05),
    ),
    objectives.CISPO: {
        "min_ratio": lambda config: 1.0 - _low(config),
        "max_ratio": lambda config: 1.0 + _high(config),
    },
    objectives.DPPO: {"bound_low": _low, "bound_high": _high, "max_ratio": _dual},
    objectives.DRO: {"beta": partial(hooks.read, path="policy_loss.dro_beta")},
    objectives.GRPO: {"clip_low": _low, "clip_high": _high, "dual_clip": _dual},
}
"""The options that an objective and its subclasses read from the actor's config, like verl's own losses."""


@dataclass(frozen=True)
class VerlPolicyLoss:
    """A policy loss with the signature of verl's registry.

    Args:
        name: the loss's name in the registry, for messages.
        objective: a class, whose options come from the config of each call, or an instance, which is used
            unchanged.
        follow_config: aggregate as ``loss_agg_mode`` says, not as the objective does. Only with a class.
    """

    name: str
    objective: type[Objective] | Objective
    follow_config: bool = False

    def __post_init__(self) -> None:
        if self.follow_config and isinstance(self.objective, Objective):
            raise ValueError("follow_config: got True, but an instance has its aggregation, expected False")

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and the metrics of a micro-batch, as floats under verl's names.

        The loss is divided by the count of the whole batch and multiplied by dp_size, because FSDP averages
        over ranks. Only ``log_prob`` receives a gradient.

        Args:
            old_log_prob, log_prob, advantages, rollout_is_weights: [B, T]; advantages may differ within a
                sequence only where the objective takes one per token. Weights multiply the loss, never the
                ratio.
            response_mask: [B, T], bool or 0/1.
            loss_agg_mode: one of verl's five; warns if the objective's differs.
            config: verl's ActorConfig: clip ranges (``OPTIONS``), and ``global_batch_info`` with dp_size,
                batch_num_tokens, global_batch_size and loss_scale_factor for the divisor.

        Raises:
            IntegrationError: an objective, mode or config that can't be served; the message says why.
        """
        if config is None:
            raise IntegrationError("config: got None, expected the actor's config")
        info = getattr(config, "global_batch_info", None) or {}
        objective = self._objective(loss_agg_mode, config, info, response_mask)
        hooks.check_objective(objective, "verl")
        terms: dict[str, Any] = {
            "old_logprobs": old_log_prob,
            "advantages": hooks.fitting_advantages(objective, advantages, response_mask),
            "loss_mask": response_mask,
            "rollout_weights": rollout_is_weights,
            "normalizer": _normalizer(objective, info),
        }
        output = policy_loss(log_prob, objective=objective, **terms)
        cut = output.metrics["clip_fraction/tokens"]
        dual = torch.zeros_like(cut)
        if getattr(objective, "dual_clip", None) is not None:
            without_dual: Any = dataclasses.replace(objective, dual_clip=None)  # type: ignore[call-arg]
            by_range = policy_loss(log_prob.detach(), objective=without_dual, **terms)
            dual = cut - by_range.metrics["clip_fraction/tokens"]
        metrics = {
            "actor/pg_clipfrac": cut - dual,
            "actor/pg_clipfrac_lower": dual,
            "actor/ppo_kl": output.metrics["kl/old"],
        }
        for name in ("ratio/mean", "ratio/min", "ratio/max", "active_fraction"):
            metrics[f"actor/{name}"] = output.metrics[name]
        return output.loss, hooks.numbers(metrics)

    def _objective(self, mode: str, config: Any, info: Mapping[str, Any], response_mask: Tensor) -> Objective:
        configured = AGGREGATIONS[checks.choice("loss_agg_mode", mode, tuple(AGGREGATIONS))]
        aggregation = configured if self.follow_config else self.objective.aggregation
        if aggregation != configured:
            ours = next(key for key, value in AGGREGATIONS.items() if value == aggregation)
            other = f", or take {self.name}_config" if isinstance(self.objective, type) else ""
            hooks.warn_once(
                f"{self.name}: aggregates by {ours!r}, while loss_agg_mode={mode!r} applies to verl's own "
                f"entropy and KL terms; set it too{other}"
            )
        if isinstance(self.objective, Objective):
            return self.objective
        more: dict[str, Any] = {"aggregation": aggregation}
        if aggregation == "constant":
            scale = info.get("loss_scale_factor")
            more["aggregation_constant"] = response_mask.shape[-1] if scale is None else scale
        range_names = ("clip_ratio_low", "clip_ratio_high")
        return hooks.from_config(self.name, self.objective, OPTIONS, config, range_names, **more)


def _normalizer(objective: Objective, info: Mapping[str, Any]) -> float | None:
    """Return the outer divisor over all ranks, divided by dp_size: FSDP's mean divides by dp_size again."""
    ranks = info.get("dp_size") or 1
    if objective.aggregation == "sum":
        return 1.0 / ranks
    name = "batch_num_tokens" if objective.aggregation == "token_mean" else "global_batch_size"
    total = info.get(name)
    if total is None and ranks > 1:
        raise IntegrationError(
            f"global_batch_info: has dp_size={ranks} but no {name}, which aggregation="
            f"{objective.aggregation!r} divides by"
        )
    # an empty batch has nothing to divide
    return float(total) / ranks if total else None


LOSSES = {
    f"{name}{suffix}": VerlPolicyLoss(f"{name}{suffix}", objective, follow_config=suffix != "")
    for name, objective in hooks.named_objectives().items()
    for suffix in ("", "_config")
}
"""All losses by name. A loss that verl can't serve raises IntegrationError when it is called."""


def register(name: str, objective: Objective) -> VerlPolicyLoss:
    """Register an objective of your own, or one with options that verl's config doesn't have.

    Call this in a module that all workers import, and name that module in ``VERL_USE_EXTERNAL_MODULES``.

    Args:
        name: for ``actor.policy_loss.loss_mode``.
        objective: an instance, used unchanged, with its ``aggregation``.

    Raises:
        TypeError: ``objective`` is not an instance of an objective.
        IntegrationError: verl is missing or too old, calls losses in another way, or can't serve the
            objective.
    """
    hooks.check_objective(objective, "verl")
    loss = VerlPolicyLoss(name, objective)
    _algorithms().register_policy_loss(name)(loss)
    return loss


def _algorithms() -> Any:
    """Return verl's module of losses; raise IntegrationError if it is too old or calls them differently."""
    require_package("verl")
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    original = getattr(algorithms, "compute_policy_loss_vanilla", None)
    name = "trainer.ppo.core_algos.compute_policy_loss_vanilla"
    check_signature("verl", name, original, LOSSES["gk_gspo"])
    return algorithms


def _register_all() -> None:
    """Register all losses with verl; where verl doesn't fit they raise IntegrationError when called.

    verl hides errors that a plugin raises, so this function must not raise.
    """
    losses: Mapping[str, Callable[..., Any]] = LOSSES
    try:
        _algorithms()
    except IntegrationError as error:
        reason = str(error)

        def refuse(*args: Any, **named: Any) -> NoReturn:
            raise IntegrationError(reason)

        losses = dict.fromkeys(LOSSES, refuse)
    for name, loss in losses.items():
        importlib.import_module("verl.trainer.ppo.core_algos").register_policy_loss(name)(loss)


if importlib.util.find_spec("verl") is not None:
    _register_all()
