"""Distillation losses: divergences of a student from a teacher, from logits and from hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.head import (
    HeadOptions,
    LinearOperands,
    check_inputs,
    check_teachers_head,
    from_host,
)
from gspo_kernels.arguments.logit_options import LogitOptions, check_inplace, check_labels_match, zero_labels
from gspo_kernels.arguments.terms import Terms, merge_mask, normalize_terms
from gspo_kernels.backends.dispatch import refuse_backend
from gspo_kernels.core import checks
from gspo_kernels.core.batch_invariance import or_current
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.types import DistillationOutput, LoRAHead, RowOptions
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.shards import columns_of
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.distillation import LinearDistillationFunction
from gspo_kernels.logits.divergence import DivergenceFunction, KnownDivergenceFunction, summed
from gspo_kernels.logits.pairs import DivergenceSpec, TeacherRows
from gspo_kernels.logits.selected import checked_ids
from gspo_kernels.objectives import Linear
from gspo_kernels.objectives.aggregation import token_shares

SIDES = ("teacher", "student")


class DivergenceArguments(NamedTuple):
    """The arguments that select a divergence, as the caller passed them."""

    beta: float = 0.5
    top_k: int = 0
    top_k_of: str = "teacher"
    add_tail: bool = True

    def normalize(self, vocabulary: int, ids: Tensor | None) -> DivergenceSpec:
        """Check the arguments together with ``ids``; a vocabulary of 0 means an unknown size."""
        beta = checks.number("beta", self.beta)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta: got {beta}, expected 0 (forward KL) to 1 (reverse KL)")
        checks.choice("top_k_of", self.top_k_of, SIDES)
        tail = checks.flag("add_tail", self.add_tail)
        top_k = checks.integer("top_k", self.top_k)
        if top_k < 0 or (vocabulary and top_k > vocabulary):
            maximum = vocabulary or "V"
            raise ValueError(f"top_k: got {top_k}, expected 0 to {maximum}, the size of the vocabulary")
        if not top_k:
            if self.top_k_of != "teacher":
                raise ValueError(f"top_k_of: got {self.top_k_of!r}, expected 'teacher' without top_k")
            if ids is None and not tail:
                raise ValueError(
                    "add_tail: got False, expected True: without top_k or ids all columns are compared"
                )
            return DivergenceSpec(beta, 0, False, tail)
        if ids is not None:
            raise ValueError(f"top_k: got {top_k}, expected 0 along with ids")
        return DivergenceSpec(beta, top_k, self.top_k_of == "student", tail)


class TeacherArguments(NamedTuple):
    """The teacher's logit options, or its log-probs of some ids, as the caller passed them."""

    teacher_temperature: float | Tensor | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    def check_source(self, name: str, source: Tensor | None) -> None:
        """Require a tensor ``source``, called ``name``, or ids with log-probs, but not both."""
        of_ids = {"ids": self.ids, "teacher_logprobs": self.teacher_logprobs}
        for label, value in of_ids.items():
            if source is not None and value is not None:
                raise ValueError(f"{label}: got a tensor, expected None with {name}")
            if source is None and value is None:
                raise ValueError(f"{name}: got None, expected a tensor, or ids with teacher_logprobs")
        options = self._replace(ids=None, teacher_logprobs=None)
        if source is None and options != TeacherArguments():
            raise ValueError(
                "teacher_temperature, teacher_logit_scale, teacher_softcap: not supported with "
                "teacher_logprobs, which are already normalized"
            )

    def normalize(
        self,
        tokens: Tensor,
        labels: Tensor,
        student: LogitOptions,
        options: RowOptions,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        width: int,
    ) -> TeacherRows:
        """Convert the teacher's inputs to rows, without its logits.

        Args:
            tokens: any tensor of the tokens' shape, in the caller's layout.
            labels: [B, T]; ids and log-probs are ignored where these are ``ignore_index``.
            student: the student's options as the caller passed them.
            options: ``student``, normalized.
            cu_seqlens: checked offsets, or None for padded tokens.
            dtype: of the student's logits.
            width: the number of logit columns of this process.
        """
        teacher_options = LogitOptions(
            student.temperature if self.teacher_temperature is None else self.teacher_temperature,
            self.teacher_logit_scale,
            self.teacher_softcap,
            backend=student.backend,
        )
        try:
            of_teacher = teacher_options.normalize(tokens, cu_seqlens, dtype, width, Parallel())
        except (TypeError, ValueError) as error:
            raise type(error)(f"teacher_{error}") from None
        if self.ids is None:
            return TeacherRows(None, None, None, of_teacher.transform)
        device, packed = tokens.device, cu_seqlens is not None
        ids = checks.tensor("ids", self.ids, None, "[B, T, K] or [N, K]", device, checks.INTEGERS)
        if ids.shape[:-1] != tokens.shape or ids.shape[-1] == 0:
            raise ValueError(
                f"ids: got shape {tuple(ids.shape)}, expected {(*tokens.shape, 'K')} with K >= 1"
            )
        given, shape = self.teacher_logprobs, tuple(ids.shape)
        logprobs = checks.floats("teacher_logprobs", given, shape, "the shape of ids", device).detach()
        logprobs = as_rows(logprobs, packed)
        ids = checked_ids(as_rows(ids, packed), logprobs, labels, width, options, packed)
        return TeacherRows(None, ids, logprobs, of_teacher.transform)


