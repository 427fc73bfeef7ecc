"""NeMo-RL: ``PolicyLoss`` is the ``loss_fn`` that its trainers hand to the policy's workers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.integrations.hooks import RolloutCorrection
from gspo_kernels.losses import policy_loss
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.terms import KL_ESTIMATORS

SUPPORTED = ">=0.6,<0.8"

__all__ = ["PolicyLoss", "RolloutCorrection"]


class PolicyLoss:
    """Any objective as a NeMo-RL loss function of log-probs.

    It divides by the global batch's number of sequences or tokens, as the objective's aggregation asks. So
    the losses of micro-batches and ranks add up.

    Args:
        objective: GSPO() by default.
        kl_beta: weight of the KL to the reference policy. Unlike NeMo-RL's KL, this one is not clamped.
        kl_estimator: "k1", "k2" or "k3".
        correction: weights for rollouts from the inference engine, or None.
        on_policy: take the current log-probs as the old ones. Set it with
            ``loss_fn.force_on_policy_ratio=true``: NeMo-RL then passes zeros as old log-probs.
        use_fused_linear_logprobs: take log-probs from NeMo-RL's fused head, which writes no logits. It must
            be ``policy.megatron_cfg.use_fused_linear_logprobs``.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        IntegrationError: NeMo-RL is missing or at another version, or the objective doesn't fit.

    Attributes:
        loss_type: NeMo-RL's ``LossType``: whether the loss is divided by tokens or by sequences.
        input_type: NeMo-RL's ``LossInputType.LOGPROB``.
        reference_policy_kl_penalty: ``kl_beta``; NeMo-RL reads it when it filters by top-k or top-p.
        metric_normalizations: NeMo-RL's ``MetricNormalizer`` of each metric, for trainers that pass counts of
            1 and divide afterwards; empty before NeMo-RL has that.
    """

    def __init__(
        self,
        objective: Objective = GSPO(),
        *,
        kl_beta: float = 0.0,
        kl_estimator: str = "k3",
        correction: RolloutCorrection | None = None,
        on_policy: bool = False,
        use_fused_linear_logprobs: bool = False,
    ) -> None:
        self.objective = hooks.check_objective(objective, "NeMo-RL", divides_by=("sequences", "tokens"))
        self.reference_policy_kl_penalty = checks.number("kl_beta", kl_beta)
        self.kl_estimator = checks.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
        self.correction = hooks.check_correction(correction)
        self.on_policy = checks.flag("on_policy", on_policy)
        self.use_fused_linear_logprobs = checks.flag("use_fused_linear_logprobs", use_fused_linear_logprobs)
        require_package("nemo-rl", SUPPORTED, optional=True)
        try:
            interfaces: Any = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
        except ImportError as error:
            raise IntegrationError(
                f"nemo-rl: its loss interface can't be imported ({error}); this adapter needs NeMo-RL "
                f"{SUPPORTED}, installed from its repository: the package registry has only a placeholder"
            ) from None
        by_token = objective.outer_divisor()[0] == "tokens"
        self.loss_type = interfaces.LossType.TOKEN_LEVEL if by_token else interfaces.LossType.SEQUENCE_LEVEL
        self.input_type = interfaces.LossInputType.LOGPROB
        of_ratios = "SEQUENCES" if objective.level == "sequence" else "TOKENS"
        normalizers = getattr(interfaces, "MetricNormalizer", None)
        self.metric_normalizations = {} if normalizers is None else {
            name: normalizers[counted]
            for name, counted in {
                "loss": "TOKENS" if by_token else "SEQUENCES", "probs_ratio": of_ratios,
                "clip_fraction": "TOKENS", "kl_old": "TOKENS", "kl_penalty": "TOKENS",
                "active_fraction": "SEQUENCES", "num_valid_samples": "NONE",
                "probs_ratio_min": "NONE", "probs_ratio_max": "NONE",
            }.items()
        }  # fmt: skip

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return one micro-batch's part of the global batch's loss.

        Args:
            next_token_logprobs: [B, S - 1].
            data: ``token_mask``, ``advantages``, ``prev_logprobs``, ``generation_logprobs`` and
                ``reference_policy_logprobs`` [B, S], ``sample_mask`` [B].
            global_valid_seqs, global_valid_toks: 0-d, counts of the global batch over all ranks.

        Returns:
            The loss, and metrics, under NeMo-RL's names if it has them. All but ``probs_ratio_min`` and
            ``probs_ratio_max`` add up over micro-batches and ranks.
        """
        logprobs = next_token_logprobs
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        old = logprobs.detach() if self.on_policy else data["prev_logprobs"][:, 1:]
        if not self.on_policy:
            _refuse_placeholder("prev_logprobs", old, logprobs, mask, "give on_policy=True")
        reference = None
        if self.reference_policy_kl_penalty != 0:
            if "curr_logprobs_unfiltered" in data:
                raise ValueError(
                    "kl_beta: under top-k or top-p sampling NeMo-RL's KL takes unfiltered log-probs, which "
                    "this loss does not; expected kl_beta=0, or sampling without a filter"
                )
            reference = data["reference_policy_logprobs"][:, 1:]
            _refuse_placeholder(
                "reference_policy_logprobs", reference, logprobs, mask,
                "set loss_fn.reference_policy_kl_penalty above 0 and "
                "grpo.skip_reference_policy_logprobs_calculation to false",
            )  # fmt: skip
        weights = None
        if self.correction is not None:
            weights = self.correction.weights(old, data["generation_logprobs"][:, 1:], mask)
        counted, _ = self.objective.outer_divisor()
        out = policy_loss(
            logprobs,
            old,
            hooks.fitting_advantages(self.objective, data["advantages"][:, 1:], mask),
            loss_mask=mask,
            ref_logprobs=reference,
            kl_beta=self.reference_policy_kl_penalty,
            kl_estimator=self.kl_estimator,
            rollout_weights=weights,
            normalizer=global_valid_toks if counted == "tokens" else global_valid_seqs,
            objective=self.objective,
        )
        tokens = hooks.count("tokens", mask)
        of_tokens = tokens / global_valid_toks
        of_sequences = hooks.count("sequences", mask) / global_valid_seqs
        of_ratios = of_sequences if self.objective.level == "sequence" else of_tokens
        mean = out.metrics
        metrics = {
            "loss": out.loss.detach(),
            "probs_ratio": mean["ratio/mean"] * of_ratios,
            "clip_fraction": mean["clip_fraction/tokens"] * of_tokens,
            "kl_old": mean["kl/old"] * of_tokens,
            "kl_penalty": mean["kl/ref"] * of_tokens if "kl/ref" in mean else tokens * 0,
            "active_fraction": mean["active_fraction"] * of_sequences,
            "num_valid_samples": data["sample_mask"].sum(),
            # without a token there is no ratio; NeMo-RL leaves infinities out
            "probs_ratio_min": torch.where(tokens > 0, mean["ratio/min"], math.inf),
            "probs_ratio_max": torch.where(tokens > 0, mean["ratio/max"], -math.inf),
        }
        return out.loss, hooks.floats(metrics)


def _refuse_placeholder(name: str, values: Tensor, current: Tensor, mask: Tensor, advice: str) -> None:
    """Raise ValueError if NeMo-RL has passed zeros, its placeholder for log-probs that it did not compute."""
    counts = mask != 0
    computed, likely = ((values != 0) & counts).any(), ~((current.detach() < -0.01) & counts).any()
    if not bool(computed | likely):
        raise ValueError(f"{name}: all zeros, NeMo-RL's sign that they were not computed; {advice}")
