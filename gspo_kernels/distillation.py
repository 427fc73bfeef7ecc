"""Distillation: divergences of a student from a teacher as a loss, from logits and from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.aggregation import token_shares
from gspo_kernels.entry import implemented_by
from gspo_kernels.layout import as_rows, from_rows
from gspo_kernels.linear.chunks import Chunking, LinearOperands
from gspo_kernels.linear.distillation import LinearDistillationFunction, LinearTeacher
from gspo_kernels.linear.inputs import ProductArguments, check_inputs
from gspo_kernels.logits import LogitArguments, check_inplace, check_logits
from gspo_kernels.objectives import Linear
from gspo_kernels.ops.divergence import DivergenceForm, DivergenceFunction, TeacherRows
from gspo_kernels.ops.selected import checked_ids
from gspo_kernels.terms import Terms, merge_mask, shaped
from gspo_kernels.types import DistillationOutput, RowOptions

SIDES = ("teacher", "student")
_IGNORED = -100


class DivergenceArguments(NamedTuple):
    """Which divergence, as the caller said it."""

    beta: float = 0.5
    top_k: int = 0
    top_k_of: str = "teacher"
    add_tail: bool = True

    def checked(self, vocabulary: int, ids: Tensor | None) -> DivergenceForm:
        """Checked; ``ids`` are those that the caller gave."""
        beta = checks.number("beta", self.beta)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta: got {beta}, expected 0 (forward KL) to 1 (reverse KL)")
        checks.choice("top_k_of", self.top_k_of, SIDES)
        tail = checks.flag("add_tail", self.add_tail)
        top_k = checks.integer("top_k", self.top_k)
        if not 0 <= top_k <= vocabulary:
            raise ValueError(f"top_k: got {top_k}, expected 0 to {vocabulary}, the size of the vocabulary")
        if not top_k:
            if self.top_k_of != "teacher":
                raise ValueError(f"top_k_of: got {self.top_k_of!r} without a top_k to take")
            if ids is None and not tail:
                raise ValueError(
                    "add_tail: got False, but without top_k or ids there is no tail, expected True"
                )
            return DivergenceForm(beta, 0, False, tail)
        if ids is not None:
            raise ValueError(f"top_k: got {top_k}, expected 0 along with ids")
        return DivergenceForm(beta, top_k, self.top_k_of == "student", tail)


class TeacherArguments(NamedTuple):
    """How a teacher's logits become its distribution, and what it has said of some ids, as the caller said
    it.
    """

    teacher_temperature: float | Tensor | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    def check_source(self, name: str, given: Tensor | None) -> None:
        """There must be the tensor of a name, or ids with their log-probs."""
        of_ids = {"ids": self.ids, "teacher_logprobs": self.teacher_logprobs}
        for label, value in of_ids.items():
            if given is not None and value is not None:
                raise ValueError(f"{label}: got a tensor, expected None along with {name}")
            if given is None and value is None:
                raise ValueError(f"{name}: got None, expected a tensor, or ids along with teacher_logprobs")
        own = self._replace(ids=None, teacher_logprobs=None)
        if given is None and own != TeacherArguments():
            raise ValueError(
                "teacher_temperature, teacher_logit_scale or teacher_softcap: got one, but teacher_logprobs "
                "are normalised already, expected none"
            )


class _Call:
    """What both entries make of their arguments: rows, options of both sides, and the shares of tokens."""

    def __init__(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        vocabulary: int,
        logit_arguments: LogitArguments,
        teacher_arguments: TeacherArguments,
        divergence_arguments: DivergenceArguments,
        terms: Terms,
        aggregation: Linear,
    ):
        self.packed = checks.layout("loss_mask or the tokens", tokens, terms.cu_seqlens) is not None
        sequences = tokens.shape[0] if terms.cu_seqlens is None else terms.cu_seqlens.shape[0] - 1
        options = logit_arguments.checked(tokens, sequences, vocabulary)
        self.form = divergence_arguments.checked(vocabulary, teacher_arguments.ids)
        terms = shaped(terms, tokens, aggregation)
        self.labels, terms = merge_mask(as_rows(tokens, self.packed), terms, _IGNORED)

        def with_rows(arguments: LogitArguments, options: RowOptions) -> RowOptions:
            return arguments.with_rows(options, self.labels, self.packed, terms.cu_seqlens, dtype, vocabulary)

        self.options = with_rows(logit_arguments, options)
        theirs = self.options
        given = teacher_arguments
        if given.teacher_logprobs is None:
            arguments = LogitArguments(
                logit_arguments.temperature
                if given.teacher_temperature is None
                else given.teacher_temperature,
                given.teacher_logit_scale,
                given.teacher_softcap,
                backend=logit_arguments.backend,
            )
            theirs = with_rows(arguments, arguments.checked(tokens, sequences, vocabulary))
        ids, logprobs = self._of_ids(tokens, vocabulary, given)
        self.teacher = TeacherRows(
            None,
            ids,
            logprobs,
            theirs.logit_scale,
            theirs.softcap,
            theirs.temperature,
            theirs.row_temperature,
        )
        self.shares = token_shares(self.labels, terms)

    def _of_ids(
        self, tokens: Tensor, vocabulary: int, given: TeacherArguments
    ) -> tuple[Tensor | None, Tensor | None]:
        """What a teacher has said of ids, in rows."""
        if given.ids is None or given.teacher_logprobs is None:
            return None, None
        ids = checks.tensor("ids", given.ids, None, "[B, T, K] or [N, K]", tokens.device)
        checks.dtype("ids", ids, checks.INTEGERS)
        if ids.shape[:-1] != tokens.shape or ids.shape[-1] == 0:
            raise ValueError(
                f"ids: got shape {tuple(ids.shape)}, expected {(*tokens.shape, 'K')} with K >= 1"
            )
        logprobs = checks.floats(
            "teacher_logprobs", given.teacher_logprobs, tuple(ids.shape), "the shape of ids", tokens.device
        )
        rows = checked_ids(as_rows(ids, self.packed), vocabulary, self.options)
        return rows, as_rows(logprobs.detach(), self.packed)

    def output(self, loss: Tensor, divergence: Tensor) -> DistillationOutput:
        """As the caller gets it."""
        return DistillationOutput(loss, from_rows(divergence, self.packed))


def _aggregation(aggregation: str, constant: float | None) -> Linear:
    """An objective that says how tokens become one loss."""
    return Linear(aggregation=aggregation, aggregation_constant=constant)


def _distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor | None,
    logit_arguments: LogitArguments,
    teacher_arguments: TeacherArguments,
    divergence_arguments: DivergenceArguments,
    terms: Terms,
    aggregation: str,
    aggregation_constant: float | None,
    inplace_backward: bool,
) -> DistillationOutput:
    checks.floats("logits", logits, None, "[B, T, V], or [N, V] with cu_seqlens", None)
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    check_logits(logits, tokens)
    teacher_arguments.check_source("teacher_logits", teacher_logits)
    check_inplace(logits, inplace_backward)
    call = _Call(
        tokens,
        logits.dtype,
        logits.shape[-1],
        logit_arguments,
        teacher_arguments,
        divergence_arguments,
        terms,
        _aggregation(aggregation, aggregation_constant),
    )
    teacher = call.teacher
    if teacher_logits is not None:
        checks.floats(
            "teacher_logits", teacher_logits, tuple(logits.shape), "the shape of logits", logits.device
        )
        teacher = teacher._replace(logits=as_rows(teacher_logits.detach(), call.packed))
    learns = torch.is_grad_enabled() and logits.requires_grad
    # In fp16 a loss scale decides what is representable, and only the backward knows it.
    known = (
        learns
        and not inplace_backward
        and not torch.compiler.is_compiling()
        and logits.dtype != torch.float16
    )
    loss, divergence = DivergenceFunction.apply(
        as_rows(logits, call.packed),
        teacher,
        call.labels,
        call.options,
        call.form,
        call.shares,
        inplace_backward,
        known,
    )
    return call.output(loss, divergence)


@implemented_by(_distillation_loss)
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
) -> DistillationOutput:
    """Divergence of a student from a teacher as a loss, from logits: both are read, and one gradient is
    written.

    ``loss = agg(token_weights * D(student, teacher))``. With p the student's softmax and q the teacher's, D
    is by ``beta``, as in GKD (arXiv 2306.13649), TRL and Liger: 0 the forward KL(q || p), 1 the reverse KL(p
    || q), between them the generalised Jensen-Shannon divergence ``beta KL(q || m) + (1 - beta) KL(p || m)``
    with ``m = (1 - beta) p + beta q``. Not multiplied by the square of a temperature. Only the student
    learns: whatever is the teacher's is detached.

    Args:
        logits: [B, T, V], or [N, V] with ``cu_seqlens``: the student's; fp16, bf16, fp32 or fp64, any
            strides.
        teacher_logits: the same shape, any of these dtypes and strides. None: ``ids`` and
            ``teacher_logprobs`` say what is known.
        beta: 0 to 1, see above.
        top_k: compare over so many ids; 0: over the whole vocabulary.
        top_k_of: "teacher" or "student": whose most likely ids these are.
        add_tail: over ids, what they leave is one more column; False: both sides are normalised over the ids.
        ids: [B, T, K] or [N, K], int64 or int32, -100 where there are fewer: the ids of ``teacher_logprobs``.
            One that is there twice counts once. A token without any is left at 0.
        teacher_logprobs: like ``ids``: log-probs in nats over the whole vocabulary, as an engine returns
            them.
        loss_mask: the tokens' shape, bool or 0/1: tokens that count, holes allowed. None: all.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences.
        aggregation: "token_mean", "sequence_mean", "sequence_mean_token_sum", "constant" or "sum", as in the
            objectives.
        aggregation_constant: for "constant".
        token_weights: the tokens' shape: factors on divergences.
        lengths: [B], |y_i| where it is not the number of counted tokens.
        normalizer: number or 0-d tensor that replaces the outer divisor (for gradient accumulation: the whole
            batch's).
        temperature, logit_scale, softcap: the student's, as in ``token_logprobs``; a temperature [B] is one
            per sequence.
        teacher_temperature, teacher_logit_scale, teacher_softcap: the teacher's; a temperature of None is the
            student's.
        inplace_backward: the backward overwrites the student's logits with their gradient.
        backend: as in ``token_logprobs``.

    Returns:
        DistillationOutput(loss, divergence).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """


def _fused_linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    logit_arguments: LogitArguments,
    teacher_arguments: TeacherArguments,
    divergence_arguments: DivergenceArguments,
    product_arguments: ProductArguments,
    terms: Terms,
    aggregation: str,
    aggregation_constant: float | None,
) -> DistillationOutput:
    chunking = product_arguments.checked(compact=True, group=None)
    checks.floats("hidden", hidden, None, "[B, T, H], or [N, H] with cu_seqlens", None)
    tokens = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    hidden, weight, bias = check_inputs(hidden, weight, bias, tokens, chunking)
    teacher_arguments.check_source("teacher_hidden", teacher_hidden)
    theirs = _teachers_head(teacher_hidden, teacher_weight, teacher_bias, tokens, weight.shape[0], chunking)
    call = _Call(
        tokens,
        hidden.dtype,
        weight.shape[0],
        logit_arguments,
        teacher_arguments,
        divergence_arguments,
        terms,
        _aggregation(aggregation, aggregation_constant),
    )
    their_hidden, their_weight, their_bias = theirs
    if their_hidden is not None:
        their_hidden = as_rows(their_hidden, call.packed)
    loss, divergence = LinearDistillationFunction.apply(
        *LinearOperands(as_rows(hidden, call.packed), weight, bias, call.labels, call.options, chunking),
        LinearTeacher(their_hidden, their_weight, their_bias, call.teacher),
        call.form,
        call.shares,
        torch.compiler.is_compiling(),
    )
    return call.output(loss, divergence)


def _teachers_head(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    tokens: Tensor,
    vocabulary: int,
    chunking: Chunking,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The teacher's three, checked, detached, and as autocast wants them."""
    if hidden is None:
        for name, value in (("teacher_weight", weight), ("teacher_bias", bias)):
            if value is not None:
                raise ValueError(f"{name}: got a tensor, expected None without teacher_hidden")
        return None, None, None
    if weight is None:
        raise ValueError("teacher_weight: got None, expected [V, H] along with teacher_hidden")
    checks.floats("teacher_hidden", hidden, None, "like hidden but for the width", tokens.device)
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(
            f"teacher_hidden: got shape {tuple(hidden.shape)}, expected {(*tokens.shape, 'H of teacher')} "
            "for the tokens of hidden"
        )
    checks.floats("teacher_weight", weight, None, "[V, H of the teacher]", tokens.device)
    if tuple(weight.shape) != (vocabulary, hidden.shape[-1]):
        raise ValueError(
            f"teacher_weight: got shape {tuple(weight.shape)}, expected {(vocabulary, hidden.shape[-1])}, "
            "the student's vocabulary and the width of teacher_hidden"
        )
    if bias is not None:
        checks.floats("teacher_bias", bias, (vocabulary,), "[V]", tokens.device)
        bias = bias.detach()
    try:
        return check_inputs(hidden.detach(), weight.detach(), bias, tokens, chunking)
    except TypeError as error:
        raise TypeError(f"teacher_{error}") from None


@implemented_by(_fused_linear_distillation_loss)
def fused_linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
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
) -> DistillationOutput:
    """Divergence of a student from a teacher as a loss, from hidden states: neither side's logits are ever
    whole.

    Equivalent to ``distillation_loss(hidden @ weight.T + bias, teacher_hidden @ teacher_weight.T +
    teacher_bias, ...)`` with the products in fp32. The loss's gradient is computed along with it: a chunk of
    rows is projected once on either side. The widths of the two models may differ, the vocabulary is the
    same.

    Args:
        hidden: [B, T, H], or [N, H] with ``cu_seqlens``: the student's; fp16, bf16, fp32 or fp64, any
            strides.
        weight: [V, H], the student's lm_head's; hidden's dtype, or any under autocast.
        teacher_hidden: [B, T, H of the teacher] or [N, H of the teacher], in a dtype of its own. None:
            ``ids`` and ``teacher_logprobs`` say what is known of the teacher.
        teacher_weight: [V, H of the teacher].
        bias: [V] or None.
        teacher_bias: [V] or None.
        beta, top_k, top_k_of, add_tail, ids, teacher_logprobs: as in ``distillation_loss``.
        loss_mask, cu_seqlens: as there. Tokens that don't count are never projected.
        aggregation, aggregation_constant, token_weights, lengths, normalizer: as there.
        temperature, logit_scale, softcap: as there, the student's.
        teacher_temperature, teacher_logit_scale, teacher_softcap: as there.
        logits_dtype, backend: as in ``linear_token_logprobs``.
        max_chunk_bytes: of logits at once, both sides together; None: by the device's memory.
        batch_invariant: as in ``linear_token_logprobs``.

    Returns:
        DistillationOutput(loss, divergence).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
