"""Batch-invariant mode: a token's results have the same bits whatever is computed along with it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.linear import head, products
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.segments import Segments
from tests.cases import generator

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)

V, H = 203, 150
LENGTHS = (40, 0, 1, 130, 7, 64, 90, 25, 33, 3)
"""393 tokens, of which a seventh is masked: three segments, with V and H in more than one piece."""
NORMALIZER = 5.0


@dataclass(frozen=True)
class Sequence:
    """One sequence's tokens and what goes with them."""

    hidden: Tensor
    labels: Tensor
    mask: Tensor
    old: Tensor
    advantage: float
    temperature: float


@dataclass(frozen=True)
class Problem:
    """Sequences and a head."""

    sequences: tuple[Sequence, ...]
    weight: Tensor
    bias: Tensor


def problem(dtype: torch.dtype, seed: int = 0) -> Problem:
    rng = generator(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    sequences = []
    for i, length in enumerate(LENGTHS):
        sequences.append(
            Sequence(
                hidden=(2 * randn(length, H)).to(dtype),
                labels=torch.randint(V, (length,), generator=rng),
                mask=torch.rand(length, generator=rng) > 1 / 7,
                old=-5.0 + 0.3 * randn(length),
                advantage=0.0 if i == 4 else float(randn(())),
                temperature=0.7 + 0.1 * i,
            )
        )
    return Problem(tuple(sequences), (randn(V, H) / H**0.5).to(dtype), randn(V).to(dtype))


@dataclass(frozen=True)
class Way:
    """How a batch is arranged and computed."""

    packed: bool = False
    padding: tuple[int, int] = (0, 0)
    order: tuple[int, ...] = tuple(range(len(LENGTHS)))
    splits: int = 1
    rows: int = 1000
    schedule: str = "auto"
    threads: int = 1
    skip: str = "backward"


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def arranged(sequences: list[Sequence], way: Way, grad: bool) -> dict[str, Tensor | None]:
    """Padded, with the sequence anywhere in its row, or packed."""
    offsets = [0, *itertools.accumulate(len(sequence.labels) for sequence in sequences)]
    layout = {"advantages": torch.tensor([sequence.advantage for sequence in sequences])}
    layout["temperature"] = torch.tensor([sequence.temperature for sequence in sequences])
    fields = ("hidden", "labels", "mask", "old")
    if way.packed:
        found = {name: torch.cat([getattr(s, name) for s in sequences]) for name in fields}
        layout["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    else:
        left, right = way.padding
        length = left + right + max(len(s.labels) for s in sequences)
        found = {}
        for name in fields:
            one = getattr(sequences[0], name)
            # what stands in the padding must not be looked at
            fill = False if name == "mask" else -100 if name == "labels" else float("nan")
            found[name] = torch.full((len(sequences), length, *one.shape[1:]), fill, dtype=one.dtype)
            for row, sequence in zip(found[name], sequences, strict=True):
                row[left : left + len(sequence.labels)] = getattr(sequence, name)
    found["hidden"].requires_grad_(grad)
    return found | layout


def unarranged(values: Tensor, sequences: list[Sequence], way: Way) -> list[Tensor]:
    """Of each sequence what it has of ``values``."""
    lengths = [len(sequence.labels) for sequence in sequences]
    if way.packed:
        return list(values.split(lengths))
    left = way.padding[0]
    return [row[left : left + length] for row, length in zip(values, lengths, strict=True)]


def compute(given: Problem, way: Way, objective=None, head_learns=True, backend="auto", **terms):
    """Per sequence log-probs and dHidden, in the problem's order, and dWeight and dBias as autograd adds.

    ``terms`` may say "on_policy", or "reference": log-probs of it so far below the old ones.
    """
    weight, bias = (x.clone().requires_grad_(head_learns) for x in (given.weight, given.bias))
    shown: dict[str, list] = {"logprobs": [None] * len(LENGTHS), "hidden": [None] * len(LENGTHS)}
    per_batch = -(-len(way.order) // way.splits)
    on_policy, reference = terms.pop("on_policy", False), terms.pop("reference", None)
    with threads(way.threads), gk.set_batch_invariant(True):
        for first in range(0, len(way.order), per_batch):
            members = way.order[first : first + per_batch]
            sequences = [given.sequences[i] for i in members]
            batch = arranged(sequences, way, True)
            if reference is not None:
                terms["ref_logprobs"] = batch["old"] - reference
            out = gk.fused_linear_policy_loss(
                batch["hidden"], weight, batch["labels"], None if on_policy else batch["old"],
                batch["advantages"], bias=bias, loss_mask=batch["mask"], cu_seqlens=batch.get("cu_seqlens"),
                temperature=batch["temperature"], normalizer=NORMALIZER,
                objective=objective or gk.GSPO(0.3, 0.3), max_chunk_bytes=way.rows * V * 4,
                schedule=way.schedule, skip_inactive=way.skip, backend=backend, **terms,
            )  # fmt: skip
            # no power of two: it must multiply at the same place
            (out.loss * 0.3).backward()
            for name, values in (("logprobs", out.logprobs), ("hidden", batch["hidden"].grad)):
                for i, own in zip(members, unarranged(values, sequences, way), strict=True):
                    shown[name][i] = own
    found = {name: torch.cat([x for x in values if x is not None]) for name, values in shown.items()}
    return found | ({"weight": weight.grad, "bias": bias.grad} if head_learns else {})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], names=None) -> None:
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name
        assert expected[name].isfinite().all() and (expected[name] != 0).any()


ROWS = ("logprobs", "hidden")
SHUFFLED = (3, 9, 0, 5, 1, 8, 2, 7, 4, 6)
SAME_SUMS = (
    Way(rows=70),
    Way(rows=300, threads=3),
    Way(rows=1),
    Way(packed=True, threads=2),
    Way(packed=True, rows=130),
    Way(padding=(5, 0), schedule="aligned", rows=140),
    Way(padding=(3, 8), schedule="two_pass", rows=90, threads=2),
    Way(schedule="two_pass", rows=33),
    Way(packed=True, schedule="two_pass", rows=256, threads=3),
    Way(schedule="two_pass", skip="none"),
    Way(packed=True, schedule="aligned", skip="none"),
)
"""Arrangements in which dWeight is the same sum of the same segments."""
SAME_ROWS = (
    Way(order=SHUFFLED),
    Way(order=SHUFFLED, packed=True, rows=64, threads=2),
    Way(splits=2),
    Way(splits=5, rows=40, schedule="two_pass"),
    Way(splits=10, packed=True, threads=3),
    Way(order=SHUFFLED, splits=3, padding=(0, 9), schedule="two_pass"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_arrangement_gives_the_same_bits(dtype):
    for seed in range(2):
        given = problem(dtype, seed)
        expected = compute(given, Way())
        for way in SAME_SUMS:
            assert_same(compute(given, way), expected)
        for way in SAME_ROWS:
            assert_same(compute(given, way), expected, ROWS)


TERMS = {
    "GRPO": (gk.GRPO(), {}),
    "GRPO with KL and entropy": (gk.GRPO(), {"reference": 0.1, "kl_beta": 0.1, "entropy_coef": 0.02}),
    "GSPO with KL": (gk.GSPO(), {"reference": 0.1, "kl_beta": 0.1}),
    "on-policy": (gk.GSPO(), {"on_policy": True}),
    "token_mean": (gk.GSPO(0.3, 0.3, aggregation="token_mean"), {}),
    "an objective without a launch of its own": (gk.CISPO(), {}),
}


@pytest.mark.parametrize("name", TERMS)
def test_every_kind_of_coefficient(name):
    objective, terms = TERMS[name]
    given = problem(torch.float32)
    expected = compute(given, Way(), objective, **terms)
    for way in (
        Way(rows=70, threads=2),
        Way(packed=True, rows=140),
        Way(packed=True, schedule="two_pass", rows=33),
        Way(schedule="aligned", rows=150, padding=(2, 1)),
    ):
        assert_same(compute(given, way, objective, **terms), expected)
    for way in (Way(order=SHUFFLED, packed=True), Way(splits=3, threads=3)):
        assert_same(compute(given, way, objective, **terms), expected, ROWS)


def test_a_frozen_head():
    given = problem(torch.bfloat16)
    expected = compute(given, Way(schedule="frozen"), head_learns=False)
    trained = compute(given, Way())
    assert_same(trained, expected, ROWS)
    for schedule in ("aligned", "two_pass", "auto"):
        assert_same(
            compute(given, Way(schedule=schedule, packed=True, rows=140), head_learns=False), expected
        )


def test_other_backends_rows():
    """Triton's kernels under the interpreter, where they are."""
    from gspo_kernels.ops import backends

    if backends.why_not("triton", torch.device("cpu")) is not None:
        pytest.skip("Triton has no interpreter here")
    given = problem(torch.float32)
    few = Way(order=(0, 2, 4, 9))
    expected = compute(given, few, backend="triton")
    for way in (
        replace(few, packed=True, rows=20),
        replace(few, schedule="two_pass", padding=(3, 1), rows=9),
    ):
        assert_same(compute(given, way, backend="triton"), expected)


def rows_of_problem(given: Problem) -> tuple[Tensor, Tensor]:
    hidden = torch.cat([sequence.hidden for sequence in given.sequences])
    return hidden, torch.cat([sequence.labels for sequence in given.sequences])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_is_the_losses_own(dtype):
    """Token log-probs, entropies and selected ids of any rows together; log-probs are those of the losses."""
    given = problem(dtype)
    hidden, labels = rows_of_problem(given)
    ids = torch.stack([labels, (labels + 7) % V, (labels + 50) % V], -1)
    grad = torch.randn(len(labels), generator=generator(3))

    def scores(chosen: slice | Tensor, **options) -> list[Tensor]:
        leaf = hidden[chosen].requires_grad_()
        out = gk.linear_token_logprobs(
            leaf, given.weight, labels[chosen], bias=given.bias, return_entropy=True, **options
        )
        (out.logprobs * grad[chosen] + out.entropy * grad[chosen] ** 2).sum().backward()
        some = gk.linear_selected_logprobs(
            picked := hidden[chosen].requires_grad_(), given.weight, ids[chosen], bias=given.bias, **options
        )
        (some.logprobs * grad[chosen].unsqueeze(1) + some.tail.unsqueeze(1)).sum().backward()
        return [*out, leaf.grad, *some, picked.grad]

    scores = functools.partial(scores, batch_invariant=True)
    expected = scores(slice(None))
    for chosen in (
        slice(5, 6),
        slice(0, 2),
        slice(100, 333),
        torch.randperm(len(labels), generator=generator(1)),
    ):
        for rows, count in ((1000, 1), (37, 2)):
            with threads(count):
                found = scores(chosen, max_chunk_bytes=rows * V * 4)
            for got, whole in zip(found, expected, strict=True):
                assert torch.equal(got, whole[chosen])
    loss = compute(given, Way())
    mask = torch.cat([sequence.mask for sequence in given.sequences])
    warm = torch.cat([torch.full(s.labels.shape, s.temperature) for s in given.sequences])
    alone = gk.linear_token_logprobs(
        hidden, given.weight, labels, bias=given.bias, temperature=warm, batch_invariant=True
    )
    assert torch.equal(alone.logprobs[mask], loss["logprobs"][mask])


def test_from_logits_rows_are_so_in_every_mode():
    """Whatever memory a row begins at, and whatever rows and threads there are; coefficients, too."""
    given = problem(torch.float32)
    for objective in (gk.GSPO(0.3, 0.3), gk.CISPO(), gk.GRPO()):
        results = []
        for way in (Way(), Way(packed=True, threads=2), Way(order=SHUFFLED, padding=(3, 2), threads=3)):
            sequences = [given.sequences[i] for i in way.order]
            batch = arranged(sequences, way, False)
            # rows that begin at any address
            logits = (batch["hidden"].nan_to_num() @ given.weight.t().double().float()).round(decimals=2)
            memory = torch.empty(logits.numel() + 3)[3:].view_as(logits).copy_(logits).requires_grad_()
            with threads(way.threads):
                out = gk.fused_policy_loss(
                    memory, batch["labels"], batch["old"], batch["advantages"], loss_mask=batch["mask"],
                    cu_seqlens=batch.get("cu_seqlens"), normalizer=NORMALIZER, objective=objective,
                )  # fmt: skip
                (grad,) = torch.autograd.grad(out.loss * 0.3, memory)
            found = []
            for values in (out.logprobs, grad):
                parts = dict(zip(way.order, unarranged(values, sequences, way), strict=True))
                found.append(torch.cat([parts[i] for i in range(len(LENGTHS))]))
            results.append(found)
        for found in results[1:]:
            assert all(torch.equal(got, whole) for got, whole in zip(found, results[0], strict=True))


# --- what the comparisons would find


def test_products_that_depend_on_the_number_of_rows_are_found(monkeypatch):
    """As libraries' do, which choose how to split K by the shape."""
    plain = head.fixed_product

    def split(a, b, out, **options):
        if a.shape[0] > 50 or options.get("accumulate"):
            return plain(a, b, out, **options)
        half = a.shape[1] // 2
        plain(a[:, :half], b[:half], out, **options)
        return plain(a[:, half:], b[half:], out, accumulate=True)

    monkeypatch.setattr(head, "fixed_product", split)
    monkeypatch.setattr(Call, "folds", False)  # logits that are never written are another product's
    given = problem(torch.float32)
    with pytest.raises(AssertionError, match="logprobs"):
        assert_same(compute(given, Way(rows=33)), compute(given, Way()))


def test_segments_that_end_with_chunks_are_found(monkeypatch):
    def cut(self, parts, ranks):
        return iter(()) if not ranks.numel() else iter([self._segmented((*parts, ranks))])

    monkeypatch.setattr(Segments, "cut", cut)
    given = problem(torch.float32)
    wide = gk.GSPO(0.999, 1e4)  # so that hardly a draw clips all sequences but a short one
    ways = (Way(rows=20, schedule="two_pass"), Way())
    found, expected = (compute(given, way, objective=wide) for way in ways)
    assert_same(found, expected, ROWS)
    with pytest.raises(AssertionError, match="weight"):
        assert_same(found, expected, ["weight"])


def test_without_the_mode_bits_differ_where_the_library_multiplies(monkeypatch):
    """Where the processor's library multiplies one row in another order than many; it may not."""
    monkeypatch.setattr(products, "fp32_library", lambda: "torch")
    given = problem(torch.float32)
    hidden, labels = rows_of_problem(given)
    one, many = hidden[:1] @ given.weight.t(), (hidden @ given.weight.t())[:1]
    if torch.equal(one, many):
        pytest.skip("this library multiplies one row as it does many")
    single = gk.linear_token_logprobs(hidden[:1], given.weight, labels[:1], return_entropy=True)
    whole = gk.linear_token_logprobs(hidden, given.weight, labels, return_entropy=True)
    same = [
        torch.equal(gk.linear_token_logprobs(hidden[i : i + 1], given.weight, labels[i : i + 1]).logprobs,
                    whole.logprobs[i : i + 1])
        for i in range(40)
    ]  # fmt: skip
    assert single.logprobs.shape == (1,) and not all(same)


# --- the switch


def test_the_mode_is_switched_like_gradients():
    assert not gk.is_batch_invariant()
    with gk.set_batch_invariant(True):
        assert gk.is_batch_invariant()
        with gk.set_batch_invariant(False):
            assert not gk.is_batch_invariant()
        assert gk.is_batch_invariant()
    assert not gk.is_batch_invariant()
    gk.set_batch_invariant(True)
    try:
        assert gk.is_batch_invariant()
    finally:
        gk.set_batch_invariant(False)
    with pytest.raises(TypeError, match="mode"):
        gk.set_batch_invariant(1)


def call(**options):
    given = problem(options.pop("dtype", torch.float32))
    batch = arranged(list(given.sequences[:3]), Way(), True)
    weight = given.weight.clone().requires_grad_()
    function = options.pop("function", gk.fused_linear_policy_loss)
    return function(
        batch["hidden"], weight, batch["labels"], batch["old"], batch["advantages"],
        loss_mask=batch["mask"], **options,
    )  # fmt: skip


def test_the_plan_says_so():
    assert "batch-invariant" in str(call(function=gk.explain_schedule, batch_invariant=True))
    assert "batch-invariant" not in str(call(function=gk.explain_schedule))
    with gk.set_batch_invariant(True):
        assert call(function=gk.explain_schedule).batch_invariant
        assert not call(function=gk.explain_schedule, batch_invariant=False).batch_invariant


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_invariant": 1}, TypeError, "batch_invariant"),
        ({"dtype": torch.float64}, ValueError, "fp64 have no fixed order"),
        ({"backend": "reference"}, ValueError, "reference"),
        ({"schedule": "deferred"}, ValueError, "sums dWeight in segments"),
        ({"schedule": "known", "objective": gk.GRPO()}, ValueError, "from whole sequences"),
    ],
)
def test_what_has_no_fixed_order_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        call(**({"batch_invariant": True} | options))


@pytest.mark.parametrize("name", ["tp_group", "cp_group"])
def test_process_groups_are_refused(name, group_of_one):
    with pytest.raises(ValueError, match=f"{name}: got a process group in batch-invariant mode"):
        call(batch_invariant=True, parallel=gk.Parallel(**{name: group_of_one}))
