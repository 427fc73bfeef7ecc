"""prime-rl: ``PolicyLoss`` is both a custom loss (``[trainer.loss] type = "custom"``) and a loss object."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.centering import ScoreCentering, require_weight
from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import require_package
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.terms import KL_ESTIMATORS
from gspo_kernels.types import SelectedLogprobs

SUPPORTED = ">=0.7,<0.10"


class LossInputs(Protocol):
    """The inputs of one sequence that this loss reads from prime-rl; each tensor is [T], or [T, K] for the K
    ids of sampling masks.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None
    trainer_mask_logprobs: Tensor | None
    inference_mask_logprobs: Tensor | None


class LossOutputs(NamedTuple):
    """The result that prime-rl reads: the loss, a sum over tokens, and 0-d metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


class PolicyLoss:
    """Any objective as prime-rl's custom loss, a sum over the tokens of one sequence.

    prime-rl divides the sum over all sequences by the number of tokens in the whole batch (or the sum of
    their weights), so the objective must aggregate by "token_mean": GSPO's loss of a sequence then counts
    once per token.

    prime-rl calls a custom loss itself, and the method ``loss`` of a loss object. Here both do the same.

    Args:
        objective: ``GSPO(aggregation="token_mean")`` by default. The ratio's old log-probs are the inference
            engine's, so the engine's rounding enters the ratio.
        kl_beta: weight of the KL to the reference policy. Unless it is 0, batches must have ``ref_logprobs``.
        kl_estimator: "k1", "k2" or "k3".
        score_centering: prime-rl's option of that name: a ``ScoreCentering`` over the ids of sampling masks.
            Sequences without their log-probs are not centred, as in prime-rl.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        IntegrationError: prime-rl is installed at another version, or the objective doesn't fit.
    """

    def __init__(
        self,
        objective: Objective = GSPO(aggregation="token_mean"),
        *,
        kl_beta: float = 0.0,
        kl_estimator: str = "k3",
        score_centering: bool = False,
    ) -> None:
        require_package("prime-rl", SUPPORTED, optional=True)
        self.objective = hooks.check_objective(objective, "prime-rl", divides_by=("tokens",))
        self.kl_beta = checks.number("kl_beta", kl_beta)
        self.kl_estimator = checks.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
        self.score_centering = checks.flag("score_centering", score_centering)
        if score_centering:
            require_weight(objective)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """See ``loss``."""
        return self.loss(inputs)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Return the loss of a sequence, summed over its counted tokens, each times its ``loss_weights``."""
        weights, reference = inputs.loss_weights, inputs.ref_logprobs
        mask, advantages = inputs.loss_mask[None], inputs.advantages[None]
        if self.kl_beta != 0 and reference is None:
            raise ValueError("ref_logprobs: got None, but kl_beta asks for a KL term")
        policy_weights, centered = weights, {}
        if self.score_centering and weights is not None:
            # they multiply what is centred, too; rollout weights would not
            advantages, policy_weights = advantages * weights[None], None
        if self.score_centering and not hasattr(inputs, "inference_mask_logprobs"):
            raise ValueError("score_centering: got True, but this prime-rl passes no log-probs of masks")
        if self.score_centering and inputs.inference_mask_logprobs is not None:
            centered = _centered(inputs.trainer_mask_logprobs, inputs.inference_mask_logprobs)
        out = policy_loss(
            inputs.trainer_logprobs[None],
            inputs.inference_logprobs[None],
            hooks.fitting_advantages(self.objective, advantages, mask),
            loss_mask=mask,
            ref_logprobs=None if reference is None else reference[None],
            kl_beta=self.kl_beta if weights is None or self.kl_beta == 0 else self.kl_beta * weights[None],
            kl_estimator=self.kl_estimator,
            rollout_weights=None if policy_weights is None else policy_weights[None],
            normalizer=1.0,
            objective=self.objective,
            **centered,
        )
        return LossOutputs(out.loss, out.metrics)


def _centered(trainer: Tensor | None, sampler: Tensor) -> dict[str, Any]:
    """Return the arguments of ``policy_loss`` from log-probs [T, K] of all ids that could be drawn; the
    sampler's are -inf where a token has fewer. Which ids these are does not matter.
    """
    if trainer is None:
        return {}
    ids = torch.arange(sampler.shape[1], device=sampler.device).masked_fill(~sampler.isfinite(), -1)
    centering = ScoreCentering(ids[None], sampler[None])
    return {"centering": centering, "selected_logprobs": SelectedLogprobs(trainer[None], None)}
