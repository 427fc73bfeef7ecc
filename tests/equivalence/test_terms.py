"""Every entry point, objective, term and aggregation equals the fp64 oracle, values and gradients."""

import itertools

import pytest
import torch

import gspo_kernels as gk
from tests.cases import (
    AGGREGATIONS,
    FUSED_ENTRIES,
    KIND,
    LAYOUTS,
    TERMS,
    make_case,
)
from tests.equivalence.common import OBJECTIVES, check, with_aggregation


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "terms"),
    # Linear has no importance ratio to weight a KL with
    sorted(set(itertools.product(OBJECTIVES, TERMS)) - {("Linear", "kl_ratio_weighted")}),
)
def test_policy_loss(name, terms, layout):
    check(make_case("logprobs", layout, terms), "policy_loss", OBJECTIVES[name])


@pytest.mark.parametrize("terms", ["plain", "weighted", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO dual", "Linear"])
def test_policy_loss_aggregations(name, aggregation, layout, terms):
    objective = with_aggregation(OBJECTIVES[name], aggregation)
    check(make_case("logprobs", layout, terms), "policy_loss", objective)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPOToken", "GRPO", "GRPO dual"])
@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_token_advantages(entry, name, layout):
    check(make_case(KIND[entry], layout, "all+token_advantages"), entry, OBJECTIVES[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_policy_loss_dtypes(dtype):
    check(make_case("logprobs", "padded", "all", dtype=dtype), "policy_loss", gk.GSPO())


@pytest.mark.parametrize("terms", ["plain", "on_policy", "weighted", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO dual", "GSPOToken", "GRPO", "Linear"])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_fused_entries(entry, name, layout, terms):
    check(make_case(KIND[entry], layout, terms), entry, OBJECTIVES[name], "cpp")


# Backends know rows, not objectives, but for the single launch: a few of each kind for all of them.
EVERY_BACKEND = [
    *itertools.product(["fused_policy_loss"], ["GSPO", "GSPO dual"], LAYOUTS, ["plain", "weighted"]),
    *itertools.product(["fused_policy_loss"], ["GSPO", "Linear"], LAYOUTS, ["on_policy"]),
    *itertools.product(FUSED_ENTRIES, ["GSPO", "GSPOToken"], LAYOUTS, ["all"]),
    ("token_logprobs", "GRPO", "packed", "plain"),
    ("linear_token_logprobs", "Linear", "packed", "weighted"),
    ("linear_token_logprobs", "GRPO", "padded", "on_policy"),
    ("fused_linear_policy_loss", "GSPO", "packed", "on_policy"),
    ("fused_linear_policy_loss", "GRPO", "padded", "weighted"),
    ("fused_linear_policy_loss", "Linear", "padded", "plain"),
]


@pytest.mark.parametrize(("entry", "name", "layout", "terms"), EVERY_BACKEND)
def test_fused_entries_of_every_backend(entry, name, layout, terms, backend):
    case = make_case(KIND[entry], layout, terms, lengths=(3, 0, 1, 2, 1), padding=1)
    check(case, entry, OBJECTIVES[name], backend)


@pytest.mark.parametrize(
    "terms", ["k3", "kl_tensor", "kl_ratio_weighted", "entropy_tensor", "on_policy_terms"]
)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_fused_terms(entry, name, terms):
    check(make_case(KIND[entry], "padded", terms), entry, OBJECTIVES[name], "cpp")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["GSPO", "GRPO"])
def test_fused_linear_aggregations(name, aggregation):
    objective = with_aggregation(OBJECTIVES[name], aggregation)
    check(make_case("linear", "packed", "weighted"), "fused_linear_policy_loss", objective)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_of_the_single_launch(aggregation, backend):
    for terms in ("plain", "weighted"):
        objective = with_aggregation(gk.GSPO(), aggregation)
        check(make_case("logits", "packed", terms), "fused_policy_loss", objective, backend)
