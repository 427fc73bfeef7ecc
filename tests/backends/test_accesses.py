"""Memory accesses of kernels: none outside of their tensors, no result that depends on which thread or
program is first, and no more accesses than needed.

``tests/conftest.py`` checks the bounds of every launch of the suite under the interpreter. The tests here
look for races, count how often rows are read and written, and plant faults that must be found.
"""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.triton import logprobs
from gspo_kernels.backends.triton.launch import Tile
from gspo_kernels.core.types import LogitRows, RatioClip, RatioOperands, RowPair
from tests.backends.accesses import backwards, counted, rebuilt, without_races
from tests.backends.row_calls import IGNORE, PLAIN, Rows, draw
from tests.draws import shifted_seed
from tests.gpu.calls import CALLS, Scale

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are seen under the interpreter")
ROWS = Rows("triton")


@pytest.fixture(autouse=True)
def triton_from_log_probs(monkeypatch):
    """Take Triton for losses from log-probs, too: on the CPU these losses take another backend."""
    monkeypatch.setattr("gspo_kernels.losses.resolve", lambda *_: "triton")
    monkeypatch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})


def scaled(factor=0.5):
    values = torch.randn(20000)
    with counted(values) as traffic:
        kernels.scale_(values, torch.tensor(factor))
    return values, traffic.reads[0], traffic.writes[0]


LAUNCHES = {
    name: partial(call, torch.device("cpu"), Scale(8, 300, 32, 1)) for name, call in CALLS.items()
} | {"scale": scaled}


