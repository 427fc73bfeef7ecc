"""Every schedule of a hidden-state loss gives the same result, in the products and the memory it promises."""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.linear.cost import MACHINES, Shapes, cost
from gspo_kernels.linear.gradients import HeadSums
from gspo_kernels.linear.head import HIDDEN_SLAB, LOGITS_SLAB, Head
from gspo_kernels.linear.scaling import times, times_
from gspo_kernels.linear.schedule import SCHEDULES, Part, Refusals, plan_parts
from gspo_kernels.linear.scores import Kept
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from gspo_kernels.objectives.finite import exp, mul
from gspo_kernels.ops import memory
from tests import oracle
from tests.accuracy import Spread, assert_as_exact
from tests.cases import (
    LAYOUTS,
    assert_equals_oracle,
    call,
    for_objective,
    generator,
    make_case,
    offsets,
    run,
)

ENTRY = "fused_linear_policy_loss"
V = 61
ROW = V * 4
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


def run_with_frozen_head(case, objective, **options):
    """Only hidden needs a gradient."""
    leaves = {name: value.detach() for name, value in case.inputs.items()}
    leaves["hidden"].requires_grad_()
    output = call(case, leaves, ENTRY, objective, **options)
    output.loss.backward()
    return output, leaves["hidden"].grad


def is_exact(schedule, objective, terms=(), trains_head=True):
    """What the design's table says."""
    token_level = type(objective).__name__ in ("GRPO", "Linear")
    if schedule == "known":
        return token_level
    if schedule == "deferred":
        return not token_level and not {"kl", "entropy", "token_advantages"} & set(terms)
    if schedule == "frozen":
        return not trains_head and "entropy" not in terms
    return schedule != "cached" or "entropy" not in terms


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


# --- equality


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
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "cached", "two_pass"])
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


@pytest.mark.parametrize("schedule", ["auto", "aligned", "cached", "two_pass", "known"])
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
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "cached", "two_pass"])
def test_dtypes_of_every_schedule(schedule, dtype, backend):
    case = make_case("linear", "packed", "holes", dtype=dtype)
    check(case, gk.GSPO(), schedule, max_chunk_bytes=4 * V * max(4, dtype.itemsize), backend=backend)


@pytest.mark.parametrize("name", ["together", "kept and the rest"])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "cached", "two_pass"])
def test_logit_options_of_every_schedule(schedule, name):
    case = make_case("linear", "padded", "holes", logit_options=name)
    check(case, gk.GSPO(), schedule, max_chunk_bytes=4 * ROW)


@pytest.mark.parametrize("schedule", ["auto", "aligned", "cached", "two_pass"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_in_the_inputs_dtype(schedule, dtype):
    # Linear has no clip decision that such rounding could turn
    case = for_objective(
        make_case("linear", "packed", "plain", dtype=dtype, logits_dtype="input"), gk.Linear()
    )
    check(case, gk.Linear(), schedule, max_chunk_bytes=4 * V * 6)


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "cached", "two_pass", "auto"])
def test_strided_and_interleaved(schedule):
    """Idle sequences between the others, hidden states of any strides."""
    case = make_case("linear", "packed", "holes", advantages=INACTIVE[50])
    hidden = case.inputs["hidden"].t().contiguous().t()
    assert not hidden.is_contiguous()
    check(
        replace(case, inputs={**case.inputs, "hidden": hidden}), gk.GSPO(), schedule, max_chunk_bytes=4 * ROW
    )


# --- objectives over more than a sequence


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
@pytest.mark.parametrize("schedule", ["auto", "aligned", "cached", "frozen", "deferred", "known"])
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
        torch.testing.assert_close(grad, expected.grads[name], rtol=1e-5, atol=1e-7)


# --- what is computed


