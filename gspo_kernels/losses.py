"""The losses: from log-probs, from logits, from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.entry import implemented_by
from gspo_kernels.layout import as_rows, from_rows
from gspo_kernels.linear import calls
from gspo_kernels.linear.exactness import coefficients_depend_on
from gspo_kernels.linear.plan import SchedulePlan
from gspo_kernels.linear.scopes import without_logprobs
from gspo_kernels.logits import (
    LogitArguments,
    check_inplace,
    check_logits,
    wants_entropy,
)
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.logprobs import KnownCoefficientsFunction, TokenLogprobsFunction
from gspo_kernels.parallel.groups import Parallel
from gspo_kernels.ranks import compare_ranks, on_all_ranks
from gspo_kernels.sequence_ratio import RatioOperands, SequenceRatioFunction, sequence_form
from gspo_kernels.step import carried_loss, loss_of, output_of, policy_step
from gspo_kernels.terms import Terms, checked, merge_mask
from gspo_kernels.types import LossOutput


def _given_logprobs(
    logprobs: Tensor, entropy: Tensor | None, terms: Terms, objective: Objective
) -> tuple[Tensor, Tensor | None, str, Terms]:
    """Log-probs and entropy in rows, the backend that serves them, and checked terms."""
    checks.floats("logprobs", logprobs, None, "[B, T], or [N] with cu_seqlens", None)
    packed = checks.layout("logprobs", logprobs, terms.cu_seqlens) is not None
    checked_terms = checked(terms, logprobs, objective, entropy is not None)
    if entropy is not None:
        checks.floats("entropy", entropy, tuple(logprobs.shape), "the shape of logprobs", logprobs.device)
        entropy = as_rows(entropy, packed)
    rows = as_rows(logprobs, packed)
    compare_ranks(rows.detach(), checked_terms)
    return rows, entropy, resolve("auto", logprobs.device), checked_terms


@on_all_ranks
def _policy_loss(logprobs: Tensor, entropy: Tensor | None, terms: Terms, objective: Objective) -> LossOutput:
    rows = _given_logprobs(logprobs, entropy, terms, objective)
    return loss_of(*rows, packed=terms.cu_seqlens is not None)


@implemented_by(_policy_loss)
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    *,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    entropy: Tensor | None = None,
    objective: Objective = GSPO(),
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss of given log-probs: the drop-in for a trainer that already computes them.

    ``loss = agg(policy term * rollout_weights) + kl_beta * agg(KL) - entropy_coef * agg(H)`` with the
    objective's aggregation and divisor. Only ``logprobs`` and ``entropy`` receive gradients; everything else
    is a constant.

    Args:
        logprobs: [B, T], or [N] with ``cu_seqlens``; nats; fp16, bf16, fp32 or fp64.
        old_logprobs: the same shape: log-probs under the policy that sampled. None: on-policy, the detached
            current ones.
        advantages: [B], or per token in the labels' shape where the objective takes them (packed with N == B:
            [B]).
        loss_mask: labels' shape, bool or 0/1: tokens that count, holes allowed. None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.
        ref_logprobs: labels' shape: log-probs under the reference policy, for the KL term and its metric.
        kl_beta: weight of the KL term; a number, or a tensor that broadcasts to the labels.
        kl_estimator: "k1", "k2" or "k3", of d = logp - ref: d, d^2/2, exp(-d) + d - 1.
        kl_ratio_weighted: multiply the KL by the (undetached) importance ratio, as TRL does by default.
        entropy_coef: weight of the entropy bonus; a number, or a tensor that broadcasts to the labels.
        rollout_weights: [B] or labels' shape (packed with N == B: [B]): off-policy corrections, multiply the
            policy term only.
        token_weights: labels' shape: factors on the log-probs' contributions to the objective.
        lengths: [B], |y_i| where it is not the number of counted tokens.
        group_ids: [B], integers: for objectives over groups.
        turn_ids: labels' shape, integers, -1 = none: for objectives over turns.
        normalizer: number or 0-d tensor that replaces the outer divisor (for gradient accumulation: the whole
            batch's).
        entropy: labels' shape, from ``token_logprobs(..., return_entropy=True)``: for the bonus and its
            metric.
        objective: GSPO() by default; see ``gspo_kernels.objectives``.
        parallel: ``Parallel(cp_group=...)`` where ranks have parts of the same sequences.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RanksDisagreeError: with GSPO_KERNELS_VALIDATE=1, another rank refused the call, or was called with
            something else; see ``docs/parallel.md``.
    """


