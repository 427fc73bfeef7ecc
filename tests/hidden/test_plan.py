"""Plans from numbers alone: which rows are in which step, and where chunks end."""

import itertools
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo_kernels as gk
from gspo_kernels.hidden import loss
from gspo_kernels.hidden.call import call_of
from gspo_kernels.hidden.chunk import cut
from gspo_kernels.hidden.plan import make_plan

NAMES = st.sampled_from(["auto", "two_pass", "deferred", "frozen", "forward"])


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    chunk_rows, count = draw(st.integers(1, 60)), len(lengths)
    return {
        "schedule": draw(NAMES),
        "lengths": lengths,
        "inactive": draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)),
        "groups": draw(st.none() | st.lists(st.integers(0, 3), min_size=count, max_size=count)),
        "chunk_rows": chunk_rows,
        "least_rows": draw(st.integers(1, chunk_rows)),
        "min_statistics_rows": draw(st.sampled_from([1, 16])),
        "min_deferred_rows": draw(st.sampled_from([0, 1, 20])),
        "min_aligned_rows": draw(st.sampled_from([0, 30])),
        "by_columns": draw(st.booleans()),
        "batch_invariant": draw(st.booleans()),
        "one_evaluation": draw(st.booleans()),
    }


@given(problems())
@settings(max_examples=300, deadline=None)
def test_plans_keep_their_promises(problem):
    plan = make_plan(**problem)
    lengths, groups, inactive = problem["lengths"], problem["groups"], problem["inactive"]
    # steps have every row once
    spans = sorted((step.start, step.stop) for step in plan.steps if step.row_count)
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), sum(lengths)]
    present = [i for i in plan.sequences if lengths[i]]
    assert sorted(present) == [i for i, length in enumerate(lengths) if length]
    ends = [0, *itertools.accumulate(lengths[i] for i in plan.sequences)]
    assert all((ends[step.first], ends[step.last]) == (step.start, step.stop) for step in plan.steps)
    # chunks keep to the budget, which is the smaller one if all rows with a gradient are projected twice
    twice = {step.schedule for step in plan.steps} - {"forward"} == {"two_pass"}
    assert plan.max_rows <= plan.chunk_rows == problem["least_rows" if twice else "chunk_rows"]
    for step in plan.steps:
        sizes = [stop - start for start, stop in itertools.pairwise((0, *step.ends))]
        assert sum(sizes) == step.row_count and all(sizes)
        only_statistics = step.schedule in ("forward", "two_pass")
        budget = max(plan.max_rows, problem["min_statistics_rows"] if only_statistics else 0)
        assert max(sizes, default=0) <= budget
        assert step.schedule != "aligned" or len(sizes) == 1
    # groups stay together and in order
    step_of = {i: n for n, step in enumerate(plan.steps) for i in plan.sequences[step.first : step.last]}
    for group in set(groups or ()):
        members = [i for i, other in enumerate(groups) if other == group and lengths[i]]
        assert len({step_of.get(i) for i in members}) <= 1
    if problem["one_evaluation"]:
        forward = [step.schedule == "forward" for step in plan.steps]
        assert forward == sorted(forward, reverse=True)
    if groups is not None:
        return
    assert plan.in_order or not problem["batch_invariant"] or any(inactive)
    # what has no gradient is projected once, or fills up the last chunk
    for step in plan.steps:
        idle = [bool(inactive[i]) for i in plan.sequences[step.first : step.last]]
        if step.schedule == "forward":
            assert all(idle) or problem["schedule"] == "forward"
        elif step.schedule != "aligned":
            assert not any(idle)


@given(st.integers(0, 5000), st.integers(1, 700), st.sampled_from([1, 128]))
@settings(max_examples=200, deadline=None)
def test_cut_gives_chunks_of_similar_size(count, max_rows, multiple):
    ends = cut(count, max_rows, multiple)
    sizes = [stop - start for start, stop in itertools.pairwise((0, *ends))]
    assert sum(sizes) == count and max(sizes, default=0) <= max_rows
    assert len(sizes) == -(-count // max_rows) or multiple > 1
    if multiple == 1:
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
    elif max_rows % multiple == 0:
        assert all(size % multiple == 0 for size in sizes[:-1])


CALLS = [("auto", False), ("deferred", False), ("aligned", False), ("auto", True), ("two_pass", True)]


@pytest.mark.parametrize(("schedule", "invariant"), CALLS)
def test_only_accumulators_change(schedule, invariant, monkeypatch):
    """Call and plan are frozen, and the matmul is the same object with the same attributes after the call."""
    seen = []

    def recorded(*arguments, **options):
        call = call_of(*arguments, **options)
        seen.append((call, dict(vars(call.matmul))))
        return call

    monkeypatch.setattr(loss, "call_of", recorded)
    plans, plan_of = [], loss.plan_of
    monkeypatch.setattr(loss, "plan_of", lambda *given: plans.append(plan_of(*given)) or plans[-1])
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((3, 8, 16), (50, 16)))
    labels = torch.randint(50, (3, 8), generator=generator)
    mask = torch.arange(8) < torch.tensor([[8], [5], [2]])
    out = gk.fused_linear_policy_loss(
        hidden.requires_grad_(), weight.requires_grad_(), labels, torch.full((3, 8), -4.0), torch.ones(3),
        loss_mask=mask, schedule=schedule, max_chunk_bytes=50 * 4 * 9, batch_invariant=invariant,
        entropy_coef=0.0 if schedule == "deferred" else 0.01, objective=gk.GSPO(0.2, 0.2),
    )  # fmt: skip
    out.loss.backward()
    (call, before), ((plan, _),) = seen[0], plans
    assert all(value is before[name] for name, value in vars(call.matmul).items())
    for frozen in (call, plan):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, fields(frozen)[0].name, None)
