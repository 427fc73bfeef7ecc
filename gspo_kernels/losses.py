"""The losses: from log-probs, from logits, from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.cache import look_up, store
from gspo_kernels.arguments.head import (
    LEAST_BYTES,
    HeadOptions,
    LinearOperands,
    check_inputs,
    with_host_lengths,
)
from gspo_kernels.arguments.logit_options import (
    LogitOptions,
    check_inplace,
    check_labels_match,
    wants_entropy,
)
from gspo_kernels.arguments.prefetch import take_prefetched
from gspo_kernels.arguments.terms import Terms, TermsForm, merge_mask, skip_inactive_sequences, validate_terms
from gspo_kernels.backends.dispatch import refuse_backend, resolve
from gspo_kernels.core import checks
from gspo_kernels.core.batch_invariance import mode_of
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.torch_internals import applied
from gspo_kernels.core.types import LoRAHead, LossOutput, RatioClip, RowOptions, SelectedLogprobs
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.call import Decisions, RequiresGrad, call_of
from gspo_kernels.hidden.logprobs import LinearSelectedLogprobsFunction, LinearTokenLogprobsFunction
from gspo_kernels.hidden.loss import LinearPolicyFunction, plan_of
from gspo_kernels.hidden.peak_memory import SchedulePlan, explain
from gspo_kernels.hidden.plan import choose, unsupported
from gspo_kernels.hidden.small import SmallLossFunction, small_loss
from gspo_kernels.logits.centering import CenteringRows, ScoreCentering, centering_loss, normalize_given
from gspo_kernels.logits.centering import normalize as normalize_centering
from gspo_kernels.logits.logprobs import KnownCoefficientsFunction, TokenLogprobsFunction, logprobs_forward
from gspo_kernels.logits.policy_step import PolicyLossFunction, known_coefficients, output_of, policy_step
from gspo_kernels.logits.selected import SelectedLogprobsFunction
from gspo_kernels.logits.sequence_ratio import (
    SequenceRatioFunction,
    is_sequence_ratio,
    ratio_clip_of,
    ratio_operands,
)
from gspo_kernels.objectives import GSPO
from gspo_kernels.objectives.base import Objective
from gspo_kernels.objectives.evaluate import coefficients_depend_on

_ALL = ("tp_group", "vocab_range", "reduce_hidden_grad", "sequence_parallel", "cp_group")


@agree_across_ranks
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
    centering: ScoreCentering | None = None,
    selected_logprobs: SelectedLogprobs | None = None,
    objective: Objective = GSPO(),
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss of given log-probs, for trainers that already compute them.

    ``loss = agg(policy term * rollout_weights) + kl_beta * agg(KL) - entropy_coef * agg(H)``. agg is the
    objective's aggregation, a mean or sum over tokens and sequences; the number that it divides by is the
    divisor. Only ``logprobs`` and ``entropy`` receive gradients.

    Args:
        logprobs: [B, T], or [N] with ``cu_seqlens``, called the labels' shape below; nats; fp16, bf16, fp32
            or fp64.
        old_logprobs: labels' shape: log-probs under the policy that sampled. Default: the detached
            ``logprobs`` (on-policy).
        advantages: [B], or per token in the labels' shape if the objective supports it (packed with N == B:
            [B]).
        loss_mask: labels' shape, bool or 0/1: tokens that count, possibly with holes. Default: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences. Mask and offsets may be on
            the CPU while other tensors are on a GPU, which saves a sync, see ``docs/losses.md``.
        ref_logprobs: labels' shape: log-probs under the reference policy, for the KL term and its metric.
        kl_beta: weight of the KL term; a number, or a tensor that broadcasts to the labels.
        kl_estimator: "k1", "k2" or "k3": d, d^2/2 or exp(-d) + d - 1, with d = logp - ref.
        kl_ratio_weighted: multiply the KL by the (undetached) importance ratio, as TRL does by default.
        entropy_coef: weight of the entropy bonus; a number, or a tensor that broadcasts to the labels.
        rollout_weights: [B] or labels' shape (packed with N == B: [B]): off-policy corrections, which
            multiply the policy term only.
        token_weights: labels' shape: factors on the tokens' log-ratios in the objective (on the log-probs in
            objectives without a ratio).
        lengths: [B], the length |y_i| of each sequence, if it is not its number of counted tokens.
        group_ids: [B], integers: the group of each sequence, for objectives over groups and "prompt_mean".
        turn_ids: labels' shape, integers: the turn of each token, -1 = none; for objectives over turns.
        normalizer: number or 0-d tensor that replaces the divisor, the number of sequences, tokens or pairs.
            For micro-batches pass that of the whole batch, from ``gk.normalizer``; for "prompt_mean" [B].
        entropy: labels' shape, from ``token_logprobs(..., return_entropy=True)``, for the entropy bonus and
            the entropy metric.
        centering: a ``ScoreCentering``, to subtract the mean score under the sampler from the policy term.
        selected_logprobs: with ``centering``, the ``SelectedLogprobs`` of its ids, with gradients. A tail of
            None means that no other ids could be drawn.
        objective: GSPO() by default; see ``gspo_kernels.objectives``.
        parallel: ``Parallel(cp_group=...)`` if ranks have parts of the same sequences.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RanksDisagreeError: with GSPO_KERNELS_VALIDATE=1, another rank raised an error, or was called with
            different arguments; see ``docs/parallel.md``.
    """
    passed = Terms(
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, entropy_coef, rollout_weights,
        token_weights, lengths, group_ids, turn_ids, normalizer, kl_estimator, kl_ratio_weighted,
    )  # fmt: skip
    key, decided = look_up(
        "policy_loss", logprobs, objective, parallel, (logprobs, entropy, *passed),
        (centering, selected_logprobs),
    )  # fmt: skip
    centered = None
    if decided is None:
        rows, entropy, terms, form, centered = _normalize_logprobs(
            "policy_loss", logprobs, entropy, passed, objective, parallel, centering, selected_logprobs
        )
        backend = resolve("auto", logprobs.device)
        ratio_clip = ratio_clip_of(terms, backend)
        store(key, (form, backend, ratio_clip))
    else:
        form, backend, ratio_clip = decided
        packed, terms = cu_seqlens is not None, form.apply(passed, logprobs)
        rows, entropy = as_rows(logprobs, packed), None if entropy is None else as_rows(entropy, packed)
    if centered is not None:
        selected, centering_rows = centered
        centered = selected, centering_rows.weighted(rows.detach(), terms)
    return _loss_from_logprobs(rows, entropy, terms, backend, ratio_clip, centered)