class DistillationRows(NamedTuple):
    """The normalized arguments of both distillation losses.

    Attributes:
        labels: [B, T], ``ignore_index`` for tokens that don't count, otherwise arbitrary.
        options: of the student's logits.
        teacher: the teacher's rows; ``teacher_logits`` are added later.
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
    teacher: TeacherArguments
    divergence: DivergenceArguments
    terms: Terms
    aggregation: str
    aggregation_constant: float | None

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
        cu_seqlens = terms.cu_seqlens
        rows = as_rows(tokens, cu_seqlens is not None)
        labels, terms = merge_mask(rows, terms, self.student.ignore_index)
        options = self.student.normalize(tokens, cu_seqlens, dtype, width, parallel)
        spec = self.divergence.normalize(columns_of(options.shard, width)[1], self.teacher.ids)
        teacher = self.teacher.normalize(tokens, labels, self.student, options, cu_seqlens, dtype, width)
        return DistillationRows(labels, options, teacher, spec, token_shares(labels, terms))


def _terms(
    loss_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    token_weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: float | Tensor | None,
) -> Terms:
    """Return the terms of a sum over tokens, as the caller passed them."""
    return Terms(
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        token_weights=token_weights,
        lengths=lengths,
        normalizer=normalizer,
    )


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
            False, both sides are normalized over the ids.
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
    passed = DistillationArguments(
        LogitOptions(temperature, logit_scale, softcap, backend=backend),
        TeacherArguments(teacher_temperature, teacher_logit_scale, teacher_softcap, ids, teacher_logprobs),
        DivergenceArguments(beta, top_k, top_k_of, add_tail),
        _terms(loss_mask, cu_seqlens, token_weights, lengths, normalizer),
        aggregation,
        aggregation_constant,
    )
    rows, call = _normalize_logits(logits, teacher_logits, passed, inplace_backward, parallel)
    arguments = (rows, call.teacher, call.labels, call.spec, call.options)
    # the range of fp16 gradients depends on the loss scale, which only the backward has
    late = inplace_backward or rows.dtype == torch.float16 or torch.compiler.is_compiling()
    if torch.is_grad_enabled() and rows.requires_grad and not late:
        loss, each = KnownDivergenceFunction.apply(*arguments, call.shares)
    else:
        each = DivergenceFunction.apply(*arguments, inplace_backward)
        loss = summed(each, call.shares)
    return DistillationOutput(loss, from_rows(each.detach(), cu_seqlens is not None))


def _normalize_logits(
    logits: Tensor,
    teacher_logits: Tensor | None,
    passed: DistillationArguments,
    inplace_backward: bool,
    parallel: Parallel,
) -> tuple[Tensor, DistillationRows]:
    """Return the student's logits in rows, and all other arguments."""
    Parallel.check(parallel, "distillation_loss", ("tp_group", "vocab_range"))
    (logits, teacher_logits), parallel = local_tensors(
        parallel, passed.terms, logits=logits, teacher_logits=teacher_logits
    )
    tokens = zero_labels("logits", logits, "V")
    check_labels_match("logits", logits, tokens, "V")
    passed.teacher.check_source("teacher_logits", teacher_logits)
    check_inplace(logits, inplace_backward)
    if teacher_logits is not None:
        shape = tuple(logits.shape)
        checks.floats("teacher_logits", teacher_logits, shape, "the shape of logits", logits.device)
    call = passed.normalize(tokens, logits.dtype, logits.shape[-1], parallel)
    refuse_backend(call.options.backend)
    packed = passed.terms.cu_seqlens is not None
    if teacher_logits is not None:
        teacher = call.teacher._replace(logits=as_rows(teacher_logits.detach(), packed))
        call = call._replace(teacher=teacher)
    return as_rows(logits, packed), call


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
    passed = DistillationArguments(
        LogitOptions(temperature, logit_scale, softcap, backend=backend),
        TeacherArguments(teacher_temperature, teacher_logit_scale, teacher_softcap, ids, teacher_logprobs),
        DivergenceArguments(beta, top_k, top_k_of, add_tail),
        _terms(loss_mask, cu_seqlens, token_weights, lengths, normalizer),
        aggregation,
        aggregation_constant,
    )
    products = HeadOptions(logits_dtype, max_chunk_bytes, or_current(batch_invariant))
    operands, teachers_head, call = _normalize_hidden(
        (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), passed, products, parallel
    )
    rest = (call.teacher, call.spec, call.shares, torch.compiler.is_compiling())
    loss, each = LinearDistillationFunction.apply(*operands, *teachers_head, *rest)
    return DistillationOutput(loss, from_rows(each.detach(), cu_seqlens is not None))