@pytest.fixture
def products(monkeypatch):
    """Rows that enter each kind of product, and the most that exist at once."""
    rows = {"forward": 0, "hidden": 0, "weight": 0, "most": 0}
    logits, grad_hidden, sum_head = Head.logits, Head.grad_hidden, HeadSums.add

    def counted_logits(self, hidden, out):
        rows["forward"] += hidden.shape[0]
        rows["most"] = max(rows["most"], hidden.shape[0])
        return logits(self, hidden, out)

    def counted_hidden(self, scores):
        rows["hidden"] += scores.shape[0]
        return grad_hidden(self, scores)

    def counted_weight(self, scores, *args):
        rows["weight"] += scores.values.shape[0]
        return sum_head(self, scores, *args)

    monkeypatch.setattr(Head, "logits", counted_logits)
    monkeypatch.setattr(Head, "grad_hidden", counted_hidden)
    monkeypatch.setattr(HeadSums, "add", counted_weight)
    return rows


def work_case(layout, kind="linear"):
    """Six sequences: 2 without advantage (5 tokens), one clipped (4), 3 with a gradient (12): 21 tokens."""
    return make_case(
        kind, layout, "plain", lengths=(5, 3, 4, 4, 3, 2), advantages=(1.0, 0.0, -1.0, 0.5, -0.7, 0.0),
        log_s=(1e-4, 0.0, -1e-4, 0.1, 2e-4, 0.0),
    )  # fmt: skip


