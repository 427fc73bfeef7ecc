"""What kernels do to memory: no access outside of their tensors, no result that depends on which thread or
program is first, and no more accesses than they must.

Every launch of the suite under the interpreter is held to the bounds (``tests/conftest.py``). Here are the
races, how often rows are read and written, and faults that must be found.
"""

import math
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gspo_kernels import kernels
from gspo_kernels.kernels import columns, gradients, sequence_ratio, sequences
from gspo_kernels.kernels import steps as step_kernels
from gspo_kernels.kernels.columns import element
from gspo_kernels.ops.selected import SelectedGradients, score, write_gradient
from gspo_kernels.types import KLPenalty, RatioClip, RowPair, Shard
from tests.draws import shifted_seed
from tests.gpu.calls import CALLS, Scale
from tests.kernels.accesses import backwards, counted, order_of_programs, rebuilt, shuffle, without_races
from tests.kernels.row_calls import IGNORE, PLAIN, Rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are seen under the interpreter")
ROWS = Rows("triton")
GSPO = RatioClip(math.log(1 - 3e-4), math.log(1 + 4e-4), math.inf, False, "sequences", 1.0)
OPTIONS = dict.fromkeys(("weights", "lengths", "normalizer", "cu_seqlens"))


def steps(packed, level="sequence"):
    """From log-probs; what users call for them takes the CPU's own backend here."""
    mask, old = torch.rand(4, 9) < 0.8, 0.1 * torch.randn(4, 9)
    ends = torch.tensor([0, 9, 9, 30, 36], dtype=torch.int32) if packed else None
    rows = [value.view(1, -1) if packed else value for value in (old + 0.1, mask, old)]
    form = RatioClip(math.log(0.9), math.log(1.1), math.inf, packed, "sequences", 1.0, level)
    options = OPTIONS | {"cu_seqlens": ends}
    if level == "token":
        options |= {"weights": rows[0].exp(), "kl": KLPenalty(rows[0] + 0.2, torch.tensor(0.1), "k3")}
    return kernels.ratio_step(*rows, torch.randn(4), form, **options)


def scaled():
    values = torch.randn(20000)
    kernels.scale_(values, torch.tensor(0.5))
    return (values,)


LAUNCHES = {
    name: partial(call, torch.device("cpu"), Scale(8, 300, 32, 1))
    for name, call in CALLS.items()
    if not name.startswith("log-probs, ") and name != "log-probs"
} | {
    "step": partial(steps, False),
    "step, tokens, packed": partial(steps, True, "token"),
    "scale": scaled,
}


