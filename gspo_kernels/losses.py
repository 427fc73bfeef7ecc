"""The losses: from log-probs, from logits, from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.arguments import (
    LogitOptions,
    as_rows,
    check_inplace,
    check_linear,
    check_logits,
    chunking,
    from_rows,
    is_nonzero,
    leave_out_inactive,
    logit_options,
    merge_mask,
    policy_terms,
    row_temperature,
)
from gspo_kernels.layout import layout_of
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.exactness import coefficients_depend_on, refusals
from gspo_kernels.linear.logprobs import LinearTokenLogprobsFunction
from gspo_kernels.linear.loss import LinearPolicyFunction
from gspo_kernels.linear.plan import SchedulePlan, explain
from gspo_kernels.linear.run import shapes_of
from gspo_kernels.linear.schedule import choose
from gspo_kernels.linear.scopes import Scopes, known_coefficients
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.logprobs import KnownCoefficientsFunction, TokenLogprobsFunction
from gspo_kernels.ops.sequence_ratio import SequenceRatioFunction
from gspo_kernels.policy import PolicyTerms, metric_names
from gspo_kernels.policy_step import PolicyLoss, checked_policy_step, sequence_form, sequence_operands
from gspo_kernels.types import METRICS, ClippedSequenceRatio, LossOutput

SKIP_INACTIVE = ("backward", "all", "none")


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
        rollout_weights: [B] or labels' shape: off-policy corrections, multiply the policy term only.
        token_weights: labels' shape: factors on the log-probs' contributions to the objective.
        lengths: [B], |y_i| where it is not the number of counted tokens.
        group_ids: [B], integers: for objectives over groups.
        turn_ids: labels' shape, integers, -1 = none: for objectives over turns.
        normalizer: number or 0-d tensor that replaces the outer divisor (for gradient accumulation: the whole
            batch's).
        entropy: labels' shape, from ``token_logprobs(..., return_entropy=True)``: for the bonus and its
            metric.
        objective: GSPO() by default; see ``gspo_kernels.objectives``.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.floats("logprobs", logprobs, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout("logprobs", logprobs, cu_seqlens)
    terms = policy_terms(
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids,
        normalizer, objective, entropy is not None,
    )  # fmt: skip
    if entropy is not None:
        checks.floats("entropy", entropy, tuple(logprobs.shape), "the shape of logprobs", logprobs.device)
    packed = cu_seqlens is not None
    looked_at = None if entropy is None else as_rows(entropy, packed)
    return _policy_loss(as_rows(logprobs, packed), looked_at, resolve("auto", logprobs.device), terms, packed)


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
) -> Tensor:
    """dLoss/dlogprobs of ``policy_loss`` with the same arguments: what ``Linear`` takes as ``token_weights``.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer,
        objective: as in ``policy_loss``.
        entropy: the shape of ``logprobs``; only for objectives that look at it.

    Returns:
        The shape of ``logprobs``, fp32 (fp64 for fp64 log-probs), exactly 0.0 where there is no gradient.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. ``entropy_coef`` other than 0 is
            refused: the entropy's gradient is no coefficient of a log-prob; give it to the loss that takes
                these coefficients.
    """
    checks.floats("logprobs", logprobs, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout("logprobs", logprobs, cu_seqlens)
    if isinstance(entropy_coef, Tensor) or entropy_coef != 0:
        raise ValueError(
            "entropy_coef: coefficients of log-probs can't carry the entropy's gradient; pass entropy_coef "
            "to the loss with objective=Linear() that takes these coefficients as token_weights"
        )
    if entropy is not None:
        checks.floats("entropy", entropy, tuple(logprobs.shape), "the shape of logprobs", logprobs.device)
    terms = policy_terms(
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids,
        normalizer, objective, entropy is not None,
    )  # fmt: skip
    packed = cu_seqlens is not None
    looked_at = None if entropy is None else as_rows(entropy.detach(), packed)
    rows, backend = as_rows(logprobs.detach(), packed), resolve("auto", logprobs.device)
    return from_rows(checked_policy_step(rows, looked_at, backend, *terms)[1], packed)


def _wants_entropy(return_entropy: bool, entropy_coef: float | Tensor, objective: Objective) -> bool:
    """Whether the entropy must be computed: asked for, in the loss, or looked at by the objective."""
    checks.flag("return_entropy", return_entropy)
    checks.objective(objective, Objective)
    return return_entropy or is_nonzero(entropy_coef) or "entropy" in objective.needs


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
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    objective: Objective = GSPO(),
    backend: str = "auto",
) -> LossOutput:
    """Policy loss straight from logits: each logit is read once in the forward and once in the backward.

    Equivalent to ``policy_loss(token_logprobs(logits, labels).logprobs, ...)``.

    Args:
        logits: [B, T, V], or [N, V] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted,
            entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer, objective:
            as in ``policy_loss``; a token is also left out where its label is ``ignore_index``.
        temperature: a number, or a tensor [B] with one per sequence.
        logit_scale, softcap, ignore_index, inplace_backward, backend: as in ``token_logprobs``.
        return_entropy: also return the entropy, detached; an entropy bonus computes it anyway.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    check_logits(logits, labels)
    checks.layout("labels", labels, cu_seqlens)
    sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = logit_options(
        logits, labels, sequences, temperature, logit_scale, softcap, ignore_index, backend
    )
    check_inplace(logits, inplace_backward)
    wants_entropy = _wants_entropy(return_entropy, entropy_coef, objective)
    terms = policy_terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids,
        normalizer, objective, wants_entropy,
    )  # fmt: skip
    packed = cu_seqlens is not None
    rows, row_labels = (logits.unsqueeze(0), labels.unsqueeze(0)) if packed else (logits, labels)
    row_labels, terms = merge_mask(row_labels, terms, ignore_index)
    temperatures = row_temperature(temperature, row_labels, packed, cu_seqlens, logits.dtype)
    positional = options.positional(temperatures)

    learns = torch.is_grad_enabled() and logits.requires_grad
    tracing = torch.compiler.is_compiling()
    one_pass = learns and not (tracing or inplace_backward or wants_entropy)
    if one_pass and coefficients_depend_on(objective, terms) == "nothing":
        coefficients = known_coefficients(row_labels, terms)
        carrier, logprobs = KnownCoefficientsFunction.apply(rows, row_labels, coefficients, *positional)
        return _carried(carrier, logprobs, None, options.backend, terms, packed)
    off_policy = terms.old_logprobs is not None
    form = sequence_form(objective, terms, options.backend) if off_policy and not wants_entropy else None
    if form is not None:
        return _sequence_ratio_loss(rows, row_labels, inplace_backward, positional, terms, form, packed)
    logprobs, entropy = TokenLogprobsFunction.apply(
        rows, row_labels, wants_entropy, inplace_backward, *positional
    )
    return _policy_loss(logprobs, entropy if wants_entropy else None, options.backend, terms, packed)


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
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    schedule: str = "auto",
    skip_inactive: str = "backward",
    objective: Objective = GSPO(),
    backend: str = "auto",
) -> LossOutput:
    """Policy loss from hidden states and the lm_head's weight: the logits never exist as a whole.

    Equivalent to ``fused_policy_loss(hidden @ weight.T + bias, labels, ...)`` with the product in fp32.

    Args:
        hidden: [B, T, H], or [N, H] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H], the lm_head's; hidden's dtype, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        bias: [V] or None.
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted,
            entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer, objective:
            as in ``policy_loss``; a token is also left out where its label is ``ignore_index``.
        temperature: a number, or a tensor [B] with one per sequence.
        logit_scale, softcap, ignore_index, logits_dtype, max_chunk_bytes, backend: as in
            ``linear_token_logprobs``.
        return_entropy: also return the entropy, detached; an entropy bonus computes it anyway.
        schedule: "auto", "known", "aligned", "deferred", "frozen", "cached" or "two_pass": how the batch is
            cut into chunks and products. All give the same result; one that can't is refused with the reason.
            "auto" chooses by a cost model, for each sequence; see ``explain_schedule``. All but "two_pass"
            compute the gradient along with the loss.
        skip_inactive: "backward": rows without gradient enter no gradient product, where the schedule knows
            them in time ("deferred" and "frozen" don't, but for zero advantages). "all": sequences whose
            gradient is known to be zero beforehand (zero advantage, no KL or entropy term) enter no product
            at all; their log-probs are NaN and metrics cover the rest. "none": nothing is left out, no look
            at the device.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message; a schedule that is not exact for the
            call.
        RuntimeError: the backend can't serve the tensors' device.
    """
    hidden, weight, bias = check_linear(hidden, weight, bias, labels)
    checks.layout("labels", labels, cu_seqlens)
    sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = logit_options(
        hidden, labels, sequences, temperature, logit_scale, softcap, ignore_index, backend
    )
    wants_entropy = _wants_entropy(return_entropy, entropy_coef, objective)
    checks.choice("skip_inactive", skip_inactive, SKIP_INACTIVE)
    chunked = chunking(logits_dtype, max_chunk_bytes, compact=skip_inactive != "none")
    terms = policy_terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids,
        normalizer, objective, wants_entropy,
    )  # fmt: skip
    call = _LinearCall(hidden, weight, bias, labels, terms, options, temperature, skip_inactive, objective)
    name, _ = call.choose(schedule)
    operands = (call.labels, *options.positional(call.temperatures), *chunked)
    if name == "two_pass":
        logprobs, entropy = LinearTokenLogprobsFunction.apply(
            call.hidden, weight, bias, operands[0], wants_entropy, call.skip, *operands[1:]
        )
        return _policy_loss(
            logprobs, entropy if wants_entropy else None, options.backend, call.terms, call.packed
        )
    carrier, logprobs, entropy = LinearPolicyFunction.apply(
        call.hidden, weight, bias, name, wants_entropy, call.skip, options.backend,
        torch.compiler.is_compiling(), *operands, *call.terms,
    )  # fmt: skip
    shown = entropy if wants_entropy else None
    return _carried(carrier, logprobs, shown, options.backend, call.terms, call.packed)


