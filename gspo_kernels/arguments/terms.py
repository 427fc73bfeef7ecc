"""The terms of a loss besides log-probs, in one table from which checks, operator schemas and slices derive.

Inside the package token tensors are [B, T] padded or [1, N] packed: two dimensions, unlike [B].
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments import values as value_checks
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import Layout, as_rows, copy_async, layout_of
from gspo_kernels.core.operators import must_check_values
from gspo_kernels.distributed.groups import Parallel, gathered_numbers, group_name
from gspo_kernels.objectives.base import Objective, from_spec
from gspo_kernels.objectives.kl import KL_ESTIMATORS


class CallShape(NamedTuple):
    """The labels' shape and device and the number of sequences, which the terms of a call must match."""

    shape: tuple[int, ...]
    device: torch.device
    sequences: int


@dataclass(frozen=True)
class ArgSpec:
    """The specification of a term.

    Attributes:
        shape: "tokens" (the labels' shape), "sequences" ([B]), "either", "broadcast" (a number, or what
            broadcasts to the labels), "number" (or a 0-d tensor) or "offsets" ([B + 1]).
        dtypes: allowed dtypes; None: any but complex.
        host: whether the tensor may be on the CPU, regardless of the labels' device.
    """

    shape: Literal["tokens", "sequences", "either", "broadcast", "number", "offsets"]
    dtypes: tuple[torch.dtype, ...] | None = checks.FLOATS
    host: bool = False

    def check(self, name: str, value: Any, call: CallShape, only: str = "") -> None:
        """Check a value.

        Args:
            name: of the argument.
            value: the caller's value, not None.
            call: the shape of the call.
            only: for "either", the name of an objective that takes one value per sequence only, or "".

        Raises:
            TypeError, ValueError: naming the argument, what was got, and what is expected.
        """
        if self.shape == "broadcast":
            checks.broadcastable(name, value, call.shape, call.device)
            return
        if self.shape == "number":
            checks.scalar(name, value)
            return
        if self.shape == "offsets":
            checks.tensor(name, value, None, "[B + 1]", call.device, host=self.host)
            return
        per_sequence = (call.sequences,)
        by_shape = call.shape if self.shape == "tokens" else None
        expected = per_sequence if self.shape == "sequences" else by_shape
        tensor = checks.tensor(
            name, value, expected, _MEANINGS[self.shape], call.device, self.dtypes, self.host
        )
        shape = tuple(tensor.shape)
        if self.shape == "either" and shape != per_sequence:
            if shape != call.shape:
                also = "" if only else f" or the labels' shape {call.shape}"
                raise ValueError(f"{name}: got shape {shape}, expected [B] = {per_sequence}{also}")
            if only:
                raise ValueError(
                    f"{name}: got shape {shape}, but {only} takes one per sequence, [B] = {per_sequence}"
                )


_MEANINGS = {"tokens": "the labels' shape", "sequences": "[B]", "either": "[B] or the labels' shape"}

TOKENS, SEQUENCES, EITHER = ArgSpec("tokens"), ArgSpec("sequences"), ArgSpec("either")
BROADCAST, NUMBER = ArgSpec("broadcast"), ArgSpec("number")
SEQUENCE_IDS, TOKEN_IDS = ArgSpec("sequences", checks.INTEGERS), ArgSpec("tokens", checks.INTEGERS)


if TYPE_CHECKING:
    PassedNumber = Any  # callers may pass a number, which ``normalize_terms`` turns into a tensor
else:
    PassedNumber = Tensor | None


