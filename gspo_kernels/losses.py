"""The public losses and log-prob functions: checks, layout, and the choice of operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import layout_of, segment_ids
from gspo_kernels.linear_policy import KnownLinearFunction, coefficients_depend_on, known_coefficients
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.linear import Head, LinearTokenLogprobsFunction, chunk_rows
from gspo_kernels.ops.logprobs import KnownCoefficientsFunction, TokenLogprobsFunction
from gspo_kernels.ops.sequence_ratio import SequenceRatioFunction, has_single_launch
from gspo_kernels.ops.values import mask_labels
from gspo_kernels.policy import KL_ESTIMATORS, PolicyLoss, PolicyTerms, metric_names, policy_step
from gspo_kernels.schedule import SchedulePlan, choose
from gspo_kernels.types import METRICS, LossOutput, TokenLogprobs, stats_dtype

SKIP_INACTIVE = ("backward", "all", "none")
LOGITS_DTYPES = ("float32", "input")


# --- per-token log-probabilities
# ------------------------------------------------------------------------------------


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probability of each label, differentiable, without keeping anything of the logits' size.

    Equivalent to ``log_softmax(z, -1).gather(-1, labels)`` in fp32, with ``z = logit_scale * logits;
    z = softcap * tanh(z / softcap); z = z / temperature``.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed logits: one per token).
        logit_scale: factor on the logits.
        softcap: bound of the tanh soft-capping, or None.
        ignore_index: positions with this label are left out: 0.0, no gradient, their logits are never read.
        return_entropy: also return the differentiable entropy.
        inplace_backward: the backward overwrites the logits with their gradient instead of allocating one.
            They must not be needed afterwards; a second backward raises.
        backend: "auto", "triton", "cpp" or "reference".

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    _check_logits(logits, labels)
    packed = labels.ndim == 1
    options = _logit_options(
        logits, labels, labels.shape[0], temperature, logit_scale, softcap, ignore_index, backend
    )
    checks.flag("return_entropy", return_entropy)
    _check_inplace(logits, inplace_backward)
    rows, row_labels = (logits.unsqueeze(0), labels.unsqueeze(0)) if packed else (logits, labels)
    temperatures = _row_temperature(temperature, row_labels, packed, None, logits.dtype)
    logprobs, entropy = TokenLogprobsFunction.apply(
        rows, row_labels, return_entropy, inplace_backward, *options.positional(temperatures)
    )
    return TokenLogprobs(_unrow(logprobs, packed), _unrow(entropy, packed) if return_entropy else None)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    backend: str = "auto",
) -> TokenLogprobs:
    """Log-probability of each label from hidden states: the logits exist only a chunk at a time.

    Equivalent to ``token_logprobs(hidden @ weight.T + bias, labels)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H], the lm_head's; hidden's dtype, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        bias: [V] or None.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed hidden states: one per
            token).
        logit_scale: factor on the logits, bias included.
        softcap: bound of the tanh soft-capping, or None.
        ignore_index: positions with this label are left out: 0.0, no gradient, never projected.
        return_entropy: also return the differentiable entropy.
        logits_dtype: "float32": products of 16-bit inputs leave the matrix product in fp32. "input": they are
            rounded to the inputs' dtype, as other trainers do.
        max_chunk_bytes: bytes of logits that exist at once; default 64 MiB on CPU and 2 GiB on GPU, at least
            a row.
        backend: "auto", "triton", "cpp" or "reference".

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    hidden, weight, bias = _check_linear(hidden, weight, bias, labels)
    packed = labels.ndim == 1
    options = _logit_options(
        hidden, labels, labels.shape[0], temperature, logit_scale, softcap, ignore_index, backend
    )
    checks.flag("return_entropy", return_entropy)
    chunking = _chunking(logits_dtype, max_chunk_bytes, compact=True)
    rows, row_labels = (hidden.unsqueeze(0), labels.unsqueeze(0)) if packed else (hidden, labels)
    temperatures = _row_temperature(temperature, row_labels, packed, None, hidden.dtype)
    logprobs, entropy = LinearTokenLogprobsFunction.apply(
        rows, weight, bias, row_labels, return_entropy, True, *options.positional(temperatures), *chunking
    )
    return TokenLogprobs(_unrow(logprobs, packed), _unrow(entropy, packed) if return_entropy else None)