@agree_across_ranks
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
    """Return dLoss/dlogprobs of ``policy_loss`` with the same arguments, for ``Linear`` as ``token_weights``.

    Args:
        logprobs, old_logprobs, advantages, objective, parallel, and all terms from loss_mask to normalizer:
            as in ``policy_loss``.
        entropy: the shape of ``logprobs``; only for objectives that depend on the entropy.

    Returns:
        The shape of ``logprobs``, fp32 (fp64 for fp64 log-probs), exactly 0.0 where there is no gradient.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. ``entropy_coef`` must be 0, because the
            entropy's gradient is not a coefficient of log-probs; pass it to the loss of these coefficients.
    """
    if not isinstance(entropy_coef, int | float) or entropy_coef != 0:
        raise ValueError(
            "entropy_coef: expected 0, as coefficients of log-probs exclude the entropy's gradient; pass it "
            "to the loss with objective=Linear() and these coefficients as token_weights"
        )
    passed = Terms(
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, entropy_coef, rollout_weights,
        token_weights, lengths, group_ids, turn_ids, normalizer, kl_estimator, kl_ratio_weighted,
    )  # fmt: skip
    rows, entropy, terms, *_ = _normalize_logprobs(
        "policy_coefficients", logprobs, entropy, passed, objective, parallel
    )
    backend = resolve("auto", logprobs.device)
    with torch.no_grad():
        step = policy_step(rows, entropy, terms, backend, ratio_clip_of(terms, backend), False)
    return from_rows(step.grad_logprobs, cu_seqlens is not None)