class Terms(NamedTuple):
    """The terms of a loss besides log-probs and entropy, by the names of the public arguments.

    ``normalize_terms`` converts the caller's values to the operators' form: detached tensors in rows, numbers
    as 0-d fp64 tensors, or None for numbers without effect. Fields from ``cp_group`` on are not arguments.
    """

    old_logprobs: Annotated[Tensor | None, TOKENS] = None  # None: on-policy
    advantages: Annotated[Tensor | None, EITHER] = None
    loss_mask: Annotated[Tensor | None, ArgSpec("tokens", None, host=True)] = None
    cu_seqlens: Annotated[Tensor | None, ArgSpec("offsets", checks.INTEGERS, host=True)] = None
    ref_logprobs: Annotated[Tensor | None, TOKENS] = None
    kl_beta: Annotated[PassedNumber, BROADCAST] = None
    entropy_coef: Annotated[PassedNumber, BROADCAST] = None
    rollout_weights: Annotated[Tensor | None, EITHER] = None
    token_weights: Annotated[Tensor | None, TOKENS] = None
    lengths: Annotated[Tensor | None, ArgSpec("sequences", (*checks.FLOATS, *checks.INTEGERS))] = None
    group_ids: Annotated[Tensor | None, SEQUENCE_IDS] = None
    turn_ids: Annotated[Tensor | None, TOKEN_IDS] = None
    normalizer: Annotated[PassedNumber, NUMBER] = None
    kl_estimator: str = "k3"
    kl_ratio_weighted: bool = False
    cp_group: str = ""  # name of the process group whose ranks share the sequences' tokens, or ""
    objective: str = ""  # ``Objective.spec``
    skipped: Annotated[Tensor | None, SEQUENCES] = None  # bool: without log-probs, counted by divisors only
    token_shares: Annotated[Tensor | None, TOKENS] = None  # loss = sum(share * value) instead of aggregating

    def layout(self, tokens: Tensor) -> Layout:
        """Return the layout of the sequences of ``tokens``."""
        return layout_of(tokens, self.cu_seqlens)

    def counted(self, tokens: Tensor) -> Tensor:
        """Return which of the tokens count, bool, the shape of ``tokens``."""
        if self.loss_mask is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        return self.loss_mask if self.loss_mask.dtype == torch.bool else self.loss_mask != 0

    def each(self, change: Callable[[ArgSpec, Tensor], Tensor | None]) -> Terms:
        """Return the terms with every tensor replaced by ``change(specification, tensor)``."""
        changed: dict[str, Any] = {}
        for name, spec in SPECS.items():
            tensor = getattr(self, name)
            if tensor is not None:
                changed[name] = change(spec, tensor)
        return self._replace(**changed)


SPECS: dict[str, ArgSpec] = {
    name: spec
    for name, hint in typing.get_type_hints(Terms, include_extras=True).items()
    for spec in getattr(hint, "__metadata__", ())
}
"""The specification of every tensor among the terms."""
_ARGUMENTS = {name: SPECS[name] for name in Terms._fields[: Terms._fields.index("kl_estimator")]}
"""The specifications of the tensors among a loss's arguments, in the order of the fields of ``Terms``."""
_PASSED = Terms._fields.index("cp_group")  # the number of fields that are arguments
_BROADCAST_TERMS = tuple(label for label, spec in _ARGUMENTS.items() if spec.shape == "broadcast")


class TermsForm(NamedTuple):
    """Conversion of a call's terms to the operators' form, cached by ``cache.look_up``.

    Attributes:
        changes: pairs of a field's position and its conversion, or None to drop a number without effect.
        on_host: whether mask or offsets are on the CPU and the tokens are not.
        cp_group, objective: fields of ``Terms``.
    """

    changes: tuple[tuple[int, Callable[[Any], Tensor] | None], ...]
    on_host: bool
    cp_group: str
    objective: str

    def apply(self, passed: Terms, tokens: Tensor) -> Terms:
        """Convert checked arguments to the operators' form."""
        values = list(passed[:_PASSED])
        for place, change in self.changes:
            values[place] = None if change is None else change(values[place])
        fields: Any = (*values, self.cp_group, self.objective)
        terms = Terms(*fields)
        return _to_device(terms, tokens) if self.on_host else terms