TOKENS, ADVANTAGE, ACTIVE = 21, 16, 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("schedule", "skip_inactive", "rows", "forward", "gradient"),
    [
        ("aligned", "backward", 8, TOKENS, ACTIVE),
        ("aligned", "all", 8, ADVANTAGE, ACTIVE),
        ("aligned", "backward", 1000, TOKENS, ACTIVE),
        ("deferred", "backward", 2, TOKENS, ADVANTAGE),
        ("deferred", "all", 2, ADVANTAGE, ADVANTAGE),
        ("cached", "backward", 2, TOKENS, ACTIVE),
        ("cached", "all", 2, ADVANTAGE, ACTIVE),
        ("two_pass", "backward", 2, TOKENS + ACTIVE, ACTIVE),
        ("two_pass", "all", 2, ADVANTAGE + ACTIVE, ACTIVE),
        ("auto", "backward", 8, TOKENS, ACTIVE),
        ("auto", "all", 8, ADVANTAGE, ACTIVE),
    ],
)
def test_rows_in_products(products, schedule, skip_inactive, rows, forward, gradient, layout, monkeypatch):
    """Rows without gradient enter no gradient product, masked ones (padding) none at all."""
    # at this size evaluations cost more than products, and "auto" knows
    monkeypatch.setitem(MACHINES, "cpu", replace(MACHINES["cpu"], launch=0.0))
    options = {"schedule": schedule, "skip_inactive": skip_inactive, "max_chunk_bytes": rows * ROW}
    run(work_case(layout), ENTRY, gk.GSPO(), **options)
    assert (products["forward"], products["hidden"], products["weight"]) == (forward, gradient, gradient)
    assert products["most"] <= rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_products_of_a_frozen_head(products, layout):
    run_with_frozen_head(work_case(layout), gk.GSPO(), schedule="frozen", max_chunk_bytes=3 * ROW)
    assert (products["forward"], products["hidden"]) == (TOKENS, ADVANTAGE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_products_of_known(products, layout):
    case = work_case(layout)
    run(case, ENTRY, gk.GRPO(), schedule="known", max_chunk_bytes=3 * ROW)
    # GRPO clips token by token: whatever it leaves, both products have the same rows
    assert products["forward"] == TOKENS and products["hidden"] == products["weight"] <= ADVANTAGE


def test_clipped_rows_never_reach_memory_again():
    """What is kept stays in the memory where it was, and no more of it moves than there are gaps."""
    for size, share in itertools.product((1, 5, 40), (0.0, 0.3, 0.9, 1.0)):
        keep = (torch.rand(size, generator=generator(size)) < share).nonzero().squeeze(1)
        values = torch.arange(size * 3.0).reshape(size, 3)
        before, address = values.clone(), values.data_ptr()
        kept = Kept.of(keep, size)
        moved = kept.to_front(values)
        assert torch.equal(kept.rows.sort().values, keep) and torch.equal(moved, before[kept.rows])
        assert not keep.numel() or moved.data_ptr() == address
        assert kept.gaps.numel() == (keep >= keep.numel()).sum()
        stayed = torch.ones(keep.numel(), dtype=torch.bool).index_fill_(0, kept.gaps, False)
        assert torch.equal(kept.rows[stayed], stayed.nonzero().squeeze(1))


# --- precision


@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "cached", "two_pass"])
def test_fp16_loses_nothing_under_a_loss_scale(schedule):
    """A coefficient of 1 / (64 * 1024) is below fp16's smallest normal number."""
    rng = generator(3)
    tokens, width, vocabulary = 6, 16, V
    hidden = torch.randn(tokens, width, generator=rng).half()
    weight = (0.02 * torch.randn(vocabulary, width, generator=rng)).half()
    labels = torch.randint(0, vocabulary, (tokens,), generator=rng)
    scale = 2.0**16
    with torch.no_grad():
        old = gk.linear_token_logprobs(hidden, weight, labels).logprobs

    def gradients(hidden, weight, trains_head, **options):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trains_head)
        loss = gk.fused_linear_policy_loss(
            *leaves, labels, old.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32),
            torch.tensor([1.0]), cu_seqlens=offsets((tokens,)), normalizer=64.0 * 1024 / tokens, **options,
        ).loss  # fmt: skip
        (loss * scale).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    trains_head = schedule != "frozen"
    got = gradients(hidden, weight, trains_head, schedule=schedule, max_chunk_bytes=6 * ROW)
    expected = gradients(hidden.double(), weight.double(), trains_head, schedule="two_pass")
    for grad, reference in zip(got, expected, strict=True):
        eps = torch.finfo(torch.float16).eps
        assert (grad.double() - reference).abs().max() <= 2 * eps * reference.abs().max()
        # relative to each entry: a gradient that had been an fp16 subnormal would show here
        relative = (grad.double() - reference).abs() / reference.abs().clamp(min=1e-2 * reference.abs().max())
        assert relative.max() < 0.02


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_products_in_slabs_cover_the_vocabulary(dtype, bias):
    """More columns than either slab holds, and a rest; the products alone, against fp64."""
    rng, count = generator(5), LOGITS_SLAB + HIDDEN_SLAB + 77
    hidden = torch.randn(6, 16, generator=rng).to(dtype)
    weight, offset = (
        torch.randn(count, 16, generator=rng).to(dtype),
        torch.randn(count, generator=rng).to(dtype),
    )
    head = Head(weight, offset if bias else None, "float32")
    found = head.logits(hidden, torch.full((6, count), torch.nan, dtype=head.dtype))
    rows = torch.randn(6, count, generator=rng).to(head.rows_dtype)
    pairs = (
        (found, lambda kind: hidden.to(kind) @ weight.to(kind).t() + (offset.to(kind) if bias else 0)),
        (head.grad_hidden(rows), lambda kind: rows.to(kind) @ weight.to(kind)),
    )
    for got, product in pairs:
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        expected, plain = product(torch.float64), product(got.dtype)
        spread = Spread.of([plain.double() - expected], by_row=False)
        assert_as_exact("product", [got - expected], spread, [expected], torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "cached", "two_pass", "auto", "known"])
def test_two_backward_passes_and_reruns_are_bit_identical(schedule):
    case = make_case("linear", "packed", "on_policy" if schedule == "known" else "holes")

    def grads(times):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
        loss = call(case, leaves, ENTRY, gk.GSPO(), schedule=schedule, max_chunk_bytes=4 * ROW).loss * 3.0
        found = []
        for i in range(times):
            loss.backward(retain_graph=i + 1 < times)
            found.append({name: leaf.grad for name, leaf in leaves.items()})
            for leaf in leaves.values():
                leaf.grad = None
        return found

    first, second = grads(2)
    (again,) = grads(1)
    for name in case.inputs:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], again[name])
        assert (first[name] != 0).any()


