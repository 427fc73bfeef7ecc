"""Arithmetic inside the Triton kernels: sums, roundings, and operations around the gradient products."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.triton.launch import Tile, launch, typed_kernel
from gspo_kernels.backends.triton.ratios import sum_sequence
from gspo_kernels.backends.triton.rows import narrowed
from gspo_kernels.core.exact import MAX_IN_SUMS, power_of_two, times
from gspo_kernels.core.types import stats_dtype
from tests.backends.row_calls import DTYPES, same
from tests.cases import device_of, generator

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run under the interpreter")
FP32 = torch.float32


# --- sums over a sequence's tokens


@typed_kernel
def summing_kernel(labels_ptr, old_ptr, logprobs_ptr, sums_ptr, counts_ptr, T: tl.int32, BLOCK: tl.constexpr):
    count, total = sum_sequence(
        0, 0, T, (labels_ptr, 0, 1), -100, (old_ptr, 0, 1), logprobs_ptr, False, True, tl.float32, BLOCK
    )
    tl.store(sums_ptr, total)
    tl.store(counts_ptr, count)


def summed(*given):
    """Return the sum and the number of log-ratios; ``given`` are labels, old and new log-probs."""
    device = device_of("triton")
    total = torch.empty((), dtype=torch.float64, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    arguments = *(each.to(device) for each in given), total, count, len(given[0])
    launch(summing_kernel, 1, device, Tile(64, 1), *arguments, BLOCK=64)
    return total.item(), count.item()


def test_sums_ignore_padding_holes_and_order():
    """Log-ratios are rounded to a grid, where a sum has one value; numbers beyond it stay as they are."""
    rng, size = generator(0), 700
    # from near 0, where the grid is coarser than fp32, to far off-policy
    logprobs = -torch.logspace(-9, 2, size)[torch.randperm(size, generator=rng)]
    old = logprobs - torch.randn(size, generator=rng) * 0.3 * logprobs.abs()
    labels, ratios = torch.ones(size, dtype=torch.int64), (logprobs - old).double()
    expected, count = summed(labels, old, logprobs)
    assert count == size and abs(expected - ratios.sum()) <= size * 2.0**-41
    plain = {float(ratios[torch.randperm(size, generator=rng)].cumsum(0)[-1]) for _ in range(20)}
    assert len(plain) > 1  # without the grid the order changes the sum
    for left, hole in ((13, 0), (0, 5), (64, 70)):
        spread = torch.full((left + size + hole,), -100)
        places = torch.cat([torch.arange(left, left + 300), torch.arange(left + 300 + hole, len(spread))])
        spread[places] = 1
        wide = [torch.full(spread.shape, torch.nan).index_copy_(0, places, x) for x in (old, logprobs)]
        assert summed(spread, *wide) == (expected, size)
    order = torch.randperm(size, generator=rng)
    assert summed(labels, old[order], logprobs[order]) == (expected, size)
    for far in (-1e30, -float("inf")):
        logprobs, old = torch.tensor([-0.5, far, -0.25]), torch.tensor([-0.5, 0.0, -0.25])
        assert summed(labels[:3], old, logprobs)[0] == torch.tensor(far).double().item()


# --- rounding to 16 bits, to the nearest even, by integer operations where no instruction does it


@triton.jit
def narrowing(values, out, COUNT: tl.constexpr, PLATFORM: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    tl.store(out + lanes, narrowed(tl.load(values + lanes), tl.bfloat16, PLATFORM))


@interpreted
@pytest.mark.parametrize("platform", ["interpreter", "hip"])
def test_numbers_of_all_sizes_round_as_in_pytorch(platform):
    """All upper halves of fp32 are tried, among them ties, subnormal numbers and NaN of many payloads."""
    for low in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(low)
        values = torch.from_numpy(bits.view(np.float32))
        out = torch.empty(len(values), dtype=torch.bfloat16)
        narrowing[(1,)](values, out, len(values), platform)
        assert same([out], [values.bfloat16()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling(monkeypatch, dtype):
    """At most two programs share all blocks here."""
    monkeypatch.setattr("gspo_kernels.backends.triton.row_scaling._PROGRAMS", 2)
    device = device_of("triton")
    # times 1.5, every other 16-bit number lies half-way between two
    factor = torch.tensor(-1.5, dtype=stats_dtype(dtype))
    for count in (1, 8192 * 4 + 3):
        values = torch.randn(count, dtype=torch.float64).to(dtype)
        scaled, want = values.to(device, copy=True), (values.to(factor.dtype) * factor).to(dtype)
        for by in (factor, torch.ones_like(factor)):
            kernels.scale_(scaled, by.to(device))
            assert torch.equal(scaled.cpu(), want)


# --- around the gradient products

SIZES = torch.tensor([0.0, -0.0, 1.0, -3.7, 1e-42, 3e-30, -5e20, 3e38, float("inf"), float("nan")])
"""Coefficients that a loss may have, and some that it shouldn't have."""