def normalize_terms(
    passed: Terms, tokens: Tensor, objective: Objective, parallel: Parallel | None = None
) -> tuple[Terms, TermsForm]:
    """Check shapes, dtypes and devices, and convert the terms to the operators' form.

    Args:
        passed: the arguments as the caller passed them.
        tokens: labels, log-probs or mask, whose layout has been checked.
        objective: the objective.
        parallel: the ranks of the call.

    Raises:
        TypeError, ValueError: naming the argument, what was got, and what is expected.
    """
    packed = passed.cu_seqlens is not None
    sequences = tokens.shape[0] if passed.cu_seqlens is None else passed.cu_seqlens.shape[0] - 1
    shape = CallShape(tuple(tokens.shape), tokens.device, sequences)
    by_prompt = objective.aggregation == "prompt_mean"
    if by_prompt and passed.normalizer is None and passed.group_ids is None:
        raise ValueError(
            'group_ids: got None, but aggregation="prompt_mean" needs them, or a normalizer [B] from '
            "gk.normalizer of the whole batch"
        )
    changes: list[tuple[int, Callable[[Any], Tensor] | None]] = []
    on_host = False
    for place, ((name, spec), value) in enumerate(zip(_ARGUMENTS.items(), passed, strict=False)):
        if value is None:
            continue
        if type(value) in (int, float) and value == 0 and spec.shape == "broadcast":
            changes.append((place, None))
            continue
        if by_prompt and name == "normalizer":
            spec = SEQUENCES
        only = name == "advantages" and not objective.takes_token_advantages
        try:
            spec.check(name, value, shape, type(objective).__name__ if only else "")
        except ValueError:
            value_checks.refuse_lengths(passed.cu_seqlens)
            raise
        if not isinstance(value, Tensor):
            changes.append((place, functools.partial(checks.filled, device=shape.device)))
            continue
        if value.requires_grad:  # detach() takes as long as a small kernel
            changes.append((place, _detached))
        by_sequence = spec.shape == "either" and value.shape == (sequences,)
        if packed and not by_sequence and spec.shape in ("tokens", "either"):
            changes.append((place, _row))
        on_host = on_host or (spec.host and value.is_cpu and not tokens.is_cpu)
    group = "" if parallel is None or parallel.cp_group is None else group_name("cp_group", parallel.cp_group)
    form = TermsForm(tuple(changes), on_host, group, objective.spec)
    return form.apply(passed, tokens), form


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def _row(tokens: Tensor) -> Tensor:
    return tokens.unsqueeze(0)


def _to_device(terms: Terms, tokens: Tensor) -> Terms:
    """Check a mask and offsets that are on the CPU, and copy them to the tokens' device."""
    mask, offsets, checked = terms.loss_mask, terms.cu_seqlens, not torch.compiler.is_compiling()
    if offsets is not None and offsets.is_cpu:
        if checked:
            value_checks.check_cu_seqlens(offsets, tokens)
        terms = terms._replace(cu_seqlens=copy_async(offsets, tokens.device, "cu_seqlens"))
    if mask is not None and mask.is_cpu:
        mask = value_checks.check_mask(mask) if checked else mask != 0
        terms = terms._replace(loss_mask=copy_async(mask, tokens.device, "loss_mask"))
    return terms