def test_a_changed_weight_is_refused_in_a_second_backward():
    """The first backward has the gradient; a second one would compute with the new weight."""
    case = make_case("linear", "packed", "holes")
    leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
    loss = call(case, leaves, ENTRY, gk.GSPO()).loss
    loss.backward(retain_graph=True)
    with torch.no_grad():
        leaves["weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "frozen", "cached", "two_pass"])
@pytest.mark.parametrize("upstream", [1.0, 2.0**16])
def test_an_overflowed_coefficient_makes_no_nan(schedule, upstream):
    """Log-ratios of 500 overflow fp32, for both signs of the advantage: infinities, and zeros stay zeros."""
    rng = generator(9)
    hidden, weight = torch.randn(2, 3, 4, generator=rng), torch.randn(V, 4, generator=rng)
    hidden[..., 0], weight[:, 1] = 0.0, 0.0
    leaves = hidden.requires_grad_(), weight.requires_grad_(schedule != "frozen")
    labels, old = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), -500.0)
    objective = gk.GSPO(clip_low=1.0, clip_high=1e300)
    loss = gk.fused_linear_policy_loss(
        *leaves, labels, old, torch.tensor([-1.0, 1.0]), objective=objective, schedule=schedule
    ).loss
    (loss * upstream).backward()
    assert (hidden.grad[..., 1] == 0).all() and hidden.grad[..., [0, 2, 3]].isinf().all()
    if schedule != "frozen":
        assert (weight.grad[:, 0] == 0).all() and not weight.grad.isnan().any()
        assert weight.grad[0, 2:].abs().min() > 1e25


# --- refusals and plans


def test_every_refusal_names_its_reason():
    case = make_case("linear", "packed", "all")
    for schedule, reason in {
        "known": "GSPO off-policy makes them depend on the sequence",
        "deferred": "entropy_coef",
        "cached": "entropy_coef",
        "frozen": "entropy_coef",
    }.items():
        with pytest.raises(ValueError, match=f"'{schedule}' is not exact here: .*{reason}"):
            run(case, ENTRY, gk.GSPO(), schedule=schedule)
    case = make_case("linear", "packed", "k3")
    with pytest.raises(ValueError, match="'deferred' is not exact here: kl_beta"):
        run(case, ENTRY, gk.GSPO(), schedule="deferred")
    with pytest.raises(ValueError, match="'frozen' is not exact here: the lm_head's weight or bias needs"):
        run(case, ENTRY, gk.GSPO(), schedule="frozen")
    with pytest.raises(ValueError, match="'deferred' is not exact here: GRPO's coefficients"):
        run(make_case("linear", "packed", "holes"), ENTRY, gk.GRPO(), schedule="deferred")


def shapes(**changes):
    values = {
        "vocabulary": 32000, "width": 512, "chunk_rows": 100, "logits_itemsize": 4, "rows_itemsize": 4,
        "accumulator_itemsize": 4, "operand_itemsize": 4, "trains_hidden": True, "trains_weight": True,
        "one_launch": False, "one_pass": False, "device": "cpu",
    }  # fmt: skip
    return Shapes(**{**values, **changes})


TRAINED = Refusals({"frozen": "the head is trained"})


def test_small_parts_are_joined_where_evaluations_cost_more_than_products():
    tiny = shapes(vocabulary=61, width=16, chunk_rows=8)
    assert [part.strategy for part in plan_parts("auto", [4] * 20, 0, tiny, TRAINED)] == ["two_pass"]
    assert {part.strategy for part in plan_parts("auto", [4] * 2, 0, tiny, TRAINED)} == {"aligned"}


