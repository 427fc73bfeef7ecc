"""Batch-invariant mode: a token's results have the same bits whatever is computed along with it."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.ops.backends import why_not
from tests.cases import generator

V, H = 203, 150
LENGTHS = (40, 0, 1, 130, 7, 64, 90, 25, 33, 3)
"""393 tokens, of which a seventh is masked: three segments, with V and H in more than one piece."""
NORMALIZER = 5.0
FIELDS = ("hidden", "labels", "mask", "old")


def problem(dtype: torch.dtype) -> tuple[list[dict[str, Tensor]], Tensor, Tensor]:
    """Sequences of tokens and what goes with them, weight and bias."""
    rng = generator(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    sequences = [
        {
            "hidden": (2 * randn(length, H)).to(dtype),
            "labels": torch.randint(V, (length,), generator=rng),
            "mask": torch.rand(length, generator=rng) > 1 / 7,
            "old": -5.0 + 0.3 * randn(length),
            "advantages": randn(1)[0] * (i != 4),
            "temperature": torch.tensor(0.7 + 0.1 * i),
        }
        for i, length in enumerate(LENGTHS)
    ]
    return sequences, (randn(V, H) / H**0.5).to(dtype), randn(V).to(dtype)


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


def arranged(sequences: list[dict[str, Tensor]], way: Way) -> dict[str, Tensor]:
    """Padded, with the sequence anywhere in its row, or packed."""
    lengths = [len(sequence["labels"]) for sequence in sequences]
    batch = {name: torch.stack([s[name] for s in sequences]) for name in ("advantages", "temperature")}
    if way.packed:
        batch["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return batch | {name: torch.cat([s[name] for s in sequences]) for name in FIELDS}
    left, right = way.padding
    # what stands in the padding must not be looked at
    for name, fill in zip(FIELDS, (torch.nan, -100, False, torch.nan), strict=True):
        first = sequences[0][name]
        shape = (len(sequences), left + max(lengths) + right, *first.shape[1:])
        batch[name] = torch.full(shape, fill, dtype=first.dtype)
        for row, sequence, length in zip(batch[name], sequences, lengths, strict=True):
            row[left : left + length] = sequence[name]
    return batch


def in_order(values: list[Tensor], way: Way) -> Tensor:
    """What batches have, a tensor each, as tokens in the problem's order of sequences."""
    found, per_batch = {}, -(-len(way.order) // way.splits)
    for first, batch in zip(range(0, len(way.order), per_batch), values, strict=True):
        members = way.order[first : first + per_batch]
        lengths = [LENGTHS[i] for i in members]
        rows = batch.split(lengths) if way.packed else [row[way.padding[0] :] for row in batch]
        found |= {i: row[:length] for i, row, length in zip(members, rows, lengths, strict=True)}
    return torch.cat([found[i] for i in sorted(found)])


def compute(given, way: Way, objective=None, head_learns=True, backend="auto", **terms) -> dict[str, Tensor]:
    """Log-probs and dHidden in the problem's order, and dWeight and dBias as autograd adds.

    ``terms`` may say "on_policy", or "reference": log-probs of it so far below the old ones.
    """
    sequences, *leaves = given
    weight, bias = (x.clone().requires_grad_(head_learns) for x in leaves)
    per_batch = -(-len(way.order) // way.splits)
    on_policy, reference = terms.pop("on_policy", False), terms.pop("reference", None)
    logprobs, hidden = [], []
    with threads(way.threads), gk.set_batch_invariant(True):
        for first in range(0, len(way.order), per_batch):
            batch = arranged([sequences[i] for i in way.order[first : first + per_batch]], way)
            if reference is not None:
                terms["ref_logprobs"] = batch["old"] - reference
            old = None if on_policy else batch["old"]
            out = gk.fused_linear_policy_loss(
                batch["hidden"].requires_grad_(), weight, batch["labels"], old, batch["advantages"],
                bias=bias, loss_mask=batch["mask"], cu_seqlens=batch.get("cu_seqlens"),
                temperature=batch["temperature"], normalizer=NORMALIZER,
                objective=objective or gk.GSPO(0.3, 0.3), max_chunk_bytes=way.rows * V * 4,
                schedule=way.schedule, skip_inactive=way.skip, backend=backend, **terms,
            )  # fmt: skip
            # no power of two: it must multiply at the same place
            (out.loss * 0.3).backward()
            logprobs.append(out.logprobs)
            hidden.append(batch["hidden"].grad)
    found = {"logprobs": in_order(logprobs, way), "hidden": in_order(hidden, way)}
    return found | ({"weight": weight.grad, "bias": bias.grad} if head_learns else {})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], names=None) -> None:
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name
        assert expected[name].isfinite().all() and (expected[name] != 0).any()