class _LinearCall:
    """A hidden-state loss in the operators' form: rows, terms, and what may serve it."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: PolicyTerms,
        options: LogitOptions,
        temperature: float | Tensor,
        skip_inactive: str,
        objective: Objective,
    ):
        self.packed = terms.cu_seqlens is not None
        self.hidden = hidden.unsqueeze(0) if self.packed else hidden
        rows = labels.unsqueeze(0) if self.packed else labels
        rows, terms = merge_mask(rows, terms, options.ignore_index)
        if skip_inactive == "all":
            rows, terms = leave_out_inactive(rows, terms, objective, options.ignore_index)
        self.labels, self.terms = rows, terms
        self.temperatures = row_temperature(temperature, rows, self.packed, terms.cu_seqlens, hidden.dtype)
        self.skip = skip_inactive != "none"
        inputs = (hidden, weight, bias)
        learns = torch.is_grad_enabled()
        self.needs = tuple(learns and x is not None and x.requires_grad for x in inputs)
        self.refusals = refusals(objective, terms, self.needs[1] or self.needs[2])

    def choose(self, schedule: str) -> tuple[str, str]:
        """See ``schedule.choose``."""
        lengths_known = self.skip or not self.packed or not self.hidden.is_cuda
        return choose(schedule, self.refusals, any(self.needs), lengths_known)


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
    schedule: str = "auto",
    skip_inactive: str = "backward",
    objective: Objective = GSPO(),
) -> SchedulePlan:
    """The plan of a ``fused_linear_policy_loss`` call with these arguments, without running it; print it to
    read it: matrix products, memory, the cost model's time, the reason, and the alternatives.

    Arguments of the loss that can't change the plan are left out here. Which inputs need a gradient does, so
    call it under the same grad mode. Sequence lengths are read from the device.

    Raises:
        TypeError, ValueError: as the loss itself.
    """
    hidden, weight, bias = check_linear(hidden, weight, bias, labels)
    checks.layout("labels", labels, cu_seqlens)
    checks.choice("skip_inactive", skip_inactive, SKIP_INACTIVE)
    chunked = chunking(logits_dtype, max_chunk_bytes, compact=skip_inactive != "none")
    sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = logit_options(hidden, labels, sequences, 1.0, 1.0, None, ignore_index, "auto")
    terms = policy_terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, "k3",
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, None,
        objective, True,
    )  # fmt: skip
    call = _LinearCall(hidden, weight, bias, labels, terms, options, 1.0, skip_inactive, objective)
    name, reason = call.choose(schedule)
    operands = (*options.positional(None), *chunked)
    rows = Call.of(call.hidden, weight, bias, call.labels, *operands)
    scopes = Scopes(rows, call.terms, call.skip)
    shapes = shapes_of(rows, call.terms, call.needs)
    return explain(name, reason, scopes.rows, scopes.idle, shapes, call.refusals, weight.element_size())


def _named_metrics(values: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    return dict(zip(names, values.detach().unbind(), strict=True))


def _output(
    loss: Tensor, metrics: Tensor, logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, packed: bool
) -> LossOutput:
    shown = logprobs.detach()
    if terms.skipped is not None and terms.loss_mask is not None:
        layout = layout_of(shown, terms.cu_seqlens)
        absent = layout.expand(terms.skipped) & (terms.loss_mask != 0)
        shown = shown.masked_fill(absent, float("nan"))
        entropy = None if entropy is None else entropy.masked_fill(absent, float("nan"))
    names = metric_names(terms, entropy)
    return LossOutput(
        loss,
        from_rows(shown, packed),
        None if entropy is None else from_rows(entropy.detach(), packed),
        _named_metrics(metrics, names),
    )


def _policy_loss(
    logprobs: Tensor, entropy: Tensor | None, backend: str, terms: PolicyTerms, packed: bool
) -> LossOutput:
    loss, metrics = PolicyLoss.apply(logprobs, entropy, backend, *terms)
    return _output(loss, metrics, logprobs, entropy, terms, packed)


def _carried(
    carrier: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    backend: str,
    terms: PolicyTerms,
    packed: bool,
) -> LossOutput:
    """The loss of a call whose forward computed the gradient: ``carrier`` is 0 and holds it."""
    loss, *_, metrics = checked_policy_step(logprobs, entropy, backend, *terms)
    return _output(carrier + loss, metrics, logprobs, entropy, terms, packed)


def _sequence_ratio_loss(
    rows: Tensor,
    row_labels: Tensor,
    inplace: bool,
    options: tuple[Any, ...],
    terms: PolicyTerms,
    form: ClippedSequenceRatio,
    packed: bool,
) -> LossOutput:
    operands = sequence_operands(row_labels, terms)
    loss, logprobs, metrics = SequenceRatioFunction.apply(
        rows, row_labels, inplace, options, *operands, *form
    )
    return LossOutput(loss, from_rows(logprobs, packed), None, _named_metrics(metrics, METRICS))
