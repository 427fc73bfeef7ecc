"""AReaL: ``PolicyLoss`` is the ``loss_fn`` of ``train_batch``, and its ``weight`` the ``loss_weight_fn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import require_package
from gspo_kernels.integrations.hooks import RolloutCorrection
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective

SUPPORTED = ">=1.0.4,<1.1"

__all__ = ["PolicyLoss", "RolloutCorrection"]


class PolicyLoss:
    """Any objective as an AReaL loss function of packed (or padded) log-probs.

    AReaL weighs each micro-batch's mean by ``loss_weight_fn`` and divides by the sum of these weights over
    all ranks. So pass ``weight`` along with the loss: it counts what the objective divides by. (AReaL's own
    actor counts tokens, which would make a mean over sequences wrong.)

    The ratio's old log-probs are ``prox_logp``; if the batch has none, they are the rollout's ``logprobs``.
    If the objective takes one advantage per sequence, it gets the mean over the sequence's tokens, as in
    AReaL.

    Args:
        objective: GSPO() by default.
        correction: weights from ``prox_logp`` and the rollout's ``logprobs``, or None.
        log: called with the metrics of each micro-batch as numbers, for example
            ``lambda metrics: stats_tracker.scalar(**metrics)``. None: metrics are not used.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        IntegrationError: AReaL is installed at another version, or the objective doesn't fit.
    """

    def __init__(
        self,
        objective: Objective = GSPO(),
        *,
        correction: RolloutCorrection | None = None,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        require_package("areal", SUPPORTED, optional=True)
        self.objective = hooks.check_objective(objective, "AReaL", divides_by=("sequences", "tokens"))
        self.correction = hooks.check_correction(correction)
        if log is not None and not callable(log):
            raise TypeError(f"log: got {type(log).__name__}, expected a function or None")
        self.log = log

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        input_data: Mapping[str, Any],
        vocab_min_logits: Tensor | None = None,
        vocab_max_logits: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of one micro-batch, divided by the micro-batch's ``weight``.

        Args:
            logprobs, entropy: [N] with ``cu_seqlens`` in ``input_data``, otherwise [B, T]. The entropy only
                enters the metrics.
            input_data: ``logprobs`` (of the rollout), ``advantages``, ``loss_mask``, and optionally
                ``prox_logp``, ``cu_seqlens``.
            vocab_min_logits, vocab_max_logits: the logits' range at each token; only their means are logged.
        """
        if input_data.get("teacher_logp") is not None:
            raise ValueError("teacher_logp: got a tensor, expected None: this loss has no distillation")
        mask, cu_seqlens = input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
        rollout, proximal = input_data["logprobs"], input_data.get("prox_logp")
        weights = None
        if self.correction is not None:
            if proximal is None:
                raise ValueError("prox_logp: got None, but the correction needs it (actor.recompute_logprob)")
            weights = self.correction.weights(proximal, rollout, mask, cu_seqlens)
        out = policy_loss(
            logprobs,
            rollout if proximal is None else proximal,
            hooks.fitting_advantages(
                self.objective, input_data["advantages"], mask, cu_seqlens, average=True
            ),
            loss_mask=mask,
            cu_seqlens=cu_seqlens,
            rollout_weights=weights,
            entropy=entropy.detach(),
            objective=self.objective,
        )
        if self.log is not None:
            metrics = {name: float(value) for name, value in out.metrics.items()}
            ranges = {"vocab_min_logits": vocab_min_logits, "vocab_max_logits": vocab_max_logits}
            metrics |= {name: float(each.float().mean()) for name, each in ranges.items() if each is not None}
            self.log(metrics)
        return out.loss

    def weight(self, input_data: Mapping[str, Any]) -> Tensor:
        """Return the number of sequences or tokens that the loss is a mean over, 0-d; AReaL adds these up."""
        counted, _ = self.objective.outer_divisor()
        return hooks.count(counted, input_data["loss_mask"], input_data.get("cu_seqlens")).float()
