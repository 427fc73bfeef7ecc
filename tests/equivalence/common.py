"""Objectives, and a call beside the oracle."""

from dataclasses import replace

import gspo_kernels as gk
from tests.cases import (
    for_objective,
    run,
)
from tests.judging import assert_equals_oracle

OBJECTIVES = {
    "GSPO": gk.GSPO(),
    "GSPO dual": gk.GSPO(dual_clip=1.2),
    "GSPOToken": gk.GSPOToken(),
    "GRPO": gk.GRPO(),
    "GRPO dual": gk.GRPO(clip_low=0.1, clip_high=0.15, dual_clip=1.3),
    "Linear": gk.Linear(),
}
LINEAR_ENTRIES = ("linear_token_logprobs", "fused_linear_policy_loss")


def check(case, entry, objective, backend="auto", **options):
    case = for_objective(case, objective)
    assert_equals_oracle(run(case, entry, objective, backend, **options), case, objective)


def with_aggregation(objective, aggregation):
    constant = 6.0 if aggregation == "constant" else None
    return replace(objective, aggregation=aggregation, aggregation_constant=constant)
