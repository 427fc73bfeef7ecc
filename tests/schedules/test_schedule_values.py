"""Every schedule of a hidden-state loss gives the same result."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.schedule import SCHEDULES
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from gspo_kernels.objectives.finite import exp, mul
from tests.cases import LAYOUTS, for_objective, make_case, run
from tests.judging import assert_equals_oracle
from tests.schedules.common import ENTRY, ROW, V, run_with_frozen_head

OBJECTIVES = {
    "GSPO": gk.GSPO(),
    "GSPO token mean": gk.GSPO(aggregation="token_mean"),
    "GSPOToken": gk.GSPOToken(),
    "GRPO": gk.GRPO(),
    "Linear": gk.Linear(),
}
# of the six sequences of a case: none, half, all without advantage
INACTIVE = {
    0: (1.0, -0.4, -0.7, -1.3, -0.5, 0.3),
    50: (0.0, -0.4, 1.0, 0.0, -0.5, 0.0),
    100: (0.0,) * 6,
}
NAMES = ("auto", *SCHEDULES)


def frozen_head(case):
    return replace(case, inputs={"hidden": case.inputs["hidden"]})


def is_exact(schedule, objective, terms=(), trains_head=True):
    """What the design's table says."""
    token_level = type(objective).__name__ in ("GRPO", "Linear")
    if schedule == "known":
        return token_level
    if schedule == "deferred":
        return not token_level and not {"kl", "entropy", "token_advantages"} & set(terms)
    if schedule == "frozen":
        return not trains_head and "entropy" not in terms
    return True


def check(case, objective, schedule, **options):
    """The oracle's result; both heads, trained and frozen."""
    options["schedule"] = schedule
    if schedule == "frozen":
        output, grad = run_with_frozen_head(case, objective, **options)
        trained = run(case, ENTRY, objective, schedule="two_pass")
        result = replace(
            trained,
            loss=output.loss.detach(),
            logprobs=output.logprobs,
            grads={**trained.grads, "hidden": grad},
        )
    else:
        result = run(case, ENTRY, objective, **options)
    if options.get("skip_inactive") == "all":
        # left out, as asked
        result = replace(
            result,
            logprobs=torch.where(
                result.logprobs.isnan(), run(case, ENTRY, objective).logprobs, result.logprobs
            ),
        )
    assert_equals_oracle(result, case, objective)


@pytest.mark.parametrize("inactive", INACTIVE)
@pytest.mark.parametrize("rows", [1, 3, 4, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_schedules_equal_the_oracle(name, schedule, layout, rows, inactive):
    objective = OBJECTIVES[name]
    case = for_objective(make_case("linear", layout, "weighted", advantages=INACTIVE[inactive]), objective)
    options = {"max_chunk_bytes": rows * ROW}
    if not is_exact(schedule, objective, trains_head=schedule != "frozen"):
        with pytest.raises(ValueError, match=f"schedule: '{schedule}' is not exact here"):
            check(case, objective, schedule, **options)
        return
    # of the sequences that have a gradient; Linear has no advantages to tell them by
    longest = 4 if case.advantages is None else {0: 4, 50: 2, 100: 0}[inactive]
    if schedule == "aligned" and rows < longest:
        with pytest.raises(ValueError, match=f"has {longest} counted tokens but a chunk {rows} row"):
            check(case, objective, schedule, **options)
        return
    check(case, objective, schedule, **options)


@pytest.mark.parametrize("inactive", [0, 50, 100])
@pytest.mark.parametrize("skip_inactive", ["all", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "two_pass"])
def test_schedules_with_and_without_skipping(schedule, layout, skip_inactive, inactive):
    case = make_case("linear", layout, "holes", advantages=INACTIVE[inactive])
    # "none" projects padding too, so that a sequence has six rows
    check(case, gk.GSPO(), schedule, skip_inactive=skip_inactive, max_chunk_bytes=6 * ROW)


@pytest.mark.parametrize(
    "terms", ["all", "kl_tensor", "kl_ratio_weighted", "entropy_tensor", "token_weights"]
)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken"])
def test_schedules_with_every_term(name, schedule, rows, terms):
    case = make_case("linear", "packed", terms)
    present = {"all": {"kl", "entropy"}, "entropy_tensor": {"entropy"}, "token_weights": set()}.get(
        terms, {"kl"}
    )
    if not is_exact(schedule, OBJECTIVES[name], present, trains_head=schedule != "frozen"):
        term = "entropy_coef" if "entropy" in present else "kl_beta|its? needs coefficients|it needs"
        with pytest.raises(ValueError, match=rf"schedule: '{schedule}' is not exact here: .*({term}|{name})"):
            check(case, OBJECTIVES[name], schedule, max_chunk_bytes=rows * ROW)
        return
    if schedule == "aligned":
        rows = 5
    check(case, OBJECTIVES[name], schedule, max_chunk_bytes=rows * ROW)


@pytest.mark.parametrize("schedule", ["auto", "aligned", "two_pass", "known"])
def test_per_token_advantages(schedule):
    objective = gk.GRPO() if schedule == "known" else gk.GSPOToken()
    case = make_case("linear", "packed", "holes+token_advantages")
    check(case, objective, schedule, max_chunk_bytes=4 * ROW)


def test_deferred_refuses_coefficients_per_token():
    case = make_case("linear", "packed", "holes+token_advantages")
    with pytest.raises(ValueError, match="'deferred' is not exact here: advantages per token"):
        check(case, gk.GSPOToken(), "deferred")
    case = make_case("linear", "packed", "rollout_token")
    with pytest.raises(ValueError, match="'deferred' is not exact here: rollout_weights per token"):
        check(case, gk.GSPOToken(), "deferred")
    check(case, gk.GSPO(), "deferred", max_chunk_bytes=2 * ROW)  # takes their mean over the sequence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "two_pass"])
def test_dtypes_of_every_schedule(schedule, dtype, backend):
    case = make_case("linear", "packed", "holes", dtype=dtype)
    check(case, gk.GSPO(), schedule, max_chunk_bytes=4 * V * max(4, dtype.itemsize), backend=backend)


@pytest.mark.parametrize("name", ["together", "kept and the rest"])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "two_pass"])
def test_logit_options_of_every_schedule(schedule, name):
    case = make_case("linear", "padded", "holes", logit_options=name)
    check(case, gk.GSPO(), schedule, max_chunk_bytes=4 * ROW)