# --- losses
# ---------------------------------------------------------------------------------------------------------


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
    terms = _terms(
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer,
        objective, entropy is not None,
    )  # fmt: skip
    if entropy is not None:
        checks.floats("entropy", entropy, tuple(logprobs.shape), "the shape of logprobs", logprobs.device)
    packed = cu_seqlens is not None
    return _policy_loss(
        _row(logprobs, packed), None if entropy is None else _row(entropy, packed), terms, packed
    )


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
    objective: Objective,
) -> Tensor:
    """dLoss/dlogprobs of ``policy_loss`` with the same arguments: what ``Linear`` takes as ``token_weights``.

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
            "entropy_coef: coefficients of log-probs can't carry the entropy's gradient; pass entropy_coef to the loss "
            "with objective=Linear() that takes these coefficients as token_weights"
        )
    terms = _terms(
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer,
        objective, False,
    )  # fmt: skip
    packed = cu_seqlens is not None
    return _unrow(policy_step(_row(logprobs.detach(), packed), None, *terms)[1], packed)


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
    _check_logits(logits, labels)
    checks.layout("labels", labels, cu_seqlens)
    sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = _logit_options(
        logits, labels, sequences, temperature, logit_scale, softcap, ignore_index, backend
    )
    _check_inplace(logits, inplace_backward)
    wants_entropy = checks.flag("return_entropy", return_entropy) or _is_nonzero(entropy_coef)
    terms = _terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer,
        objective, wants_entropy,
    )  # fmt: skip
    packed = cu_seqlens is not None
    rows, row_labels = (logits.unsqueeze(0), labels.unsqueeze(0)) if packed else (logits, labels)
    row_labels, terms = _merge_mask(row_labels, terms, ignore_index)
    temperatures = _row_temperature(temperature, row_labels, packed, cu_seqlens, logits.dtype)
    positional = options.positional(temperatures)

    learns = torch.is_grad_enabled() and logits.requires_grad
    tracing = torch.compiler.is_compiling()
    if learns and not tracing and not inplace_backward and not wants_entropy:
        if coefficients_depend_on(objective, terms) == "nothing":
            coefficients = known_coefficients(row_labels, terms)
            carrier, logprobs = KnownCoefficientsFunction.apply(rows, row_labels, coefficients, *positional)
            return _carried(carrier, logprobs, None, terms, packed)
    if not wants_entropy and _single_launch(options.backend, objective, terms):
        return _sequence_ratio_loss(rows, row_labels, inplace_backward, positional, terms, objective, packed)
    logprobs, entropy = TokenLogprobsFunction.apply(
        rows, row_labels, wants_entropy, inplace_backward, *positional
    )
    return _policy_loss(logprobs, entropy if wants_entropy else None, terms, packed)


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
        schedule: "auto", "known" or "two_pass"; see ``explain_schedule``.
        skip_inactive: "backward": rows without gradient enter no gradient product. "all": sequences whose
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
    hidden, weight, bias = _check_linear(hidden, weight, bias, labels)
    checks.layout("labels", labels, cu_seqlens)
    sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    options = _logit_options(
        hidden, labels, sequences, temperature, logit_scale, softcap, ignore_index, backend
    )
    wants_entropy = checks.flag("return_entropy", return_entropy) or _is_nonzero(entropy_coef)
    checks.choice("skip_inactive", skip_inactive, SKIP_INACTIVE)
    chunking = _chunking(logits_dtype, max_chunk_bytes, compact=skip_inactive != "none")
    terms = _terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, kl_estimator,
        kl_ratio_weighted, entropy_coef, rollout_weights, token_weights, lengths, group_ids, turn_ids, normalizer,
        objective, wants_entropy,
    )  # fmt: skip
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    depends_on = coefficients_depend_on(objective, terms)
    name, _ = choose(schedule, depends_on, _why(objective, terms), learns)

    packed = cu_seqlens is not None
    rows, row_labels = (hidden.unsqueeze(0), labels.unsqueeze(0)) if packed else (hidden, labels)
    row_labels, terms = _merge_mask(row_labels, terms, ignore_index)
    if skip_inactive == "all":
        row_labels, terms = _leave_out_inactive(row_labels, terms, objective, ignore_index)
    temperatures = _row_temperature(temperature, row_labels, packed, cu_seqlens, hidden.dtype)
    call = (*options.positional(temperatures), *chunking)
    skip = skip_inactive != "none"
    if name == "known":
        carrier, logprobs, entropy = KnownLinearFunction.apply(
            rows, weight, bias, wants_entropy, skip, row_labels, *call, *terms
        )
        return _carried(carrier, logprobs, entropy if wants_entropy else None, terms, packed)
    logprobs, entropy = LinearTokenLogprobsFunction.apply(
        rows, weight, bias, row_labels, wants_entropy, skip, *call
    )
    return _policy_loss(logprobs, entropy if wants_entropy else None, terms, packed)


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
    token_weights: Tensor | None = None,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    schedule: str = "auto",
    objective: Objective = GSPO(),
) -> SchedulePlan:
    """The plan of a ``fused_linear_policy_loss`` call with these arguments, without running it; print it to
    read it.

    Arguments of the loss that can't change the plan are left out here.

    Raises:
        TypeError, ValueError: as the loss itself.
    """
    hidden, weight, bias = _check_linear(hidden, weight, bias, labels)
    checks.layout("labels", labels, cu_seqlens)
    chunking = _chunking(logits_dtype, max_chunk_bytes, compact=True)
    terms = _terms(
        labels, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, "k3", kl_ratio_weighted,
        entropy_coef, None, token_weights, None, None, None, None, objective, True,
    )  # fmt: skip
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    depends_on = coefficients_depend_on(objective, terms)
    name, reason = choose(schedule, depends_on, _why(objective, terms), learns)
    itemsize = Head(weight, bias, logits_dtype).dtype.itemsize
    rows = chunk_rows(weight.shape[0], itemsize, chunking[1], weight.device.type)
    gradients = int(hidden.requires_grad) + int(weight.requires_grad) if learns else 0
    accumulated = sum(x.numel() for x in (weight, bias) if x is not None and x.requires_grad) if learns else 0
    return SchedulePlan(
        schedule=name,
        gemms=1 + gradients + int(name == "two_pass" and gradients > 0),
        chunk_rows=min(rows, max(labels.numel(), 1)),
        chunks=-(-labels.numel() // rows),
        chunk_bytes=min(rows, max(labels.numel(), 1)) * weight.shape[0] * itemsize,
        accumulator_bytes=accumulated * stats_dtype(weight.dtype).itemsize,
        reason=reason,
    )


# --- shared by the functions above
# ----------------------------------------------------------------------------------


class _LogitOptions(NamedTuple):
    logit_scale: float
    softcap: float
    temperature: float
    ignore_index: int
    backend: str

    def positional(self, row_temperature: Tensor | None) -> tuple[Any, ...]:
        """In the order of the operators' schemas."""
        return (*self[:3], row_temperature, *self[3:])


