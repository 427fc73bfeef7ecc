"""Products with a fixed order of their sums, under the interpreter unless a GPU is present."""

import pytest
import torch

from tests.accuracy import Spread, assert_as_exact
from tests.cases import generator

pytest.importorskip("triton")

from gspo_kernels.kernels import fixed_product, products

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Fewer than a tile and a segment, one more and one less, whole ones, and vectors that fill no tile
SHAPES = ((1, 1, 1), (5, 7, 3), (33, 65, 127), (32, 64, 128), (31, 63, 257), (40, 72, 256))


def draw(shape, dtype, seed=0):
    M, N, K = shape
    rng = generator(seed)
    a, b = torch.randn(M, K, generator=rng), torch.randn(K, N, generator=rng)
    return a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE)


def multiply(a, b, out=None, **options):
    if out is None:
        out = torch.full((a.shape[0], b.shape[1]), torch.nan, device=DEVICE)
    return fixed_product(a, b, out, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype):
    a, b = draw(shape, dtype)
    bias, there = (torch.randn(size, generator=generator(1)) for size in ((shape[1],), shape[:2]))
    bias, there = bias.to(DEVICE), there.to(DEVICE)
    product, eps = a.double() @ b.double(), torch.finfo(torch.float32).eps
    for got, expected in (
        (multiply(a, b), product),
        (multiply(a, b, bias=bias), product + bias),
        (multiply(a, b, there.clone(), accumulate=True), product + there),
    ):
        plain = []
        for seed in range(8):
            order = torch.randperm(shape[2], generator=generator(seed)).to(DEVICE)
            more = expected - product
            plain.append(((a[:, order].float() @ b[order].float()).double() + more).float() - expected)
        spread = Spread.of(plain, by_row=False)
        assert_as_exact("product", [got.double() - expected], spread, [expected], eps)
    if dtype != torch.float32:
        assert torch.equal(multiply(a, b, torch.empty_like(there, dtype=dtype)), multiply(a, b).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 72, 256), (37, 70, 200)])
def test_an_element_depends_on_its_row_and_its_column_alone(shape, dtype, monkeypatch):
    """Not on strides, nor on where in memory rows are, how many there are, and which program has them."""
    a, b = draw(shape, dtype)
    expected = multiply(a, b)
    for left in (a, a.t().contiguous().t(), torch.cat([a[:1, :5].flatten(), a.flatten()])[5:].view_as(a)):
        assert torch.equal(multiply(left, b), expected)
    assert torch.equal(multiply(a[7:9], b), expected[7:9])
    assert torch.equal(multiply(torch.cat([a.flip(0)] * 2), b), torch.cat([expected.flip(0)] * 2))
    around = torch.full((shape[0] + 2, shape[1] + 3), 7.0, device=DEVICE)
    assert torch.equal(multiply(a, b, around[1:-1, 2:-1]), expected)
    around[1:-1, 2:-1] = 7.0
    assert (around == 7.0).all()
    for programs in (1, 2, 64):
        monkeypatch.setattr(products, "_multiprocessors", lambda device, programs=programs: programs)
        assert torch.equal(multiply(a, b), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_add_up_the_same_in_one_product_or_in_many(dtype):
    a, b = draw((40, 72, 300), dtype)
    a = a.t().contiguous().t()
    there = torch.randn(40, 72, generator=generator(2)).to(DEVICE)
    ends = [128, 256, 300]
    whole = multiply(a, b, there.clone(), accumulate=True, ends=torch.tensor(ends))
    parts = there.clone()
    for start, end in ((0, 256), (256, 300)):
        own = [e - start for e in ends if start < e <= end]
        multiply(a[:, start:end], b[start:end], parts, accumulate=True, ends=torch.tensor(own))
    assert torch.equal(parts, whole)
    # zeros in the place of rows that have nothing to add
    a[:, 130:150] = 0
    filled = multiply(a, b, there.clone(), accumulate=True)
    assert not torch.equal(filled, whole)
    with pytest.raises(ValueError, match="128 apart"):
        multiply(a, b, there, ends=torch.tensor([100, 300]))


def test_nothing_is_read_beyond_the_operands():
    """Guarded by NaN on all sides, in lines that follow each other along either dimension."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 5, 7), (33, 70, 130), (8, 8, 8)):
            a, b = draw(shape, dtype)
            expected = multiply(a, b)

            def guarded(matrix, turned):
                matrix = matrix.t() if turned else matrix
                rows, columns = matrix.shape
                memory = torch.full((rows + 40, columns + 40), torch.nan, dtype=matrix.dtype, device=DEVICE)
                inner = memory[20:-20, 20:-20].copy_(matrix)
                return inner.t() if turned else inner

            for turns in ((False, False), (True, False), (False, True), (True, True)):
                got = multiply(guarded(a, turns[0]), guarded(b, turns[1]))
                assert torch.equal(got, expected)