def _normalize_logprobs(
    function: str,
    logprobs: Tensor,
    entropy: Tensor | None,
    passed: Terms,
    objective: Objective,
    parallel: Parallel,
    centering: ScoreCentering | None = None,
    selected_logprobs: SelectedLogprobs | None = None,
) -> tuple[Tensor, Tensor | None, Terms, TermsForm, tuple[tuple[Tensor, Tensor], CenteringRows] | None]:
    """Return log-probs and entropy in rows, and the results of ``validate_terms`` and ``normalize_given``."""
    centered = None
    Parallel.check(parallel, function, ("cp_group",))
    checks.tensor("logprobs", logprobs, None, "[B, T], or [N] with cu_seqlens", None, checks.FLOATS)
    checks.layout("logprobs", logprobs, passed.cu_seqlens)
    packed = passed.cu_seqlens is not None
    terms, form = validate_terms(passed, logprobs, objective, entropy is not None, parallel)
    if entropy is not None:
        shape, device = tuple(logprobs.shape), logprobs.device
        checks.tensor("entropy", entropy, shape, "the shape of logprobs", device, checks.FLOATS)
        entropy = as_rows(entropy, packed)
    rows = as_rows(logprobs, packed)
    if centering is not None or selected_logprobs is not None:
        centered = normalize_given(centering, selected_logprobs, rows.detach(), terms, objective)
    return rows, entropy, terms, form, centered


@agree_across_ranks
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
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    centering: ScoreCentering | None = None,
    objective: Objective = GSPO(),
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss from logits, which reads each logit once in the forward and once in the backward.

    Equivalent to ``policy_loss(token_logprobs(logits, labels).logprobs, ...)``.

    Args:
        logits: [B, T, V], or [N, V] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        labels: [B, T] or [N], int64 or int32: the token predicted at each position (not shifted here).
        old_logprobs, advantages, objective, and all terms from loss_mask to normalizer: as in
            ``policy_loss``. Tokens whose label is ``ignore_index`` are masked, too.
        temperature: a number, or a tensor [B] with one per sequence.
        logit_scale, softcap, ignore_index, inplace_backward, backend: as in ``token_logprobs``.
        kept_mask: as in ``token_logprobs``. Old and reference log-probs must be normalized over the
            same ids.
        return_entropy: also return the entropy, detached; always returned with an entropy bonus.
        centering: as in ``policy_loss``; not supported with an entropy bonus.
        parallel: ``tp_group``, ``vocab_range`` and ``cp_group`` of ``Parallel``.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    passed = Terms(
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, entropy_coef, rollout_weights,
        token_weights, lengths, group_ids, turn_ids, normalizer, kl_estimator, kl_ratio_weighted,
    )  # fmt: skip
    key, decisions = look_up(
        "fused_policy_loss", labels, objective, parallel, (labels, logits, *passed),
        (temperature, logit_scale, softcap, kept_mask, ignore_index, return_entropy, inplace_backward,
         centering, backend),
    )  # fmt: skip
    centered = None
    if decisions is None:
        options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
        rows, row_labels, terms, decisions, centered = _normalize_logits(
            logits, labels, passed, options, return_entropy, inplace_backward, centering, objective,
            parallel,
        )  # fmt: skip
        store(key, decisions)
    else:
        if inplace_backward:
            check_inplace(logits, inplace_backward)
        packed = cu_seqlens is not None
        rows, row_labels = as_rows(logits, packed), as_rows(labels, packed)
        terms = decisions.form.apply(passed, labels)
        if decisions.merges_mask:
            row_labels, terms = merge_mask(row_labels, terms, ignore_index)
    row_options, ratio_clip, with_entropy = decisions.options, decisions.ratio_clip, decisions.entropy
    refuse_backend(row_options.backend)
    if centered is not None:
        centered = centered.weighted(row_labels, terms, row_options, rows.shape[-1])
        selected = SelectedLogprobsFunction.apply(rows, centered.ids, inplace_backward, row_options, False)
        entropy = logprobs_forward(rows, row_labels, row_options, True).entropy if with_entropy else None
        logprobs, ids = selected[0][..., 0], (selected, centered)
        return _loss_from_logprobs(logprobs, entropy, terms, row_options.backend, ratio_clip, ids)
    if decisions.known:
        return _with_known_coefficients(rows, row_labels, terms, row_options, ratio_clip)
    if decisions.in_one_launch:
        operands, mask = ratio_operands(row_labels, terms), None if decisions.merges_mask else terms.loss_mask
        loss, logprobs, metrics = applied(SequenceRatioFunction)(
            rows, row_labels, mask, inplace_backward, row_options, operands, ratio_clip
        )
        return output_of(loss, metrics, logprobs, None, terms)
    logprobs, entropy = applied(TokenLogprobsFunction)(
        rows, row_labels, with_entropy, inplace_backward, row_options
    )
    entropy = entropy if with_entropy else None
    return _loss_from_logprobs(logprobs, entropy, terms, row_options.backend, ratio_clip)