@on_all_ranks
def _policy_coefficients(
    logprobs: Tensor, entropy: Tensor | None, terms: Terms, objective: Objective
) -> Tensor:
    if isinstance(terms.entropy_coef, Tensor) or terms.entropy_coef != 0:
        raise ValueError(
            "entropy_coef: coefficients of log-probs can't carry the entropy's gradient; pass entropy_coef "
            "to the loss with objective=Linear() that takes these coefficients as token_weights"
        )
    rows = _given_logprobs(logprobs, entropy, terms, objective)
    with torch.no_grad():
        return from_rows(policy_step(*rows, False).grad_logprobs, terms.cu_seqlens is not None)


@implemented_by(_policy_coefficients)
def policy_coefficients(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    *,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    entropy: Tensor | None = None,
    objective: Objective,
    parallel: Parallel = Parallel(),
) -> Tensor:
    """dLoss/dlogprobs of ``policy_loss`` with the same arguments: what ``Linear`` takes as ``token_weights``.

    Args:
        logprobs, old_logprobs, advantages, objective, parallel, and all terms from loss_mask to normalizer:
            as in ``policy_loss``.
        entropy: the shape of ``logprobs``; only for objectives that look at it.

    Returns:
        The shape of ``logprobs``, fp32 (fp64 for fp64 log-probs), exactly 0.0 where there is no gradient.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. ``entropy_coef`` other than 0 is
            refused: the entropy's gradient is no coefficient of a log-prob; give it to the loss that takes
            these coefficients.
    """


@on_all_ranks
def _fused_policy_loss(
    logits: Tensor,
    labels: Tensor,
    logit_arguments: LogitArguments,
    terms: Terms,
    return_entropy: bool,
    inplace_backward: bool,
    objective: Objective,
) -> LossOutput:
    check_logits(logits, labels)
    packed = checks.layout("labels", labels, terms.cu_seqlens) is not None
    sequences = labels.shape[0] if terms.cu_seqlens is None else terms.cu_seqlens.shape[0] - 1
    options = logit_arguments.checked(labels, sequences, logits.shape[-1])
    check_inplace(logits, inplace_backward)
    with_entropy = wants_entropy(return_entropy, terms.entropy_coef, objective)
    terms = checked(terms, labels, objective, with_entropy)
    rows = as_rows(logits, packed)
    row_labels, terms = merge_mask(as_rows(labels, packed), terms, options.ignore_index)
    options = logit_arguments.with_rows(
        options, row_labels, packed, terms.cu_seqlens, logits.dtype, logits.shape[-1]
    )
    whole = not options.shard.group
    compare_ranks(row_labels, terms, options, logits.shape[-1])
    learns = torch.is_grad_enabled() and logits.requires_grad
    tracing = torch.compiler.is_compiling()
    # In fp16 a loss scale decides what is representable, and only the backward knows it.
    narrow = logits.dtype == torch.float16
    one_pass = learns and not (tracing or inplace_backward or with_entropy or narrow)
    if one_pass and coefficients_depend_on(objective, terms) == "nothing":
        given, alone = without_logprobs(row_labels, terms)
        with torch.no_grad():
            coefficients = policy_step(given, None, options.backend, alone, False).grad_logprobs
        carrier, logprobs = KnownCoefficientsFunction.apply(rows, row_labels, coefficients, options)
        return carried_loss(carrier, logprobs, None, options.backend, terms, packed)
    one_launch = whole and terms.old_logprobs is not None and not with_entropy
    form = sequence_form(objective, terms, options.backend) if one_launch else None
    if form is not None:
        loss, logprobs, metrics = SequenceRatioFunction.apply(
            rows, row_labels, inplace_backward, options, RatioOperands.of(row_labels, terms), form
        )
        return output_of(loss, metrics, logprobs, None, terms, packed)
    logprobs, entropy = TokenLogprobsFunction.apply(rows, row_labels, with_entropy, inplace_backward, options)
    return loss_of(logprobs, entropy if with_entropy else None, options.backend, terms, packed)