def test_an_evaluation_that_is_one_launch_counts_less():
    """Six chunks of whole sequences, or one evaluation and a fourth product."""
    short = shapes(vocabulary=4000, width=64, chunk_rows=96)
    for one_launch, expected in ((True, "aligned"), (False, "two_pass")):
        parts = plan_parts("auto", [16] * 32, 0, replace(short, one_launch=one_launch), TRAINED)
        assert {part.strategy for part in parts} == {expected}


def test_the_plan_knows_which_objectives_are_one_launch():
    tensors = (
        torch.zeros(2, 3, 8, requires_grad=True),
        torch.zeros(V, 8),
        torch.zeros(2, 3, dtype=torch.int64),
    )
    policy = (torch.zeros(2, 3), torch.ones(2))
    plans = [
        gk.explain_schedule(*tensors, *policy, objective=objective, schedule="aligned")
        for objective in (gk.GSPO(), gk.GSPOToken())
    ]
    assert plans[0].parts == plans[1].parts and plans[0].seconds < plans[1].seconds


@pytest.mark.skipif(cpp.unavailable(torch.device("cpu")) is not None, reason="needs the C++ backend")
@pytest.mark.parametrize(
    ("schedule", "terms", "together"),
    [
        ("aligned", "holes", True),
        ("deferred", "holes", True),
        ("cached", "holes", True),
        ("aligned", "entropy", False),
        ("two_pass", "entropy", False),
    ],
)
def test_rows_come_with_the_statistics_where_they_can(schedule, terms, together, monkeypatch):
    """The results are the same either way, so only counting shows it; an entropy bonus needs the logits."""
    rows, one_pass = [], cpp.logprobs_and_rows

    def counted(logits, *args, **kwargs):
        rows.append(logits.shape[1])
        return one_pass(logits, *args, **kwargs)

    monkeypatch.setattr(cpp, "logprobs_and_rows", counted)
    case = make_case("linear", "packed", terms)
    run(case, ENTRY, gk.GSPO(), "cpp", schedule=schedule)
    mask = case.labels != -100 if case.loss_mask is None else case.loss_mask != 0
    assert sum(rows) == (int(mask.sum()) if together else 0)


def test_rows_that_come_with_the_statistics_are_cheaper():
    for name in SCHEDULES:
        apart, together = (cost(name, 1000, shapes(one_pass=one), 1.0).moved for one in (False, True))
        assert together == apart - 1000 * 32000 * 4


@pytest.mark.parametrize("factors", [(2.0, -0.5), (2.0, 0.0), (2.0, math.inf), (0.0, math.nan)])
def test_an_exact_zero_beats_an_overflow(factors):
    """In place and not, whichever way the factors have it done."""
    values = [3.0, 0.0, math.inf, math.nan]
    want = [[0.0 if 0 in (value, factor) else value * factor for value in values] for factor in factors]
    rows, column = torch.tensor([values, values]), torch.tensor(factors).unsqueeze(1)
    for got in (times(rows, column), times_(rows.clone(), column)):
        assert torch.equal(got.nan_to_num(7.0), torch.tensor(want).nan_to_num(7.0))


@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES[1:]])
def test_parts_cover_every_scope_once(schedule):
    rng = generator(11)
    for trial in range(50):
        rows = torch.randint(0, 100 if schedule == "aligned" else 300, (trial,), generator=rng).tolist()
        idle = trial // 3
        parts = plan_parts(schedule, rows, idle, shapes(), Refusals())
        covered = [i for part in parts for i in range(part.start, part.stop)]
        assert covered == sorted(set(covered))
        assert all(rows[i] == 0 for i in set(range(trial)) - set(covered))
        for part in parts:
            assert part.rows == sum(rows[part.start : part.stop]) > 0
            assert (part.strategy == "forward") == (part.start >= trial - idle)
            if part.strategy == "aligned":
                assert part.rows <= 100
                assert part.resting == sum(rows[max(part.start, trial - idle) : part.stop])
            if part.strategy == "deferred":
                assert part.stop - part.start == 1