ROWS = ("logprobs", "hidden")
SHUFFLED = (3, 9, 0, 5, 1, 8, 2, 7, 4, 6)
SAME_SUMS = (
    Way(rows=300, threads=3),
    Way(rows=1),
    Way(packed=True, rows=130, threads=2),
    Way(padding=(5, 0), schedule="aligned", rows=140),
    Way(padding=(3, 8), schedule="two_pass", rows=90, threads=2),
    Way(packed=True, schedule="two_pass", rows=256, skip="none"),
    Way(packed=True, schedule="aligned", skip="none"),
)
"""Arrangements in which dWeight is the same sum of the same segments."""
SAME_ROWS = (
    Way(order=SHUFFLED, packed=True, rows=64, threads=2),
    Way(splits=5, rows=40, schedule="two_pass"),
    Way(splits=10, packed=True, threads=3),
    Way(order=SHUFFLED, splits=3, padding=(0, 9), schedule="two_pass"),
)
TERMS = {
    "GSPO": (None, {}),
    "GRPO": (gk.GRPO(), {}),
    "GRPO with KL and entropy": (gk.GRPO(), {"reference": 0.1, "kl_beta": 0.1, "entropy_coef": 0.02}),
    "GSPO with KL": (gk.GSPO(), {"reference": 0.1, "kl_beta": 0.1}),
    "on-policy": (gk.GSPO(), {"on_policy": True}),
    "token_mean": (gk.GSPO(0.3, 0.3, aggregation="token_mean"), {}),
    "an objective without a launch of its own": (gk.CISPO(), {}),
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *itertools.product([torch.bfloat16, torch.float16], ["GSPO"]),
        *((torch.float32, name) for name in TERMS),
    ],
)
def test_every_arrangement_gives_the_same_bits(dtype, name):
    objective, terms = TERMS[name]
    given, some = problem(dtype), slice(None) if name == "GSPO" else slice(2, None, 2)
    expected = compute(given, Way(), objective, **terms)
    for way in SAME_SUMS[some]:
        assert_same(compute(given, way, objective, **terms), expected)
    for way in SAME_ROWS[some]:
        assert_same(compute(given, way, objective, **terms), expected, ROWS)


def test_a_frozen_head():
    given = problem(torch.bfloat16)
    expected = compute(given, Way(schedule="frozen"), head_learns=False)
    assert_same(compute(given, Way()), expected, ROWS)
    for schedule in ("aligned", "two_pass", "auto"):
        way = Way(schedule=schedule, packed=True, rows=140)
        assert_same(compute(given, way, head_learns=False), expected)


