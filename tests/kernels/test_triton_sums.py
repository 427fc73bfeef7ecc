"""Sums over a sequence's tokens: the same bits wherever in their rows the tokens that count stand."""

import pytest
import torch

from tests.cases import generator

pytest.importorskip("triton")

import triton.language as tl

from gspo_kernels.kernels.launch import Tile, encode_wide, launch, row_kernel
from gspo_kernels.kernels.sequences import sum_sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64


@row_kernel
def summing_kernel(
    labels_ptr, old_ptr, logprobs_ptr, sums_ptr, counts_ptr, strides, T: tl.int32, BLOCK: tl.constexpr
):
    count, total = sum_sequence(
        0, 0, T, T, labels_ptr, strides, -100, old_ptr, strides, logprobs_ptr, True, tl.float32, BLOCK
    )
    tl.store(sums_ptr, total)
    tl.store(counts_ptr, count)


def summed(labels, old, logprobs):
    total = torch.empty((), dtype=torch.float64, device=DEVICE)
    count = torch.empty((), dtype=torch.int32, device=DEVICE)
    given = (each.to(DEVICE) for each in (labels, old, logprobs))
    strides = (encode_wide(0), encode_wide(1))
    launch(
        summing_kernel,
        1,
        total.device,
        Tile(BLOCK, 1),
        *given,
        total,
        count,
        strides,
        len(labels),
        BLOCK=BLOCK,
    )
    return total.item(), count.item()


def test_neither_padding_nor_holes_nor_the_order_change_a_sum():
    rng = generator(0)
    size = 700
    # from near 0, where the grid is coarser than fp32, to far off-policy
    logprobs = -torch.logspace(-9, 2, size)[torch.randperm(size, generator=rng)]
    old = logprobs - torch.randn(size, generator=rng) * 0.3 * logprobs.abs()
    labels = torch.ones(size, dtype=torch.int64)
    exact = (logprobs - old).double()
    expected, count = summed(labels, old, logprobs)
    assert count == size and abs(expected - exact.sum()) <= size * 2.0**-41
    plain = {float(exact[torch.randperm(size, generator=rng)].cumsum(0)[-1]) for _ in range(20)}
    assert len(plain) > 1  # without the grid the order shows
    for left, hole in ((1, 0), (13, 0), (0, 5), (64, 70), (200, 1)):
        spread = torch.full((left + size + hole,), -100)
        places = torch.cat([torch.arange(left, left + 300), torch.arange(left + 300 + hole, len(spread))])
        spread[places] = 1
        wide = [
            torch.full(spread.shape, float("nan")).index_copy_(0, places, each) for each in (old, logprobs)
        ]
        assert summed(spread, *wide) == (expected, size)
    order = torch.randperm(size, generator=rng)
    assert summed(labels, old[order], logprobs[order]) == (expected, size)


@pytest.mark.parametrize(("new", "expected"), [(-1e30, -1e30), (-float("inf"), -float("inf"))])
def test_what_no_grid_holds_stays_as_it_is(new, expected):
    logprobs = torch.tensor([-0.5, new, -0.25])
    total, _ = summed(torch.ones(3, dtype=torch.int64), torch.tensor([-0.5, 0.0, -0.25]), logprobs)
    assert total == torch.tensor(expected).double().item()