def test_sequences_that_fit_share_chunks_of_about_the_same_size():
    parts = plan_parts("auto", [30] * 11, 0, shapes(), TRAINED)
    assert [part.rows for part in parts] == [90, 90, 90, 60]
    assert {part.strategy for part in parts} == {"aligned"}


def test_long_sequences_are_deferred_where_that_pays_and_recomputed_where_not():
    """Reading and writing [V, H] for each chunk of a sequence must cost less than a fourth product."""
    wide = shapes(width=4096, chunk_rows=1000)
    strategies = {rows: plan_parts("auto", [rows], 0, wide, TRAINED)[0].strategy for rows in (500, 20000)}
    assert strategies == {500: "aligned", 20000: "deferred"}
    narrow = replace(wide, width=64, chunk_rows=8)
    assert plan_parts("auto", [40], 0, narrow, Refusals())[0].strategy != "aligned"
    refused = Refusals({"deferred": "kl_beta", "cached": "not here", "frozen": "trains"})
    assert plan_parts("auto", [20000], 0, wide, refused)[0].strategy == "two_pass"


def test_a_frozen_head_takes_two_products_for_long_sequences():
    one = plan_parts(
        "auto", [5000], 0, shapes(trains_weight=False), Refusals({"deferred": "no", "cached": "no"})
    )
    assert one == [Part("frozen", 0, 1, 5000)]