def _logit_options(
    scores: Tensor,
    labels: Tensor,
    sequences: int,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    backend: str,
) -> _LogitOptions:
    scalar = 1.0
    if isinstance(temperature, Tensor):
        checks.floats("temperature", temperature, (sequences,), "one per sequence", labels.device)
    else:
        scalar = checks.number("temperature", temperature, positive=True)
    scale = checks.number("logit_scale", logit_scale)
    cap = 0.0 if softcap is None else checks.number("softcap", softcap, positive=True)
    checks.integer("ignore_index", ignore_index)
    if not isinstance(backend, str):
        raise TypeError(f"backend: got {type(backend).__name__}, expected a name")
    return _LogitOptions(scale, cap, scalar, ignore_index, resolve(backend, scores.device))


def _check_logits(logits: Tensor, labels: Tensor) -> None:
    checks.tensor("labels", labels, None, "[B, T] or [N]", None)
    checks.dtype("labels", labels, checks.INTEGERS)
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected [B, T] or [N]")
    checks.floats("logits", logits, None, "[B, T, V] or [N, V]", None)
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits: got shape {tuple(logits.shape)}, expected {(*labels.shape, 'V')} for labels of shape "
            f"{tuple(labels.shape)}"
        )
    if logits.shape[-1] == 0:
        raise ValueError("logits: the vocabulary is empty, expected V >= 1")
    if logits.device != labels.device:
        raise ValueError(f"labels: is on {labels.device}, expected {logits.device} like logits")


