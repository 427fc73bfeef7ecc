"""Tests of an objective's declarations on random batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import BACKENDS, ratio_backend, unavailable_reason
from gspo_kernels.core.layout import layout_of
from gspo_kernels.core.types import LogitRows, LogitTransform, RatioOperands, RatioWeight
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import Objective, PolicyBatch, checked_evaluate, refuse_ignored_options
from gspo_kernels.objectives.clip import log_clip

_GROUP_IDS = (0, 0, 1, 1, 0, 1)
_ADVANTAGES = (1.0, -0.7, 0.3, -1.3, 2.0, 0.4)
_TOKENS = 7
_DEVIATIONS = (0.0, 1e-4, 0.02, 0.2, 2.0)
"""Sizes of log-ratios: on-policy, and inside and outside of every clip range."""
_DRAWS = 2
_TERMS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "token_weights")
"""Inputs of a batch per token, besides its mask and ``turn_ids``."""


def check(objective: Objective) -> None:
    """Test an objective's declarations on random batches.

    Calls rely on declarations: a wrong one means a silently wrong gradient. For log-ratios of several sizes
    this changes inputs on which a coefficient dLoss/dlogprob is declared not to depend. An objective with a
    ``ratio_form`` is also evaluated by all available backends, from log-probs and from logits. Passing is not
    a proof, as batches that are not drawn may contradict a declaration.

    Args:
        objective: the objective, with the options to check.

    Raises:
        TypeError: ``objective`` is not an instance of ``Objective``, or its class has ignored attributes.
        ValueError: wrong declarations, listed in the message with the reasons.
    """
    if not isinstance(objective, Objective):
        raise TypeError(f"objective: got {objective!r}, expected an instance of Objective")
    refuse_ignored_options(type(objective))

    def refuse(faults: Iterator[str]) -> None:
        if found := list(faults):
            name = type(objective).__name__
            raise ValueError("\n- ".join([f"objective: {name} has wrong declarations:", *found]))

    for seed in range(_DRAWS):
        rng = torch.Generator().manual_seed(seed)
        for deviation in _DEVIATIONS:
            refuse(_faults(objective, deviation, rng))
    refuse(_faults_of_backends(objective))


def _faults(objective: Objective, deviation: float, rng: torch.Generator) -> Iterator[str]:
    """Yield an error for each declaration that a random batch contradicts."""
    scope, values = objective.coefficient_scope, _draw(deviation, rng)
    mask, sequences = values["mask"], len(_ADVANTAGES)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=rng, dtype=torch.float64, device="cpu")

    def changed(**changes: Tensor) -> Tensor:
        return _coefficients(objective, values | changes)

    try:
        plain = changed()
    except Exception as error:  # any error of the formula
        yield f"evaluate, called with the inputs of needs={objective.needs}, raises {_text(error)}"
        return
    if not bool(plain.isfinite().all()):
        yield f"its gradient is not finite for log-ratios around {deviation}"
        return
    everything = _coefficients(objective, values, terms=("token_weights", "rollout_weights"))

    # the scope of coefficients
    even = torch.arange(sequences, device="cpu") % 2 == 0
    if scope != "batch":
        rows = values["group_ids"] == 0 if scope == "group" else even
        some = _coefficients(objective, {name: each[rows] for name, each in values.items()})
        if not _equal(some, plain[rows]):
            others = "groups" if scope == "group" else "sequences"
            yield f"coefficient_scope is {scope!r}, but coefficients change if other {others} are removed"
    if scope in ("nothing", "token", "turn"):
        kept = {"nothing": mask & False, "token": uniform(*mask.shape) < 0.5, "turn": values["turn_ids"] == 0}
        other, stays = _draw(deviation or 0.3, rng), kept[scope]
        redrawn = {
            name: torch.where(stays, values[name], other[name]) for name in _TERMS if name != "token_weights"
        }
        compared = mask if scope == "nothing" else mask & stays
        if not _equal(changed(**redrawn)[compared], plain[compared]):
            whose = "any token" if scope == "nothing" else f"tokens outside of its {scope}"
            yield f"coefficient_scope is {scope!r}, but a coefficient changes with log-probs of {whose}"
    if objective.ratio_only:
        shift = 2 * uniform(*mask.shape)
        moved = {name: values[name] - shift for name in ("logprobs", "old_logprobs")}
        if not _equal(changed(**moved, entropy=uniform(*mask.shape)), plain):
            yield (
                "ratio_only is True, but coefficients change with the entropy, or where logprobs and "
                "old_logprobs move by the same amount"
            )
    if not objective.needs_token_order:
        order = torch.randperm(_TOKENS, generator=rng, device="cpu")
        swapped = changed(**{name: values[name][:, order] for name in ("mask", "turn_ids", *_TERMS)})
        if not _equal(swapped, plain[:, order]):
            yield "needs_token_order is False, but coefficients change with the order of a sequence's tokens"

    # zero and equal coefficients
    if objective.needs_advantages and objective.zero_advantage_is_inactive:
        some = values["advantages"] * (torch.arange(sequences, device="cpu") % 3 != 0)
        ways = [some, torch.zeros_like(some)]
        if scope == "token" and objective.takes_token_advantages:
            ways.append(some.unsqueeze(1) * (uniform(*mask.shape) < 0.5))
        for advantages in ways:
            zero = (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)) == 0
            if bool((changed(advantages=advantages) * zero).any()):
                yield "zero_advantage_is_inactive is True, but the gradient of a zero advantage is not 0"
                break
        remaining = {name: each[some != 0] for name, each in values.items()}
        if not _equal(_coefficients(objective, remaining), changed(advantages=some)[some != 0]):
            yield "zero_advantage_is_inactive is True, but inactive sequences change others' coefficients"
        weights = values["rollout_weights"] * even
        left = _coefficients(objective, values | {"rollout_weights": weights}, terms=("rollout_weights",))
        if scope in ("token", "sequence") and bool(left[weights == 0].any()):
            yield "zero_advantage_is_inactive is True, but the gradient of a zero rollout weight is not 0"
    if objective.factorizes:
        each = (everything / values["token_weights"]).masked_fill(~mask, -torch.inf)
        if not _equal(torch.where(mask, each.amax(1, keepdim=True), 0.0), torch.where(mask, each, 0.0)):
            yield "factorizes is True, but coefficients of a sequence are not one number times token_weights"

    # inputs and layout
    if objective.needs_advantages and objective.takes_token_advantages:
        try:
            changed(advantages=values["advantages"].unsqueeze(1) * uniform(*mask.shape))
        except Exception as error:
            yield (
                f"takes_token_advantages is True, but evaluate raises {_text(error)}; set "
                "takes_token_advantages = False in the class if it needs one per sequence"
            )
    weighted = _coefficients(objective, values, terms=("rollout_weights",))
    if bool(plain.any()) and _equal(weighted, plain):
        yield "rollout_weights have no effect; evaluate must return batch.weighted(loss)"
    if not _equal(_coefficients(objective, values, packed=True), plain):
        yield "coefficients change if sequences are packed; combine tokens only through batch.layout"
    weight = objective.ratio_weight()
    if weight is not None:
        log_p, log_q, A = values["logprobs"], values["old_logprobs"], values["advantages"].unsqueeze(1)
        pair = (weight, weight) if isinstance(weight, RatioWeight) else weight
        positive, negative = (f.times_q(log_p, log_q) / log_q.exp() for f in pair)
        if not _equal(torch.where(mask, -A * torch.where(A >= 0, positive, negative), 0.0), plain):
            yield "ratio_weight differs from the f of the coefficients -A f(r)"
    ratio_clip = objective.ratio_form()
    if ratio_clip is not None:
        aggregation = objective.aggregation != "sequence_mean", *objective.outer_divisor(), objective.level
        clipped = _coefficients(objective, values, bounds=ratio_clip[:3])
        if aggregation != ratio_clip[3:] or not _equal(clipped, plain):
            yield "ratio_form differs from the loss of evaluate and its aggregation"


def _faults_of_backends(objective: Objective) -> Iterator[str]:
    """Yield an error for each backend whose ``ratio_form`` differs from ``evaluate``."""
    # circular imports
    from gspo_kernels.arguments.terms import Terms
    from gspo_kernels.objectives.evaluate import evaluate

    ratio_clip = objective.ratio_form()
    if ratio_clip is None:
        return
    rng = torch.Generator().manual_seed(0)
    draws = [_draw(deviation, rng) for deviation in _DEVIATIONS if deviation]
    values = {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}
    logprobs, mask = values["logprobs"], values["mask"]
    given = [values[name] for name in ("old_logprobs", "advantages", "rollout_weights", "lengths")]
    divisors = None
    if ratio_clip.divisor == "prompts":
        # the prompts' divisors, which calls pass with the weights, are 1 here
        ratio_clip = ratio_clip._replace(count_tokens=True, divisor="one", divisor_scale=1.0)
        divisors = torch.ones_like(values["advantages"])
    old, advantages, weights, lengths = given
    terms = Terms(
        old, advantages, mask, rollout_weights=weights, lengths=lengths, normalizer=divisors,
        objective=objective.spec,
    )  # fmt: skip
    # two columns, the label's first
    logits = torch.stack([logprobs, (-torch.expm1(logprobs)).log()], -1)
    labels = torch.zeros_like(mask, dtype=torch.int64)
    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    for name in BACKENDS:
        for device in devices:
            if unavailable_reason(name, device) is not None or not hasattr(ratio_backend(name), "ratio_step"):
                continue
            backend, operands = ratio_backend(name), RatioOperands(*(each.to(device) for each in given))
            tokens = logprobs.to(device)
            step = backend.ratio_step(tokens, mask.to(device), operands, ratio_clip)
            found = [(tokens, step.loss, step.grad_logprobs, step.metrics)]
            if ratio_clip.level == "sequence":
                rows = LogitRows(logits.to(device), labels.to(device), LogitTransform(), -100)
                fused = backend.sequence_ratio_forward(rows, mask.to(device), operands, ratio_clip)
                per_token = (fused.coefficients / fused.divisor).unsqueeze(1).expand(mask.shape)
                found.append((fused.logprobs, fused.loss, per_token, fused.metrics))
            for tokens, loss, gradient, metrics in found:
                wanted = evaluate(tokens.cpu(), None, terms)
                same = _equal(torch.where(mask, gradient.cpu(), 0.0), wanted.grad_logprobs)
                if not (same and _equal(loss.cpu(), wanted.loss) and _equal(metrics.cpu(), wanted.metrics)):
                    yield f"ratio_form differs from the loss of evaluate on the backend {name!r}"
                    break


def _draw(deviation: float, rng: torch.Generator) -> dict[str, Tensor]:
    """Draw six sequences, the last one empty, with holes in their masks and all terms."""
    shape = len(_ADVANTAGES), _TOKENS

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=rng, dtype=torch.float64, device="cpu")

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64, device="cpu")

    mask = uniform(*shape) < 0.75
    mask[:, 0], mask[-1] = True, False
    logprobs = -normal(*shape).abs() - 1e-3
    log_ratio = deviation * (normal(shape[0], 1) + normal(*shape))
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old_logprobs": (logprobs - log_ratio).clamp(max=-1e-3),
        "advantages": torch.tensor(_ADVANTAGES, dtype=torch.float64, device="cpu"),
        "lengths": mask.sum(1).double() + 2.5,
        "ref_logprobs": logprobs + 0.3 * normal(*shape),
        "entropy": 0.5 + uniform(*shape),
        "token_weights": 0.5 + uniform(*shape),
        "rollout_weights": 0.5 + uniform(shape[0]),
        "group_ids": torch.tensor(_GROUP_IDS, dtype=torch.int64, device="cpu"),
        "turn_ids": torch.randint(-1, 2, shape, generator=rng, device="cpu"),
    }


def _coefficients(
    objective: Objective,
    values: dict[str, Tensor],
    *,
    terms: tuple[str, ...] = (),
    packed: bool = False,
    bounds: tuple[float, float, float] | None = None,
) -> Tensor:
    """Return the gradient of the sum of a batch's losses with respect to its log-probs, [B, T].

    Args:
        objective: the objective to evaluate, with the terms that it needs.
        values: the batch, [B, T] and [B].
        terms: terms besides those that the objective needs.
        packed: pack all tokens as [1, B * T].
        bounds: evaluate ``log_clip`` with these bounds instead of the objective.
    """
    shape, rows = values["mask"].shape, values["mask"].shape[0]
    ends = torch.arange(rows + 1, device="cpu") * shape[1] if packed else None
    laid_out = {name: x.reshape(1, -1) if packed and x.ndim == 2 else x for name, x in values.items()}
    mask = laid_out["mask"]
    layout = layout_of(mask, ends)
    usable: dict[str, Any] = {
        name: torch.where(mask, each, 0.0) if name in _TERMS else each for name, each in laid_out.items()
    }
    leaf = usable["logprobs"].clone().requires_grad_()
    optional = {name: usable[name] for name in {*objective.needs, *terms} - {"lengths"}}
    log_ratio = finite.difference(leaf, usable["old_logprobs"])
    if "token_weights" in optional:
        log_ratio = finite.mul(optional["token_weights"], log_ratio)
    counts = layout.sum(mask.double())
    batch = PolicyBatch(
        layout=layout,
        mask=mask,
        lengths=usable["lengths"] if "lengths" in objective.needs else counts.clamp(min=1.0),
        logprobs=leaf,
        old_logprobs=usable["old_logprobs"],
        log_ratio=log_ratio,
        advantages=usable["advantages"] if objective.needs_advantages else None,
        **optional,
    )
    if bounds is None:
        loss = checked_evaluate(objective, batch).loss
    elif objective.level == "sequence":
        loss, *_ = log_clip(batch.sequence_log_ratio(), usable["advantages"], *bounds)
    else:
        loss, *_ = log_clip(batch.log_ratio, batch.token_advantages(), *bounds)
    counted = mask if objective.level == "token" else counts > 0
    (gradient,) = torch.autograd.grad(torch.where(counted, loss, 0.0).sum(), leaf)
    return torch.where(mask, gradient, 0.0).view(shape)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two gradients are equal up to fp64 rounding."""
    largest = max([each.abs().max().item() for each in (one, other) if each.numel()], default=0.0)
    return torch.allclose(one, other, rtol=0.0, atol=1e-9 * largest)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