@pytest.mark.parametrize("schedule", ["auto", "aligned", "two_pass"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_in_the_inputs_dtype(schedule, dtype):
    # Linear has no clip decision that such rounding could turn
    case = for_objective(
        make_case("linear", "packed", "plain", dtype=dtype, logits_dtype="input"), gk.Linear()
    )
    check(case, gk.Linear(), schedule, max_chunk_bytes=4 * V * 6)


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "two_pass", "auto"])
def test_strided_and_interleaved(schedule):
    """Idle sequences between the others, hidden states of any strides."""
    case = make_case("linear", "packed", "holes", advantages=INACTIVE[50])
    hidden = case.inputs["hidden"].t().contiguous().t()
    assert not hidden.is_contiguous()
    check(
        replace(case, inputs={**case.inputs, "hidden": hidden}), gk.GSPO(), schedule, max_chunk_bytes=4 * ROW
    )


@dataclass(frozen=True)
class Relative(Objective):
    """Each sequence's ratio relative to the mean log-ratio of its group, or of the batch."""

    whole: bool = False
    coefficient_scope: ClassVar[Literal["group"]] = "group"
    level: ClassVar[Literal["sequence"]] = "sequence"
    needs: ClassVar[tuple[str, ...]] = ("group_ids",)
    takes_token_advantages: ClassVar[bool] = False
    zero_advantage_is_inactive: ClassVar[bool] = False

    def evaluate(self, batch):
        log_s = batch.sequence_log_ratio()
        same = batch.group_ids.unsqueeze(0) == batch.group_ids.unsqueeze(1)
        mean = (same * log_s).sum(1) / same.sum(1)
        loss = -mul(batch.advantages, exp(log_s - mean))
        never = torch.zeros_like(loss, dtype=torch.bool)
        return ObjectiveLoss(loss, log_s, never, never)


@dataclass(frozen=True)
class RelativeToAll(Relative):
    """Coefficients look at the batch: one group."""

    coefficient_scope: ClassVar[Literal["batch"]] = "batch"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 6, 8, 1000])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "frozen", "deferred", "known"])
@pytest.mark.parametrize("kind", [Relative, RelativeToAll])
def test_groups_and_batch(kind, schedule, rows, layout):
    groups = (5, 2, 5, 2, 2, 5) if kind is Relative else (0,) * 6  # interleaved: 5 counts 4, 2 counts 6
    case = make_case("linear", layout, "holes")
    case = replace(case, terms={**case.terms, "group_ids": torch.tensor(groups)})
    options = {"max_chunk_bytes": rows * ROW}
    if schedule in ("known", "deferred"):
        with pytest.raises(ValueError, match=r"not exact here.*Relative"):
            run(case, ENTRY, kind(), schedule=schedule, **options)
        return
    largest = 6 if kind is Relative else 9
    if schedule == "aligned" and rows < largest:
        with pytest.raises(ValueError, match=f"one has {largest} counted tokens"):
            run(case, ENTRY, kind(), schedule=schedule, **options)
        return
    expected = run(case, ENTRY, kind(), schedule="two_pass")
    if schedule == "frozen":
        got = {"hidden": run_with_frozen_head(case, kind(), schedule=schedule, **options)[1]}
    else:
        got = run(case, ENTRY, kind(), schedule=schedule, **options).grads
    for name, grad in got.items():
        assert (grad != 0).any()
        # another grouping is another gradient; the roundings of other chunks are judged elsewhere
        most = float(expected.grads[name].abs().max())
        torch.testing.assert_close(grad, expected.grads[name], rtol=0, atol=1e-5 * most)