def _normalize_hidden(
    student: tuple[Tensor, Tensor | LoRAHead, Tensor | None],
    teacher: tuple[Tensor | None, Tensor | None, Tensor | None],
    passed: DistillationArguments,
    products: HeadOptions,
    parallel: Parallel,
) -> tuple[LinearOperands, tuple[Tensor | None, Tensor | None, Tensor | None], DistillationRows]:
    """Return the student's operands, the teacher's hidden states, weight and bias, and other arguments."""
    name, invariant = "fused_linear_distillation_loss", products.batch_invariant
    sides: dict[str, Any] = dict(zip(("hidden", "weight", "bias"), student, strict=True))
    sides |= dict(zip(("teacher_hidden", "teacher_weight", "teacher_bias"), teacher, strict=True))
    Parallel.check(parallel, name, ("tp_group", "vocab_range", "reduce_hidden_grad"), invariant)
    local, parallel = local_tensors(parallel, passed.terms, invariant, **sides)
    hidden, weight, bias, their_hidden, their_weight, their_bias = local
    chunking = products.normalize(passed.terms.loss_mask is not None, parallel)
    if chunking.scattered:
        raise ValueError("hidden: is sharded over tokens, expected a DTensor with placement Replicate()")
    tokens = zero_labels("hidden", hidden, "H")
    hidden, weight, bias, base = check_inputs(hidden, weight, bias, tokens, chunking)
    passed.teacher.check_source("teacher_hidden", their_hidden)
    their_rows, their_weight, their_bias = check_teachers_head(
        their_hidden, their_weight, their_bias, tokens, weight.shape[0], chunking
    )
    call = passed.normalize(tokens, hidden.dtype, weight.shape[0], parallel)
    if not tokens.is_cpu:
        mask, offsets = passed.terms.loss_mask, passed.terms.cu_seqlens
        head = weight if base is None else base
        chunking = from_host(chunking, mask, offsets, tokens, head, parallel)
    packed = passed.terms.cu_seqlens is not None
    their_rows = None if their_rows is None else as_rows(their_rows, packed)
    hidden = as_rows(hidden, packed)
    operands = LinearOperands(hidden, weight, bias, call.labels, call.options, chunking, base)
    return operands, (their_rows, their_weight, their_bias), call