def test_products_of_the_cost_model():
    """The table of the design, in units of one product over all rows."""
    both = shapes(chunk_rows=10**9)
    counts = {name: cost(name, 1000, both, 0.5).products / 1000 for name in ("forward", *SCHEDULES)}
    assert counts == {
        "forward": 1.0, "known": 3.0, "aligned": 2.0, "deferred": 3.0, "frozen": 2.0, "cached": 2.0,
        "two_pass": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip_inactive", ["backward", "all", "none"])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "cached", "two_pass"])
def test_explained_products_are_those_that_run(products, schedule, skip_inactive, layout):
    """Every sequence with an advantage active: then nothing is left to guess."""
    case = make_case(
        "linear", layout, "holes", lengths=(5, 3, 4, 4, 3, 2), advantages=(1.0, 0.0, -1.0, 0.5, -0.7, 0.0),
        log_s=(1e-4, 0.0, -1e-4, 1e-4, 2e-4, 0.0),
    )  # fmt: skip
    options = {"schedule": schedule, "skip_inactive": skip_inactive, "max_chunk_bytes": 8 * ROW}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
    plan = gk.explain_schedule(
        leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
        bias=leaves["bias"], loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens, **options,
    )  # fmt: skip
    run(case, ENTRY, gk.GSPO(), **options)
    rows = sum(plan.parts.values())
    expected = products["forward"] + products["hidden"] + products["weight"]
    if skip_inactive == "none" and schedule != "deferred":
        # masked rows and those without advantage take part there
        assert rows == case.labels.numel()
    assert plan.gemms * rows == pytest.approx(expected)
    assert products["most"] <= plan.chunk_rows <= 8


def test_a_plan_reads_well():
    case = make_case("linear", "packed", "holes")
    leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
    plan = gk.explain_schedule(
        leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
        bias=leaves["bias"], loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens,
    )  # fmt: skip
    text = str(plan)
    assert plan.schedule == "aligned" and "GEMMs" in text and "cost model" in text
    assert set(plan.alternatives) == set(SCHEDULES) - {"aligned"}
    assert "not known: it needs coefficients that depend on one token alone" in text
    assert plan.peak_bytes == plan.chunk_bytes == plan.chunk_rows * ROW  # fp32: dWeight is its own sum
    with torch.no_grad():
        forward = gk.explain_schedule(
            leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
            cu_seqlens=case.cu_seqlens,
        )  # fmt: skip
    assert forward.gemms == 1.0 and "no input needs a gradient" in forward.reason


def test_extra_memory_of_the_plan():
    """Beyond chunk, dHidden and dWeight: what the design's table names."""
    hidden = torch.zeros(1, 40, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(V, 8, dtype=torch.bfloat16, requires_grad=True)
    labels, old, advantages = torch.zeros(1, 40, dtype=torch.int64), torch.zeros(1, 40), torch.ones(1)
    explain = functools.partial(
        gk.explain_schedule, hidden, weight, labels, old, advantages, max_chunk_bytes=10 * ROW
    )
    accumulator, chunk = V * 8 * 4, 10 * ROW
    assert explain(schedule="two_pass").peak_bytes == chunk + accumulator
    assert explain(schedule="deferred").peak_bytes == chunk + 2 * accumulator
    # rows are fp32 on CPUs that don't multiply bf16 natively
    rows = 40 * V * Head(weight, None, "float32").rows_dtype.itemsize
    assert explain(schedule="cached").peak_bytes == chunk + accumulator + rows
    assert explain(schedule="auto").peak_bytes <= chunk + 2 * accumulator


# --- memory


def test_default_chunk_is_a_function_of_shapes_and_memory():
    gib = 2**30
    assert memory.default_chunk_bytes(4 * 151936, 80 * gib, "cuda") == 4096 * 4 * 151936
    assert memory.default_chunk_bytes(4 * 151936, 24 * gib, "cpu") == 1024 * 4 * 151936
    assert memory.default_chunk_bytes(4 * 100000, 24 * gib, "cpu") == 1024 * 4 * 100000
    assert memory.default_chunk_bytes(4 * 50000, 24 * gib, "cpu") == gib // 4
    assert memory.default_chunk_bytes(4 * 32000, 24 * gib, "cpu") == 2048 * 4 * 32000
    assert memory.default_chunk_bytes(4 * 32000, 2 * gib, "cpu") == gib // 8
    assert memory.default_chunk_bytes(4 * 151936, 4 * gib, "cpu") == gib // 4
    assert memory.default_chunk_bytes(4 * 1000, 24 * gib, "cpu") == memory.MIN_CHUNK_BYTES
    assert memory.host_memory() > gib


def test_the_case_of_the_product_counts_is_what_it_says():
    case = work_case("packed")
    active = [
        s.count for s in oracle.sequences(case.counted, case.cu_seqlens) if case.advantages[s.index] != 0
    ]
    assert (int(case.counted.sum()), sum(active)) == (TOKENS, ADVANTAGE)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
    call(case, leaves, ENTRY, gk.GSPO()).loss.backward()
    assert int(leaves["hidden"].grad.ne(0).any(-1).sum()) == ACTIVE


@pytest.mark.parametrize("schedule", ["auto", "two_pass"])
def test_tied_embeddings(schedule):
    """The lm_head's weight is the embedding too: both gradients reach it."""
    rng = generator(5)
    embedding = torch.randn(V, 8, generator=rng)
    ids, labels = torch.randint(0, V, (2, 5), generator=rng), torch.randint(0, V, (2, 5), generator=rng)
    old, advantages = -torch.rand(2, 5, generator=rng) - 3, torch.tensor([1.0, -0.5])

    def gradient(fused, dtype=torch.float32):
        weight = embedding.to(dtype).requires_grad_()
        hidden = torch.tanh(torch.nn.functional.embedding(ids, weight))
        if fused:
            loss = gk.fused_linear_policy_loss(
                hidden, weight, labels, old, advantages, objective=gk.GSPO(clip_low=1.0, clip_high=1e9),
                schedule=schedule,
            ).loss  # fmt: skip
        else:
            logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            loss = -((logprobs - old).mean(1).exp() * advantages).mean()
        loss.backward()
        return weight.grad

    exact, plain, ours = gradient(False, torch.float64), gradient(False), gradient(True)
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed
