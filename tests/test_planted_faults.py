"""Faults of a few units in the last place, planted into results that pass: the judgement must find them."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.accuracy import Spread, assert_as_exact
from tests.cases import KIND, generator, make_case, run
from tests.judging import assert_equals_oracle

EPS = torch.finfo(torch.float32).eps
# A ratio's relative error is its log-probs' error. fp32 logits from a product add its roundings.
ULPS = {"policy_loss": 8, "fused_policy_loss": 32, "fused_linear_policy_loss": 192}


def one_element(values, ulps):
    """Return the values with the largest alone changed."""
    changed = values.clone().flatten()
    changed[changed.abs().argmax()] *= 1 + ulps * EPS
    return changed.view(values.shape)


def all_elements(values, ulps):
    return values * (1 + ulps * EPS)


@pytest.mark.parametrize(("entry", "ulps"), ULPS.items())
@pytest.mark.parametrize(
    ("objective", "terms"), [(gk.GSPO(), "plain"), (gk.GRPO(), "plain"), (gk.GRPO(), "k3")]
)
def test_results_a_few_ulps_off(objective, terms, entry, ulps):
    case = make_case(KIND[entry], terms=terms)
    result = run(case, entry, objective)
    assert_equals_oracle(result, case, objective)
    wrong = [
        (f"grad {name}", replace(result, grads=result.grads | {name: fault(value, sign * ulps)}))
        for name, value in result.grads.items()
        for fault in (all_elements, one_element)
        for sign in (-1, 1)
    ]
    if terms == "plain" and isinstance(objective, gk.GSPO):
        wrong.append(("loss", replace(result, loss=all_elements(result.loss, ulps))))
        if entry != "policy_loss":  # it takes log-probs as an input
            wrong.append(("logprobs", replace(result, logprobs=all_elements(result.logprobs, ulps))))
    for name, fault in wrong:
        with pytest.raises(AssertionError, match=name):
            assert_equals_oracle(fault, case, objective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["weight", "hidden"])
def test_gradients_of_16_bits_one_percent_off(name, dtype):
    """bf16 numbers are up to 0.8 percent apart."""
    case, objective = make_case("linear", dtype=dtype, lengths=(9, 7, 12, 8)), gk.GSPO()
    result = run(case, "fused_linear_policy_loss", objective)
    assert_equals_oracle(result, case, objective)
    for scale in (0.99, 1.01):
        wrong = (scale * result.grads[name].float()).to(dtype)
        with pytest.raises(AssertionError, match=f"grad {name}: norm"):
            assert_equals_oracle(replace(result, grads=result.grads | {name: wrong}), case, objective)


def test_single_numbers_are_judged_with_chance():
    spread = Spread.of([torch.tensor(1e-6)], by_row=False)
    assert_as_exact("loss", [torch.tensor(5e-6)], spread, [torch.tensor(1.0)], EPS)
    with pytest.raises(AssertionError, match="norm"):
        assert_as_exact("loss", [torch.tensor(1e-5)], spread, [torch.tensor(1.0)], EPS)


def test_correct_roundings_pass():
    """A thousand judgements accept errors as large as plain PyTorch's, of eight numbers each."""
    for errors in torch.randn(1000, 9, 8, generator=generator(1), dtype=torch.float64):
        spread = Spread.of(list(errors[1:]), by_row=False)
        assert_as_exact("numbers", [errors[0]], spread, [torch.zeros(8)], EPS)
