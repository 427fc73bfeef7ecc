"""What a student may learn from beside, or instead of, an objective: the arguments of a teacher, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import as_rows
from gspo_kernels.logits import LogitArguments
from gspo_kernels.ops.divergence import DivergenceFunction
from gspo_kernels.ops.pairs import DivergenceForm, TeacherRows
from gspo_kernels.ops.selected import checked_ids
from gspo_kernels.ops.shards import columns_of
from gspo_kernels.step import DivergenceLoss, loss_of, with_divergence
from gspo_kernels.terms import Terms
from gspo_kernels.types import LossOutput, RowOptions

SIDES = ("teacher", "student")


class DivergenceArguments(NamedTuple):
    """Which divergence, as the caller said it."""

    beta: float = 0.5
    top_k: int = 0
    top_k_of: str = "teacher"
    add_tail: bool = True

    def checked(self, vocabulary: int, ids: Tensor | None, labelled: bool) -> DivergenceForm:
        """The same, checked, given the caller's ``ids``; a vocabulary of 0 is one of unknown size."""
        beta = checks.number("beta", self.beta)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta: got {beta}, expected 0 (forward KL) to 1 (reverse KL)")
        checks.choice("top_k_of", self.top_k_of, SIDES)
        tail = checks.flag("add_tail", self.add_tail)
        top_k = checks.integer("top_k", self.top_k)
        if top_k < 0 or (vocabulary and top_k > vocabulary):
            most = vocabulary or "what there are, at most"
            raise ValueError(f"top_k: got {top_k}, expected 0 to {most}, the size of the vocabulary")
        if not top_k:
            if self.top_k_of != "teacher":
                raise ValueError(f"top_k_of: got {self.top_k_of!r} without a top_k to take")
            if ids is None and not tail:
                raise ValueError(
                    "add_tail: got False, but without top_k or ids there is no tail, expected True"
                )
            return DivergenceForm(beta, 0, False, tail, labelled)
        if ids is not None:
            raise ValueError(f"top_k: got {top_k}, expected 0 along with ids")
        return DivergenceForm(beta, top_k, self.top_k_of == "student", tail, labelled)


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
        """Refuse all but the tensor of a name, or ids with their log-probs, and not both."""
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

    def rows(
        self,
        tokens: Tensor,
        row_labels: Tensor,
        student: LogitArguments,
        options: RowOptions,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        width: int,
    ) -> TeacherRows:
        """What there is of the teacher, but for its logits.

        Args:
            tokens: what has the tokens' shape, as the caller gave it.
            row_labels: the same in rows.
            student: how the student's logits become log-probs, as the caller said it.
            options: the same, checked.
            cu_seqlens: checked; None: padded.
            dtype: of the student's logits.
            width: how many columns of logits this process has.
        """
        packed = cu_seqlens is not None
        own = LogitArguments(
            student.temperature if self.teacher_temperature is None else self.teacher_temperature,
            self.teacher_logit_scale,
            self.teacher_softcap,
            backend=student.backend,
        )
        sequences = tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        try:
            theirs = own.checked(tokens, sequences, width)
        except (TypeError, ValueError) as error:
            raise type(error)(f"teacher_{error}") from None
        theirs = own.with_rows(theirs, row_labels, packed, cu_seqlens, dtype, width)
        ids, logprobs = self._of_ids(tokens, packed, width, options)
        return TeacherRows(
            None,
            ids,
            logprobs,
            theirs.logit_scale,
            theirs.softcap,
            theirs.temperature,
            theirs.row_temperature,
        )

    def _of_ids(
        self, tokens: Tensor, packed: bool, width: int, options: RowOptions
    ) -> tuple[Tensor | None, Tensor | None]:
        """What a teacher has said of ids, in rows."""
        if self.ids is None or self.teacher_logprobs is None:
            return None, None
        ids = checks.tensor("ids", self.ids, None, "[B, T, K] or [N, K]", tokens.device)
        checks.dtype("ids", ids, checks.INTEGERS)
        if ids.shape[:-1] != tokens.shape or ids.shape[-1] == 0:
            raise ValueError(
                f"ids: got shape {tuple(ids.shape)}, expected {(*tokens.shape, 'K')} with K >= 1"
            )
        logprobs = checks.floats(
            "teacher_logprobs", self.teacher_logprobs, tuple(ids.shape), "the shape of ids", tokens.device
        )
        return checked_ids(as_rows(ids, packed), width, options), as_rows(logprobs.detach(), packed)


