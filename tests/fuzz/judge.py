"""Runs a drawn call, and judges what it answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from tests.cases import Case, call, device_of
from tests.fuzz import SINGLE
from tests.fuzz.draw import Drawn, cleaned
from tests.judging import expect


def attempt(drawn: Drawn, backend: str) -> bool:
    """Run and judge one call; False where the package refused a schedule that can't serve it."""
    case, entry, options = drawn.case, drawn.entry, dict(drawn.options)
    device = device_of(backend)

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    leaves = {name: moved(value.detach()).requires_grad_() for name, value in case.inputs.items()}
    inplace = options.pop("inplace_backward", False)
    given = dict(leaves)
    if inplace:
        options["inplace_backward"] = True
        given["logits"] = leaves["logits"] * 1.0
    if options.get("schedule") == "frozen":
        given = {name: leaf if name == "hidden" else leaf.detach() for name, leaf in leaves.items()}
    try:
        output = call(case, given, entry, drawn.objective, backend, moved, **options)
    except ValueError as refusal:
        if "schedule" in str(refusal):
            return False
        raise
    loss = output.loss * drawn.factor
    if drawn.twice and not inplace:
        loss.backward(retain_graph=True)
        for leaf in leaves.values():
            leaf.grad = None
    loss.backward()
    judge(drawn, output, {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None})
    return True


def judge(drawn: Drawn, output: gk.LossOutput, grads: dict[str, Tensor], draws: int = 0) -> None:
    """Error at most 16 times plain fp32's, and what roundings of inputs' dtype in between can make.

    Plain fp32 may be lucky, as where two large numbers leave little of each other: what it does not allow is
    judged again by the worst of eight draws, whose inputs are rounded otherwise.
    """
    try:
        _judge(drawn, output, grads, draws)
    except AssertionError:
        if draws:
            raise
        judge(drawn, output, grads, 8)


def _judge(drawn: Drawn, output: gk.LossOutput, grads: dict[str, Tensor], draws: int) -> None:
    case, factor = cleaned(drawn.case), drawn.factor
    truth = expect(case, drawn.objective)
    single = replace(case, inputs={name: value.float() for name, value in case.inputs.items()})
    rough = expect(single, drawn.objective, None).values()
    others = [expect(rounded(single, seed), drawn.objective, None).values() for seed in range(draws)]
    in_double = case.inputs[next(iter(case.inputs))].dtype == torch.float64
    finer = torch.finfo(torch.float64).eps / SINGLE.eps if in_double else 1.0
    same = expect(single, drawn.objective) if in_double else truth
    spread = {
        name: finer * max(float((each[name].double() - value).abs().max()) for each in (rough, *others))
        if value.numel()
        else 0.0
        for name, value in same.values().items()
    }
    carried = sum(spread.get(name, 0.0) * weight for name, weight in truth.sensitivity.items())
    slope, vocabulary = steepest(case.logit_options), vocabulary_of(case)
    moves = truth.sensitivity.get
    reach = moves("logprobs", 0.0) + 2 * math.log(vocabulary + 2) * moves("entropy", 0.0)
    answers = {"loss": output.loss, **{f"grad {name}": grad for name, grad in grads.items()}}
    if drawn.entry in ("fused_policy_loss", "fused_linear_policy_loss"):
        answers["logprobs"] = output.logprobs
    for name, got in answers.items():
        want = truth.values()[name] * (factor if name.startswith("grad ") else 1.0)
        got = got.detach().cpu()
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if want.numel() == 0:
            continue
        info, largest = torch.finfo(got.dtype), float(want.abs().max())
        own = reach if name == "loss" else 0.0
        allowed = 16 * spread[name] + 64 * SINGLE.eps * finer * (largest + own) + info.eps * largest
        if name == "loss":
            allowed += 16 * carried
        elif name == "logprobs":
            # near 0 the truth is the one that is rounded
            allowed += 64 * torch.finfo(torch.float64).eps
        else:
            allowed += info.smallest_normal * info.eps
        if name.startswith("grad "):
            allowed = (
                abs(factor) * (16 * spread[name] + 64 * SINGLE.eps * finer * reach * slope)
                + info.eps * largest
            )
            allowed += 2 * info.smallest_normal * info.eps
            # rows of 16 bits enter the products
            allowed += abs(factor) * 4 * info.eps * reach * slope * partner(case, name)
        if name == "grad logits":
            # a probability below 1e-38 is 0 before a coefficient multiplies it
            small = max(4 * info.smallest_normal * info.eps, 1e-30 * max(1.0, largest))
            # and one that plain fp32 misses as well is the little that two larger ones leave of each other
            near = (rough[name] * factor - want).abs() < 1e-2 * want.abs()
            there = (want.abs() > small) & near
            lost = float((there & (got == 0)).double().mean())
            assert lost == 0, f"{name}: {lost:.1%} of the numbers that {got.dtype} can hold came out as zero"
        found = float((got.double() - want).abs().nan_to_num(math.inf).max())
        assert found <= allowed, (
            f"{name}: error {found:.3e}, allowed {allowed:.3e}, largest value {largest:.3e}"
        )


def rounded(case: Case, seed: int) -> Case:
    """With fp32 inputs that are off by up to an ulp."""
    rng = torch.Generator().manual_seed(seed)
    ulps = {
        name: 1 + SINGLE.eps * (2 * torch.rand(value.shape, generator=rng) - 1)
        for name, value in case.inputs.items()
    }
    return replace(case, inputs={name: value * ulps[name] for name, value in case.inputs.items()})


def steepest(options: dict[str, Any]) -> float:
    temperature = options.get("temperature", 1.0)
    coldest = (
        float(temperature.min()) if isinstance(temperature, Tensor) and temperature.numel() else temperature
    )
    return abs(options.get("logit_scale", 1.0)) / (coldest if isinstance(coldest, float) else 1.0)


def vocabulary_of(case: Case) -> int:
    return (
        case.inputs["logits"].shape[-1] if "logits" in case.inputs else len(case.inputs.get("weight", (0,)))
    )


def partner(case: Case, name: str) -> float:
    """The largest number that a row of the product's gradient meets."""
    other = {"grad hidden": "weight", "grad weight": "hidden"}.get(name)
    if other is None or case.inputs[other].numel() == 0:
        return 1.0 if name == "grad bias" else 0.0
    return float(case.inputs[other].double().nan_to_num(0.0, 0.0, 0.0).abs().max())
