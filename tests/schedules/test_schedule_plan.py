"""How a schedule is chosen, explained and refused."""

import functools
import math
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.linear.cost import Shapes, cost
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.picture import STRATEGIES
from gspo_kernels.linear.scaling import times, times_
from gspo_kernels.linear.schedule import SCHEDULES, Part, Refusals, plan_parts
from gspo_kernels.ops import memory
from tests import oracle
from tests.cases import LAYOUTS, call, generator, make_case, run
from tests.schedules.common import ACTIVE, ADVANTAGE, ENTRY, ROW, TOKENS, V, work_case


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
        "one_launch": False, "one_pass": False, "one_pass_settled": False, "device": "cpu",
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


TEACHERS = {
    "head": {"hidden": torch.zeros(21, 40), "weight": torch.zeros(V, 40)},
    "top k": {"hidden": torch.zeros(21, 4), "weight": torch.zeros(V, 4), "top_k": 5},
    "ids": {"ids": torch.zeros(21, 2, dtype=torch.int64), "logprobs": torch.full((21, 2), -1.0)},
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_teacher_is_part_of_the_plan(products, kind):
    """Its product, its logits in each chunk, and gradients of rows that have none of the objective."""
    case, teacher = work_case("packed"), gk.Teacher(**TEACHERS[kind])
    width, theirs = 16, teacher.hidden.shape[1] if teacher.hidden is not None else 0
    row = ROW if teacher.hidden is None else 2 * ROW
    for schedule, objective, skip in (
        ("known", gk.GRPO(), "backward"),
        ("aligned", gk.GSPO(), "none"),
        ("aligned", gk.GSPO(), "backward"),
        ("two_pass", gk.GSPO(), "backward"),
        ("auto", gk.GSPO(), "backward"),
    ):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in case.inputs.items()}
        options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": 8 * row}
        explain = functools.partial(
            gk.explain_schedule, leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs,
            case.advantages, bias=leaves["bias"], cu_seqlens=case.cu_seqlens, objective=objective, **options,
        )  # fmt: skip
        alone, plan = explain(), explain(teacher=teacher)
        products.update(dict.fromkeys(products, 0))
        call(case, leaves, ENTRY, objective, teacher=teacher, **options).loss.backward()
        assert products["hidden"] == products["weight"] == TOKENS == sum(plan.parts.values())
        assert plan.gemms * TOKENS == pytest.approx(products["projected"] / width + 2 * TOKENS)
        assert plan.teacher_gemms == theirs / width and "teacher" in plan.reason
        assert (f"{theirs / width:.2f} of them the teacher's" in str(plan)) == (theirs > 0)
        assert 0 < products["most"] <= plan.chunk_rows <= 8
        assert plan.peak_bytes == plan.chunk_bytes == plan.chunk_rows * row
        assert plan.seconds > alone.seconds * (1.0 if schedule in ("known", "aligned") else 0.0)
        with torch.no_grad():
            forward = explain(teacher=teacher)
        assert forward.gemms == 1.0 + theirs / width and forward.seconds < plan.seconds


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


def test_a_plan_is_drawn(tmp_path):
    """Its strategies in their colours, the rest of the figure in grey."""
    image = pytest.importorskip("matplotlib.image")
    hidden, weight = torch.zeros(60, 8, requires_grad=True), torch.zeros(V, 8, requires_grad=True)
    old, advantages = torch.zeros(60), torch.tensor([1.0, -1.0])
    offsets, labels = torch.tensor([0, 50, 60]), torch.zeros(60, dtype=torch.int64)
    colours = {}
    for schedule in ("two_pass", "deferred"):
        plan = gk.explain_schedule(
            hidden, weight, labels, old, advantages, cu_seqlens=offsets, schedule=schedule,
            max_chunk_bytes=16 * ROW,
        )  # fmt: skip
        path = plan.plot(tmp_path / f"{schedule}.png")
        pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
        colours[schedule] = {
            name: int((abs(pixels - [int(code[i : i + 2], 16) for i in (1, 3, 5)]).sum(-1) <= 3).sum())
            for name, code in STRATEGIES.items()
        }
    assert colours["two_pass"]["two_pass"] > 10_000 and colours["deferred"]["deferred"] > 10_000
    assert colours["two_pass"]["deferred"] == colours["deferred"]["two_pass"] == 0


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