class LogitsDecisions(NamedTuple):
    """The cached decisions of a loss from logits; see ``cache.look_up``.

    Attributes:
        form: the conversion of the terms.
        options: the options in the operators' form.
        ratio_clip: see ``ratio_clip_of``.
        entropy: whether to compute the entropy.
        known: whether coefficients are known before the forward, which then writes the gradient.
        in_one_launch: whether log-probs and clipped ratios are one launch.
        merges_mask: whether labels and mask are merged before the launch.
    """

    form: TermsForm
    options: RowOptions
    ratio_clip: RatioClip
    entropy: bool
    known: bool
    in_one_launch: bool
    merges_mask: bool


def _normalize_logits(
    logits: Tensor,
    labels: Tensor,
    passed: Terms,
    options: LogitOptions,
    return_entropy: bool,
    inplace_backward: bool,
    centering: ScoreCentering | None,
    objective: Objective,
    parallel: Parallel,
) -> tuple[Tensor, Tensor, Terms, LogitsDecisions, CenteringRows | None]:
    """Check the arguments of a loss from logits, convert them to rows, and decide how to run the call; the
    last output is the rows of score centering.
    """
    Parallel.check(parallel, "fused_policy_loss", ("tp_group", "vocab_range", "cp_group"))
    (logits,), parallel = local_tensors(parallel, passed, logits=logits)
    check_labels_match("logits", logits, labels, "V")
    checks.layout("labels", labels, passed.cu_seqlens)
    packed, vocabulary = passed.cu_seqlens is not None, logits.shape[-1]
    check_inplace(logits, inplace_backward)
    with_entropy = wants_entropy(return_entropy, passed.entropy_coef, objective)
    terms, form = validate_terms(passed, labels, objective, with_entropy, parallel)
    row_options = options.normalize(labels, terms.cu_seqlens, logits.dtype, vocabulary, parallel)
    rows, row_labels = as_rows(logits, packed), as_rows(labels, packed)
    ratio_clip = ratio_clip_of(terms, row_options.backend)
    # the range of fp16 gradients depends on the loss scale, which only the backward has
    late = with_entropy or inplace_backward or rows.dtype == torch.float16 or torch.compiler.is_compiling()
    learns = torch.is_grad_enabled() and rows.requires_grad
    known = learns and not late and coefficients_depend_on(objective, terms) == "nothing"
    alone = centering is None and not (with_entropy or known or row_options.shard.group)
    in_one_launch, weights = alone and is_sequence_ratio(terms, ratio_clip), terms.rollout_weights
    # the kernel reads the mask along with the labels, unless weights have to be averaged before
    merges_mask = not in_one_launch or (weights is not None and weights.ndim == 2)
    if merges_mask:
        row_labels, terms = merge_mask(row_labels, terms, options.ignore_index)
    centered = None
    if centering is not None:
        centered = normalize_centering(centering, row_labels, terms, objective, row_options, vocabulary)
    decisions = LogitsDecisions(
        form, row_options, ratio_clip, with_entropy, known, in_one_launch, merges_mask
    )
    return rows, row_labels, terms, decisions, centered