def validate_terms(
    passed: Terms, tokens: Tensor, objective: Objective, has_entropy: bool, parallel: Parallel
) -> tuple[Terms, TermsForm]:
    """Call ``normalize_terms`` and reject terms that the objective does not support or would ignore.

    ``has_entropy``: whether the entropy was passed or will be computed.
    """
    checks.objective(objective, Objective)
    for label in _BROADCAST_TERMS:
        if getattr(passed, label) is None:
            checks.number(label, None)  # raises: 0 disables the term, None is not accepted
    (terms, form), name = normalize_terms(passed, tokens, objective, parallel), type(objective).__name__
    if not isinstance(terms.kl_estimator, str) or terms.kl_estimator not in KL_ESTIMATORS:
        checks.choice("kl_estimator", terms.kl_estimator, KL_ESTIMATORS)
    checks.flag("kl_ratio_weighted", terms.kl_ratio_weighted)
    if objective.needs_advantages and terms.advantages is None:
        raise TypeError(f"advantages: got None, but {name} needs them, one per sequence or per token")
    if not objective.needs_advantages and terms.advantages is not None:
        raise ValueError(f"advantages: got a tensor, expected None: {name} takes no advantages")
    for needed in objective.needs:
        missing = not has_entropy if needed == "entropy" else getattr(terms, needed) is None
        if missing:
            raise ValueError(f"{needed}: got None, but {name} needs it")
    if objective.needs_token_order and terms.cp_group:
        raise ValueError(
            f"cp_group: expected None: {name} depends on the order of tokens, which is not known where ranks "
            "share sequences (if it does not, declare needs_token_order=False)"
        )
    for label in ("group_ids", "turn_ids"):
        if getattr(terms, label) is not None and label not in objective.needs:
            if label == "group_ids" and objective.aggregation == "prompt_mean" and terms.normalizer is None:
                continue
            raise ValueError(f"{label}: got a tensor, expected None: {name} does not use them")
    if objective.coefficient_scope == "batch" and terms.normalizer is not None:
        raise ValueError(
            f"normalizer: got {terms.normalizer.tolist()}, expected None: {name} depends on the whole batch; "
            "to split it, compute policy_coefficients of the whole batch and pass each part's as "
            "token_weights to objective=Linear()"
        )
    if terms.kl_beta is not None and terms.ref_logprobs is None:
        raise ValueError("ref_logprobs: got None, but kl_beta asks for a KL term")
    if terms.kl_ratio_weighted and objective.coefficient_scope == "nothing":
        raise ValueError(f"kl_ratio_weighted: got True, expected False: {name} has no importance ratio")
    if terms.entropy_coef is not None and not has_entropy:
        raise ValueError("entropy: got None, but entropy_coef asks for an entropy bonus")
    return terms, form


def check_values(
    tokens: Tensor,
    terms: Terms,
    *,
    mask: bool = True,
    logprobs_too: bool = True,
    logprobs: Tensor | None = None,
) -> Terms:
    """Check values, see ``values``; return the terms with a bool mask.

    Args:
        tokens: labels or log-probs in rows.
        terms: the terms in the operators' form.
        mask: check and convert the mask; otherwise its consumer does.
        logprobs_too: check log-probs and advantages; otherwise their consumer does.
        logprobs: the current log-probs, if already computed.
    """
    if terms.cu_seqlens is not None:
        value_checks.check_cu_seqlens(terms.cu_seqlens, tokens)
    if mask and terms.loss_mask is not None and terms.loss_mask.dtype != torch.bool:
        terms = terms._replace(loss_mask=value_checks.check_mask(terms.loss_mask))

    def counts() -> Tensor:
        return terms.layout(tokens).sum(exact(terms.counted(tokens)))

    if terms.normalizer is not None:
        normalizer = terms.normalizer
        if normalizer.ndim:
            normalizer = torch.where(counts() > 0, normalizer, 1.0)
        value_checks.check_normalizer(normalizer)
    if terms.lengths is not None:
        value_checks.check_lengths(terms.lengths, counts())
    # aggregation="prompt_mean" allows groups of one sequence, objectives over groups do not
    ids = terms.group_ids
    if ids is not None and "group_ids" in from_spec(terms.objective).needs and must_check_values(ids.device):
        _check_groups(ids, counts() > 0)
    if logprobs_too:
        check_token_values(tokens, terms, logprobs)
    return _agree_on_token_terms(tokens, terms) if terms.cp_group else terms


def _agree_on_token_terms(tokens: Tensor, terms: Terms) -> Terms:
    """Agree across ``cp_group`` on which terms are per token, which the shape of a packed term leaves open on
    a rank with as many tokens as sequences.
    """
    either = [name for name, spec in SPECS.items() if spec is EITHER and getattr(terms, name) is not None]
    if not from_spec(terms.objective).takes_token_advantages:
        either = [name for name in either if name != "advantages"]
    if terms.cu_seqlens is None or not either:
        return terms
    per_token = [getattr(terms, name).ndim == 2 for name in either]
    every = gathered_numbers(terms.cp_group, tokens.device, per_token)
    for name, ranks in zip(either, zip(*every, strict=True), strict=True):
        value = getattr(terms, name)
        if any(ranks) and value.ndim == 1:
            if value.numel() != tokens.numel():
                raise ValueError(
                    f"{name}: got one per sequence, expected one per token, as another rank of cp_group has"
                )
            terms = terms._replace(**{name: value.unsqueeze(0)})
    return terms