def rows_of(width, dtype):
    """Draw values [n, width] with a row for each of ``SIZES``, and a factor for each row."""
    rng, n = generator(0), len(SIZES)
    return torch.randn(n, width, generator=rng).to(dtype), 0.5 + torch.rand(n, generator=rng)


@interpreted
def test_operands_of_rows_without_gradient_are_zero():
    """Their hidden states may be anything."""
    hidden, active = rows_of(16, FP32)[0], torch.ones(len(SIZES), dtype=torch.bool)
    hidden[0], hidden[3], active[3] = torch.nan, torch.inf, False
    given = (MAX_IN_SUMS[FP32], FP32)
    got = kernels.product_operand(hidden, SIZES[2].expand(len(SIZES)), None, active, None, *given)
    assert got[3].eq(0).all() and got[0].isnan().all() and got[4:].isfinite().all()
    assert kernels.product_operand(hidden, SIZES, None, None, None, *given)[0].eq(0).all()


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum warns of rows of NaN
@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("whole_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_gradients_are_rounded_once(dtype, whole_last, width):
    values, factors = rows_of(width, FP32)
    values = values * torch.logspace(-12, 12, len(SIZES)).unsqueeze(1)
    hidden, scales = torch.full((14, width), 9.0, dtype=dtype), torch.full((14,), 9.0)
    chosen = torch.tensor([2, 3, 5, 6, 9, 0])
    where = torch.randperm(14, generator=generator(1))[: len(SIZES)]
    given = values[:6], SIZES[chosen], factors[chosen], where[chosen]
    kernels.store_hidden(*given, hidden, scales, whole_last)
    got = hidden.double() * scales.double().unsqueeze(1)
    exactly = values[:6].double() * (SIZES.double() * factors.double())[chosen].unsqueeze(1)
    error = (got[where[chosen]] - exactly).abs()[:4]
    # one rounding to the dtype after three of fp32; values far below their row's largest are subnormal
    largest = exactly.abs().amax(1, keepdim=True)[:4] * torch.finfo(dtype).smallest_normal
    budget = exactly[:4].abs() * (torch.finfo(dtype).eps / 2 + 2e-7) + largest * torch.finfo(dtype).eps
    assert bool((error <= budget).all()) and got[where[9]].isnan().all() and got[where[0]].eq(0).all()
    others = [i for i in range(14) if i not in where[chosen].tolist()]
    assert hidden[others].eq(9).all() and scales[others].eq(9).all()
    # without scales, rows are stored in this dtype at once, as PyTorch's operations do
    kernels.store_hidden(values, SIZES, None, slice(3, 13), hidden, None, whole_last)
    scale = SIZES if whole_last else power_of_two(SIZES)
    units = values if whole_last else times(values, (SIZES / scale).unsqueeze(1))
    assert same([hidden[3:13]], [times(units, scale.unsqueeze(1)).to(dtype)])


@interpreted
def test_a_unit_is_the_largest_power_so_far():
    factors, chosen, most = 8 * rows_of(16, FP32)[1], [1, 3], MAX_IN_SUMS[FP32]
    assert kernels.sum_unit(SIZES[:7], None, None, most, FP32)[0] == power_of_two(SIZES[6])
    assert kernels.sum_unit(SIZES, None, None, most, FP32)[0] == power_of_two(torch.tensor(most))
    for before, expected in ((0.25, power_of_two(3.7 * factors[3])), (64.0, 64.0)):
        given = SIZES[chosen], factors[chosen], torch.tensor(before)
        unit, shrink = kernels.sum_unit(*given, most, FP32)
        assert unit == expected and shrink == before / unit


# --- the interpreter itself


@triton.jit
def sums_and_products(out_ptr, x: tl.int32, y: tl.int32):
    tl.store(out_ptr, x + y)
    tl.store(out_ptr + 1, x - y)
    tl.store(out_ptr + 2, x * y)


@interpreted
def test_an_integer_that_overflows_is_found():
    out = torch.zeros(3, dtype=torch.int32)
    sums_and_products[(1,)](out, -(2**31) + 1, 1)
    assert out.tolist() == [-(2**31) + 2, -(2**31), -(2**31) + 1]
    for name, x, y in (("add", 2**31 - 1, 1), ("sub", -(2**31), 1), ("mul", 2**16, 2**15)):
        with pytest.raises(Exception, match=f"int32 overflow detected for operation {name}"):
            sums_and_products[(1,)](out, x, y)
