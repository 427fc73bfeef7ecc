"""What is done around the gradient products in one launch each, against PyTorch's operations and fp64."""

import pytest
import torch

pytest.importorskip("triton")

from gspo_kernels import kernels
from gspo_kernels.linear.sums import MOST_IN_SUMS, bounded_for_sums, power_of_two, times
from tests.cases import generator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run under the interpreter")
FP32 = torch.float32
SIZES = torch.tensor([0.0, -0.0, 1.0, -3.7, 1e-42, 3e-30, -5e20, 3e38, float("inf"), float("nan")])
"""Coefficients that a loss may have, and some that it shouldn't."""


def rows_of(width, dtype, seed=0):
    """[n, width] with a row for each of ``SIZES``, and a factor for each."""
    rng, n = generator(seed), len(SIZES)
    return torch.randn(n, width, generator=rng).to(dtype), 0.5 + torch.rand(n, generator=rng)


def same(got, want):
    assert got.dtype == want.dtype and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (got, want)


@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP32])
def test_an_operand_is_hidden_states_times_bounded_coefficients(dtype, width):
    hidden, factors = rows_of(width, dtype)
    unit = torch.tensor(2.0**-3)
    shares = bounded_for_sums(SIZES)
    want = torch.where((SIZES != 0).unsqueeze(1), hidden.float(), 0.0)
    most = MOST_IN_SUMS[FP32]
    same(
        kernels.product_operand(hidden, SIZES, None, None, None, most, dtype),
        (want * shares.unsqueeze(1)).to(dtype),
    )
    same(
        kernels.product_operand(hidden, SIZES, factors, None, unit, most, FP32),
        want * (times(factors, shares) / unit).unsqueeze(1),
    )
    # hidden states of rows without gradient may be anything
    hidden[0], hidden[3] = float("nan"), float("inf")
    active = torch.ones(len(SIZES), dtype=torch.bool)
    active[3] = False
    got = kernels.product_operand(hidden, SIZES[2].expand(10), None, active, None, most, dtype)
    assert got[3].eq(0).all() and got[0].isnan().all() and got[4:].isfinite().all()
    assert kernels.product_operand(hidden, SIZES, None, None, None, most, dtype)[0].eq(0).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the interpreter's maximum says of such rows
@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("whole_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_hidden_gradients_lose_nothing_whatever_their_coefficients(dtype, whole_last, width):
    values, factors = rows_of(width, FP32)
    values = values * torch.logspace(-12, 12, len(SIZES)).unsqueeze(1)
    hidden, scales = torch.full((14, width), 9.0, dtype=dtype), torch.full((14,), 9.0)
    chosen = torch.tensor([2, 3, 5, 6, 9, 0])
    where = torch.randperm(14, generator=generator(1))[: len(SIZES)]
    kernels.store_hidden(
        values[:6], SIZES[chosen], factors[chosen], where[chosen], hidden, scales, whole_last
    )
    got = hidden.double() * scales.double().unsqueeze(1)
    exact = values[:6].double() * (SIZES.double() * factors.double())[chosen].unsqueeze(1)
    error = (got[where[chosen]] - exact).abs()[:4]
    # one rounding to the dtype, three of fp32 before; what is far below its row's largest is subnormal
    largest = exact.abs().amax(1, keepdim=True)[:4] * torch.finfo(dtype).smallest_normal
    budget = exact[:4].abs() * (torch.finfo(dtype).eps / 2 + 2e-7) + largest * torch.finfo(dtype).eps
    assert bool((error <= budget).all()) and got[where[9]].isnan().all() and got[where[0]].eq(0).all()
    others = [i for i in range(14) if i not in where[chosen].tolist()]
    assert hidden[others].eq(9).all() and scales[others].eq(9).all()
    # and in this dtype at once, as PyTorch's operations do it
    kernels.store_hidden(values, SIZES, None, slice(3, 13), hidden, None, whole_last)
    scale = SIZES if whole_last else power_of_two(SIZES)
    units = values if whole_last else times(values, (SIZES / scale).unsqueeze(1))
    same(hidden[3:13], times(units, scale.unsqueeze(1)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_are_scaled_by_what_comes_from_above(dtype):
    values, _ = rows_of(33, dtype)
    stats = torch.float64 if dtype == torch.float64 else FP32
    scales, upstream = SIZES.to(stats), torch.tensor(-0.3, dtype=stats)
    want = times(values.to(stats), (scales * upstream).unsqueeze(1)).to(dtype)
    kernels.scale_rows_(values, scales, upstream)
    same(values, want)


def test_a_unit_is_the_largest_power_so_far():
    coefficients, factors = SIZES[:7], rows_of(16, FP32)[1][:7]
    chosen = [1, 3]
    most = MOST_IN_SUMS[FP32]
    unit, _ = kernels.sum_unit(coefficients, None, None, most, FP32)
    assert unit == power_of_two(SIZES[6])
    unit, _ = kernels.sum_unit(SIZES, None, None, most, FP32)
    assert unit == power_of_two(torch.tensor(most))
    unit, shrink = kernels.sum_unit(SIZES[chosen], factors[chosen], torch.tensor(0.25), most, FP32)
    assert unit == power_of_two(3.7 * factors[3]) and shrink == 0.25 / unit
    unit, shrink = kernels.sum_unit(SIZES[chosen], factors[chosen], torch.tensor(64.0), most, FP32)
    assert unit == 64 and shrink == 1
