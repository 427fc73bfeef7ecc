"""Every schedule of a hidden-state loss makes the products, and takes the memory, that it promises."""

import itertools

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.head import HIDDEN_SLAB, LOGITS_SLAB, Head
from gspo_kernels.linear.scores import CompactedRows
from tests.accuracy import Spread, assert_as_exact
from tests.cases import LAYOUTS, call, generator, make_case, offsets, run
from tests.schedules.common import ACTIVE, ADVANTAGE, ENTRY, ROW, TOKENS, V, run_with_frozen_head, work_case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("schedule", "skip_inactive", "rows", "forward", "gradient"),
    [
        ("aligned", "backward", 8, TOKENS, ACTIVE),
        ("aligned", "all", 8, ADVANTAGE, ACTIVE),
        ("aligned", "backward", 1000, TOKENS, ACTIVE),
        ("deferred", "backward", 2, TOKENS, ADVANTAGE),
        ("deferred", "all", 2, ADVANTAGE, ADVANTAGE),
        ("two_pass", "backward", 2, TOKENS + ACTIVE, ACTIVE),
        ("two_pass", "all", 2, ADVANTAGE + ACTIVE, ACTIVE),
        ("auto", "backward", 8, TOKENS, ACTIVE),
        ("auto", "all", 8, ADVANTAGE, ACTIVE),
    ],
)
def test_rows_in_products(products, schedule, skip_inactive, rows, forward, gradient, layout):
    """Rows without gradient enter no gradient product, masked ones (padding) none at all."""
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
        mask = torch.rand(size, generator=generator(size)) < share
        keep = mask.nonzero().squeeze(1)
        values = torch.arange(size * 3.0).reshape(size, 3)
        before, address = values.clone(), values.data_ptr()
        kept = CompactedRows.of(mask)
        if mask.all():
            assert kept is None
            continue
        moved = kept.compact(values)
        assert torch.equal(kept.rows.sort().values, keep) and torch.equal(moved, before[kept.rows])
        assert not keep.numel() or moved.data_ptr() == address
        assert kept.gaps.numel() == (keep >= keep.numel()).sum()
        stayed = torch.ones(keep.numel(), dtype=torch.bool).index_fill_(0, kept.gaps, False)
        assert torch.equal(kept.rows[stayed], stayed.nonzero().squeeze(1))


@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "frozen", "two_pass"])
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


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "two_pass", "auto", "known"])
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


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "frozen", "two_pass"])
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