def _check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    checks.tensor("labels", labels, None, "[B, T] or [N]", None)
    checks.dtype("labels", labels, checks.INTEGERS)
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected [B, T] or [N]")
    checks.floats("hidden", hidden, None, "[B, T, H] or [N, H]", labels.device)
    if hidden.ndim != labels.ndim + 1 or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden: got shape {tuple(hidden.shape)}, expected {(*labels.shape, 'H')} for labels of shape "
            f"{tuple(labels.shape)}"
        )
    checks.floats("weight", weight, None, "[V, H]", labels.device)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}, expected [V, H] with H = {hidden.shape[-1]}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight: the vocabulary is empty, expected V >= 1")
    if bias is not None:
        checks.floats("bias", bias, (weight.shape[0],), "[V]", labels.device)
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        # as F.linear does it: fp64 stays out of autocast
        if torch.float64 not in (hidden.dtype, weight.dtype):
            return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(
                f"{name}: got {value.dtype}, expected {hidden.dtype} like hidden; mixed dtypes need torch.autocast"
            )
    return hidden, weight, bias


def _check_inplace(logits: Tensor, inplace_backward: bool) -> None:
    if not checks.flag("inplace_backward", inplace_backward):
        return
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "inplace_backward: logits are expanded (stride 0), so their gradient doesn't fit in them"
        )
    if logits.numel() and logits.stride(-1) != 1:
        raise ValueError("inplace_backward: logits need a vocabulary stride of 1")


def _chunking(logits_dtype: str, max_chunk_bytes: int | None, compact: bool) -> tuple[str, int, bool]:
    checks.choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    if max_chunk_bytes is not None and checks.integer("max_chunk_bytes", max_chunk_bytes) < 1:
        raise ValueError(f"max_chunk_bytes: got {max_chunk_bytes}, expected at least 1")
    return logits_dtype, max_chunk_bytes or 0, compact


def _is_nonzero(value: float | Tensor) -> bool:
    return isinstance(value, Tensor) or value != 0


def _row(tokens: Tensor, packed: bool) -> Tensor:
    return tokens.unsqueeze(0) if packed else tokens


def _unrow(tokens: Tensor, packed: bool) -> Tensor:
    return tokens.squeeze(0) if packed else tokens