_LOGPROBS = ("old_logprobs", "ref_logprobs")
_FACTORS = ("advantages", "rollout_weights", "token_weights", "kl_beta", "entropy_coef")


def check_token_values(tokens: Tensor, terms: Terms, logprobs: Tensor | None = None) -> None:
    """Reject log-probs above 1 nat, and NaN in factors and in old and reference log-probs.

    Factors are advantages, weights and coefficients of terms. Tokens that don't count are not checked. Old
    log-probs may be NaN where no gradient depends on them, reference log-probs where neither the KL term nor
    the objective needs them. For NaN in the current ``logprobs`` see ``docs/precision.md``.
    """
    if not must_check_values(tokens.device):
        return
    named = {"logprobs": logprobs, **{name: getattr(terms, name) for name in _LOGPROBS + _FACTORS}}
    for name, value in named.items():
        factor = name in _FACTORS
        highest = math.inf if factor else value_checks.HIGHEST_LOGPROB
        if value is not None and not value_checks.all_valid(value, highest):
            refuse = _refuse_factor if factor else _refuse_logprobs
            refuse(name, value, tokens, terms)


def _refuse_factor(name: str, factor: Tensor, tokens: Tensor, terms: Terms) -> None:
    needed = terms.counted(tokens)
    if name in _BROADCAST_TERMS:
        factor = factor.to(tokens.device).expand(tokens.shape)
    elif factor.ndim == 1:
        needed = terms.layout(tokens).sum(exact(needed)) > 0
    value_checks.refuse_nan(name, factor, needed, terms.cu_seqlens is not None)


def _refuse_logprobs(name: str, logprobs: Tensor, tokens: Tensor, terms: Terms) -> None:
    counted, packed = terms.counted(tokens), terms.cu_seqlens is not None
    value_checks.refuse_high_logprobs(name, logprobs, counted, packed)
    if name == "logprobs":
        return
    objective, needed = from_spec(terms.objective), torch.zeros_like(counted)
    if name in objective.needs or (name == "old_logprobs" and objective.coefficient_scope != "nothing"):
        needed = may_have_gradient(tokens, terms)
    if name == "ref_logprobs" and terms.kl_beta is not None:
        needed = needed | (counted & (terms.kl_beta.to(tokens.device) != 0))
    expected = (
        "log-probs wherever the gradient depends on them "
        '(skip_inactive="all" returns NaN for sequences without gradient)'
    )
    value_checks.refuse_nan(name, logprobs, needed, packed, expected)


def may_have_gradient(tokens: Tensor, terms: Terms) -> Tensor:
    """Return which counted tokens may have a gradient, bool in the shape of ``tokens``.

    All others have a zero gradient even if their log-probs are NaN: their advantage or rollout weight is
    zero, without a KL term or an entropy bonus.
    """
    possible, objective = terms.counted(tokens), from_spec(terms.objective)
    if any(getattr(terms, name) is not None for name in _OTHER_GRADIENTS):
        return possible
    scope, layout = objective.coefficient_scope, terms.layout(tokens)
    # rollout weights multiply the whole loss only if a zero advantage means a zero gradient
    factors = (terms.advantages, terms.rollout_weights if scope in ("token", "sequence") else None)
    for factor in factors if objective.zero_advantage_is_inactive else ():
        if factor is None:
            continue
        if factor.ndim == 1:
            possible = possible & layout.expand(factor != 0)
        elif scope == "token":
            possible = possible & (factor != 0)
        elif not terms.cp_group:  # in a cp_group other ranks have tokens of the same sequence
            some = layout.sum(exact(possible & (factor != 0))) > 0
            possible = possible & layout.expand(some)
    return possible


