"""The policy loss of slime, from packed fp32 logits.

Read at slime's main (624b824, 2026-08-21), after 0.3.1. Tested on a CPU against formulas in fp64, and over
ranks that share the vocabulary and tokens against one process; not run inside slime. Name the function:

    --loss-type custom_loss --custom-loss-function-path my_package.slime.policy_loss

All other arguments stay: `--advantage-estimator gspo`, `cispo` or any other for PPO's ratio of tokens,
`--eps-clip` and `--eps-clip-high` (GSPO's paper: 3e-4, 4e-4), `--eps-clip-c`, `--calculate-per-token-loss`,
`--entropy-coef`, `--use-kl-loss`, `--use-tis`, `--use-rollout-logprobs`, tensor and context parallelism.
Arguments in `REFUSED` are refused with the reason. Another objective goes into `objective_of`.

slime's pull request #2383 (open; read at d88425a) scores tokens from hidden states, for slime's own losses:
`--log-probs-backend triton`. Its head is verl's, so our kernels fit there, in a module that workers import:

    import slime.backends.megatron_utils.triton_log_probs.megatron as megatron
    from gspo_kernels.integrations.backends.verl import linear_cross_entropy
    megatron.linear_cross_entropy = linear_cross_entropy
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.models.layouts import tokens_of_rank

IGNORED = -100
REFUSED: dict[str, tuple[Any, str]] = {
    "log_probs_backend": ("torch", "with another one log-probs come in the place of logits"),
    "allgather_cp": (False, "logits and log-probs of a rank then belong to different tokens"),
    "rollout_top_p": (1.0, "this loss passes no mask of sampled tokens"),
    "use_opsm": (False, "off-policy sequence masking is not part of this loss"),
    "get_mismatch_metrics": (False, "these metrics are not part of this loss"),
    "custom_tis_function_path": (None, "weights are those of --tis-clip-low and --tis-clip"),
    "custom_pg_loss_reducer_function_path": (None, "the reduction is the objective's aggregation"),
    "use_unbiased_kl": (False, "the KL is not weighted by the ratio of tokens"),
}
"""Arguments that change slime's loss: for each the only value that is served, and the reason."""


def objective_of(args: Namespace) -> Any:
    """Return the objective that slime's arguments describe."""
    mean = {"aggregation": "token_mean" if args.calculate_per_token_loss else "sequence_mean"}
    if args.advantage_estimator == "cispo":
        return gk.CISPO(max(1.0 - args.eps_clip, 0.0), 1.0 + args.eps_clip_high, **mean)
    kind = gk.GSPO if args.advantage_estimator == "gspo" else gk.GRPO
    return kind(args.eps_clip, args.eps_clip_high, dual_clip=args.eps_clip_c, **mean)


