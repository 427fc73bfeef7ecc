"""The loss of an AReaL actor, from packed or padded log-probs.

Read at AReaL 2.0.0 (fee938e); 1.0.4 passes a subset of the arguments. Tested on a CPU against
formulas in fp64, not run inside AReaL. Put the function in the place of AReaL's, in a module that every
worker imports; all options of the actor's configuration stay:

    import areal.trainer.ppo.actor as actor
    actor.grpo_loss_fn = grpo_loss_fn

With `importance_sampling_level: sequence` it is GSPO; the paper's clip range is `eps_clip: 3e-4`,
`eps_clip_higher: 4e-4`. AReaL weighs a micro-batch's mean by its number of tokens, so long sequences weigh
more. For the paper's mean over sequences the weight must count sequences. Override a method of the actor:

    def train_batch(self, input_, loss_fn, loss_weight_fn):
        loss_fn = functools.partial(grpo_loss_fn, aggregation="sequence_mean", **loss_fn.keywords)
        return super().train_batch(input_, loss_fn, count_sequences)

Another objective goes into `objective_of`. Metrics go to AReaL's `stats_tracker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from areal.utils import stats_tracker
from torch import Tensor

import gspo_kernels as gk


def objective_of(
    aggregation: str,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    importance_sampling_level: str,
    sapo: tuple[float, float] | None,
    use_cispo_loss: bool,
) -> Any:
    """Return the objective that options of AReaL's actor describe."""
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    if importance_sampling_level == "sequence":
        return gk.GSPO(eps_clip, high, dual_clip=c_clip, aggregation=aggregation)
    if sapo is not None:
        return gk.SAPO(tau_positive=sapo[0], tau_negative=sapo[1], aggregation=aggregation)
    if use_cispo_loss:
        return gk.CISPO(max(1.0 - eps_clip, 0.0), 1.0 + high, aggregation=aggregation)
    return gk.GRPO(eps_clip, high, dual_clip=c_clip, aggregation=aggregation)


def grpo_loss_fn(
    logprobs: Tensor,
    entropy: Tensor,
    input_data: Mapping[str, Any],
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    rejection_sampling: Any = None,
    m2_threshold: float | None = None,
    importance_sampling_level: str = "token",
    current_version: int | None = None,
    prox_logp_method: str = "recompute",
    use_sapo_loss: bool = False,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
    use_cispo_loss: bool = False,
    use_decoupled_loss: bool = False,
    vocab_min_logits: Tensor | None = None,
    vocab_max_logits: Tensor | None = None,
    vocab_mean_logits: Tensor | None = None,
    vocab_norm_logits: Tensor | None = None,
    *,
    aggregation: str = "token_mean",
) -> Tensor:
    """Return the mean loss of a micro-batch.

    Args:
        logprobs, entropy: [N] with `cu_seqlens` in `input_data`, otherwise [B, T].
        input_data: `logprobs` of the rollout, `advantages`, `loss_mask`, and optionally `prox_logp`, the old
            log-probs; without them those of the rollout are the old ones.
        aggregation: "token_mean", or "sequence_mean" with `count_sequences` as the weight.
        vocab_min_logits, vocab_max_logits, vocab_mean_logits, vocab_norm_logits: at each token; their means
            are logged.

    All other arguments are options of AReaL's actor.
    """
    by_token, rejection = importance_sampling_level == "token", rejection_sampling
    refused = {
        "m2_threshold": m2_threshold is not None,
        "prox_logp_method": prox_logp_method != "recompute",
        "teacher_logp": input_data.get("teacher_logp") is not None,
        "importance_sampling_level": importance_sampling_level not in ("token", "sequence"),
        "use_sapo_loss": use_sapo_loss and (not by_token or use_cispo_loss or use_decoupled_loss),
        "use_cispo_loss": use_cispo_loss and not by_token,
    }
    if rejection is not None:
        refused["rejection_sampling"] = not by_token or use_sapo_loss
        refused["rejection_sampling.level"] = rejection.level != "token"
        refused["rejection_sampling.metric"] = rejection.metric != "ratio"
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"{name}: this loss does not serve this value, see `refused` in {__name__}")
    mask, cu_seqlens = input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
    rollout, old, advantages = (input_data.get(name) for name in ("logprobs", "prox_logp", "advantages"))
    old = rollout if old is None or use_sapo_loss else old
    weights = None
    if rejection is not None:
        mode = {"clamp": "truncate", "mask": "mask"}[rejection.action]
        bounds = {"low": rejection.lower, "high": rejection.upper}
        weights = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, mode=mode, **bounds)
    if not by_token:  # AReaL, too, takes the mean of a sequence's advantages
        ids, count = sequence_ids(mask, cu_seqlens)
        tokens = mask.flatten().to(advantages)
        total = advantages.new_zeros(2, count).index_add(
            1, ids, torch.stack([torch.where(mask, advantages, 0.0).flatten(), tokens])
        )
        advantages = total[0] / total[1].clamp(min=1)
    sapo = (sapo_tau_pos, sapo_tau_neg) if use_sapo_loss else None
    objective = objective_of(
        aggregation, eps_clip, eps_clip_higher, c_clip, importance_sampling_level, sapo, use_cispo_loss
    )
    out = gk.policy_loss(
        logprobs, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, rollout_weights=weights,
        entropy=entropy.detach(), objective=objective,
    )  # fmt: skip
    ranges = {
        "vocab_min_logits": vocab_min_logits, "vocab_max_logits": vocab_max_logits,
        "vocab_mean_logits": vocab_mean_logits, "vocab_norm_logits": vocab_norm_logits,
    }  # fmt: skip
    means = {name: values.float().mean() for name, values in ranges.items() if values is not None}
    stats_tracker.scalar(**{name: float(value) for name, value in (out.metrics | means).items()})
    return out.loss


def sequence_ids(mask: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """Return the number of each token's sequence, flat, and how many sequences there are."""
    if cu_seqlens is None:
        return torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1]), len(mask)
    lengths = cu_seqlens.diff().long()
    return torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths), len(lengths)


def count_sequences(input_data: Mapping[str, Any]) -> Tensor:
    """Return the number of sequences with a token, as AReaL's `loss_weight_fn`."""
    mask = input_data["loss_mask"] != 0
    ids, count = sequence_ids(mask, input_data.get("cu_seqlens"))
    return (mask.new_zeros(count, dtype=torch.int64).index_add(0, ids, mask.flatten().long()) > 0).sum()