def _row_temperature(
    temperature: float | Tensor,
    row_labels: Tensor,
    packed: bool,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    if not isinstance(temperature, Tensor):
        return None
    values = temperature.detach().to(stats_dtype(dtype))
    if cu_seqlens is not None:
        values = values[segment_ids(cu_seqlens, row_labels.numel())]
    return values.unsqueeze(0) if packed else values.unsqueeze(1).expand(row_labels.shape)


def _terms(
    tokens: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    loss_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ref_logprobs: Tensor | None,
    kl_beta: float | Tensor,
    kl_estimator: str,
    kl_ratio_weighted: bool,
    entropy_coef: float | Tensor,
    rollout_weights: Tensor | None,
    token_weights: Tensor | None,
    lengths: Tensor | None,
    group_ids: Tensor | None,
    turn_ids: Tensor | None,
    normalizer: float | Tensor | None,
    objective: Objective,
    has_entropy: bool,
) -> PolicyTerms:
    """Check everything that surrounds the log-probs and bring it into the operators' form."""
    checks.objective(objective, Objective)
    shape, device, packed = tuple(tokens.shape), tokens.device, cu_seqlens is not None
    sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    name = type(objective).__name__

    def per_token(label: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return _row(checks.floats(label, value, shape, "the labels' shape", device).detach(), packed)

    def per_either(label: str, value: Tensor, tokens_allowed: bool) -> Tensor:
        checks.floats(label, value, None, "[B] or the labels' shape", device)
        if tuple(value.shape) == (sequences,):
            return value.detach()
        if tuple(value.shape) == shape:
            if not tokens_allowed:
                raise ValueError(
                    f"{label}: got shape {tuple(value.shape)}, but {name} takes one per sequence, [B] = ({sequences},)"
                )
            return _row(value.detach(), packed)
        raise ValueError(
            f"{label}: got shape {tuple(value.shape)}, expected [B] = ({sequences},)"
            + (f" or the labels' shape {shape}" if tokens_allowed else "")
        )

    def integers(label: str, value: Tensor | None, expected: tuple[int, ...], meaning: str) -> Tensor | None:
        if value is None:
            return None
        return checks.dtype(label, checks.tensor(label, value, expected, meaning, device), checks.INTEGERS)

    if advantages is None:
        if objective.needs_advantages:
            raise TypeError(f"advantages: got None, but {name} needs them, [B] = ({sequences},)")
    elif not objective.needs_advantages:
        raise ValueError(f"advantages: {name} has none and would ignore them, expected None")
    else:
        advantages = per_either("advantages", advantages, objective.takes_token_advantages)
    if loss_mask is not None:
        checks.tensor("loss_mask", loss_mask, shape, "the labels' shape", device)
        if loss_mask.is_complex():
            raise TypeError(f"loss_mask: got {loss_mask.dtype}, expected bool, int or float")
        loss_mask = _row(loss_mask.detach(), packed)
    if rollout_weights is not None:
        rollout_weights = per_either("rollout_weights", rollout_weights, True)
    if lengths is not None:
        checks.tensor("lengths", lengths, (sequences,), "[B]", device)
        checks.dtype("lengths", lengths, (*checks.FLOATS, *checks.INTEGERS))
    turn_ids = integers("turn_ids", turn_ids, shape, "the labels' shape")
    given = {
        "ref_logprobs": ref_logprobs, "token_weights": token_weights, "group_ids": group_ids, "turn_ids": turn_ids,
        "rollout_weights": rollout_weights, "lengths": lengths, "old_logprobs": old_logprobs,
        "entropy": True if has_entropy else None,
    }  # fmt: skip
    for needed in objective.needs:
        if given[needed] is None:
            raise ValueError(f"{needed}: got None, but {name} needs it")
    for label in ("group_ids", "turn_ids"):
        if given[label] is not None and label not in objective.needs:
            raise ValueError(f"{label}: {name} would ignore it, expected None")

    beta = checks.broadcastable("kl_beta", kl_beta, shape, device)
    if beta is not None and ref_logprobs is None:
        raise ValueError("ref_logprobs: got None, but kl_beta asks for a KL term")
    checks.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    checks.flag("kl_ratio_weighted", kl_ratio_weighted)
    coefficient = checks.broadcastable("entropy_coef", entropy_coef, shape, device)
    if coefficient is not None and not has_entropy:
        raise ValueError("entropy: got None, but entropy_coef asks for an entropy bonus")
    if normalizer is not None:
        if isinstance(normalizer, Tensor):
            if normalizer.ndim != 0:
                raise ValueError(
                    f"normalizer: got shape {tuple(normalizer.shape)}, expected a number or a 0-d tensor"
                )
            normalizer = normalizer.detach()
        else:
            normalizer = torch.tensor(
                checks.number("normalizer", normalizer, positive=True), dtype=torch.float64
            )
    return PolicyTerms(
        old_logprobs=per_token("old_logprobs", old_logprobs),
        advantages=advantages,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        ref_logprobs=per_token("ref_logprobs", ref_logprobs),
        kl_beta=beta,
        entropy_coef=coefficient,
        rollout_weights=rollout_weights,
        token_weights=per_token("token_weights", token_weights),
        lengths=lengths,
        group_ids=integers("group_ids", group_ids, (sequences,), "[B]"),
        turn_ids=None if turn_ids is None else _row(turn_ids, packed),
        normalizer=normalizer,
        skipped=None,
        token_shares=None,
        objective=objective.spec,
        kl_estimator=kl_estimator,
        kl_ratio_weighted=kl_ratio_weighted,
    )


def _merge_mask(row_labels: Tensor, terms: PolicyTerms, ignore_index: int) -> tuple[Tensor, PolicyTerms]:
    """One mask for both: labels are ``ignore_index`` exactly where ``loss_mask`` is 0."""
    if terms.loss_mask is not None or terms.cu_seqlens is not None:
        row_labels = mask_labels(row_labels, terms.loss_mask, terms.cu_seqlens, ignore_index)
    return row_labels, terms._replace(loss_mask=row_labels != ignore_index)


def _leave_out_inactive(
    row_labels: Tensor, terms: PolicyTerms, objective: Objective, ignore_index: int
) -> tuple[Tensor, PolicyTerms]:
    """Sequences whose gradient is zero whatever the forward finds: their labels become ``ignore_index``."""
    if not objective.zero_advantage_is_inactive:
        raise ValueError(
            f"skip_inactive: 'all' needs an objective without gradient at zero advantage, which {type(objective).__name__} "
            "is not; use 'backward'"
        )
    for term, value in (("kl_beta", terms.kl_beta), ("entropy_coef", terms.entropy_coef)):
        if value is not None:
            raise ValueError(
                f"skip_inactive: 'all' leaves sequences out that {term} gives a gradient; use 'backward'"
            )
    assert terms.advantages is not None and terms.loss_mask is not None
    layout = layout_of(row_labels, terms.cu_seqlens)
    idle = terms.advantages == 0
    if idle.ndim == 2:
        moving = ~idle & (terms.loss_mask != 0)
        idle = layout.sum(moving.to(torch.float64)) == 0
    return row_labels.masked_fill(layout.expand(idle), ignore_index), terms._replace(skipped=idle)


def _why(objective: Objective, terms: PolicyTerms) -> str:
    """What makes coefficients depend on more than a token, in words."""
    name = f"{type(objective).__name__} off-policy" if objective.ratio_only else type(objective).__name__
    if terms.kl_beta is not None and terms.kl_ratio_weighted:
        return f"kl_ratio_weighted with {name}"
    return name


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
        _unrow(shown, packed),
        None if entropy is None else _unrow(entropy.detach(), packed),
        _named_metrics(metrics, names),
    )


def _policy_loss(logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, packed: bool) -> LossOutput:
    loss, metrics = PolicyLoss.apply(logprobs, entropy, *terms)
    return _output(loss, metrics, logprobs, entropy, terms, packed)


def _carried(
    carrier: Tensor, logprobs: Tensor, entropy: Tensor | None, terms: PolicyTerms, packed: bool
) -> LossOutput:
    """The loss of a call whose gradient the forward computed already: ``carrier`` is 0 and holds the gradient."""
    step = policy_step(logprobs, entropy, *terms)
    return _output(carrier + step[0], step[3], logprobs, entropy, terms, packed)


def _single_launch(backend: str, objective: Objective, terms: PolicyTerms) -> bool:
    """Whether one launch serves the call: the objective has the form and no term goes beyond it."""
    beyond = (terms.ref_logprobs, terms.token_weights, terms.kl_beta, terms.entropy_coef)
    return (
        objective.sequence_ratio_form() is not None
        and terms.old_logprobs is not None
        and all(term is None for term in beyond)
        and has_single_launch(backend)
    )


def _sequence_ratio_loss(
    rows: Tensor,
    row_labels: Tensor,
    inplace: bool,
    options: tuple[Any, ...],
    terms: PolicyTerms,
    objective: Objective,
    packed: bool,
) -> LossOutput:
    form = objective.sequence_ratio_form()
    assert form is not None
    weights = terms.rollout_weights
    if weights is not None and weights.ndim == 2:
        layout = layout_of(row_labels, terms.cu_seqlens)
        counted = row_labels != options[4]
        counts = layout.sum(counted.to(torch.float64)).clamp(min=1)
        weights = layout.sum(torch.where(counted, weights.double(), 0.0)) / counts
    normalizer = terms.normalizer
    if normalizer is not None:
        normalizer = normalizer.to(rows.device)
    loss, logprobs, metrics = SequenceRatioFunction.apply(
        rows, row_labels, inplace, options, terms.old_logprobs, terms.advantages, weights, terms.lengths, normalizer,
        terms.cu_seqlens, *form,
    )  # fmt: skip
    return LossOutput(loss, _unrow(logprobs, packed), None, _named_metrics(metrics, METRICS))
