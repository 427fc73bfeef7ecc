"""A custom loss of prime-rl, from the log-probs of one sequence.

Read at prime-rl's main (559b447, 2026-08-21), and at that of November 2026 for `score_centering`. Tested on a
CPU against formulas in fp64, not run inside prime-rl. Name the function, an objective and its options in the
trainer's configuration:

    [trainer.loss]
    type = "custom"
    import_path = "my_package.prime_rl.policy_loss"
    kwargs = { objective = "GSPO", clip_low = 0.01, clip_high = 0.01 }

prime-rl divides the sum over all sequences by the number of tokens in the batch (later by the sum of their
weights), so every objective is aggregated by "token_mean": long sequences weigh more than in GSPO's paper.
Old log-probs are the inference engine's, whose rounding enters the ratio: GSPO's own range of 3e-4 clips most
sequences. `objective = "PrimeIPO", eps = 0.3` is prime-rl's own default of November 2026.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.hooks import fitting_advantages


class LossOutputs(NamedTuple):
    """The fields of prime-rl's `LossOutputs`: the loss, a sum over tokens, and 0-d metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    inputs: Any,
    *,
    objective: str = "GSPO",
    kl_beta: float = 0.0,
    kl_estimator: str = "k3",
    score_centering: bool = False,
    **options: Any,
) -> LossOutputs:
    """Return the loss of a sequence, summed over its counted tokens, each times its `loss_weights`.

    Args:
        inputs: prime-rl's `LossInputs`: `trainer_logprobs`, `inference_logprobs`, `advantages`, `loss_mask`
            [T], `ref_logprobs` and `loss_weights` [T] or None; for score centering also
            `trainer_mask_logprobs` and `inference_mask_logprobs` [T, K] of the ids that could be drawn, -inf
            where a token has fewer, or None: then the sequence is not centered, as in prime-rl.
        objective: its name in `gspo_kernels`.
        kl_beta, kl_estimator: KL to the reference policy; "k1", "k2" or "k3".
        score_centering: see `gk.ScoreCentering`.
        options: of the objective.
    """
    if not isinstance(getattr(gk, objective, None), type) or objective not in gk.objectives.__all__:
        raise ValueError(f"objective: got {objective!r}, expected one of {', '.join(gk.objectives.__all__)}")
    chosen = getattr(gk, objective)(aggregation="token_mean", **options)
    if kl_beta != 0 and inputs.ref_logprobs is None:
        raise ValueError("kl_beta: got no ref_logprobs, expected an algorithm that scores with a reference")
    mask, advantages, weights = inputs.loss_mask, inputs.advantages, inputs.loss_weights
    terms: dict[str, Any] = {}
    if score_centering:
        if not hasattr(inputs, "inference_mask_logprobs"):
            raise ValueError("score_centering: this prime-rl passes no log-probs of masks, expected False")
        if weights is not None:  # they multiply what is centered, too; rollout weights would not
            advantages, weights = advantages * weights, None
        sampler = inputs.inference_mask_logprobs
        if sampler is not None:
            ids = torch.arange(sampler.shape[1], device=sampler.device)
            ids = ids.masked_fill(~sampler.isfinite(), -1)  # which ids these are does not matter
            terms["centering"] = gk.ScoreCentering(ids[None], sampler[None])
            terms["selected_logprobs"] = gk.SelectedLogprobs(inputs.trainer_mask_logprobs[None], None)
    if kl_beta != 0:
        per_token = inputs.loss_weights
        terms["kl_beta"] = kl_beta if per_token is None else kl_beta * per_token[None]
        terms |= {"kl_estimator": kl_estimator, "ref_logprobs": inputs.ref_logprobs[None]}
    out = gk.policy_loss(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        fitting_advantages(chosen, advantages[None], mask[None]),
        loss_mask=mask[None],
        rollout_weights=None if weights is None else weights[None],
        normalizer=1.0,
        objective=chosen,
        **terms,
    )
    return LossOutputs(out.loss, out.metrics)