def test_other_backends_rows():
    """Triton's kernels under the interpreter, where they are."""
    if why_not("triton", torch.device("cpu")) is not None:
        pytest.skip("Triton has no interpreter here")
    given, few, objective = problem(torch.float32), Way(order=(2, 7, 9)), gk.GSPO(0.999, 1e9)
    expected = compute(given, few, objective, backend="triton")
    for way in (
        replace(few, packed=True, rows=10),
        replace(few, schedule="two_pass", padding=(1, 1), rows=7),
    ):
        assert_same(compute(given, way, objective, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_is_the_losses_own(dtype):
    """Token log-probs, entropies and selected ids of any rows together; log-probs are those of the losses."""
    sequences, weight, bias = given = problem(dtype)
    batch = arranged(sequences, Way(packed=True))
    hidden, labels, mask = batch["hidden"], batch["labels"], batch["mask"]
    ids = torch.stack([labels, (labels + 7) % V, (labels + 50) % V], -1)
    grad, order = (
        torch.randn(len(labels), generator=generator(3)),
        torch.randperm(len(labels), generator=generator(1)),
    )

    def scores(chosen: slice | Tensor, **options) -> list[Tensor]:
        options |= {"bias": bias, "batch_invariant": True}
        leaf, other = (hidden[chosen].requires_grad_() for _ in range(2))
        out = gk.linear_token_logprobs(leaf, weight, labels[chosen], return_entropy=True, **options)
        (out.logprobs * grad[chosen] + out.entropy * grad[chosen] ** 2).sum().backward()
        some = gk.linear_selected_logprobs(other, weight, ids[chosen], **options)
        (some.logprobs * grad[chosen].unsqueeze(1) + some.tail.unsqueeze(1)).sum().backward()
        return [*out, leaf.grad, *some, other.grad]

    expected = scores(slice(None))
    for chosen in (slice(5, 6), slice(100, 333), order):
        for rows, count in ((1000, 1), (37, 2)):
            with threads(count):
                found = scores(chosen, max_chunk_bytes=rows * V * 4)
            assert all(torch.equal(got, whole[chosen]) for got, whole in zip(found, expected, strict=True))
    warm = batch["temperature"].repeat_interleave(torch.tensor(LENGTHS))
    options = {"bias": bias, "temperature": warm, "batch_invariant": True}
    alone = gk.linear_token_logprobs(hidden, weight, labels, **options)
    assert torch.equal(alone.logprobs[mask], compute(given, Way())["logprobs"][mask])


@pytest.mark.parametrize("objective", [gk.GSPO(0.3, 0.3), gk.CISPO(), gk.GRPO()])
def test_from_logits_rows_are_so_in_every_mode(objective):
    """Whatever memory a row begins at, and whatever rows and threads there are; coefficients, too."""
    sequences, weight, _ = problem(torch.float32)
    results = []
    for way in (Way(), Way(packed=True, threads=2), Way(order=SHUFFLED, padding=(3, 2), threads=3)):
        batch = arranged([sequences[i] for i in way.order], way)
        # rows that begin at any address
        logits = (batch["hidden"].nan_to_num() @ weight.t()).round(decimals=2)
        rows = torch.empty(logits.numel() + 3)[3:].view_as(logits).copy_(logits).requires_grad_()
        with threads(way.threads):
            out = gk.fused_policy_loss(
                rows, batch["labels"], batch["old"], batch["advantages"], loss_mask=batch["mask"],
                cu_seqlens=batch.get("cu_seqlens"), normalizer=NORMALIZER, objective=objective,
            )  # fmt: skip
            (grad,) = torch.autograd.grad(out.loss * 0.3, rows)
        results.append({"logprobs": in_order([out.logprobs], way), "logits": in_order([grad], way)})
    for found in results[1:]:
        assert_same(found, results[0])


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


def test_what_has_no_fixed_order_is_refused(group_of_one):
    groups = "got a process group in batch-invariant mode"
    for options, error, message in (
        ({"batch_invariant": 1}, TypeError, "batch_invariant"),
        ({"dtype": torch.float64}, ValueError, "fp64 have no fixed order"),
        ({"backend": "reference"}, ValueError, "reference"),
        ({"schedule": "deferred"}, ValueError, "sums dWeight in segments"),
        ({"schedule": "known", "objective": gk.GRPO()}, ValueError, "from whole sequences"),
        ({"parallel": gk.Parallel(tp_group=group_of_one)}, ValueError, f"tp_group: {groups}"),
        ({"parallel": gk.Parallel(cp_group=group_of_one)}, ValueError, f"cp_group: {groups}"),
    ):
        sequences, weight, _ = problem(options.pop("dtype", torch.float32))
        batch = arranged(sequences[:3], Way())
        terms = batch["hidden"], weight.requires_grad_(), batch["labels"], batch["old"], batch["advantages"]
        with pytest.raises(error, match=message):
            gk.fused_linear_policy_loss(
                *terms, loss_mask=batch["mask"], **{"batch_invariant": True} | options
            )