@pytest.mark.parametrize("call", LAUNCHES.values(), ids=LAUNCHES)
def test_launches_are_race_free_in_any_order(call):
    with without_races():
        want = [one.clone() for one in call()]
    torch.manual_seed(shifted_seed(0))
    with backwards() as programs, without_races():
        got = call()
    assert max(programs) > 1 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def gradients_of(V, place, dtype, out_dtype, in_one_pass):
    """Compute gradients of rows that begin ``place`` elements behind a multiple of 16 bytes. They are written
    over the rows, or elsewhere if ``out_dtype`` is None.
    """
    room = torch.randn(1, 3, (V + place + 63) // 64 * 64).to(dtype)
    logits = room[..., place : place + V]
    out = torch.empty_like(logits)
    if out_dtype is not None:
        wider = dtype.itemsize // out_dtype.itemsize
        out = room.view(out_dtype)[..., wider * place :][..., :V]
    labels, grad = torch.tensor([[0, V - 1, IGNORE]]), torch.tensor([[1.0, -2.0, 1.0]])
    if in_one_pass:
        return ROWS.and_grad(logits, labels, grad, out=out)
    return ROWS.backward(logits, labels, ROWS.forward(logits, labels, entropy=False), grad, out=out)


# The 16-bit gradient of every block but the first lies over the fp32 logits of the block before it.
NARROWS = (4096 * 2 + 16, 0, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("in_one_pass", (False, True))
def test_in_place_gradients_have_no_race(in_one_pass):
    for case in (
        NARROWS,
        (4096 * 2 + 21, 1, torch.float32, torch.float16),
        (4096 * 2 + 21, 1, torch.float32, torch.float32),
        (8192 + 16, 0, torch.bfloat16, torch.bfloat16),
        (4096 + 21, 1, torch.float32, None),
    ):
        with without_races():
            gradients_of(*case, in_one_pass)


# --- how often rows are read and written

V = 4096 * 2 + 77
COUNTED, MOVING, EACH = [1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1], [1] * 6
"""Which of the six rows have a counted label; a counted label and a gradient; and all rows."""
LABELS = torch.tensor([[0, V - 1, IGNORE], [5000, IGNORE, 4096]])
GRAD = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, 2.0]])
KEPT = PLAIN._replace(kept=torch.full((2, 3, -(-V // 32)), -1, dtype=torch.int32))


def walks(traffic, gradients=0):
    """Return how often the log-sum-exp reads each row of logits; ``gradients`` counts other reads."""
    return (torch.tensor(traffic.per_row(traffic.reads, 0)) - torch.tensor(gradients)).tolist()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_rows_are_read_once_and_written_once(dtype):
    """Rows without gradient are written but not read, like masked ones. Log-probs and gradients in one launch
    take two walks over a row, of which the second is meant to hit the cache.
    """
    logits = torch.randn(2, 3, V).to(dtype)
    old, stats = torch.zeros(2, 3), ROWS.forward(logits, LABELS)
    form = RatioClip(-1e-3, 1e-3, math.inf, False, "sequences", 1.0)
    operands = LogitRows(logits, LABELS, PLAIN, IGNORE), None, RatioOperands(old, torch.ones(2)), form
    for call, rows, old_rows in (
        (lambda: ROWS.forward(logits, LABELS), COUNTED, [0] * 6),
        (lambda: ROWS.forward(logits, LABELS, KEPT), COUNTED, [0] * 6),
        (lambda: kernels.sequence_ratio_forward(*operands), COUNTED, COUNTED),
    ):
        with counted(logits, old) as traffic:
            call()
        assert walks(traffic) == rows and traffic.reads[1].tolist() == old_rows
        assert traffic.per_row(traffic.writes, 0) == [0] * 6
    for out in (torch.empty_like(logits), logits):
        for transform in (PLAIN, KEPT):
            with counted(logits, out) as traffic:
                ROWS.backward(logits, LABELS, stats, GRAD, None, transform, out=out)
            assert traffic.per_row(traffic.reads, 0) == MOVING and traffic.per_row(traffic.writes, 1) == EACH
        with counted(logits, out) as traffic:
            ROWS.and_grad(logits, LABELS, GRAD, out=out)
        assert walks(traffic, MOVING) == COUNTED and traffic.per_row(traffic.writes, 1) == EACH


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_divergences_read_both_sides_once(beta):
    """The forward reads each row twice; the second walk is meant to hit the cache."""
    logits = torch.randn(2, 3, V).bfloat16()
    teacher, out = logits.flip(0).clone(), torch.empty_like(logits)
    pair = RowPair(logits, teacher, LABELS, PLAIN, PLAIN, beta, IGNORE)
    with counted(logits, teacher) as traffic:
        known = kernels.divergence(pair, None, None, None)
    twice = [2 * row for row in COUNTED]
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [twice, twice]
    with counted(logits, teacher, out) as traffic:
        kernels.divergence(pair, known, GRAD, out)
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [MOVING] * 2
    assert traffic.per_row(traffic.writes, 2) == EACH


def test_scaling_by_one_writes_nothing():
    for factor, touched in ((1.0, 0), (0.5, 1)):
        assert all((count == touched).all() for count in scaled(factor)[1:])


# --- planted faults


@triton.jit
def arrivals_kernel(
    rows_ptr, counter_ptr, sum_ptr, WIDTH: tl.constexpr, STEP: tl.constexpr, SEM: tl.constexpr,
    SCOPE: tl.constexpr, BARRIER_BEFORE: tl.constexpr, BARRIER_BEHIND: tl.constexpr, VOLATILE: tl.constexpr,
):  # fmt: skip
    """Write a row of 4 numbers, every STEP-th of memory with 5 per row; the last program adds up 3 rows."""
    lanes = tl.arange(0, 8)
    tl.store(rows_ptr + tl.program_id(0) * STEP + lanes, lanes, mask=lanes < WIDTH)
    if BARRIER_BEFORE:
        tl.debug_barrier()
    count = tl.atomic_add(counter_ptr, 1, sem=SEM, scope=SCOPE)
    if BARRIER_BEHIND:
        tl.debug_barrier()
    if count == tl.num_programs(0) - 1:
        lanes = tl.arange(0, 16)
        pointers = rows_ptr + lanes // 4 * 5 + lanes % 4
        tl.store(sum_ptr, tl.sum(tl.load(pointers, mask=lanes < 12, other=0, volatile=VOLATILE)))


def arrive(**changes):
    rows, counter, total = (torch.zeros(size, dtype=torch.int32) for size in ((4, 5), 1, 1))
    right = {"WIDTH": 4, "STEP": 5, "SEM": "acq_rel", "SCOPE": "gpu", "VOLATILE": True}
    right |= {"BARRIER_BEFORE": True, "BARRIER_BEHIND": True}
    arrivals_kernel[(3,)](rows[:3, :4], counter, total, **right | changes)
    return total.item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WIDTH": 5}, "out of bounds: store of 4 bytes by program 0 in 1 lanes"),  # between rows
        ({"STEP": 10}, "out of bounds: store of 4 bytes by program 2 in 4 lanes"),
        ({"STEP": 0}, "race: store by program 1"),
        ({"BARRIER_BEFORE": False}, "race: volatile load"),
        ({"BARRIER_BEHIND": False}, "race: volatile load"),
        ({"SEM": "acquire"}, "race: volatile load"),
        ({"SEM": "release"}, "race: volatile load"),
        ({"SCOPE": "cta"}, "scope CTA"),
        ({"VOLATILE": False}, "race: load by .* may come from a cache"),
    ],
)
def test_a_fault_is_found(change, message):
    with nullcontext() if "bounds" in message else without_races():
        assert arrive() == 18
        with pytest.raises(Exception, match=message):
            arrive(**change)


def test_a_missing_barrier_is_found():
    """Barriers are needed where rows are narrowed in place, and where a row is summed up and overwritten."""
    overwritten = (1024, 0, torch.float32, torch.float32)
    for case, in_one_pass in ((NARROWS, False), (NARROWS, True), (overwritten, True)):
        found = pytest.raises(Exception, match="race: store by program 0 over what")
        with without_races(), rebuilt(create_barrier=lambda plain: None), found:
            gradients_of(*case, in_one_pass)


@pytest.mark.parametrize("V", [301, 304])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_programs_that_share_a_row_write_the_same(dtype, V, monkeypatch):
    """However many they are, in place or not; of rows without a gradient each writes its zeros."""
    logits, labels, *grads = draw(V, dtype, B=1, T=4)
    labels[0, 1], grads[0][0, 2], grads[1][0, 2] = IGNORE, 0.0, 0.0
    stats, found = ROWS.forward(logits, labels), []
    monkeypatch.setattr(logprobs, "_PARTS", dict.fromkeys((2, 4, 8), Tile(128, 4)))
    for blocks in (1, 2, 3):
        monkeypatch.setattr(logprobs, "_BLOCKS", blocks)
        with without_races():
            found.append(ROWS.backward(logits, labels, stats, *grads))
            found.append(ROWS.backward(there := logits.clone(), labels, stats, *grads, out=there))
    assert all(torch.equal(each, found[-2]) for each in found) and not found[0].isnan().any()
    assert found[0].any(-1).tolist() == [[True, False, False, True]]
