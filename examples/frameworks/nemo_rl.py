"""The policy loss of NeMo-RL, from log-probs.

Read at NeMo-RL's main after 0.7.0 (7ea279a, 2026-08-22; the loss again at 006907a and c004980, the newest at
hand; the source of 0.8.0 was not). 0.6 and 0.7 have no `MetricNormalizer`. Tested on a CPU against formulas
in fp64, not run inside NeMo-RL. In your run script `setup(...)` returns a `loss_fn`. Replace it before it
reaches the trainer, with the same section of the configuration:

    loss_fn = ClippedPGLossFn(master_config.loss_fn)

The object is pickled to the workers, so this file and gspo_kernels must be in their environment.
`sequence_level_importance_ratios: true` with `token_level_loss: false` is GSPO; the paper's clip range is
`ratio_clip_min: 3e-4`, `ratio_clip_max: 4e-4`. Another objective goes into `__init__`.

The KL is not clamped, so `reference_policy_kl_penalty` needs `kl_input_clamp_value: null` and
`kl_output_clamp_value: null`. NeMo-RL's KL has one more gradient, that of the sampling probability. Tensor
and context parallelism are NeMo-RL's, which gathers log-probs before it calls a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType, MetricNormalizer
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.hooks import fitting_advantages

TRUNCATED = {None: "truncate", "tis": "truncate", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
"""The mode of `gk.rollout_weights` for each `truncated_importance_sampling_type`."""


class ClippedPGLossFn:
    """An objective with the arguments of NeMo-RL's `ClippedPGLossFn`.

    It divides by the global batch's number of sequences or tokens, so the losses of micro-batches and ranks
    add up.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        penalty = 0.0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
        sequences, corrects = cfg.sequence_level_importance_ratios, cfg.use_importance_sampling_correction
        clamps = penalty != 0
        for name, wrong in {
            "disable_ppo_ratio": cfg.disable_ppo_ratio,
            "use_on_policy_kl_approximation": cfg.use_on_policy_kl_approximation and clamps,
            "positive_example_nll_weight": cfg.positive_example_nll_weight != 0,
            "kl_input_clamp_value": cfg.kl_input_clamp_value is not None and clamps,
            "kl_output_clamp_value": cfg.kl_output_clamp_value is not None and clamps,
            "token_level_loss": cfg.token_level_loss and sequences,
            "use_importance_sampling_correction": corrects and sequences,
            "use_cispo": cfg.use_cispo and (sequences or cfg.ratio_clip_c is not None),
        }.items():
            if wrong:
                raise ValueError(f"{name}: got {getattr(cfg, name)!r}, which this loss does not serve")
        self.use_fused_linear_logprobs = use_fused_linear_logprobs  # NeMo-RL's fused head gives the log-probs
        self.reference_policy_kl_penalty, self.kl_estimator = penalty, cfg.reference_policy_kl_type
        self.on_policy, self.correction = cfg.force_on_policy_ratio, None
        if corrects:
            low, high = (f"truncated_importance_sampling_ratio{end}" for end in ("_min", ""))
            self.correction = {
                "mode": TRUNCATED[cfg.truncated_importance_sampling_type],
                "low": getattr(cfg, low) or 0.0,
                "high": getattr(cfg, high),
            }
        self.by_token = cfg.token_level_loss
        mean = {"aggregation": "token_mean" if self.by_token else "sequence_mean"}
        low, high = cfg.ratio_clip_min, cfg.ratio_clip_max
        if cfg.use_cispo:
            self.objective: Any = gk.CISPO(max(1.0 - low, 0.0), 1.0 + high, **mean)
        else:
            kind = gk.GSPO if sequences else gk.GRPO
            self.objective = kind(low, high, dual_clip=cfg.ratio_clip_c, **mean)
        tokens, counted = MetricNormalizer.TOKENS, MetricNormalizer.SEQUENCES
        self.loss_type = LossType.TOKEN_LEVEL if self.by_token else LossType.SEQUENCE_LEVEL
        self.metric_normalizations = {
            "loss": tokens if self.by_token else counted,
            "probs_ratio": counted if sequences else tokens,
            "clip_fraction": tokens,
            "kl_old": tokens,
            "kl_penalty": tokens,
            "active_fraction": counted,
            "num_valid_samples": MetricNormalizer.NONE,
            "probs_ratio_min": MetricNormalizer.NONE,
            "probs_ratio_max": MetricNormalizer.NONE,
        }

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return one micro-batch's part of the global batch's loss, and metrics that add up like it.

        Args:
            next_token_logprobs: [B, S - 1].
            data: `token_mask`, `advantages`, `prev_logprobs`, `generation_logprobs` and
                `reference_policy_logprobs` [B, S], `sample_mask` [B]; with top-k or top-p sampling also
                `curr_logprobs_keep_mask` [B, S - 1], the tokens whose log-probs are not placeholders.
            global_valid_seqs, global_valid_toks: 0-d, counts of the global batch over all ranks, or 1.
        """
        logprobs, mask = next_token_logprobs, data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        of_old, keep = mask, data.get("curr_logprobs_keep_mask")
        mask = mask if keep is None else mask * keep
        old = logprobs.detach() if self.on_policy else data["prev_logprobs"][:, 1:]
        advantages = data["advantages"][:, 1:]
        terms: dict[str, Any] = {}
        if self.reference_policy_kl_penalty != 0:
            if "curr_logprobs_unfiltered" in data:
                raise ValueError(
                    "reference_policy_kl_penalty: got top-k or top-p sampling, whose unfiltered log-probs "
                    "this loss does not serve, expected 0"
                )
            terms["ref_logprobs"] = data["reference_policy_logprobs"][:, 1:]
            terms["kl_beta"] = self.reference_policy_kl_penalty
            terms["kl_estimator"] = self.kl_estimator
        if self.correction is not None:
            rollout = data["generation_logprobs"][:, 1:]
            of_old = mask if self.on_policy else of_old
            terms["rollout_weights"] = gk.rollout_weights(old, rollout, loss_mask=of_old, **self.correction)
        out = gk.policy_loss(
            logprobs,
            old,
            fitting_advantages(self.objective, advantages, mask),
            loss_mask=mask,
            normalizer=global_valid_toks if self.by_token else global_valid_seqs,
            objective=self.objective,
            **terms,
        )
        tokens, sequences = (mask != 0).sum(), (mask != 0).any(1).sum()
        of_tokens, of_sequences = tokens / global_valid_toks, sequences / global_valid_seqs
        mean = out.metrics
        metrics = {
            "loss": out.loss.detach(),
            "probs_ratio": mean["ratio/mean"]
            * (of_sequences if self.objective.level == "sequence" else of_tokens),
            "clip_fraction": mean["clip_fraction/tokens"] * of_tokens,
            "kl_old": mean["kl/old"] * of_tokens,
            "kl_penalty": mean["kl/ref"] * of_tokens if "kl/ref" in mean else tokens * 0,
            "active_fraction": mean["active_fraction"] * of_sequences,
            "num_valid_samples": data["sample_mask"].sum(),
            "probs_ratio_min": torch.where(tokens > 0, mean["ratio/min"], math.inf),
            "probs_ratio_max": torch.where(tokens > 0, mean["ratio/max"], -math.inf),
        }
        values = torch.stack([value.double() for value in metrics.values()]).tolist()  # one copy, one sync
        return out.loss, dict(zip(metrics, values, strict=True))
