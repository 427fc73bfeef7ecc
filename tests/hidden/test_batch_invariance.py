"""Batch-invariant mode: a token's results are bitwise identical in any batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.backends.dispatch import unavailable_reason
from tests.cases import HEAD, Case, Result, device_of, generator, make_case, offsets, pad, run

# Triton where there is a GPU. On such a machine the C++ extension may be missing, and "auto" on the CPU would
# be the reference, which has no batch-invariant mode.
BACKEND = "triton" if torch.cuda.is_available() else "auto"
V, H = 203, 150
LENGTHS = (40, 0, 1, 130, 7, 64, 90, 25, 33, 3)
"""393 tokens, of which a seventh is masked: three segments, with V and H in more than one piece."""
ALL, SHUFFLED = tuple(range(len(LENGTHS))), (3, 9, 0, 5, 1, 8, 2, 7, 4, 6)
GSPO = gk.GSPO(0.3, 0.3)


@functools.cache
def problem(terms: str = "plain", dtype: torch.dtype = torch.float32) -> Case:
    """Return packed sequences, each with its own temperature."""
    case = make_case("linear", "packed", terms, lengths=LENGTHS, vocabulary=V, width=H, dtype=dtype)
    # logits of a language model's size
    inputs = case.inputs | {"weight": (case.inputs["weight"].float() / 6).to(dtype)}
    old = case.old_logprobs
    if old is not None:
        old = gk.linear_token_logprobs(**inputs, labels=case.labels).logprobs
        old = old + 0.1 * torch.randn(old.shape, generator=generator(1))
    mask = torch.rand(case.labels.shape, generator=generator(2)) > 1 / 7
    mask[-sum(LENGTHS[-3:]) :] = True  # calls without masked tokens may take another path
    return replace(
        case, inputs=inputs, old_logprobs=old, loss_mask=mask, terms=case.terms | {"normalizer": 5.0},
        logit_options={"temperature": 0.7 + 0.1 * torch.arange(len(LENGTHS))},
    )  # fmt: skip


def part(case: Case, members: tuple[int, ...]) -> Case:
    """Return the sequences ``members`` of a case, in this order."""
    if members == ALL:
        return case
    spans = [range(*case.cu_seqlens[i : i + 2].tolist()) for i in members]
    rows = torch.tensor(list(itertools.chain(*spans)), dtype=torch.int64)

    def of(name, value):
        if name in HEAD or value.ndim == 0:
            return value
        return value[rows] if len(value) == len(case.labels) else value[list(members)]

    some = replace(case, cu_seqlens=None).each(of)
    return replace(some, cu_seqlens=offsets(tuple(map(len, spans))))


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compute(
    case: Case, objective=GSPO, entry="fused_linear_policy_loss", backend=BACKEND, *, members=ALL, splits=1,
    padding=None, rows=1000, count=1, mode=True, **options,
) -> dict[str, Tensor]:  # fmt: skip
    """Return log-probs and gradients of tokens in the problem's order, and the head's of a single call.

    Args:
        members: the sequences, in the order of the calls.
        splits: the number of calls that share the sequences.
        padding: columns after the longest sequence; None: packed.
        rows: rows of a chunk.
        count: number of threads.
        mode: whether batch-invariant mode is on.
    """
    found, size = {}, -(-len(members) // splits)
    if "linear" in entry:
        options["max_chunk_bytes"] = rows * V * 4
    result: Result | None = None
    with threads(count), gk.set_batch_invariant(mode):
        for first in range(0, len(members), size):
            some = members[first : first + size]
            here = part(case, some)
            lengths = here.cu_seqlens.diff().tolist()
            here = here if padding is None else pad(here, padding)
            # no power of two, so that the place where it is multiplied shows in the bits
            result = run(here, entry, objective, backend, factor=0.3, **options)
            tokens = [result.logprobs, *(grad for name, grad in result.grads.items() if name not in HEAD)]
            pieces = [
                each.split(lengths)
                if padding is None
                else [row[:n] for row, n in zip(each, lengths, strict=True)]
                for each in tokens
            ]
            found |= dict(zip(some, zip(*pieces, strict=True), strict=True))
    by_token = [torch.cat(each) for each in zip(*(found[i] for i in sorted(found)), strict=True)]
    head = {name: grad for name, grad in result.grads.items() if name in HEAD and splits == 1}
    return dict(zip(("logprobs", "inputs"), by_token, strict=True)) | head


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], names=None) -> None:
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name
        assert expected[name].isfinite().all() and (expected[name] != 0).any()


ROWS = ("logprobs", "inputs")
SAME_SUMS = (
    {"rows": 300, "count": 3},
    {"rows": 1, "padding": 0},
    {"rows": 130, "count": 2},
    {"padding": 5, "schedule": "aligned", "rows": 140},
    {"padding": 11, "schedule": "two_pass", "rows": 90, "count": 2},
    {"schedule": "two_pass", "rows": 256, "skip_inactive": "none"},
    {"schedule": "aligned", "skip_inactive": "none"},
)
"""Arrangements in which dWeight is the same sum of the same segments."""
SAME_ROWS = (
    {"members": SHUFFLED, "rows": 64, "count": 2},
    {"splits": 5, "padding": 0, "rows": 40, "schedule": "two_pass"},
    {"splits": 10, "count": 3},
    {"members": SHUFFLED, "splits": 3, "padding": 9, "schedule": "two_pass"},
)
TERMS = {
    "GSPO": (GSPO, "plain"),
    "GRPO": (gk.GRPO(), "plain"),
    "GRPO with KL and entropy": (gk.GRPO(), "k3+entropy"),
    "GSPO with KL": (gk.GSPO(), "k3"),
    "on-policy": (GSPO, "on_policy"),
    "token_mean": (gk.GSPO(0.3, 0.3, aggregation="token_mean"), "plain"),
    "an objective without a launch of its own": (gk.CISPO(), "plain"),
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "GSPO"), (torch.float16, "GSPO"), *((torch.float32, name) for name in TERMS)],
)
def test_every_arrangement_gives_the_same_bits(dtype, name):
    objective, terms = TERMS[name]
    if BACKEND == "triton" and dtype == torch.float16:
        with pytest.raises(ValueError, match="summed in a unit"):
            compute(problem(terms, dtype), objective)
        return
    case, some = problem(terms, dtype), slice(None) if name == "GSPO" else slice(2, None, 2)
    expected = compute(case, objective)
    for way in SAME_SUMS[some]:
        assert_same(compute(case, objective, **way), expected)
    for way in SAME_ROWS[some]:
        assert_same(compute(case, objective, **way), expected, ROWS)


def test_a_frozen_head():
    case = problem(dtype=torch.bfloat16)
    frozen = replace(case, frozen=("weight", "bias"))
    expected = compute(case, schedule="frozen")
    assert_same(compute(case), expected, ROWS)
    for schedule in ("aligned", "two_pass", "auto"):
        assert_same(compute(frozen, schedule=schedule, rows=140), expected)


def test_other_backends_rows():
    """Triton's kernels under the interpreter keep their bits, too."""
    if unavailable_reason("triton", torch.device("cpu")) is not None:
        pytest.skip("Triton has no interpreter here")
    few = functools.partial(
        compute, part(problem(), (2, 7, 9)), gk.GSPO(0.999, 1e9), backend="triton", members=(0, 1, 2)
    )
    expected = few()
    for way in ({"rows": 10, "padding": 0}, {"schedule": "two_pass", "padding": 1, "rows": 7}):
        assert_same(few(**way), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_equal_those_of_losses(dtype):
    """Log-probs of a row are bitwise identical among any rows, and to those of the losses."""
    case = problem(dtype=dtype)
    here = case.each(lambda _, value: value.to(device_of(BACKEND)))
    (hidden, weight, bias), labels, mask = here.inputs.values(), here.labels, case.loss_mask
    ids = torch.stack([labels, (labels + 7) % V, (labels + 50) % V], -1)
    grad = torch.randn(len(labels), generator=generator(3)).to(labels.device)

    def scores(chosen: slice | Tensor, **options) -> list[Tensor]:
        options |= {"bias": bias, "batch_invariant": True}
        leaf, other = (hidden[chosen].clone().requires_grad_() for _ in range(2))
        out = gk.linear_token_logprobs(leaf, weight, labels[chosen], return_entropy=True, **options)
        (out.logprobs * grad[chosen] + out.entropy * grad[chosen] ** 2).sum().backward()
        some = gk.linear_selected_logprobs(other, weight, ids[chosen], **options)
        (some.logprobs * grad[chosen].unsqueeze(1) + some.tail.unsqueeze(1)).sum().backward()
        return [*out, leaf.grad, *some, other.grad]

    expected = scores(slice(None))
    for chosen in (slice(5, 6), slice(100, 333), torch.randperm(len(labels), generator=generator(1))):
        for rows, count in ((1000, 1), (37, 2)):
            with threads(count):
                found = scores(chosen, max_chunk_bytes=rows * V * 4)
            assert all(torch.equal(got, whole[chosen]) for got, whole in zip(found, expected, strict=True))
    warm = here.logit_options["temperature"].repeat_interleave(here.cu_seqlens.diff())
    options = {"bias": bias, "temperature": warm, "batch_invariant": True}
    alone = gk.linear_token_logprobs(hidden, weight, labels, **options)
    assert torch.equal(alone.logprobs.cpu()[mask], compute(case)["logprobs"][mask])


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("objective", [GSPO, gk.CISPO(), gk.GRPO()])
def test_from_logits_rows_are_so_in_every_mode(objective, mode):
    """Bits of log-probs and gradients do not depend on a row's address, other rows or threads."""
    case = problem()
    hidden, weight, _ = case.inputs.values()
    case = replace(case, kind="logits", inputs={"logits": (hidden @ weight.t()).round(decimals=2)})
    expected, *others = (
        compute(case, objective, "fused_policy_loss", mode=mode, **way)
        for way in (
            {"padding": 0},
            {"count": 2, "strides": "off by three"},
            {"members": SHUFFLED, "padding": 2, "count": 3},
        )
    )
    for found in others:
        assert_same(found, expected)


# --- the switch


def test_the_mode_is_switched_like_gradients():
    assert not gk.is_batch_invariant()
    with gk.set_batch_invariant(True):
        with gk.set_batch_invariant(False):
            assert not gk.is_batch_invariant()
        assert gk.is_batch_invariant()
        gk.set_batch_invariant(False)  # a call inside a context ends with it
        assert not gk.is_batch_invariant()
    assert not gk.is_batch_invariant()
    gk.set_batch_invariant(True)
    try:
        assert gk.is_batch_invariant()
    finally:
        gk.set_batch_invariant(False)
    with pytest.raises(TypeError, match="mode"):
        gk.set_batch_invariant(1)
    context = gk.set_batch_invariant(True)
    for _ in range(2):
        with context:
            with pytest.raises(RuntimeError, match="set_batch_invariant"), context:
                pass
            assert gk.is_batch_invariant()
        assert not gk.is_batch_invariant()


@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("apart", "order"), [(True, (0, 1)), (False, (0, 1)), (False, (1, 0))])
def test_contexts_may_overlap(modes, apart, order):
    """Contexts of two threads, or of two coroutines of one: each has its own mode, and none outlives both."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        threads = (one, two) if apart else (one, one)

        def seen():
            here = [each.submit(gk.is_batch_invariant).result() for each in threads]
            return [*here, gk.is_batch_invariant()]

        contexts = [
            each.submit(gk.set_batch_invariant, mode).result()
            for each, mode in zip(threads, modes, strict=True)
        ]
        for thread, context in zip(threads, contexts, strict=True):
            thread.submit(context.__enter__).result()
        assert seen() == [modes[0] if apart else modes[1], modes[1], modes[1]]
        for last, i in enumerate(order):
            threads[i].submit(contexts[i].__exit__, None, None, None).result()
            assert seen() == [False if last else modes[order[1]]] * 3


def test_unsupported_calls_are_errors(group_of_one):
    groups = "got a process group in batch-invariant mode"
    for options, error, message in (
        ({"batch_invariant": 1}, TypeError, "batch_invariant"),
        ({"dtype": torch.float64}, ValueError, "fp64 matmuls are not"),
        ({"backend": "reference"}, ValueError, "reference"),
        ({"schedule": "deferred"}, ValueError, "sums dWeight in segments"),
        ({"schedule": "known", "objective": gk.GRPO()}, ValueError, "from whole sequences"),
        ({"tp_group": group_of_one}, ValueError, f"tp_group: {groups}"),
        ({"cp_group": group_of_one}, ValueError, f"cp_group: {groups}"),
    ):
        case = part(problem(dtype=options.pop("dtype", torch.float32)), (0, 1, 2))
        options = {"batch_invariant": True, "objective": GSPO, "backend": BACKEND} | options
        with pytest.raises(error, match=message):
            run(case, "fused_linear_policy_loss", **options)
