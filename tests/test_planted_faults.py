"""Faults of a few units in the last place, planted into results that pass: the judgement has to see them."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.types import LogitTransform
from tests.accuracy import Spread, assert_as_exact
from tests.cases import KIND, generator, make_case, run
from tests.cpp.cpp_oracle import IGNORE, assert_within_budget, exact, plain
from tests.judging import assert_equals_oracle

EPS = torch.finfo(torch.float32).eps
# A ratio has log-probs' error as its relative one; logits from a product in fp32 have its roundings too.
ULPS = {"policy_loss": 8, "fused_policy_loss": 32, "fused_linear_policy_loss": 192}


def one_element(values, ulps):
    """The largest value alone is off."""
    changed = values.clone().flatten()
    changed[changed.abs().argmax()] *= 1 + ulps * EPS
    return changed.view(values.shape)


def all_elements(values, ulps):
    return values * (1 + ulps * EPS)


def a_row(values, ulps):
    changed = values.clone()
    changed[changed.flatten(1).norm(dim=1).argmax()] *= 1 + ulps * EPS
    return changed


@pytest.mark.parametrize(("fault", "ulps"), [(all_elements, 8), (a_row, 12), (one_element, 32)])
@pytest.mark.parametrize("field", ["logprobs", "entropy", "grad"])
def test_rows_a_few_ulps_off(field, fault, ulps):
    """Here log p is a difference of numbers around 8, and an exponent of the gradient around 10."""
    rng, transform = generator(0), LogitTransform()
    logits = 3 * torch.randn(2, 32, 1009, generator=rng)
    labels = torch.randint(0, 1009, (2, 32), generator=rng)
    g, ge = torch.randn(2, 2, 32, generator=rng)
    stats = cpp.logprobs_forward(logits, labels, transform, ignore_index=IGNORE, entropy=True)
    grad = torch.empty_like(logits)
    cpp.logprobs_backward(logits, labels, stats, g, ge, None, transform, ignore_index=IGNORE, out=grad)
    sound = {"logprobs": stats.logprobs, "entropy": stats.entropy, "grad": grad}[field]
    usual, want = plain(logits, labels, transform, g, ge), exact(logits, labels, transform, g, ge)
    assert_within_budget(field, sound, usual, want, field)
    with pytest.raises(AssertionError, match="error"):
        assert_within_budget(field, fault(sound, ulps), usual, want, field)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("entry", "ulps"), ULPS.items())
@pytest.mark.parametrize(
    ("objective", "terms"), [(gk.GSPO(), "plain"), (gk.GRPO(), "plain"), (gk.GRPO(), "k3")]
)
def test_gradients_a_few_ulps_off(objective, terms, entry, ulps, sign):
    case = make_case(KIND[entry], terms=terms)
    options = {} if entry == "policy_loss" else {"backend": "cpp"}
    result = run(case, entry, objective, **options)
    assert_equals_oracle(result, case, objective)
    for name, value in result.grads.items():
        for fault in (all_elements, one_element):
            wrong = replace(result, grads=result.grads | {name: fault(value, sign * ulps)})
            with pytest.raises(AssertionError, match=f"grad {name}"):
                assert_equals_oracle(wrong, case, objective)


@pytest.mark.parametrize("name", ["loss", "logprobs"])
@pytest.mark.parametrize(("entry", "ulps"), ULPS.items())
def test_values_a_few_ulps_off(entry, ulps, name):
    if entry == "policy_loss" and name == "logprobs":
        pytest.skip("they are an input of this call")
    case = make_case(KIND[entry])
    options = {} if entry == "policy_loss" else {"backend": "cpp"}
    result = run(case, entry, gk.GSPO(), **options)
    wrong = replace(result, **{name: all_elements(getattr(result, name), ulps)})
    with pytest.raises(AssertionError, match=name):
        assert_equals_oracle(wrong, case, gk.GSPO())


def test_one_number_is_judged_with_what_chance_adds():
    spread = Spread.of([torch.tensor(1e-6)], by_row=False)
    assert_as_exact("loss", [torch.tensor(5e-6)], spread, [torch.tensor(1.0)], EPS)
    with pytest.raises(AssertionError, match="norm"):
        assert_as_exact("loss", [torch.tensor(1e-5)], spread, [torch.tensor(1.0)], EPS)


def test_honest_roundings_are_never_refused():
    """A thousand judgements of errors as large as plain PyTorch's, of eight numbers each."""
    rng = generator(1)
    for errors in torch.randn(1000, 9, 8, generator=rng, dtype=torch.float64):
        spread = Spread.of(list(errors[1:]), by_row=False)
        assert_as_exact("numbers", [errors[0]], spread, [torch.zeros(8)], EPS)
