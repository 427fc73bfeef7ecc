"""The expected result of a call, and the check that a call returns it.

The budget comes from the data. The error of plain PyTorch (the oracle in the kernel's dtype of statistics)
against fp64 is measured over a few neighbors of the case. A kernel may have twice that (``accuracy``).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.types import stats_dtype
from tests import oracle
from tests.accuracy import Spread, assert_as_exact
from tests.cases import Case, Result, generator, scores_of

_DRAWS = 8


def expect(case: Case, objective: Any, dtype: torch.dtype | None = torch.float64) -> Result:
    """Return the oracle's result in fp64, or for ``None`` plain PyTorch's in the dtype of statistics."""
    leaves = {
        name: value.detach().to(dtype or value.dtype).clone().requires_grad_()
        for name, value in case.inputs.items()
    }
    rounded = dtype is None and case.logits_dtype == "input"
    raised = {name: leaf if rounded else leaf.to(stats_dtype(leaf.dtype)) for name, leaf in leaves.items()}
    labels, counted = case.labels, case.counted
    entropy = None
    if case.kind == "logprobs":
        logprobs, entropy = raised["logprobs"], raised.get("entropy")
    else:
        scores = scores_of(raised, rounded)
        logprobs, entropy = oracle.token_logprobs(
            scores, labels, counted, cu_seqlens=case.cu_seqlens, **case.logit_options
        )
    loss = oracle.policy_loss(
        logprobs,
        case.old_logprobs,
        case.advantages,
        counted,
        objective,
        cu_seqlens=case.cu_seqlens,
        entropy=entropy if case.wants_entropy else None,
        **case.terms,
    )
    # where no token counts, this connects the loss with its inputs
    loss = loss + sum(leaf[:0].sum() for leaf in leaves.values())
    between = {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}
    between = {name: value for name, value in between.items() if value.requires_grad}
    grads = torch.autograd.grad(
        loss, [*leaves.values(), *between.values()], allow_unused=True, materialize_grads=True
    )
    moved_by = dict(zip(between, (grad.abs() for grad in grads[len(leaves) :]), strict=True))
    shown = torch.where(counted, logprobs, 0.0) if case.kind != "logprobs" else logprobs
    return Result(
        loss.detach(),
        shown.detach(),
        dict(zip(leaves, grads[: len(leaves)], strict=True)),
        entropy.detach() if case.wants_entropy else None,
        {name: float(size.sum()) for name, size in moved_by.items()},
    )


def neighbor(case: Case, draw: int) -> Case:
    """Return the case with inputs moved by up to a part in 128: as ill-conditioned, but with other roundings.

    Old and reference log-probs move along, so that every ratio and clip decision stays.
    """
    if draw == 0:
        return case
    rng = generator(draw)

    def moved(value: Tensor) -> Tensor:
        noise = torch.rand(value.shape, generator=rng, dtype=torch.float64) - 0.5
        return (value.double() * (1 + noise / 64)).to(value.dtype)

    there = replace(case, inputs={name: moved(value) for name, value in case.inputs.items()})
    change = (true_logprobs(there) - true_logprobs(case)).nan_to_num(0.0, 0.0, 0.0)

    def along(value: Any) -> Any:
        return (value.double() + change).to(value.dtype) if isinstance(value, Tensor) else value

    terms = {name: along(value) if name == "ref_logprobs" else value for name, value in case.terms.items()}
    return replace(there, old_logprobs=along(case.old_logprobs), terms=terms)


def true_logprobs(case: Case) -> Tensor:
    """Return the case's log-probs in fp64; from logits or hidden states they are 0 where not counted."""
    inputs = {name: value.detach().double() for name, value in case.inputs.items()}
    if case.kind == "logprobs":
        return inputs["logprobs"]
    return oracle.token_logprobs(
        scores_of(inputs), case.labels, case.counted, cu_seqlens=case.cu_seqlens, **case.logit_options
    )[0]


def _dtype_of(name: str, value: Tensor, case: Case) -> torch.dtype:
    """Return the dtype of a result's rounding; that of hidden states for their gradients, even with an fp32
    adapter.
    """
    from_hidden = name.startswith("grad ") and "hidden" in case.inputs
    return case.inputs["hidden"].dtype if from_hidden else value.dtype


@functools.lru_cache(maxsize=4096)
def _judged(case: Case, objective: Any) -> tuple[Result, dict[str, Spread]]:
    """Return the fp64 result and the spread of plain PyTorch's errors."""
    reference = expect(case, objective)
    errors: dict[str, list[Tensor]] = {}
    in_double = next(iter(case.inputs.values())).dtype == torch.float64
    # Nothing finer than fp64 is at hand: its errors are fp32's, scaled, plus half as much for the truth's own
    scale = 1.5 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if in_double else 1.0
    for draw in range(_DRAWS):
        there = neighbor(case, draw)
        if in_double:
            old = None if there.old_logprobs is None else there.old_logprobs.float()
            inputs = {name: value.float() for name, value in there.inputs.items()}
            there = replace(there, inputs=inputs, old_logprobs=old)
        exact = expect(there, objective).values()
        for name, value in expect(there, objective, None).values().items():
            value = value.to(_dtype_of(name, value, there))
            errors.setdefault(name, []).append(scale * (value.double() - exact[name]))
    spreads = {
        name: Spread.of(each, by_row=name in ("grad logits", "grad hidden", "grad weight"))
        for name, each in errors.items()
    }
    # errors of tokens cancel in a sum only by luck
    moved_by = reference.sensitivity.items()
    carried = sum(spreads[name].element * weight for name, weight in moved_by if name in spreads)
    tokens = int(case.counted.sum()) * _DRAWS
    spreads["loss"] = spreads["loss"].at_least(carried, carried, tokens)
    if case.kind != "logprobs" and type(objective).__name__ != "Linear":
        # a ratio is an exponential: its relative error is the error of its log-probs
        ratio = spreads["logprobs"].element
        for name, value in reference.values().items():
            if name.startswith("grad ") and value.numel():
                moved = ratio * float(value.norm()), ratio * float(value.abs().max())
                spreads[name] = spreads[name].at_least(*moved, tokens)
    return reference, spreads


def assert_equals_oracle(actual: Result, case: Case, objective: Any) -> None:
    """Check that every output of a call is as exact as plain PyTorch's."""
    reference, plain = _judged(case, objective)
    answers = actual.values()
    for name, expected in reference.values().items():
        if name.removeprefix("grad ") in actual.frozen:
            continue
        got = answers[name]
        assert got.shape == expected.shape, name
        if name.startswith("grad "):
            assert got.dtype == case.inputs[name.removeprefix("grad ")].dtype, name
        eps = torch.finfo(_dtype_of(name, got, case)).eps
        assert_as_exact(name, [got.double() - expected.double()], plain[name], [expected], eps)
