"""From the arguments of the public functions to what the operators take: checks, row shapes, terms.

Rows are [B, T] or [1, N] from here on; see ``layout``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import layout_of, segment_ids
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.values import mask_labels
from gspo_kernels.policy import KL_ESTIMATORS, PolicyTerms
from gspo_kernels.types import stats_dtype

LOGITS_DTYPES = ("float32", "input")


class LogitOptions(NamedTuple):
    """The scalar part of how logits become log-probs, checked."""

    logit_scale: float
    softcap: float
    temperature: float
    ignore_index: int
    backend: str

    def positional(self, row_temperature: Tensor | None) -> tuple[Any, ...]:
        """In the order of the operators' schemas."""
        return (*self[:3], row_temperature, *self[3:])


def logit_options(
    scores: Tensor,
    labels: Tensor,
    sequences: int,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    backend: str,
) -> LogitOptions:
    """Check the logit options and settle the backend that serves ``scores``, logits or hidden states."""
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
    return LogitOptions(scale, cap, scalar, ignore_index, resolve(backend, scores.device))


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """[B, T, V] with [B, T], or [N, V] with [N]."""
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


def check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[B, T, H] with [B, T], or [N, H] with [N]; returns the three as autocast, if on, wants them."""
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
    if 0 in weight.shape:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected V >= 1 and H >= 1")
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
                f"{name}: got {value.dtype}, expected {hidden.dtype} like hidden; "
                "mixed dtypes need torch.autocast"
            )
    return hidden, weight, bias


def check_inplace(logits: Tensor, inplace_backward: bool) -> None:
    """Refuse logits that can't hold their own gradient."""
    if not checks.flag("inplace_backward", inplace_backward):
        return
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "inplace_backward: logits are expanded (stride 0), so their gradient doesn't fit in them"
        )
    if logits.numel() and logits.stride(-1) != 1:
        raise ValueError("inplace_backward: logits need a vocabulary stride of 1")


def chunking(logits_dtype: str, max_chunk_bytes: int | None, compact: bool) -> tuple[str, int, bool]:
    """The last operands of the linear operators: logits dtype, chunk budget (0: default), compaction."""
    checks.choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    if max_chunk_bytes is not None and checks.integer("max_chunk_bytes", max_chunk_bytes) < 1:
        raise ValueError(f"max_chunk_bytes: got {max_chunk_bytes}, expected at least 1")
    return logits_dtype, max_chunk_bytes or 0, compact


def is_nonzero(value: float | Tensor) -> bool:
    """Whether a coefficient asks for its term; a tensor always does."""
    return isinstance(value, Tensor) or value != 0


def as_rows(tokens: Tensor, packed: bool) -> Tensor:
    """[N] -> [1, N] where packed."""
    return tokens.unsqueeze(0) if packed else tokens


def from_rows(tokens: Tensor, packed: bool) -> Tensor:
    """[1, N] -> [N] where packed."""
    return tokens.squeeze(0) if packed else tokens


def row_temperature(
    temperature: float | Tensor,
    row_labels: Tensor,
    packed: bool,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """A temperature tensor as one value per row, or None for a number."""
    if not isinstance(temperature, Tensor):
        return None
    values = temperature.detach().to(stats_dtype(dtype))
    if cu_seqlens is not None:
        values = values[segment_ids(cu_seqlens, row_labels.numel())]
    return values.unsqueeze(0) if packed else values.unsqueeze(1).expand(row_labels.shape)


def policy_terms(
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
        return as_rows(checks.floats(label, value, shape, "the labels' shape", device).detach(), packed)

    def per_either(label: str, value: Tensor, tokens_allowed: bool) -> Tensor:
        checks.floats(label, value, None, "[B] or the labels' shape", device)
        if tuple(value.shape) == (sequences,):
            return value.detach()
        if tuple(value.shape) == shape:
            if not tokens_allowed:
                raise ValueError(
                    f"{label}: got shape {tuple(value.shape)}, but {name} takes one per sequence, "
                    f"[B] = ({sequences},)"
                )
            return as_rows(value.detach(), packed)
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
        loss_mask = as_rows(loss_mask.detach(), packed)
    if rollout_weights is not None:
        rollout_weights = per_either("rollout_weights", rollout_weights, True)
    if lengths is not None:
        checks.tensor("lengths", lengths, (sequences,), "[B]", device)
        checks.dtype("lengths", lengths, (*checks.FLOATS, *checks.INTEGERS))
    turn_ids = integers("turn_ids", turn_ids, shape, "the labels' shape")
    given = {
        "ref_logprobs": ref_logprobs,
        "token_weights": token_weights,
        "group_ids": group_ids,
        "turn_ids": turn_ids,
        "rollout_weights": rollout_weights,
        "lengths": lengths,
        "old_logprobs": old_logprobs,
        "entropy": True if has_entropy else None,
    }
    for needed in objective.needs:
        if given[needed] is None:
            raise ValueError(f"{needed}: got None, but {name} needs it")
    for label in ("group_ids", "turn_ids"):
        if given[label] is not None and label not in objective.needs:
            raise ValueError(f"{label}: {name} would ignore it, expected None")

    if objective.coefficient_scope == "batch" and normalizer is not None:
        raise ValueError(
            f"normalizer: got {normalizer}, but {name} looks at the whole batch and can't be called on a "
            "part of it, expected None; take policy_coefficients of the whole batch and give each part's to "
            "objective=Linear() as token_weights"
        )
    beta = checks.broadcastable("kl_beta", kl_beta, shape, device)
    if beta is not None and ref_logprobs is None:
        raise ValueError("ref_logprobs: got None, but kl_beta asks for a KL term")
    checks.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    if checks.flag("kl_ratio_weighted", kl_ratio_weighted) and objective.coefficient_scope == "nothing":
        raise ValueError(f"kl_ratio_weighted: {name} has no importance ratio, expected False")
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
        turn_ids=None if turn_ids is None else as_rows(turn_ids, packed),
        normalizer=normalizer,
        skipped=None,
        token_shares=None,
        objective=objective.spec,
        kl_estimator=kl_estimator,
        kl_ratio_weighted=kl_ratio_weighted,
    )


def merge_mask(row_labels: Tensor, terms: PolicyTerms, ignore_index: int) -> tuple[Tensor, PolicyTerms]:
    """One mask for both: labels are ``ignore_index`` exactly where ``loss_mask`` is 0."""
    if terms.loss_mask is not None or terms.cu_seqlens is not None:
        row_labels = mask_labels(row_labels, terms.loss_mask, terms.cu_seqlens, ignore_index)
    return row_labels, terms._replace(loss_mask=row_labels != ignore_index)


def leave_out_inactive(
    row_labels: Tensor, terms: PolicyTerms, objective: Objective, ignore_index: int
) -> tuple[Tensor, PolicyTerms]:
    """Sequences whose gradient is zero whatever the forward finds: their labels become ``ignore_index``."""
    if not objective.zero_advantage_is_inactive:
        raise ValueError(
            f"skip_inactive: 'all' needs an objective without gradient at zero advantage, which "
            f"{type(objective).__name__} is not; use 'backward'"
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
