"""Distillation losses: divergences of a student from a teacher, from logits and from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import (
    HeadOptions,
    LinearOperands,
    check_inputs,
    check_teachers_head,
    with_host_lengths,
)
from gspo_kernels.arguments.logit_options import LogitOptions, check_inplace, check_labels_match, zero_labels
from gspo_kernels.arguments.terms import Terms, merge_mask, normalize_terms
from gspo_kernels.backends.dispatch import refuse_backend
from gspo_kernels.core import checks
from gspo_kernels.core.batch_invariance import mode_of
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.types import DistillationOutput, LoRAHead, RowOptions
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.shards import columns_of
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.distillation import LinearDistillationFunction
from gspo_kernels.logits.divergence import (
    DivergenceFunction,
    DivergenceSpec,
    KnownDivergenceFunction,
    TeacherRows,
    summed,
)
from gspo_kernels.logits.selected import checked_ids
from gspo_kernels.objectives import Linear
from gspo_kernels.objectives.aggregation import token_shares

SIDES = ("teacher", "student")


class DistillationRows(NamedTuple):
    """The normalized arguments of both distillation losses.

    Attributes:
        labels: [B, T], ``ignore_index`` for tokens that don't count, otherwise arbitrary.
        options: of the student's logits.
        teacher: the teacher's rows; its logits are added later.
        spec: the divergence.
        shares: [B, T] fp64, d loss / d divergence of each token.
    """

    labels: Tensor
    options: RowOptions
    teacher: TeacherRows
    spec: DivergenceSpec
    shares: Tensor


class DistillationArguments(NamedTuple):
    """The arguments of both distillation losses, as the caller passed them."""

    student: LogitOptions
    teacher_temperature: float | Tensor | None
    teacher_logit_scale: float
    teacher_softcap: float | None
    ids: Tensor | None
    teacher_logprobs: Tensor | None
    beta: float
    top_k: int
    top_k_of: str
    add_tail: bool
    terms: Terms
    aggregation: str
    aggregation_constant: float | None

    def check_source(self, name: str, source: Tensor | None) -> None:
        """Require a tensor ``source``, called ``name``, or ids with log-probs, but not both."""
        for label, value in (("ids", self.ids), ("teacher_logprobs", self.teacher_logprobs)):
            if source is not None and value is not None:
                raise ValueError(f"{label}: got a tensor, expected None with {name}")
            if source is None and value is None:
                raise ValueError(f"{name}: got None, expected a tensor, or ids with teacher_logprobs")
        options = (self.teacher_temperature, self.teacher_logit_scale, self.teacher_softcap)
        if source is None and options != (None, 1.0, None):
            raise ValueError(
                "teacher_temperature, teacher_logit_scale, teacher_softcap: not supported with "
                "teacher_logprobs, which are already normalized"
            )

    def normalize(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        width: int,
        parallel: Parallel,
    ) -> DistillationRows:
        """Check the arguments and convert them to rows.

        Args:
            tokens: zeros of the tokens' shape.
            dtype: of the student's logits.
            width: the number of logit columns of this process.
            parallel: the ranks that have the other columns.
        """
        objective = Linear(aggregation=self.aggregation, aggregation_constant=self.aggregation_constant)
        if parallel.cp_group is not None:
            raise ValueError(
                "logits or hidden: got a DTensor sharded over tokens, expected Replicate() over these ranks"
            )
        checks.layout("loss_mask or the tokens", tokens, self.terms.cu_seqlens)
        terms, _ = normalize_terms(self.terms, tokens, objective)
        rows = as_rows(tokens, terms.cu_seqlens is not None)
        labels, terms = merge_mask(rows, terms, self.student.ignore_index)
        options = self.student.normalize(tokens, terms.cu_seqlens, dtype, width, parallel)
        spec = self._divergence(columns_of(options.shard, width)[1])
        teacher = self._teacher(tokens, labels, options, terms.cu_seqlens, dtype, width)
        if not spec.tail and (spec.top_k if teacher.ids is None else teacher.ids.shape[-1]) == 1:
            raise ValueError(
                "add_tail: got False, expected True with one id per token: normalized over it, both sides "
                "are 1, and the divergence is always 0"
            )
        return DistillationRows(labels, options, teacher, spec, token_shares(labels, terms))

    def _divergence(self, vocabulary: int) -> DivergenceSpec:
        """Return the divergence; a vocabulary of 0 means an unknown size."""
        beta = checks.number("beta", self.beta)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta: got {beta}, expected 0 (forward KL) to 1 (reverse KL)")
        checks.choice("top_k_of", self.top_k_of, SIDES)
        tail = checks.flag("add_tail", self.add_tail)
        top_k = checks.integer("top_k", self.top_k)
        if top_k < 0 or (vocabulary and top_k > vocabulary):
            maximum = vocabulary or "V"
            raise ValueError(f"top_k: got {top_k}, expected 0 to {maximum}, the size of the vocabulary")
        if top_k and self.ids is not None:
            raise ValueError(f"top_k: got {top_k}, expected 0 along with ids")
        if not top_k and self.top_k_of != "teacher":
            raise ValueError(f"top_k_of: got {self.top_k_of!r}, expected 'teacher' without top_k")
        if not top_k and self.ids is None and not tail:
            raise ValueError(
                "add_tail: got False, expected True: without top_k or ids all columns are compared"
            )
        return DivergenceSpec(beta, top_k, self.top_k_of == "student", tail)

    def _teacher(
        self,
        tokens: Tensor,
        labels: Tensor,
        options: RowOptions,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        width: int,
    ) -> TeacherRows:
        """Return the teacher's rows without its logits; ignored labels also mark ignored ids."""
        temperature = self.teacher_temperature
        teacher_options = self.student._replace(
            temperature=self.student.temperature if temperature is None else temperature,
            logit_scale=self.teacher_logit_scale,
            softcap=self.teacher_softcap,
        )
        try:
            transform = teacher_options.normalize(tokens, cu_seqlens, dtype, width, Parallel()).transform
        except (TypeError, ValueError) as error:
            raise type(error)(f"teacher_{error}") from None
        if self.ids is None:
            return TeacherRows(None, None, None, transform)
        device, packed = tokens.device, cu_seqlens is not None
        ids = checks.tensor("ids", self.ids, None, "[B, T, K] or [N, K]", device, checks.INTEGERS)
        if ids.shape[:-1] != tokens.shape or ids.shape[-1] == 0:
            raise ValueError(
                f"ids: got shape {tuple(ids.shape)}, expected {(*tokens.shape, 'K')} with K >= 1"
            )
        given, shape = self.teacher_logprobs, tuple(ids.shape)
        logprobs = checks.floats("teacher_logprobs", given, shape, "the shape of ids", device).detach()
        logprobs = as_rows(logprobs, packed)
        names = ("ids", "teacher_logprobs")
        ids = checked_ids(as_rows(ids, packed), logprobs, labels, width, options, packed, *names)
        return TeacherRows(None, ids, logprobs, transform)


