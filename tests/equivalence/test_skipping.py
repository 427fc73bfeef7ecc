"""Schedules, and what is left out of products, change nothing beside the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import (
    LAYOUTS,
    make_case,
    run,
)
from tests.equivalence.common import LINEAR_ENTRIES, OBJECTIVES, check
from tests.judging import assert_equals_oracle


@pytest.mark.parametrize("terms", ["on_policy", "on_policy_terms", "all"])
@pytest.mark.parametrize("name", ["GSPO", "GRPO", "Linear"])
@pytest.mark.parametrize("schedule", ["known", "two_pass", "auto"])
def test_schedules_agree(schedule, name, terms):
    if (name, terms) == ("GSPO", "all"):
        schedule = {"known": "auto"}.get(schedule, schedule)  # "known" is not exact here, and refused
    case = make_case("linear", "packed", terms)
    check(case, "fused_linear_policy_loss", OBJECTIVES[name], schedule=schedule, max_chunk_bytes=4 * 61 * 4)


@pytest.mark.parametrize("schedule", ["known", "two_pass"])
@pytest.mark.parametrize("skip_inactive", ["backward", "none"])
def test_skipping_changes_nothing(skip_inactive, schedule, backend):
    case = make_case("linear", "padded", "all")
    check(
        case, "fused_linear_policy_loss", gk.GRPO(), backend, schedule=schedule, skip_inactive=skip_inactive
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_skipping_all_that_is_known_to_be_inactive(name, layout):
    case = make_case("linear", layout, "holes", advantages=(1.0, 0.0, 0.0, -1.3, 0.0, 0.5))
    objective = OBJECTIVES[name]
    result = run(case, "fused_linear_policy_loss", objective, skip_inactive="all")
    everything = run(case, "fused_linear_policy_loss", objective).logprobs
    skipped = torch.zeros_like(case.counted)
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        skipped[sequence.where] = sequence.counted & (case.advantages[sequence.index] == 0)
    assert torch.equal(result.logprobs.isnan(), skipped) and skipped.any()
    filled = replace(result, logprobs=torch.where(skipped, everything, result.logprobs))
    assert_equals_oracle(filled, case, objective)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entry", LINEAR_ENTRIES)
def test_logits_rounded_to_the_inputs_dtype(entry, dtype, backend):
    # Linear has no clip decision that such rounding could turn
    case = make_case("linear", "packed", "plain", dtype=dtype, logits_dtype="input")
    check(case, entry, gk.Linear(), backend)


def test_without_bias(backend):
    check(make_case("linear", "padded", "all", bias=False), "fused_linear_policy_loss", gk.GSPO(), backend)
