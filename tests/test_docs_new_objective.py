"""The objectives that docs/new_objective.md writes are served by every entry point and schedule."""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import make_case, run
from tests.judging import assert_equals_oracle
from tests.test_readme import run as read

PAGE = read("docs/new_objective.md")
SCHEDULES = ("auto", "aligned", "deferred", "two_pass")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["Damped", "Truncated"])
def test_entry_points_and_schedules_agree(name, layout):
    objective = PAGE[name]()
    case = make_case("linear", layout, "holes")
    reference = run(case, "linear_token_logprobs", objective, "reference")
    for schedule in SCHEDULES:
        options = {"schedule": schedule, "max_chunk_bytes": 4 * 61 * 4}
        got = run(case, "fused_linear_policy_loss", objective, **options)
        torch.testing.assert_close(got.loss, reference.loss, rtol=1e-5, atol=1e-6)
        for key, grad in got.grads.items():
            assert (grad != 0).any()
            torch.testing.assert_close(grad, reference.grads[key], rtol=1e-4, atol=1e-6)


def test_the_turns_ratio_is_that_of_tl_grpo():
    case = make_case("logprobs", "packed", "holes")
    turns = torch.arange(case.labels.numel()) // 2
    arguments = (case.inputs["logprobs"], case.old_logprobs, case.advantages)
    options = {"cu_seqlens": case.cu_seqlens, "loss_mask": case.loss_mask, "turn_ids": turns}
    mine = gk.policy_loss(*arguments, **options, objective=PAGE["PerTurn"]()).loss
    built_in = gk.TLGRPO(clip_low=0.1, clip_high=0.2)
    assert torch.equal(mine, gk.policy_loss(*arguments, **options, objective=built_in).loss)


def test_a_built_in_case_still_equals_the_oracle():
    case = make_case("linear", "packed", "holes")
    assert_equals_oracle(run(case, "fused_linear_policy_loss", gk.GSPO()), case, gk.GSPO())