@pytest.mark.parametrize("call", LAUNCHES.values(), ids=LAUNCHES)
def test_no_launch_has_a_race_or_an_order(call):
    with without_races():
        want = [one.clone() for one in call()]
    for arrange in (backwards, shuffle(0)):
        torch.manual_seed(shifted_seed(0))
        with order_of_programs(arrange) as seen, without_races():
            got = call()
        assert any(order != sorted(order) for order in seen)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def gradients_of(V, place, dtype, out_dtype, in_one_pass):
    """Gradients of rows that begin ``place`` elements behind a multiple of 16 bytes, written over them, or
    elsewhere where ``out_dtype`` is None.
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


# The last two blocks' gradients lie in the first block of the logits that they are narrower than.
NARROWS = (4096 * 2 + 16, 0, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("in_one_pass", (False, True))
def test_gradients_over_their_own_rows_have_no_race(in_one_pass):
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
COUNTED = [1, 1, 0, 1, 0, 1]
GRAD = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, 2.0]])


def walks(traffic, gradients=0):
    """How often the log-sum-exp walks each row of logits, besides ``gradients`` that read each logit once.

    Of 16-bit rows, two neighbouring threads ask for the 16 bytes of memory that they share. The ends of a row
    nobody shares.
    """
    reads = traffic.reads[0].view(6, -1) - torch.tensor(gradients).view(-1, 1)
    found, most = reads[:, 0], 2 if traffic.tensors[0].element_size() == 2 else 1
    assert (reads >= found[:, None]).all() and (reads <= most * found[:, None]).all()
    assert (reads[:, -1] == found).all()
    return found.tolist()


@pytest.fixture(params=(torch.bfloat16, torch.float32), ids=str)
def batch(request):
    logits = torch.randn(2, 3, V).to(request.param)
    return logits, torch.tensor([[0, V - 1, IGNORE], [5000, IGNORE, 4096]])


def test_forwards_read_each_counted_logit_once(batch):
    logits, labels = batch
    masked = PLAIN._replace(kept=torch.full((2, 3, -(-V // 32)), -1, dtype=torch.int32))
    ids = torch.randint(0, V, (2, 3, 20)).index_fill(1, torch.tensor([2]), IGNORE)
    # a sampling mask's words, and the logits of K ids, come besides
    for call, rows in (
        (lambda: ROWS.forward(logits, labels), COUNTED),
        (lambda: ROWS.forward(logits, labels, masked), COUNTED),
        (lambda: score(logits, ids, "triton", PLAIN, False, Shard()), [1, 1, 0, 1, 1, 0]),
    ):
        with counted(logits) as traffic:
            call()
        assert walks(traffic) == rows and traffic.per_row(traffic.writes, 0) == [0] * 6
    old = torch.zeros(2, 3)
    terms = logits, labels, old, torch.ones(2), GSPO, PLAIN
    with counted(logits, old) as traffic:
        kernels.sequence_ratio_forward(*terms, ignore_index=IGNORE, **OPTIONS)
    assert walks(traffic) == traffic.reads[1].tolist() == COUNTED
    assert traffic.per_row(traffic.writes, 0) == [0] * 6


@pytest.mark.parametrize("in_place", (False, True))
def test_gradients_read_rows_once_and_write_them_once(batch, in_place):
    """Rows without gradient are written, not read, like masked ones. What does both walks them twice.
    The second walk is meant for the cache.
    """
    logits, labels = batch
    out = logits if in_place else torch.empty_like(logits)
    stats, moving = ROWS.forward(logits, labels), [1, 0, 0, 1, 0, 1]
    masked = PLAIN._replace(kept=torch.full((2, 3, -(-V // 32)), -1, dtype=torch.int32))
    for transform in (PLAIN, masked):
        with counted(logits, out) as traffic:
            ROWS.backward(logits, labels, stats, GRAD, None, transform, out=out)
        assert traffic.per_row(traffic.reads, 0) == moving and traffic.per_row(traffic.writes, 1) == [1] * 6
    with counted(logits, out) as traffic:
        ROWS.and_grad(logits, labels, GRAD, out=out)
    assert walks(traffic, gradients=moving) == COUNTED and traffic.per_row(traffic.writes, 1) == [1] * 6
    ids = torch.randint(0, V, (2, 3, 20))
    found = score(logits, ids, "triton", PLAIN, False, Shard())
    grads = SelectedGradients(torch.ones(2, 3, 20), torch.ones(2, 3))
    with counted(logits, out) as traffic:
        write_gradient(out, logits, ids, found, grads, "triton", PLAIN, False, Shard())
    if not in_place:  # K gradients are added besides
        assert traffic.per_row(traffic.reads, 0) == traffic.per_row(traffic.writes, 1) == [1] * 6


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_both_sides_of_a_divergence_are_read_once_in_the_backward(batch, beta):
    """The forward's second walk is meant for the cache."""
    logits, labels = batch
    teacher, out = logits.flip(0).clone(), torch.empty_like(logits)
    pair = RowPair(logits, teacher, labels, PLAIN, PLAIN, beta, IGNORE)
    with counted(logits, teacher) as traffic:
        known = kernels.divergence(pair, None, None, None)
    twice = [2 * row for row in COUNTED]
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [twice, twice]
    with counted(logits, teacher, out) as traffic:
        kernels.divergence(pair, known, GRAD, out)
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [[1, 0, 0, 1, 0, 1]] * 2
    assert traffic.per_row(traffic.writes, 2) == [1] * 6


def test_scaling_by_one_touches_nothing():
    values = torch.randn(20000)
    for factor, touched in ((1.0, 0), (0.5, 1)):
        with counted(values) as traffic:
            kernels.scale_(values, torch.tensor(factor))
        assert (traffic.reads[0] == touched).all() and (traffic.writes[0] == touched).all()


# --- planted faults


def found(message, call):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
        call()


@triton.jit
def load_one_more(row, start, lanes, width, stride_v, ACCESS, MASKED, EVICT):
    return tl.load((row + start) + lanes, mask=start + lanes < width + 1, other=-float("inf"))


@triton.jit
def load_one_more_column(place, column, width, MASKED, EVICT):
    return tl.load(place, mask=column < width + 1, other=-float("inf"))


@triton.jit
def load_any_column(place, column, width, MASKED, EVICT):
    return tl.load(place)


