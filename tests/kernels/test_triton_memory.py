"""No kernel reads or writes beside its tensors, and no result depends on which thread or program is first.

Every launch of the suite under the interpreter is held to the bounds (``tests/conftest.py``). Here are the
races, and faults that must be found.
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
from gspo_kernels.types import KLPenalty, RatioClip
from tests.draws import shifted_seed
from tests.gpu.calls import CALLS, Scale
from tests.kernels.accesses import backwards, order_of_programs, rebuilt, shuffle, without_races
from tests.kernels.row_oracle import PLAIN

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are seen under the interpreter")
IGNORE = -100
CPU = torch.device("cpu")


SCALE = Scale(8, 300, 32, 1)


def steps(packed, level="sequence"):
    """From log-probs; what users call for them takes the CPU's own backend here."""
    mask, old = torch.rand(4, 9) < 0.8, 0.1 * torch.randn(4, 9)
    lengths = torch.tensor([0, 9, 9, 30, 36], dtype=torch.int32) if packed else None
    rows = [value.view(1, -1) if packed else value for value in (old + 0.1, mask, old)]
    form = RatioClip(math.log(0.9), math.log(1.1), math.inf, packed, "sequences", 1.0, level)
    options = dict.fromkeys(("weights", "lengths", "normalizer"))
    if level == "token":
        options |= {"weights": rows[0].exp(), "kl": KLPenalty(rows[0] + 0.2, torch.tensor(0.1), "k3")}
    return kernels.ratio_step(*rows, torch.randn(4), form, cu_seqlens=lengths, **options)


def scaled():
    values = torch.randn(20000)
    kernels.scale_(values, torch.tensor(0.5))
    return (values,)


LAUNCHES = {
    name: partial(call, CPU, SCALE)
    for name, call in CALLS.items()
    if not name.startswith("log-probs, ") and name != "log-probs"
} | {
    "step": partial(steps, False),
    "step, packed": partial(steps, True),
    "step, tokens": partial(steps, False, "token"),
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
        return kernels.logprobs_and_grad(logits, labels, grad, PLAIN, ignore_index=IGNORE, out=out)
    stats = kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=False)
    return kernels.logprobs_backward(
        logits, labels, stats, grad, None, None, PLAIN, ignore_index=IGNORE, out=out
    )


# The last two blocks' gradients lie in the first block of the logits that they are narrower than.
NARROWS = (4096 * 2 + 16, 0, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("in_one_pass", (False, True))
@pytest.mark.parametrize(
    "case",
    [
        NARROWS,
        (4096 * 2 + 21, 1, torch.float32, torch.float16),
        (4096 * 2 + 21, 1, torch.float32, torch.float32),
        (8192 + 16, 0, torch.bfloat16, torch.bfloat16),
        (4096 + 21, 1, torch.float32, None),
    ],
)
def test_gradients_over_their_own_rows_have_no_race(case, in_one_pass):
    with without_races():
        gradients_of(*case, in_one_pass)


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


@pytest.mark.parametrize(("loads", "lanes"), [(load_one_more_column, 1), (load_any_column, 3)])
def test_a_load_beyond_the_last_row_is_found(monkeypatch, loads, lanes):
    logits, labels = torch.randn(1, 2, 1009), torch.zeros(1, 2, dtype=torch.int64)

    def call():
        return kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=False)

    call()
    monkeypatch.setattr(columns, "_load_column", loads)
    found(f"out of bounds: load of 4 bytes by program 1 in {lanes} lanes", call)


@pytest.mark.parametrize(("loads", "first"), [(load_one_more, 0), (load_one_more, 16)])
def test_a_load_between_rows_is_found(monkeypatch, loads, first):
    """Where only the tensor that holds the rows goes on."""
    room, labels = torch.randn(1, 3, 1088), torch.zeros(1, 3, dtype=torch.int64)
    monkeypatch.setattr(columns, "load_columns", loads)
    found(
        "out of bounds: load of 4 bytes by program 0 in 1 lanes",
        lambda: kernels.logprobs_forward(
            room[..., first : first + 1008], labels, PLAIN, ignore_index=IGNORE, entropy=False
        ),
    )


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

    def call():
        return kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=False)

    call()
    monkeypatch.setattr(columns, "_lies_within", within)
    found(f"out of bounds: load of 4 bytes by program 0 in {words} lanes", call)


@triton.jit
def one_element_late(pointer, b, t, strides, ACCESS):
    return element(pointer, b, t, strides) + 1


def test_a_store_beyond_the_last_row_is_found(monkeypatch):
    monkeypatch.setattr(gradients, "row_pointer", one_element_late)
    out = torch.zeros(1, 2, 64)
    stats = kernels.logprobs_forward(
        out, torch.zeros(1, 2, dtype=torch.int64), PLAIN, ignore_index=IGNORE, entropy=False
    )
    # no gradient: rows are not read, and zeros are stored
    found(
        "out of bounds: store of 4 bytes by program 1 in 1 lanes",
        lambda: kernels.logprobs_backward(
            out, torch.zeros(1, 2, dtype=torch.int64), stats, torch.zeros(1, 2), None, None, PLAIN,
            ignore_index=IGNORE, out=out,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("in_one_pass", (False, True))
def test_a_missing_barrier_is_found_where_rows_are_narrowed(in_one_pass):
    with without_races(), rebuilt(create_barrier=lambda plain: None):
        found("race: store by program 0 over what", lambda: gradients_of(*NARROWS, in_one_pass))


def test_a_missing_barrier_is_found_where_a_row_is_folded_and_overwritten():
    case = (1024, 0, torch.float32, torch.float32, True)
    with without_races(), rebuilt(create_barrier=lambda plain: None):
        found("race: store by program 0 over what", lambda: gradients_of(*case))


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


@pytest.mark.parametrize(
    "name", ("sequence ratio", "sequence ratio, packed, in place", "step", "step, tokens")
)
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
