"""What a GPU would be asked: its products, their memory, launches, and what the host would wait for."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.gradients import Gradients, HeadSums, Needs, Rows
from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import load
from tests.cases import assert_equals_oracle, generator, make_case, run
from tests.pretended import DEVICE, PretendedGpu

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests show it on the device itself"),
]
pytest.importorskip("triton")

ENTRY = "fused_linear_policy_loss"
V = 61
ROW = V * 4
NARROW = [torch.float16, torch.bfloat16]


@pytest.fixture
def gpu(monkeypatch):
    return PretendedGpu(monkeypatch)


# --- products


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "cached", "two_pass"])
@pytest.mark.parametrize("dtype", NARROW)
def test_16_bit_rows_live_in_the_memory_of_the_logits(gpu, monkeypatch, dtype, schedule):
    """Rows p - onehot in 16 bits, unscaled, over their own fp32 logits, whose memory is kept."""
    shared, logits = [], set()
    rows_of = Gradients.rows

    def rows(self, projected, *args, out=None, **kwargs):
        found = rows_of(self, projected, *args, out=out, **kwargs)
        shared.append(found.values.data_ptr() == projected.values.data_ptr())
        logits.add(projected.values.data_ptr())
        assert found.values.dtype == dtype
        return found

    monkeypatch.setattr(Gradients, "rows", rows)
    case = make_case("linear", "packed", "holes", dtype=dtype)
    with gpu:
        got = run(case, ENTRY, gk.GSPO(), "triton", schedule=schedule, max_chunk_bytes=4 * ROW)
    assert shared and all(shared) == (schedule != "cached") and len(logits) == 1
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_products_of_16_bits_add_up_in_fp32_and_in_place(gpu, dtype, bias):
    """Every product goes into memory that is there, and dWeight is summed inside of its own."""
    (hidden, weight), labels, old, advantages = problem(dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    bias = torch.zeros(V, dtype=dtype) if bias else None
    with gpu:
        options = {"schedule": "aligned", "skip_inactive": "none", "max_chunk_bytes": 2 * T * ROW}
        gk.fused_linear_policy_loss(*leaves, labels, old, advantages, bias=bias, **options)
    logits, hidden_gradient = ("mm.dtype_out", False), ("mm.dtype", False)
    first, others = ("mm.dtype_out", False), ("addmm.dtype_out", True)
    assert gpu.products == [
        product
        for chunk in range(B // 2)
        for product in (logits, hidden_gradient, others if chunk else first)
    ]


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "cached", "two_pass"])
@pytest.mark.parametrize("dtype", NARROW)
def test_peak_memory_is_what_the_plan_says(gpu, dtype, schedule):
    """All that is there beside the gradients, but for rows [n, H] of a chunk and a few numbers per token."""
    width, vocabulary = 24, 8192
    (hidden, weight), labels, old, advantages = problem(dtype, width, vocabulary)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    options = {"schedule": schedule, "skip_inactive": "none", "max_chunk_bytes": 2 * T * vocabulary * 4}
    with gpu:
        plan = gk.explain_schedule(*leaves, labels, old, advantages, **options)
        gk.fused_linear_policy_loss(*leaves, labels, old, advantages, **options).loss.backward()
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    small = 2 * T * width * 4 * 8 + 2**15
    assert 0.95 * plan.peak_bytes <= gpu.peak <= plan.peak_bytes + gradients + small
    assert gradients + small < 0.7 * weight.numel() * 4  # so that one more [V, H] shows


@pytest.mark.parametrize(
    "sizes", [(1.0, 2.0**-30), (2.0**-30, 1.0), (2.0**-90, 2.0**20), (2.0**20, 2.0**-90)]
)
@pytest.mark.parametrize("dtype", NARROW)
def test_coefficients_of_any_size_add_up_in_16_bits(gpu, dtype, sizes):
    """The coefficients of one chunk lie many powers of two from the other's."""
    rng, n, width = generator(0), 8, 16
    weight, sizes = torch.zeros(V, width, dtype=dtype), [2.0 ** round(math.log2(size)) for size in sizes]
    exact, budget = torch.zeros(V, width, dtype=torch.float64), torch.zeros(V, width, dtype=torch.float64)
    with gpu:
        sums = HeadSums(Head(weight, None, "float32"), Needs(False, True, False), load("triton"))
        for size in sizes:
            rows, hidden = (torch.randn(n, k, generator=rng).to(dtype) for k in (V, width))
            unit, scale = 1 + torch.rand(n, generator=rng), torch.full((), size, device=DEVICE)
            sums.add(Rows(rows, None), hidden, unit, torch.ones(n, dtype=torch.bool, device=DEVICE), scale)
            operand = hidden.double() * (unit.double() * size).unsqueeze(1)
            exact += rows.double().t() @ operand
            # an operand is rounded once, at most to a subnormal number in units of the largest coefficient
            unseen = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * max(sizes)
            errors = operand.abs() * torch.finfo(dtype).eps + unseen
            # and a product of n terms, and the sum, in fp32
            errors += operand.abs() * (n + 2) * torch.finfo(torch.float32).eps
            budget += rows.double().abs().t() @ (errors / 2)
        got = sums.result()[0].double()
    assert bool((got - exact).abs().le(budget).all())
    in_16_bits = [product for product in gpu.products if "dtype" in product[0]]
    assert in_16_bits == [("mm.dtype_out", False), ("addmm.dtype_out", True)]


T, B = 8, 8


def problem(dtype, width=16, vocabulary=V):
    """Tensors for a pretended device: (hidden, weight), labels, old log-probs, advantages."""
    rng = generator(0)
    hidden, weight = torch.randn(B, T, width, generator=rng), torch.randn(vocabulary, width, generator=rng)
    labels = torch.randint(vocabulary, (B, T), generator=rng)
    old, advantages = torch.randn(B, T, generator=rng) - 4, torch.randn(B, generator=rng)
    return ((hidden.to(dtype), (weight / 4).to(dtype)), labels, old, advantages)