def test_a_load_outside_of_rows_is_found(monkeypatch):
    """Beyond the last row, and between rows, where only the tensor that holds them goes on."""
    labels = torch.zeros(1, 3, dtype=torch.int64)
    logits, room = torch.randn(1, 3, 1009), torch.randn(1, 3, 1088)
    for rows, name, load, program, lanes in (
        (logits, "_load_column", load_one_more_column, 2, 1),
        (logits, "_load_column", load_any_column, 2, 3),
        (room[..., :1008], "load_columns", load_one_more, 0, 1),
        (room[..., 16:1024], "load_columns", load_one_more, 0, 1),
    ):
        ROWS.forward(rows, labels, entropy=False)
        with monkeypatch.context() as patch:
            patch.setattr(columns, name, load)
            message = f"out of bounds: load of 4 bytes by program {program} in {lanes} lanes"
            found(message, lambda rows=rows: ROWS.forward(rows, labels, entropy=False))


@triton.jit
def begins_within(column, width, WIDE):
    return column >= 0


@triton.jit
def ends_within(column, width, WIDE):
    return column <= width - WIDE


@pytest.mark.parametrize(("within", "label", "words"), [(begins_within, 0, 4), (ends_within, 4095, 1)])
def test_a_piece_that_reaches_beyond_its_row_is_found(monkeypatch, within, label, words):
    """Of a row of two blocks, the one without the label: it holds the row's end, or begins with it."""
    logits, labels = torch.randn(1, 1, 4104).bfloat16()[..., 1:4097], torch.full((1, 1), label)

    ROWS.forward(logits, labels)
    monkeypatch.setattr(columns, "_lies_within", within)
    message = f"out of bounds: load of 4 bytes by program 0 in {words} lanes"
    found(message, lambda: ROWS.forward(logits, labels))


@triton.jit
def one_element_late(pointer, b, t, strides, ACCESS):
    return element(pointer, b, t, strides) + 1


def test_a_store_beyond_the_last_row_is_found(monkeypatch):
    monkeypatch.setattr(gradients, "row_pointer", one_element_late)
    out, labels = torch.zeros(1, 2, 64), torch.zeros(1, 2, dtype=torch.int64)
    stats = ROWS.forward(out, labels)
    # no gradient: rows are not read, and zeros are stored
    found(
        "out of bounds: store of 4 bytes by program 1 in 1 lanes",
        lambda: ROWS.backward(out, labels, stats, torch.zeros(1, 2), out=out),
    )


def test_a_missing_barrier_is_found():
    """Where rows are narrowed, and where a row is summed up and overwritten."""
    overwritten = (1024, 0, torch.float32, torch.float32)
    for case, in_one_pass in ((NARROWS, False), (NARROWS, True), (overwritten, True)):
        with without_races(), rebuilt(create_barrier=lambda plain: None):
            found("race: store by program 0 over what", lambda: gradients_of(*case, in_one_pass))  # noqa: B023


@triton.jit
def first_row(pointer, b, t, strides, ACCESS):
    return pointer


def test_two_programs_that_store_to_one_place_are_found(monkeypatch):
    monkeypatch.setattr(gradients, "row_pointer", first_row)
    with without_races():
        found("race: store by program 1", lambda: gradients_of(64, 0, torch.float32, None, False))


def arrival(before=True, behind=True, sem="acq_rel", scope="gpu"):
    """``sequences.signal_and_count`` with something missing; in the interpreter it may be plain Python."""

    def signal_and_count(counter_ptr):
        if before:
            tl.debug_barrier()
        count = tl.atomic_add(counter_ptr, 1, sem=sem, scope=scope)
        if behind:
            tl.debug_barrier()
        return count

    return signal_and_count


UNORDERED = "race: volatile load by .* may not be stored yet"


@triton.jit
def cached_column(scratch_ptr, row, indices, sequences):
    pointers = scratch_ptr + row * sequences.to(tl.int64) + indices
    return tl.load(pointers, mask=indices < sequences, other=0.0)


@pytest.mark.parametrize("name", ("sequence ratio", "step"))
@pytest.mark.parametrize(
    ("where", "fault", "message"),
    [
        ("signal_and_count", arrival(before=False), UNORDERED),
        ("signal_and_count", arrival(behind=False), UNORDERED),
        ("signal_and_count", arrival(sem="acquire"), UNORDERED),
        ("signal_and_count", arrival(sem="release"), UNORDERED),
        ("signal_and_count", arrival(scope="cta"), "scope CTA"),
        ("_column", cached_column, "race: load by .* may come from a cache"),
    ],
)
def test_an_arrival_that_orders_too_little_is_found(monkeypatch, name, where, fault, message):
    with without_races():
        LAUNCHES[name]()
        holder = step_kernels if name.startswith("step") else sequence_ratio
        monkeypatch.setattr(sequences if where == "_column" else holder, where, fault)
        with pytest.raises(Exception, match=message):
            LAUNCHES[name]()