def _check_groups(group_ids: Tensor, nonempty: Tensor) -> None:
    """Reject groups of one sequence, which result from splitting groups into micro-batches; the ids of
    sequences without a counted token are ignored.
    """
    _, places, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    single = group_ids[(counts[places] == 1) & nonempty]
    if single.numel():
        raise ValueError(
            f"group_ids: group {int(single[0])} has a single sequence, expected whole groups of at least "
            "two; to split groups, compute policy_coefficients of the whole batch and pass each part's as "
            "token_weights to objective=Linear()"
        )


def merge_mask(row_labels: Tensor, terms: Terms, ignore_index: int) -> tuple[Tensor, Terms]:
    """Merge mask and labels, so that labels are ``ignore_index`` exactly where ``loss_mask`` is 0."""
    if terms.loss_mask is None and terms.cu_seqlens is None:
        return row_labels, terms._replace(loss_mask=row_labels != ignore_index)
    mask, cu_seqlens = terms.loss_mask, terms.cu_seqlens
    row_labels, counted = value_checks.mask_labels(row_labels, mask, cu_seqlens, ignore_index)
    return row_labels, terms._replace(loss_mask=counted)


def mask_rows(labels: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Check a mask; return labels [B, T] or [N] in rows, ``ignore_index`` where the mask is 0."""
    packed = labels.ndim == 1
    if loss_mask is None:
        return as_rows(labels, packed)
    shape, device = tuple(labels.shape), labels.device
    mask: Tensor = checks.tensor("loss_mask", loss_mask, shape, "the labels' shape", device, host=True)
    if mask.is_cpu and not labels.is_cpu:
        checked = mask if torch.compiler.is_compiling() else value_checks.check_mask(mask)
        mask = copy_async(checked, device, "loss_mask")
    rows: Tensor = value_checks.mask_labels(
        as_rows(labels, packed), as_rows(mask, packed), None, ignore_index
    ).labels
    return rows


_OTHER_GRADIENTS = ("kl_beta", "entropy_coef")
"""Terms that add a gradient to that of the objective."""


def shows_inactive(terms: Terms) -> bool:
    """Return whether the advantages determine which sequences have a zero gradient."""
    if terms.advantages is None or any(getattr(terms, name) is not None for name in _OTHER_GRADIENTS):
        return False
    elsewhere = bool(terms.cp_group) and terms.advantages.ndim == 2
    return not elsewhere and from_spec(terms.objective).zero_advantage_is_inactive


def skip_inactive_sequences(row_labels: Tensor, terms: Terms, ignore_index: int) -> tuple[Tensor, Terms]:
    """Skip sequences with a zero gradient: set their labels to ``ignore_index`` and mark them as ``skipped``.

    These have zero advantages on all counted tokens, an objective with ``zero_advantage_is_inactive``, and
    neither a KL term nor an entropy bonus. They are unknown for per-token advantages with a ``cp_group``, as
    other ranks have more tokens of the sequence.

    Raises:
        ValueError: inactive sequences are not known before the forward.
    """
    if not shows_inactive(terms):
        if terms.cp_group and terms.advantages is not None and terms.advantages.ndim == 2:
            raise ValueError(
                "skip_inactive: got 'all', expected 'backward': with cp_group, 'all' needs one advantage per "
                "sequence"
            )
        for name in _OTHER_GRADIENTS:
            if getattr(terms, name) is not None:
                raise ValueError(
                    f"skip_inactive: got 'all', expected 'backward': {name} gives sequences a gradient whose "
                    "advantage is 0"
                )
        raise ValueError(
            "skip_inactive: got 'all', expected 'backward': "
            f"{type(from_spec(terms.objective)).__name__} gives sequences a gradient whose advantage is 0"
        )
    assert terms.advantages is not None
    inactive = terms.advantages == 0
    if inactive.ndim == 2:
        inactive = terms.layout(row_labels).sum(exact(~inactive & terms.counted(row_labels))) == 0
    tokens = terms.layout(row_labels).expand(inactive)
    return row_labels.masked_fill(tokens, ignore_index), terms._replace(skipped=inactive)
