"""How a schedule is chosen, explained and refused."""

import functools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.linear.schedule import SCHEDULES, Part, plan_parts
from gspo_kernels.linear.sums import times, times_
from gspo_kernels.ops import memory
from tests import oracle
from tests.cases import LAYOUTS, call, generator, make_case, run
from tests.schedules.common import ACTIVE, ADVANTAGE, ENTRY, ROW, TOKENS, V, work_case


def test_every_refusal_names_its_reason():
    case = make_case("linear", "packed", "all")
    for schedule, reason in {
        "known": "GSPO off-policy makes them depend on the sequence",
        "deferred": "entropy_coef",
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


CHUNK_ROWS = 100


def chosen(*arguments, requires_grad=(True, True), **options):
    hidden, weight = (
        torch.zeros(*size, requires_grad=grad)
        for size, grad in zip(((2, 3, 8), (V, 8)), requires_grad, strict=True)
    )
    labels, old = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    return gk.explain_schedule(hidden, weight, labels, old, torch.ones(2), *arguments, **options)


def test_the_rule_takes_the_first_schedule_that_is_exact():
    """Its five lines, each with a call that the lines above don't serve."""
    two_rows = {"max_chunk_bytes": 2 * ROW}
    with torch.no_grad():
        assert chosen().schedule == "forward"
    assert chosen(objective=gk.GRPO()).schedule == "known"
    assert chosen(requires_grad=(True, False)).schedule == "frozen"
    assert chosen(requires_grad=(True, False), entropy_coef=0.1).schedule == "aligned"
    assert chosen().schedule == "aligned"
    assert chosen(**two_rows).schedule == "deferred"
    assert chosen(ref_logprobs=torch.zeros(2, 3), kl_beta=0.1, **two_rows).schedule == "two_pass"
    groups = {"objective": gk.SSPO(), **two_rows}
    assert chosen(**groups).schedule == "two_pass"


@pytest.mark.skipif(cpp.unavailable(torch.device("cpu")) is not None, reason="needs the C++ backend")
@pytest.mark.parametrize(
    ("schedule", "terms", "together"),
    [
        ("aligned", "holes", True),
        ("deferred", "holes", True),
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


@pytest.mark.parametrize("factors", [(2.0, -0.5), (2.0, 0.0), (2.0, math.inf), (0.0, math.nan)])
def test_an_exact_zero_beats_an_overflow(factors):
    """In place and not, whichever way the factors have it done."""
    values = [3.0, 0.0, math.inf, math.nan]
    want = [[0.0 if 0 in (value, factor) else value * factor for value in values] for factor in factors]
    rows, column = torch.tensor([values, values]), torch.tensor(factors).unsqueeze(1)
    for got in (times(rows, column), times_(rows.clone(), column)):
        assert torch.equal(got.nan_to_num(7.0), torch.tensor(want).nan_to_num(7.0))


@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES[1:]])
def test_parts_cover_every_group_once(schedule):
    rng = generator(11)
    for trial in range(50):
        rows = torch.randint(0, 100 if schedule == "aligned" else 300, (trial,), generator=rng).tolist()
        idle = trial // 3
        parts = plan_parts(schedule, rows, idle, CHUNK_ROWS, True)
        covered = [i for part in parts for i in range(part.start, part.stop)]
        assert covered == sorted(set(covered))
        assert all(rows[i] == 0 for i in set(range(trial)) - set(covered))
        for part in parts:
            assert part.rows == sum(rows[part.start : part.stop]) > 0
            assert (part.schedule == "forward") == (part.start >= trial - idle)
            if part.schedule == "aligned":
                assert part.rows <= 100
                assert part.inactive_rows == sum(rows[max(part.start, trial - idle) : part.stop])
            if part.schedule == "deferred":
                assert part.stop - part.start == 1


def test_sequences_that_fit_share_chunks_of_about_the_same_size():
    parts = plan_parts("auto", [30] * 11, 0, CHUNK_ROWS, True)
    assert [part.rows for part in parts] == [90, 90, 90, 60]
    assert {part.schedule for part in parts} == {"aligned"}


def test_short_and_long_sequences_of_a_call_each_go_their_way():
    rows = [30, 300, 70, 80]
    for defers, longer in ((True, "deferred"), (False, "two_pass")):
        parts = plan_parts("auto", rows, 0, CHUNK_ROWS, defers)
        assert [(part.schedule, part.rows) for part in parts] == [
            ("aligned", 30), (longer, 300), ("aligned", 70), ("aligned", 80),
        ]  # fmt: skip
    assert plan_parts("frozen", rows, 0, CHUNK_ROWS, True) == [Part("frozen", 0, 4, 480)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip_inactive", ["backward", "all", "none"])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "two_pass"])
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
    assert plan.products * rows == pytest.approx(expected)
    assert products["most"] <= 8


def test_a_plan_reads_well():
    case = make_case("linear", "packed", "holes")
    leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
    plan = gk.explain_schedule(
        leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
        bias=leaves["bias"], loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens,
    )  # fmt: skip
    text = str(plan)
    assert plan.schedule == "aligned" and plan.reason in text
    assert "3.00 matrix products over the counted tokens (aligned" in text
    assert plan.peak_bytes == plan.parts["aligned"] * ROW  # fp32: dWeight is its own sum
    with torch.no_grad():
        forward = gk.explain_schedule(
            leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
            cu_seqlens=case.cu_seqlens,
        )  # fmt: skip
    assert forward.products == 1.0 and "no input needs a gradient" in forward.reason


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
    assert explain(schedule="auto").peak_bytes <= chunk + 2 * accumulator


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
