"""slime: ``PolicyLoss`` is a loss function for ``--custom-loss-function-path``, from the packed logits."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.integrations import hooks
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.integrations.hooks import RolloutCorrection
from gspo_kernels.layout import layout_of
from gspo_kernels.losses import fused_policy_loss
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import BACKENDS
from gspo_kernels.parallel.groups import Parallel
from gspo_kernels.terms import KL_ESTIMATORS

SUPPORTED = ">=0.3,<0.4"
IGNORE = -100

__all__ = ["PolicyLoss", "RolloutCorrection"]

_REFUSED: dict[str, tuple[Any, str]] = {
    "allgather_cp": (False, "logits and log-probs of a rank then belong to different tokens"),
    "rollout_top_p": (1.0, "this adapter passes no mask of sampled tokens"),
    "use_opsm": (False, "off-policy sequence masking is not part of this loss"),
    "use_tis": (False, "give PolicyLoss a correction=RolloutCorrection(...) instead"),
    "get_mismatch_metrics": (False, "it also changes slime's loss; these metrics are not part of this one"),
    "custom_pg_loss_reducer_function_path": (None, "the reduction is the objective's aggregation"),
    "use_unbiased_kl": (False, "the KL is not weighted by the ratio of tokens here"),
}
"""Arguments that change slime's loss: for each the only value that is supported, and the reason."""


class PolicyLoss:
    """Any objective as a slime loss function, from the logits of a packed micro-batch.

    It returns the *sum* over the micro-batch's samples (or tokens, under ``--calculate-per-token-loss``).
    slime itself divides this sum by the number of the step's rollouts (or tokens). Megatron's ranks may share
    the vocabulary and the tokens of sequences; each then has the loss of all, and the gradient of its own
    logits. The loss follows slime's
    arguments ``entropy_coef``, ``use_kl_loss``, ``kl_loss_coef``, ``kl_loss_type``, ``rollout_temperature``
    and ``use_rollout_logprobs``. It ignores ``eps_clip``: the clip range is the objective's.

    Args:
        objective: GSPO() by default.
        correction: weights for rollouts from the inference engine, or None.
        inplace_backward: overwrite the logits with their gradient; see ``gspo_kernels.fused_policy_loss``.
        backend: "auto", "triton", "cpp" or "reference".

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        IntegrationError: slime is installed at another version, or the objective doesn't fit.
    """

    def __init__(
        self,
        objective: Objective = GSPO(),
        *,
        correction: RolloutCorrection | None = None,
        inplace_backward: bool = False,
        backend: str = "auto",
    ) -> None:
        require_package("slime", SUPPORTED, optional=True)
        self.objective = hooks.check_objective(objective, "slime", divides_by=("sequences", "tokens"))
        self.correction = hooks.check_correction(correction)
        self.inplace_backward = checks.flag("inplace_backward", inplace_backward)
        self.backend = checks.choice("backend", backend, ("auto", *BACKENDS))

    def __call__(
        self,
        args: Namespace,
        batch: Mapping[str, Any],
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, and metrics as sums that slime divides like the loss.

        Args:
            args: slime's arguments.
            batch: lists with one entry per sample: ``unconcat_tokens`` (prompt and response),
                ``total_lengths``, ``response_lengths``, ``loss_masks`` (of the response), ``advantages`` and
                ``log_probs`` (of this rank's part of the response), ``rollout_mask_sums``, and where an
                option needs them ``ref_log_probs`` and ``rollout_log_probs``. Without ``log_probs`` the loss
                is on-policy, unless ``use_rollout_logprobs`` is set.
            logits: [1, T, V of the rank], fp32; T counts the rank's tokens and some padding.
            sum_of_sample_mean: slime's reduction over response tokens; only metrics use it.

        Raises:
            IntegrationError: an argument changes slime's loss and is not supported here.
        """
        self.check_arguments(args)
        parallel, rank, ranks = _ranks(args)
        if ranks > 1 and self.correction is not None and self.correction.level != "token":
            raise IntegrationError(
                f"correction: got level={self.correction.level!r}, expected 'token' with "
                "context_parallel_size above 1: a rank has a part of each sequence"
            )
        where, taken, cu_seqlens = _responses(batch, logits, rank, ranks)

        def placed(values: Tensor) -> Tensor:
            return logits.new_zeros(logits.shape[1]).index_copy(0, where, values.to(logits))

        def rows(name: str) -> Tensor:
            return placed(torch.cat([*batch[name]]))

        lengths = zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)
        tokens = torch.cat([ids[len(ids) - length :] for ids, length in lengths])
        labels = torch.full((logits.shape[1],), IGNORE, dtype=torch.int64, device=logits.device)
        labels = labels.index_copy(0, where, tokens.to(labels)[taken])
        mask = placed(torch.cat([*batch["loss_masks"]]).to(logits)[taken])
        old = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
        old_logprobs = rows(old) if args.use_rollout_logprobs or batch.get(old) else None
        weights = None
        if self.correction is not None:
            if old_logprobs is None or not batch.get("rollout_log_probs"):
                raise ValueError("correction: needs the batch's log_probs and rollout_log_probs, got None")
            weights = self.correction.weights(old_logprobs, rows("rollout_log_probs"), mask, cu_seqlens)
        kl_beta: float | Tensor = args.kl_loss_coef if args.use_kl_loss else 0.0
        entropy_coef: float | Tensor = args.entropy_coef
        shares = self._shares(batch, mask)
        if shares is not None:
            of_tokens = layout_of(mask[None], cu_seqlens).expand(shares)[0]
            kl_beta, entropy_coef = kl_beta * of_tokens, entropy_coef * of_tokens
            if weights is None:
                weights = shares
            else:
                weights = weights * (of_tokens if weights.shape == mask.shape else shares)
        advantages = hooks.fitting_advantages(self.objective, rows("advantages"), mask, cu_seqlens)
        if ranks > 1 and not self.objective.takes_token_advantages:
            # a rank without a counted token of a sequence does not know its advantage
            counted = layout_of(mask[None], cu_seqlens).sum(mask[None]) > 0
            advantages = torch.where(counted, advantages, -torch.inf)
            torch.distributed.all_reduce(advantages, torch.distributed.ReduceOp.MAX, parallel.cp_group)
            advantages = advantages.masked_fill(advantages == -torch.inf, 0.0)
        out = fused_policy_loss(
            logits[0],
            labels,
            old_logprobs,
            advantages,
            loss_mask=mask,
            cu_seqlens=cu_seqlens,
            ref_logprobs=rows("ref_log_probs") if args.use_kl_loss else None,
            kl_beta=kl_beta if args.use_kl_loss else 0.0,
            kl_estimator=args.kl_loss_type,
            entropy_coef=entropy_coef if args.entropy_coef != 0 else 0.0,
            rollout_weights=weights,
            normalizer=1.0,
            temperature=float(args.rollout_temperature),
            inplace_backward=self.inplace_backward,
            objective=self.objective,
            backend=self.backend,
            parallel=parallel,
        )
        logprobs = out.logprobs[where]
        before = logprobs if old_logprobs is None else old_logprobs[where]
        by_token = self.objective.outer_divisor()[0] == "tokens"
        of = sum(each.sum() for each in batch["loss_masks"]) if by_token else len(batch["total_lengths"])
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

    def check_arguments(self, args: Namespace) -> None:
        """Raise IntegrationError if this loss doesn't support slime's arguments. Every call checks them."""
        for name, (served, reason) in _REFUSED.items():
            got = getattr(args, name, served)
            if got != served:
                raise IntegrationError(f"{name}: got {got!r}, expected {served!r}: {reason}")
        if args.use_kl_loss and args.kl_loss_type not in KL_ESTIMATORS:
            raise IntegrationError(
                f"kl_loss_type: got {args.kl_loss_type!r}, expected one of {', '.join(KL_ESTIMATORS)}"
                ": the KL is not clamped here"
            )
        by_token = self.objective.outer_divisor()[0] == "tokens"
        if bool(args.calculate_per_token_loss) != by_token:
            raise IntegrationError(
                f"calculate_per_token_loss: got {args.calculate_per_token_loss}, but the objective's "
                f"aggregation={self.objective.aggregation!r} divides by the number of "
                f"{'tokens' if by_token else 'sequences'}, expected {by_token}"
            )

    def _shares(self, batch: Mapping[str, Any], mask: Tensor) -> Tensor | None:
        """Return each sample's share of the tokens of its rollout (``rollout_mask_sums``), [B + 1].

        The last share, the padding's, is 0. None if the objective doesn't average over a sequence's tokens.
        """
        if self.objective.aggregation != "sequence_mean" or batch.get("rollout_mask_sums") is None:
            return None
        tokens, totals = (
            torch.stack([torch.as_tensor(each, dtype=mask.dtype, device=mask.device) for each in values])
            for values in ([each.sum() for each in batch["loss_masks"]], batch["rollout_mask_sums"])
        )
        return torch.cat([tokens / totals.clamp(min=1.0), tokens.new_zeros(1)])


def _ranks(args: Namespace) -> tuple[Parallel, int, int]:
    """Return Megatron's groups, and this rank's number among the ranks that share tokens."""
    tensor, context = args.tensor_model_parallel_size > 1, args.context_parallel_size > 1
    if not tensor and not context:
        return Parallel(), 0, 1
    mpu = importlib.import_module("megatron.core.mpu")
    parallel = Parallel(
        tp_group=mpu.get_tensor_model_parallel_group() if tensor else None,
        cp_group=mpu.get_context_parallel_group() if context else None,
    )
    return parallel, mpu.get_context_parallel_rank() if context else 0, args.context_parallel_size


def _responses(
    batch: Mapping[str, Any], logits: Tensor, rank: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where this rank predicts response tokens.

    With context parallelism a sequence is padded to 2 * ranks equal runs, of which the rank has two, as in
    ``tokens_of_rank``.

    Returns:
        The rows of ``logits``, the places of their tokens among the response tokens of all samples, and
        ``cu_seqlens`` of the rank's rows, with the padding as the last sequence.
    """
    checks.floats("logits", logits, (1, *logits.shape[1:]), "[1, T, V]", None)
    rows, places, ends, responses = [], [], [0], 0
    for total, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        if response >= max(total, 1):
            raise ValueError(
                f"response_lengths: got {response} of {total} tokens, expected a prompt of at least one token"
            )
        run = -(-total // (2 * ranks))
        runs = [(0, total)]
        if ranks > 1:
            runs = [(each * run, run) for each in (rank, 2 * ranks - 1 - rank)]
        positions = torch.cat([torch.arange(start, start + size, device="cpu") for start, size in runs])
        place = positions - (total - response - 1)
        here = (place >= 0) & (place < response)
        rows.append(ends[-1] + here.nonzero().squeeze(1))
        places.append(responses + place[here])
        ends.append(ends[-1] + len(positions))
        responses += response
    if ends[-1] > logits.shape[1]:
        raise ValueError(f"logits: got {logits.shape[1]} rows, total_lengths have {ends[-1]} on this rank")
    offsets = torch.tensor([*ends, logits.shape[1]], dtype=torch.int32, device="cpu")
    where, taken, cu_seqlens = (
        each.to(logits.device) for each in (torch.cat(rows), torch.cat(places), offsets)
    )
    return where, taken, cu_seqlens