def policy_loss(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the micro-batch's losses, and metrics; slime divides both by the step's rollouts.

    Args:
        args: slime's arguments.
        batch: lists with one entry per sample: `unconcat_tokens` (prompt and response), `total_lengths`,
            `response_lengths`, `loss_masks` (of the response), `advantages`, `log_probs` (of this rank's part
            of the response; without them the loss is on-policy), `rollout_mask_sums`, and where an argument
            needs them `ref_log_probs` and `rollout_log_probs`.
        logits: [1, T, V of the rank], fp32; T counts the rank's tokens and some padding.
        sum_of_sample_mean: slime's reduction over response tokens.
    """
    for name, (served, reason) in REFUSED.items():
        if (got := getattr(args, name, served)) != served:
            raise ValueError(f"{name}: got {got!r}, expected {served!r}: {reason}")
    if args.use_kl_loss and args.kl_loss_type == "low_var_kl":
        raise ValueError("kl_loss_type: got 'low_var_kl', expected k1, k2 or k3, which are not clamped")
    objective, (parallel, rank, ranks) = objective_of(args), share(args)
    labels, mask, where, cu_seqlens = lay_out(batch, logits, rank, ranks)
    B = len(cu_seqlens) - 1  # the samples, and the padding behind them

    def rows(name: str) -> Tensor:
        return logits.new_zeros(len(labels)).index_copy(0, where, torch.cat([*batch[name]]).to(logits))

    name = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    old = rows(name) if batch.get(name) else None
    terms: dict[str, Any] = {"entropy_coef": args.entropy_coef}
    if args.use_kl_loss:
        terms |= {"kl_beta": args.kl_loss_coef, "kl_estimator": args.kl_loss_type}
        terms["ref_logprobs"] = rows("ref_log_probs")
    weights = None
    if args.use_tis:
        if not batch.get("log_probs") or not batch.get("rollout_log_probs"):
            raise ValueError("use_tis: got no log_probs or no rollout_log_probs, expected both in the batch")
        weights = gk.rollout_weights(
            rows("log_probs"), rows("rollout_log_probs"), loss_mask=mask, cu_seqlens=cu_seqlens,
            low=args.tis_clip_low, high=args.tis_clip,
        )  # fmt: skip
    sequence = torch.arange(B, device=logits.device).repeat_interleave(cu_seqlens.diff())
    if not args.calculate_per_token_loss:
        # the samples of a rollout share one mean over its tokens
        tokens = torch.stack([each.sum() for each in batch["loss_masks"]])
        of_rollout = torch.stack([torch.as_tensor(each) for each in batch["rollout_mask_sums"]]).to(tokens)
        shares = torch.cat([tokens / of_rollout.clamp(min=1), tokens.new_zeros(1)]).to(logits)[sequence]
        weights = shares if weights is None else weights * shares
        for coefficient in terms.keys() & {"kl_beta", "entropy_coef"}:
            if terms[coefficient] != 0:
                terms[coefficient] = terms[coefficient] * shares
    advantages = rows("advantages")
    if not objective.takes_token_advantages:
        advantages = per_sequence(advantages, mask != 0, sequence, B, parallel.cp_group)
    out = gk.fused_policy_loss(
        logits[0], labels, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, rollout_weights=weights,
        normalizer=1.0, temperature=float(args.rollout_temperature), objective=objective, parallel=parallel,
        **terms,
    )  # fmt: skip
    logprobs = out.logprobs[where]
    before = logprobs if old is None else old[where]
    of = sum(each.sum() for each in batch["loss_masks"]) if args.calculate_per_token_loss else B - 1
    metrics = {
        # slime adds up the ranks that share tokens; each has the loss and the fraction of all
        "loss": out.loss.detach() / ranks,
        "pg_clipfrac": out.metrics["clip_fraction/tokens"] * of / ranks,
        "ppo_kl": sum_of_sample_mean(before - logprobs),
    }
    if out.entropy is not None:
        metrics["entropy_loss"] = sum_of_sample_mean(out.entropy[where])
    if batch.get("rollout_log_probs"):
        trained = logprobs if args.use_rollout_logprobs else before
        difference = (trained - torch.cat([*batch["rollout_log_probs"]])).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference)
    return out.loss, metrics


def share(args: Namespace) -> tuple[gk.Parallel, int, int]:
    """Return Megatron's groups, and this rank's number among the ranks that share tokens."""
    tensor, context = args.tensor_model_parallel_size > 1, args.context_parallel_size > 1
    if not tensor and not context:
        return gk.Parallel(), 0, 1
    mpu = importlib.import_module("megatron.core.mpu")
    parallel = gk.Parallel(
        tp_group=mpu.get_tensor_model_parallel_group() if tensor else None,
        cp_group=mpu.get_context_parallel_group() if context else None,
    )
    return parallel, mpu.get_context_parallel_rank() if context else 0, args.context_parallel_size


def lay_out(
    batch: Mapping[str, Any], logits: Tensor, rank: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return labels and mask of this rank's rows, which rows predict a response, and `cu_seqlens`.

    With context parallelism a sequence is padded to 2 * ranks equal runs, of which the rank has two.
    """
    ends, labels, masks = [0], [], []
    for ids, total, response, counted in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], batch["loss_masks"],
        strict=True,
    ):  # fmt: skip
        if response >= max(total, 1):
            raise ValueError(
                f"response_lengths: got {response} of {total} tokens, expected a prompt of at least one token"
            )
        padded = total if ranks == 1 else -(-total // (2 * ranks)) * 2 * ranks
        pads = (total - response - 1, padded - total + 1)  # a position predicts the token after it
        labels.append(torch.nn.functional.pad(ids[total - response :].to(logits.device), pads, value=IGNORED))
        masks.append(torch.nn.functional.pad(counted.to(logits), pads))
        ends.append(ends[-1] + padded)
    here, cu_seqlens = tokens_of_rank(torch.tensor(ends, device=logits.device), rank, ranks)
    padding = logits.shape[1] - len(here)
    if padding < 0:
        raise ValueError(f"logits: got {logits.shape[1]} rows, total_lengths have {len(here)} on this rank")
    label = torch.nn.functional.pad(torch.cat(labels)[here], (0, padding), value=IGNORED)
    mask = torch.nn.functional.pad(torch.cat(masks)[here], (0, padding))
    cu_seqlens = torch.nn.functional.pad(cu_seqlens, (0, 1), value=logits.shape[1])
    return label, mask, (label != IGNORED).nonzero().squeeze(1), cu_seqlens


def per_sequence(advantages: Tensor, mask: Tensor, sequence: Tensor, B: int, group: Any) -> Tensor:
    """Return the advantage of each sequence, [B]; its tokens must have the same."""
    least, most = (
        torch.full((B,), end, dtype=advantages.dtype, device=advantages.device).scatter_reduce(
            0, sequence, torch.where(mask, advantages, end), reduce
        )
        for end, reduce in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    if group is not None:  # a rank without a counted token of a sequence does not know its advantage
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group)
    if bool((most - least > 1e-4 * most.abs() + 1e-6).any()):
        raise ValueError("advantages: differ within a sequence, expected one per sequence")
    return most.masked_fill(most == -torch.inf, 0.0)