def _loss_from_logprobs(
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    backend: str,
    ratio_clip: RatioClip,
    centered: tuple[tuple[Tensor, Tensor], CenteringRows] | None = None,
) -> LossOutput:
    """Return the loss of log-probs; ``centered`` are the log-probs of ids and the rows of score centering."""
    loss, metrics = applied(PolicyLossFunction)(logprobs, entropy, terms, backend, ratio_clip)
    if centered is not None:
        loss = loss + centering_loss(*centered, terms.objective, terms.cp_group).to(loss.dtype)
    return output_of(loss, metrics, logprobs, entropy, terms)


def _with_known_coefficients(
    rows: Tensor, labels: Tensor, terms: Terms, options: RowOptions, ratio_clip: RatioClip
) -> LossOutput:
    """Return a loss with known coefficients, with log-probs and gradient in one pass."""
    coefficients = known_coefficients(labels, terms, options.backend, policy_step)
    carrier, logprobs = KnownCoefficientsFunction.apply(rows, labels, coefficients, options)
    step = policy_step(logprobs, None, terms, options.backend, ratio_clip, True)
    return output_of(carrier + step.loss, step.metrics, logprobs, None, terms)


@agree_across_ranks
def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor | LoRAHead,
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
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    memory: str = "auto",
    schedule: str = "auto",
    skip_inactive: str = "backward",
    centering: ScoreCentering | None = None,
    objective: Objective = GSPO(),
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> LossOutput:
    """Policy loss from hidden states and the lm_head's weight, without materializing the logits.

    Equivalent to ``fused_policy_loss(hidden @ weight.T + bias, labels, ...)`` with the product in fp32.

    Args:
        hidden: [B, T, H], or [N, H] with ``cu_seqlens``; fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H] of the lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or any under autocast.
        bias: [V] or None.
        labels, old_logprobs, advantages, objective, and all terms from loss_mask to normalizer: as in
            ``fused_policy_loss``.
        temperature, kept_mask, return_entropy: as in ``fused_policy_loss``.
        logit_scale, softcap, ignore_index, logits_dtype, max_chunk_bytes, batch_invariant, backend: as in
            ``linear_token_logprobs``.
        memory: "auto", or "least" for the schedule and chunks of least memory; see ``explain_schedule``.
        schedule: the split of the batch into chunks and matmuls, which does not change the result; see
            ``explain_schedule``.
        skip_inactive: the rows without gradient that matmuls skip; see ``explain_schedule``.
        centering: as in ``fused_policy_loss``; supported by the schedules "known" ("auto") and, without
            the entropy, "two_pass".
        parallel: see ``Parallel``.

    Returns:
        LossOutput(loss, logprobs, entropy, metrics).

    Raises:
        TypeError, ValueError: a wrong argument, or a schedule that is not exact, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    passed = Terms(
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, entropy_coef, rollout_weights,
        token_weights, lengths, group_ids, turn_ids, normalizer, kl_estimator, kl_ratio_weighted,
    )  # fmt: skip
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
    head_options = HeadOptions(logits_dtype, max_chunk_bytes, mode_of(batch_invariant), memory)
    operands, terms, decisions, _, centered = _normalize_linear(
        "fused_linear_policy_loss", hidden, weight, bias, labels, passed, options, head_options, objective,
        parallel, return_entropy, schedule, skip_inactive, centering,
    )  # fmt: skip
    with_entropy, backend = decisions.entropy, operands.options.backend
    # "all" skips tokens that these lengths count
    if labels.is_cuda and skip_inactive == "backward":
        on_host = take_prefetched(labels, loss_mask, advantages, cu_seqlens, ignore_index)
        if on_host is not None:
            chunking = operands.chunking._replace(compact=True, lengths=on_host, where=None)
            operands = operands._replace(chunking=chunking)
    if centered is not None:
        centered = centered.weighted(operands.labels, terms, operands.options, len(operands.weight))
    if decisions.schedule == "two_pass" and centered is not None:
        selected = LinearSelectedLogprobsFunction.apply(centered.ids, False, *operands)
        logprobs, ids = selected[0][..., 0], (selected, centered)
        return _loss_from_logprobs(logprobs, None, terms, backend, decisions.ratio_clip, ids)
    # batch-invariant schedules multiply by the upstream gradient in the same operation
    if decisions.schedule == "two_pass" and not (
        operands.chunking.batch_invariant and any(decisions.requires_grad)
    ):
        logprobs, entropy = LinearTokenLogprobsFunction.apply(with_entropy, decisions.skips, *operands)
        entropy = entropy if with_entropy else None
        return _loss_from_logprobs(logprobs, entropy, terms, backend, decisions.ratio_clip)
    if (small := small_loss(operands, terms, decisions)) is not None:
        loss, metrics, logprobs = SmallLossFunction.apply(*operands[:5], terms, *small)
        return output_of(loss, metrics, logprobs, None, terms)
    traced = torch.compiler.is_compiling()
    loss, metrics, logprobs, entropy = applied(LinearPolicyFunction)(
        traced, terms, decisions, centered or (None, None, None), *operands
    )
    return output_of(loss, metrics, logprobs, entropy if with_entropy else None, terms)


def explain_schedule(
    hidden: Tensor,
    weight: Tensor | LoRAHead,
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
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    memory: str = "auto",
    schedule: str = "auto",
    skip_inactive: str = "backward",
    centering: ScoreCentering | None = None,
    objective: Objective = GSPO(),
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> SchedulePlan:
    """Return the plan of a ``fused_linear_policy_loss`` call with these arguments, without running the call.

    The plan prints the schedule, the reason for it, the number of matmuls and the memory. It depends on which
    inputs require a gradient; call this in the grad mode of the loss. This syncs with the device to read
    sequence lengths.

    Args:
        hidden, weight, labels, and all others not listed here: as in ``fused_linear_policy_loss``.
        memory: "auto", or "least" for "frozen" if that is exact, otherwise "two_pass", with at most 256 MiB
            of logits at a time. Not supported with ``schedule`` or ``max_chunk_bytes``.
        schedule: the split of the batch into chunks and matmuls, which does not change the result; schedules
            that are not exact for the call raise an error. "auto" selects the first exact one: "known" if a
            token's coefficient is known beforehand or depends on that token only, "frozen" if the lm_head has
            no gradient, "aligned" for sequences (or groups) that fit in a chunk, "deferred" for longer ones
            (from 2,048 tokens on a GPU, 192 on a CPU), otherwise "two_pass". All but "two_pass" compute the
            gradient along with the loss. On the CPU "auto" keeps logits of up to 1 MiB for the backward
            instead.
        skip_inactive: "backward": gradient matmuls skip rows without gradient that the schedule knows in time
            ("deferred" and "frozen": those with zero advantage). "all": all matmuls skip sequences whose
            gradient is known to be zero (zero advantage, no KL or entropy term); their log-probs are NaN, and
            metrics cover the other sequences. "none": skip nothing and do not sync with the device, except
            that "aligned", "deferred" and "frozen", passed by name, read the lengths of packed sequences
            whose offsets aren't on the CPU.

    Raises:
        TypeError, ValueError: as the loss.
    """
    passed = Terms(
        old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, kl_beta, entropy_coef, rollout_weights,
        token_weights, lengths, group_ids, turn_ids, normalizer, kl_estimator, kl_ratio_weighted,
    )  # fmt: skip
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
    head_options = HeadOptions(logits_dtype, max_chunk_bytes, mode_of(batch_invariant), memory)
    operands, terms, decisions, reason, centered = _normalize_linear(
        "explain_schedule", hidden, weight, bias, labels, passed, options, head_options, objective, parallel,
        return_entropy, schedule, skip_inactive, centering,
    )  # fmt: skip
    whole_logits = centered is not None
    call = call_of(operands, None if whole_logits else decisions, checked=False, whole_logits=whole_logits)
    ids = 0 if centered is None else centered.ids.shape[-1]
    return explain(reason, call, plan_of(call, terms, decisions)[0], decisions, ids)


def _normalize_linear(
    function: str,
    hidden: Tensor,
    weight: Tensor | LoRAHead,
    bias: Tensor | None,
    labels: Tensor,
    passed: Terms,
    options: LogitOptions,
    head_options: HeadOptions,
    objective: Objective,
    parallel: Parallel,
    return_entropy: bool,
    schedule: str,
    skip_inactive: str,
    centering: ScoreCentering | None,
) -> tuple[LinearOperands, Terms, Decisions, str, CenteringRows | None]:
    """Check the arguments of a loss over hidden states, convert them to rows, and choose the schedule; the
    last outputs are the reason for the choice, and the rows of score centering.
    """
    key, decided, base = None, None, None
    if not torch._C._is_any_autocast_enabled():  # which casts inputs
        key, decided = look_up(
            function, labels, objective, parallel, (hidden, weight, bias, labels, *passed),
            (*options, *head_options, return_entropy, schedule, skip_inactive, centering),
        )  # fmt: skip
    if decided is not None:
        form, chunking, row_options, decisions, reason = decided
        terms = form.apply(passed, labels)
    else:
        Parallel.check(parallel, function, _ALL, head_options.batch_invariant)
        with_entropy = wants_entropy(return_entropy, passed.entropy_coef, objective)
        (hidden, weight, bias), parallel = local_tensors(
            parallel, passed, head_options.batch_invariant, hidden=hidden, weight=weight, bias=bias
        )
        checks.choice("skip_inactive", skip_inactive, ("backward", "all", "none"))
        chunking = head_options.normalize(skip_inactive != "none", parallel)
        hidden, weight, bias, base = check_inputs(hidden, weight, bias, labels, chunking)
        checks.layout("labels", labels, passed.cu_seqlens)
        terms, form = validate_terms(passed, labels, objective, with_entropy, parallel)
        row_options = options.normalize(labels, terms.cu_seqlens, hidden.dtype, weight.shape[0], parallel)
    assert isinstance(weight, Tensor)
    packed = terms.cu_seqlens is not None
    rows, row_labels = as_rows(hidden, packed), as_rows(labels, packed)
    row_labels, terms = merge_mask(row_labels, terms, options.ignore_index)
    if skip_inactive == "all":
        row_labels, terms = skip_inactive_sequences(row_labels, terms, options.ignore_index)
    centered = None
    if centering is not None:
        centered = normalize_centering(centering, row_labels, terms, objective, row_options, len(weight))
    this_call = chunking  # with lengths, which are not cached
    if not labels.is_cpu and skip_inactive != "all":  # "all" skips tokens of the mask
        head = weight if base is None else base
        this_call = with_host_lengths(chunking, passed.loss_mask, passed.cu_seqlens, labels, head, parallel)
    if decided is None:
        enabled, inputs = torch.is_grad_enabled(), (hidden, weight, bias)
        needs = RequiresGrad(*(enabled and x is not None and x.requires_grad for x in inputs))
        decisions = Decisions(
            coefficients_depend_on(objective, terms),
            ratio_clip_of(terms, row_options.backend),
            needs,
            skip_inactive != "none",
            with_entropy,
        )
        excluded = unsupported(objective, terms, decisions, chunking.batch_invariant)
        if centered is not None:
            others = ("aligned", "deferred", "frozen", *(("known",) if chunking.batch_invariant else ()))
            excluded |= dict.fromkeys(others, "with centering a row has coefficients of K + 1 ids")
        may_synchronize = decisions.skips or not packed or not hidden.is_cuda or this_call.lengths is not None
        name, reason = choose(schedule, excluded, any(needs), may_synchronize, head_options.memory)
        if name == "two_pass" and centered is not None and with_entropy:
            raise ValueError("return_entropy: got True, expected False with centering and two_pass")
        if name == "two_pass" and any(needs) and not chunking.max_chunk_bytes:
            chunking = chunking._replace(max_chunk_bytes=LEAST_BYTES)
            this_call = this_call._replace(max_chunk_bytes=LEAST_BYTES)
        decisions = decisions._replace(schedule=name, can_defer="deferred" not in excluded)
        store(key, (form, chunking, row_options, decisions, reason))
    operands = LinearOperands(rows, weight, bias, row_labels, row_options, this_call, base)
    return operands, terms, decisions, reason, centered