@implemented_by(_fused_policy_loss)
def fused_policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    *,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_ids: Tensor | None = None,
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    objective: Objective = GSPO(),
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss straight from logits: each logit is read once in the forward and once in the backward.

    Equivalent to ``policy_loss(token_logprobs(logits, labels).logprobs, ...)``.

    Args:
        logits: [B, T, V], or [N, V] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        old_logprobs, advantages, and all terms from loss_mask to normalizer: as in ``policy_loss``; a token
            is also left out where its label is ``ignore_index``.
        temperature: a number, or a tensor [B] with one per sequence.
        logit_scale, softcap, ignore_index, inplace_backward, backend: as in ``token_logprobs``.
        kept_ids, kept_mask: as there. Old and reference log-probs must be over the same ids.
        return_entropy: also return the entropy, detached; an entropy bonus computes it anyway.
        objective: as in ``policy_loss``.
        parallel: ``tp_group``, ``vocab_range`` and ``cp_group`` of ``Parallel``.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """


@implemented_by(calls.fused_linear_policy_loss)
def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    *,
    bias: Tensor | None = None,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_ids: Tensor | None = None,
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    schedule: str = "auto",
    skip_inactive: str = "backward",
    objective: Objective = GSPO(),
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss from hidden states and the lm_head's weight: the logits never exist as a whole.

    Equivalent to ``fused_policy_loss(hidden @ weight.T + bias, labels, ...)`` with the product in fp32.

    Args:
        hidden: [B, T, H], or [N, H] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H], the lm_head's; hidden's dtype, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        bias: [V] or None.
        old_logprobs, advantages, and all terms from loss_mask to normalizer: as in ``policy_loss``; a token
            is also left out where its label is ``ignore_index``.
        temperature: a number, or a tensor [B] with one per sequence.
        logit_scale, softcap, ignore_index, logits_dtype, backend: as in ``linear_token_logprobs``.
        max_chunk_bytes, batch_invariant: as there.
        kept_ids, kept_mask: as there. Old and reference log-probs must be over the same ids.
        return_entropy: also return the entropy, detached; an entropy bonus computes it anyway.
        objective: as in ``policy_loss``.
        parallel: see ``Parallel``.
        schedule: "auto", "known", "frozen", "aligned", "deferred" or "two_pass": how the batch is cut into
            chunks and products. All give the same result; one that can't is refused with the reason. "auto"
            is the first of them that is exact for the call: "known" where a token's coefficient is known or
            its own, "frozen" where the lm_head has no gradient, "aligned" for sequences (groups) that fit in
            a chunk, "deferred" for longer ones; see ``explain_schedule``. All but "two_pass"
            compute the gradient along with the loss; so does "auto", but on the CPU logits of up to 1 MiB
            stay until the backward.
        skip_inactive: "backward": rows without gradient enter no gradient product, where the schedule knows
            them in time ("deferred" and "frozen" don't, but for zero advantages). "all": sequences whose
            gradient is known to be zero beforehand (zero advantage, no KL or entropy term) enter no product
            at all; their log-probs are NaN and metrics cover the rest. "none": nothing is left out, no look
            at the device (of packed calls, "aligned", "deferred" and "frozen" by name look at the lengths).

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message; a schedule that is not exact for the
            call.
        RuntimeError: the backend can't serve the tensors' device.
    """


@implemented_by(calls.explain_schedule)
def explain_schedule(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    *,
    bias: Tensor | None = None,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    ignore_index: int = -100,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    schedule: str = "auto",
    skip_inactive: str = "backward",
    objective: Objective = GSPO(),
    parallel: Parallel = Parallel(),
) -> SchedulePlan:
    """The plan of a ``fused_linear_policy_loss`` call with these arguments, without running it; print it to
    read it: matrix products, memory, the reason, and the alternatives.

    Arguments of the loss that can't change the plan are left out here. Which inputs need a gradient does, so
    call it under the same grad mode. Sequence lengths are read from the device.

    Raises:
        TypeError, ValueError: as the loss itself.
    """
