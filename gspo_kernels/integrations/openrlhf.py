"""OpenRLHF: ``PolicyLoss`` takes the place of the actor's ``actor_loss_fn``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import require_package
from gspo_kernels.integrations.hooks import RolloutCorrection
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective

SUPPORTED = ">=0.11.2,<0.12"

__all__ = ["PolicyLoss", "PolicyLossOutput", "RolloutCorrection"]


class PolicyLossOutput(NamedTuple):
    """The values that OpenRLHF 0.11.2 unpacks, each 0-d. Older versions unpack four values.

    Attributes:
        loss: carries the gradient.
        clip_ratio: share of clipped tokens; OpenRLHF's own loss leaves out tokens that its dual clip clips.
        ppo_kl: mean of the old log-prob minus the current one.
        vllm_kl: mean of the engine's log-prob minus the old one; None without a correction.
        is_filter_ratio: share of tokens or sequences whose weight was bounded; None without a correction.
    """

    loss: Tensor
    clip_ratio: Tensor
    ppo_kl: Tensor
    vllm_kl: Tensor | None
    is_filter_ratio: Tensor | None


class PolicyLoss(torch.nn.Module):
    """Any objective with the signature of ``openrlhf.models.PolicyLoss``.

    It divides by the whole optimizer step's number of sequences or tokens, as the objective's aggregation
    asks. OpenRLHF adds its KL loss and its entropy bonus outside.

    Args:
        objective: GSPO() by default.
        correction: weights for rollouts from the inference engine, or None. A correction needs OpenRLHF's
            option ``is_correction_level`` at another value than "off", so that the engine returns log-probs.

    Raises:
        IntegrationError: OpenRLHF is installed at another version, or the objective doesn't fit.

    Attributes:
        metrics: of the last call; see ``gspo_kernels.LossOutput``.
    """

    def __init__(self, objective: Objective = GSPO(), *, correction: RolloutCorrection | None = None) -> None:
        super().__init__()
        require_package("openrlhf", SUPPORTED, optional=True)
        self.objective = hooks.check_objective(objective, "OpenRLHF", divides_by=("sequences", "tokens"))
        self.correction = hooks.check_correction(correction)
        self.metrics: dict[str, Tensor] = {}

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> PolicyLossOutput:
        """Return one micro-batch's part of the step's loss, times ``dp_size``, because ranks are averaged.

        Args:
            log_probs, old_log_probs, advantages: [B, T].
            action_mask: [B, T], tokens that count; None: all.
            rollout_log_probs: [B, T], of the inference engine; required with a correction, None without one.
            dp_size: data-parallel ranks.
            batch_num_tokens, global_batch_size: tokens and non-empty sequences of the step over all ranks,
                divided by the accumulation steps; None: those of this micro-batch, whatever ``dp_size`` is.
        """
        counted, _ = self.objective.outer_divisor()
        total = batch_num_tokens if counted == "tokens" else global_batch_size
        weights = vllm_kl = is_filter_ratio = None
        if (self.correction is None) != (rollout_log_probs is None):
            made = "without" if self.correction is None else "with"
            raise ValueError(
                "rollout_log_probs: OpenRLHF passes them with --algo.advantage.is_correction_level not "
                f"off, and this loss was made {made} a correction; set both or none"
            )
        if self.correction is not None and rollout_log_probs is not None:
            weights, vllm_kl, is_filter_ratio = _corrected(
                self.correction, old_log_probs, rollout_log_probs, action_mask
            )
        out = policy_loss(
            log_probs,
            old_log_probs,
            hooks.fitting_advantages(self.objective, advantages, action_mask),
            loss_mask=action_mask,
            rollout_weights=weights,
            normalizer=None if total is None else total / dp_size,
            objective=self.objective,
        )
        self.metrics = out.metrics
        return PolicyLossOutput(
            out.loss, out.metrics["clip_fraction/tokens"], out.metrics["kl/old"], vllm_kl, is_filter_ratio
        )


def _corrected(
    correction: RolloutCorrection, old: Tensor, rollout: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, the mean of rollout - old, and the share of counted tokens (or of all sequences)
    whose weights a bound has changed.
    """
    weights = correction.weights(old, rollout, mask)
    counts = torch.ones_like(old, dtype=torch.bool) if mask is None else mask != 0
    bounded = weights == 0
    if correction.mode == "truncate":
        unbounded = RolloutCorrection(correction.level, correction.reduce, low=0.0)
        bounded = weights != unbounded.weights(old, rollout, mask)
    if correction.mode == "sequence_mask":
        bounded = (bounded & counts).any(dim=1)
    if bounded.ndim == 1:
        share = bounded.sum().float() / max(len(bounded), 1)
    else:
        share = (bounded & counts).sum().float() / counts.sum().clamp(min=1)
    return weights, torch.where(counts, rollout - old, 0.0).sum() / counts.sum().clamp(min=1), share