def vocabulary_of(width: int, options: RowOptions) -> int:
    """The size of the whole vocabulary, 0 where the ``width`` columns of this process don't say it."""
    shard = options.shard
    total = columns_of(shard, width)[1] if shard.group else width
    return total


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher beside an objective: ``loss = objective + coef * agg(D(student, teacher))``, with the
    objective's aggregation and divisor, from one pass over the student's logits. Nothing of it gets a
    gradient.

    Attributes:
        hidden: [.., H of the teacher], the tokens' shape in front, for a loss from hidden states; any dtype
            of its own. None: ``ids`` and ``logprobs`` say what is known of the teacher.
        weight: [V, H of the teacher].
        bias: [V] or None.
        logits: the shape of the student's, for a loss from logits, in place of these three.
        ids, logprobs: the tokens' shape and K: the log-probs of some ids, as an engine returns them; -100
            where there are fewer.
        coef: weight of the divergence: a number, or a tensor that broadcasts to the labels.
        beta, top_k, top_k_of, add_tail: which divergence, as in ``distillation_loss``.
        temperature, logit_scale, softcap: the teacher's; a temperature of None is the student's.
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    logits: Tensor | None = None
    ids: Tensor | None = None
    logprobs: Tensor | None = None
    coef: float | Tensor = 1.0
    beta: float = 0.5
    top_k: int = 0
    top_k_of: str = "teacher"
    add_tail: bool = True
    temperature: float | Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def arguments(self) -> TeacherArguments:
        """The teacher's own options and ids, as the distillation losses take them."""
        return TeacherArguments(self.temperature, self.logit_scale, self.softcap, self.ids, self.logprobs)

    @property
    def divergence(self) -> DivergenceArguments:
        """Which divergence, as the distillation losses take it."""
        return DivergenceArguments(self.beta, self.top_k, self.top_k_of, self.add_tail)


class Taught(NamedTuple):
    """A teacher beside an objective, checked: what is compared, what there is of the teacher but for its
    logits, and the objective's terms with the divergence's weight.
    """

    form: DivergenceForm
    rows: TeacherRows
    terms: Terms


def taught(
    teacher: Teacher,
    labels: Tensor,
    row_labels: Tensor,
    student: LogitArguments,
    options: RowOptions,
    terms: Terms,
    dtype: torch.dtype,
    width: int,
    logits: Tensor | None = None,
) -> Taught:
    """Check a teacher beside an objective.

    Args:
        teacher: as the caller gave it.
        labels, row_labels: as the caller gave them, and in rows.
        student: how the student's logits become log-probs, as the caller said it.
        options, terms: checked.
        dtype: of the student's logits.
        width: how many columns of them this process has.
        logits: the student's as the caller gave them, for a teacher that may have logits, too.

    Raises:
        TypeError, ValueError: naming the field of ``Teacher``.
    """
    given, vocabulary = teacher.arguments, vocabulary_of(width, options)
    try:
        form = teacher.divergence.checked(vocabulary, teacher.ids, labelled=True)
        rows = given.rows(labels, row_labels, student, options, terms.cu_seqlens, dtype, width)
        if logits is not None:
            rows = rows.with_logits(teacher.logits, logits, terms.cu_seqlens is not None)
        coef = checks.broadcastable("coef", teacher.coef, tuple(labels.shape), labels.device)
    except (TypeError, ValueError) as error:
        raise named(error) from None
    if options.kept is not None and (form.top_k or rows.ids is not None):
        raise ValueError(
            f"{'kept_mask' if student.kept_ids is None else 'kept_ids'}: got ids, but the "
            "teacher is compared over ids of its own, expected None, or a teacher without top_k and ids"
        )
    coef = checks.filled(0.0, labels.device) if coef is None else coef.detach()
    return Taught(form, rows, terms._replace(divergence_coef=coef))


def check_teacher(teacher: object, name: str, has_entropy: bool, scattered: bool = False) -> None:
    """Refuse what is no teacher, lacks its tensor of a ``name``, or stands beside an entropy.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(teacher, Teacher):
        raise TypeError(f"teacher: got {type(teacher).__name__}, expected a gspo_kernels.Teacher")
    if has_entropy:
        raise ValueError(
            "teacher: got one along with an entropy (return_entropy, entropy_coef, or an objective that "
            "needs it), whose gradient the rows of divergences don't have, expected None"
        )
    if scattered:
        raise ValueError(
            "teacher: got one along with hidden states of some tokens (sequence_parallel), expected None, or "
            "hidden states of all tokens"
        )
    of_logits, of_hidden = {"logits": teacher.logits}, {
        "hidden": teacher.hidden, "weight": teacher.weight, "bias": teacher.bias,
    }  # fmt: skip
    for other, value in (of_hidden if name == "logits" else of_logits).items():
        if value is not None:
            raise ValueError(f"teacher.{other}: got a tensor, expected None beside the student's {name}")
    for field in ("hidden", "weight", "bias", "logits", "ids", "logprobs"):
        if hasattr(getattr(teacher, field), "device_mesh"):
            raise ValueError(
                f"teacher.{field}: is a DTensor, expected what this rank has of it, as a plain tensor"
            )
    try:
        teacher.arguments.check_source(f"teacher_{name}", getattr(teacher, name))
    except (TypeError, ValueError) as error:
        raise named(error) from None


def named(error: TypeError | ValueError) -> TypeError | ValueError:
    """An error of a teacher's argument, said of the field of ``Teacher``."""
    return type(error)(f"teacher.{str(error).removeprefix('teacher_')}")


def beside_teacher(
    lesson: Taught,
    logits: Tensor,
    row_labels: Tensor,
    options: RowOptions,
    inplace_backward: bool,
) -> LossOutput:
    """The objective's loss from logits [B, T, V] or [N, V], and the divergence from a teacher in the same
    passes.
    """
    form, rows, terms = lesson
    packed = terms.cu_seqlens is not None
    logprobs, found = DivergenceFunction.apply(
        as_rows(logits, packed), rows, row_labels, form, options, inplace_backward
    )
    out = loss_of(logprobs, None, options.backend, terms, packed)
    divergence, mean = DivergenceLoss.apply(found, terms)
    return with_divergence(out, out.loss + divergence, out.loss, divergence, mean)
