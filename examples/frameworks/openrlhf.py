"""The policy loss of OpenRLHF's actor, from log-probs.

Read at OpenRLHF 0.11.2, whose trainer unpacks five values; older versions unpack four. Tested on a CPU
against formulas in fp64, not run inside OpenRLHF. Put the class in the place of
OpenRLHF's, in a module that the actor's workers import:

    import openrlhf.trainer.ray.ppo_actor as ppo_actor
    ppo_actor.PolicyLoss = PolicyLoss

`--actor.policy_loss_type gspo` is GSPO; the paper's clip range is `--actor.eps_clip_low_high 3e-4 4e-4`.
As in OpenRLHF, `--algo.advantage.is_correction_level` then puts vLLM's log-probs into GSPO's ratio. OpenRLHF
adds its KL loss and its entropy bonus itself. GSPO takes one advantage per sequence, so keep a KL penalty out
of the reward: `--algo.kl.use_loss`. Another objective goes into `__init__`; the metrics of a call are in
`metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.hooks import fitting_advantages


class PolicyLoss(torch.nn.Module):
    """An objective with the arguments of `openrlhf.models.PolicyLoss`."""

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        for name, got, expected in (
            ("policy_loss_type", policy_loss_type, ("ppo", "gspo")),
            ("is_correction_level", is_correction_level, ("off", "token", "seq")),
            ("is_correction_mode", is_correction_mode, ("mask", "clip")),
            ("is_correction_gating", is_correction_gating, ("ratio",)),
        ):
            if got not in expected:
                raise ValueError(f"{name}: got {got!r}, expected one of {', '.join(expected)}")
        self.is_correction_level = is_correction_level  # where it is not "off", vLLM returns log-probs
        self.metrics: dict[str, Tensor] = {}
        self.in_ratio = policy_loss_type == "gspo" and is_correction_level != "off"
        self.correction = None
        if is_correction_level != "off" and not self.in_ratio:
            low, high = is_correction_threshold
            mode = "sequence_mask" if is_correction_level == "seq" else "mask"
            mode = "truncate" if is_correction_mode == "clip" else mode
            self.correction = {"mode": mode, "low": low, "high": high}
        self.by_token = token_level_loss and policy_loss_type != "gspo"
        kind = gk.GSPO if policy_loss_type == "gspo" else gk.GRPO
        self.objective = kind(
            clip_eps_low, clip_eps_high, dual_clip=dual_clip,
            aggregation="token_mean" if self.by_token else "sequence_mean",
        )  # fmt: skip

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the loss, and OpenRLHF's `ppo_clip_ratio`, `ppo_kl`, `vllm_kl` and `is_filter_ratio`.

        The loss is the micro-batch's part of the step's mean, times `dp_size`, because ranks are averaged.

        Args:
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs: [B, T].
            dp_size: data-parallel ranks.
            batch_num_tokens, global_batch_size: tokens and sequences of the step over all ranks; None: those
                of this micro-batch.
        """
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask != 0
        weights = vllm_kl = is_filter_ratio = None
        if self.correction is not None:
            options = {"loss_mask": mask, **self.correction}
            weights = gk.rollout_weights(old_log_probs, rollout_log_probs, **options)
            vllm_kl = mean(rollout_log_probs - old_log_probs, mask)
            is_filter_ratio = bounded_share(old_log_probs - rollout_log_probs, mask, **self.correction)
        total = batch_num_tokens if self.by_token else global_batch_size
        out = gk.policy_loss(
            log_probs,
            rollout_log_probs if self.in_ratio else old_log_probs,
            fitting_advantages(self.objective, advantages, mask),
            loss_mask=mask,
            rollout_weights=weights,
            normalizer=None if total is None else total / dp_size,
            objective=self.objective,
        )
        self.metrics = out.metrics
        ppo_kl = mean(old_log_probs - log_probs.detach(), mask)
        return out.loss, out.metrics["clip_fraction/tokens"], ppo_kl, vllm_kl, is_filter_ratio


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of counted tokens."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def bounded_share(log_ratio: Tensor, mask: Tensor, mode: str, low: float, high: float) -> Tensor:
    """Return the share of tokens, or of sequences, whose ratio is outside of the bounds."""
    if mode == "sequence_mask":
        log_ratio = torch.where(mask, log_ratio, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        mask = torch.ones_like(log_ratio, dtype=torch.bool)
    ratio = log_ratio.exp()
    return mean(((ratio < low) | (ratio > high)).float(), mask)