@agree_across_ranks
def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    beta: float = 0.5,
    top_k: int = 0,
    top_k_of: str = "teacher",
    add_tail: bool = True,
    ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: str = "token_mean",
    aggregation_constant: float | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    inplace_backward: bool = False,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> DistillationOutput:
    """Distillation loss from logits: the divergence of a student from a teacher.

    ``loss = agg(token_weights * D(student, teacher))``. Let p be the student's softmax and q the teacher's.
    ``beta`` selects D, as in GKD (arXiv 2306.13649), TRL and Liger: 0 is the forward KL(q || p), 1 the
    reverse KL(p || q). Between them D is the generalized Jensen-Shannon divergence ``beta KL(q || m) +
    (1 - beta) KL(p || m)`` with ``m = (1 - beta) p + beta q``. The loss is not multiplied by the square of a
    temperature. Only the student has a gradient.

    Args:
        logits: [B, T, V], or [N, V] with ``cu_seqlens``: the student's; fp16, bf16, fp32 or fp64, any
            strides.
        teacher_logits: the same shape, any of these dtypes and strides; or None with ``ids`` and
            ``teacher_logprobs``.
        beta: 0 to 1, see above.
        top_k: the number of ids to compare, or 0 for the whole vocabulary.
        top_k_of: the model whose most likely ids are compared, "teacher" or "student".
        add_tail: with ``top_k`` or ``ids``, treat the probability of all remaining ids as one more column. If
            False, both sides are normalized over the ids, of which there must be more than one.
        ids: [B, T, K] or [N, K], int64 or int32: the ids of ``teacher_logprobs``, padded with -1 or -100.
            Repeated ids count once. The divergence of a token without ids is 0.
        teacher_logprobs: the shape of ``ids``: log-probs in nats over the whole vocabulary, as returned by an
            inference engine.
        loss_mask, cu_seqlens, lengths, normalizer: as in ``policy_loss``.
        aggregation: "token_mean", "sequence_mean", "sequence_mean_token_sum", "constant" or "sum", as in the
            objectives, or "prompt_mean" with ``normalizer``; "constant" needs an ``aggregation_constant``.
        token_weights: the tokens' shape: factors on divergences.
        temperature, logit_scale, softcap: the student's, as in ``fused_policy_loss``.
        teacher_temperature, teacher_logit_scale, teacher_softcap: the teacher's; the default temperature is
            the student's.
        inplace_backward: overwrite the student's logits with their gradient in the backward.
        backend: as in ``token_logprobs``.
        parallel: as in ``token_logprobs``. A rank has the same columns of the student's and the teacher's
            logits. Ids are those of the whole vocabulary, and the same on all ranks.

    Returns:
        DistillationOutput(loss, divergence).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    terms = Terms(
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        lengths=lengths,
        normalizer=normalizer,
    )
    passed = DistillationArguments(
        LogitOptions(temperature, logit_scale, softcap, backend=backend),
        teacher_temperature,
        teacher_logit_scale,
        teacher_softcap,
        ids,
        teacher_logprobs,
        beta,
        top_k,
        top_k_of,
        add_tail,
        terms,
        aggregation,
        aggregation_constant,
    )
    Parallel.check(parallel, "distillation_loss", ("tp_group", "vocab_range"))
    (logits, teacher_logits), parallel = local_tensors(
        parallel, terms, logits=logits, teacher_logits=teacher_logits
    )
    tokens = zero_labels("logits", logits, "V")
    check_labels_match("logits", logits, tokens, "V")
    passed.check_source("teacher_logits", teacher_logits)
    check_inplace(logits, inplace_backward)
    if teacher_logits is not None:
        shape = tuple(logits.shape)
        checks.floats("teacher_logits", teacher_logits, shape, "the shape of logits", logits.device)
    call = passed.normalize(tokens, logits.dtype, logits.shape[-1], parallel)
    refuse_backend(call.options.backend)
    packed, teacher = cu_seqlens is not None, call.teacher
    if teacher_logits is not None:
        teacher = teacher._replace(logits=as_rows(teacher_logits.detach(), packed))
    arguments = (as_rows(logits, packed), teacher, call.labels, call.spec, call.options)
    # the range of fp16 gradients depends on the loss scale, which only the backward has
    late = inplace_backward or logits.dtype == torch.float16 or torch.compiler.is_compiling()
    if torch.is_grad_enabled() and logits.requires_grad and not late:
        loss, each = KnownDivergenceFunction.apply(*arguments, call.shares)
    else:
        each = DivergenceFunction.apply(*arguments, inplace_backward)
        loss = summed(each, call.shares)
    return DistillationOutput(loss, from_rows(each.detach(), packed))


@agree_across_ranks
def fused_linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor | LoRAHead,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    top_k: int = 0,
    top_k_of: str = "teacher",
    add_tail: bool = True,
    ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: str = "token_mean",
    aggregation_constant: float | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> DistillationOutput:
    """Distillation loss from hidden states, with one chunk of logits of both models at a time.

    Equivalent to ``distillation_loss(hidden @ weight.T + bias, teacher_hidden @ teacher_weight.T +
    teacher_bias, ...)`` with the products in fp32. The gradient is computed along with the loss, with one
    projection per model. The widths of the models may differ; the vocabulary must be the same.

    Args:
        hidden: [B, T, H], or [N, H] with ``cu_seqlens``: the student's; fp16, bf16, fp32 or fp64, any
            strides.
        weight: [V, H], the weight of the student's lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or
            any under autocast.
        teacher_hidden: [B, T, H of the teacher] or [N, H of the teacher], possibly of a different dtype; or
            None with ``ids`` and ``teacher_logprobs``.
        teacher_weight: [V, H of the teacher].
        bias, teacher_bias: [V] or None.
        beta, top_k, top_k_of, add_tail, ids, teacher_logprobs: as in ``distillation_loss``.
        loss_mask, cu_seqlens: as in ``distillation_loss``. Tokens that don't count are not projected.
        aggregation, aggregation_constant, token_weights, lengths, normalizer: as in ``distillation_loss``.
        temperature, logit_scale, softcap: as in ``distillation_loss``.
        teacher_temperature, teacher_logit_scale, teacher_softcap: as in ``distillation_loss``.
        logits_dtype, batch_invariant, backend: as in ``linear_token_logprobs``.
        max_chunk_bytes: bytes of logits of both models at a time; the default depends on the device's memory.
        parallel: ``tp_group``, ``vocab_range`` and ``reduce_hidden_grad`` of ``Parallel``; weights and biases
            of both models have the same shards.

    Returns:
        DistillationOutput(loss, divergence).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    terms = Terms(
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        lengths=lengths,
        normalizer=normalizer,
    )
    passed = DistillationArguments(
        LogitOptions(temperature, logit_scale, softcap, backend=backend),
        teacher_temperature,
        teacher_logit_scale,
        teacher_softcap,
        ids,
        teacher_logprobs,
        beta,
        top_k,
        top_k_of,
        add_tail,
        terms,
        aggregation,
        aggregation_constant,
    )
    head_options = HeadOptions(logits_dtype, max_chunk_bytes, mode_of(batch_invariant))
    usable, invariant = ("tp_group", "vocab_range", "reduce_hidden_grad"), head_options.batch_invariant
    Parallel.check(parallel, "fused_linear_distillation_loss", usable, invariant)
    local, parallel = local_tensors(
        parallel,
        terms,
        invariant,
        hidden=hidden,
        weight=weight,
        bias=bias,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
    )
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = local
    chunking = head_options.normalize(loss_mask is not None, parallel)
    if chunking.scattered:
        raise ValueError("hidden: is sharded over tokens, expected a DTensor with placement Replicate()")
    tokens = zero_labels("hidden", hidden, "H")
    hidden, weight, bias, base = check_inputs(hidden, weight, bias, tokens, chunking)
    passed.check_source("teacher_hidden", teacher_hidden)
    vocabulary, packed = weight.shape[0], cu_seqlens is not None
    teacher_hidden, *teacher_head = check_teachers_head(
        teacher_hidden, teacher_weight, teacher_bias, tokens, vocabulary, chunking
    )
    call = passed.normalize(tokens, hidden.dtype, vocabulary, parallel)
    if not tokens.is_cpu:
        head = weight if base is None else base
        chunking = with_host_lengths(chunking, loss_mask, cu_seqlens, tokens, head, parallel)
    hidden = as_rows(hidden, packed)
    teacher_hidden = None if teacher_hidden is None else as_rows(teacher_hidden, packed)
    operands = LinearOperands(hidden, weight, bias, call.labels, call.options, chunking, base)
    rest = (teacher_hidden, *teacher_head, call.teacher, call.spec, call.shares)
    loss, each = LinearDistillationFunction.apply(torch.compiler.is_compiling(), rest, *operands)
    return DistillationOutput(loss, from_rows(each.detach(), packed))
