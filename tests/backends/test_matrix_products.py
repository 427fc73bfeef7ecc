"""Products whose elements depend on their row and column alone: Triton's, and C++'s by instruction set."""

import functools
import itertools

import pytest
import torch

from gspo_kernels.backends.cpp import products
from gspo_kernels.backends.cpp.products import INSTRUCTIONS, PIECE
from gspo_kernels.backends.dispatch import unavailable_reason
from gspo_kernels.core import self_test
from tests.accuracy import Spread, assert_as_exact
from tests.cases import device_of, generator

FP32, BF16 = torch.float32, torch.bfloat16
# a tile, a block or a piece along K (128 or 256) exactly, with one more and with one less; tiny; odd K
SMALL = ((1, 1, 1), (31, 63, 257), (32, 64, 128), (33, 65, 127))
LARGE = (
    (5, 7, 3),
    (13, 33, 255),
    (40, 72, 256),
    (100, 300, 513),
    (505, 961, 40),
    (3, 40, 2050),
    (600, 5, 77),
)


@functools.cache
def has_instructions(name, dtype):
    one = torch.ones(1, 1, dtype=dtype)
    try:
        products.multiply(one, one, torch.empty(1, 1), instructions=name)
    except RuntimeError:
        return False
    return True


class Way:
    """Triton's product, by pointers or by tensor maps, or C++'s with one instruction set; ``dtypes`` are what
    it can multiply here.
    """

    def __init__(self, name):
        self.name, self.device = name, device_of("triton" if name == "triton" else "cpp")
        if name == "triton":
            self.dtypes, self.shapes = (FP32, BF16, torch.float16), SMALL
        else:
            self.dtypes = tuple(dtype for dtype in (FP32, BF16) if has_instructions(name, dtype))
            self.shapes = SMALL + LARGE

    def draw(self, shape, dtype):
        return tuple(each.to(self.device) for each in draw(shape, dtype))

    def __call__(self, a, b, out=None, **options):
        if out is None:
            out = torch.full((a.shape[0], b.shape[1]), torch.nan, device=self.device)
        if self.name == "triton":
            from gspo_kernels.backends.triton import batch_invariant_mm

            return batch_invariant_mm(a, b, out, **options)
        return products.multiply(a, b, out, instructions=self.name, **options)


@pytest.fixture(params=("triton", "triton by tensor maps", *INSTRUCTIONS))
def way(request, monkeypatch):
    name, _, by_tensor_maps = request.param.partition(" ")
    monkeypatch.setattr(self_test, "_enabled", bool(by_tensor_maps))
    backend = "triton" if name == "triton" else "cpp"
    if (reason := unavailable_reason(backend, device_of(backend))) is not None:
        pytest.skip(reason)
    if not (found := Way(name)).dtypes:
        pytest.skip("this processor has no such instructions")
    return found


@functools.cache
def draw(shape, dtype):
    M, N, K = shape
    rng = generator(0)
    return torch.randn(M, K, generator=rng).to(dtype), torch.randn(K, N, generator=rng).to(dtype)


@functools.cache
def sums(shape, dtype):
    """Return the exact product, and fp32 PyTorch's with sums in eight orders."""
    a, b = draw(shape, dtype)
    orders = [torch.randperm(shape[2], generator=generator(seed)) for seed in range(8)]
    return a.double() @ b.double(), [a[:, order].float() @ b[order].float() for order in orders]


def test_values(way):
    for dtype, shape in itertools.product(way.dtypes, way.shapes):
        a, b = way.draw(shape, dtype)
        product, plain = sums(shape, dtype)
        bias, there = (torch.randn(size, generator=generator(1)) for size in (shape[1:2], shape[:2]))
        for name, more, options in (
            ("alone", torch.zeros(()), {}),
            ("bias", bias, {"bias": bias.to(way.device)}),
            ("there", there, {"out": there.to(way.device, copy=True), "accumulate": True}),
        ):
            exact = product + more
            spread = Spread.of([(each + more).double() - exact for each in plain], by_row=False)
            error = way(a, b, **options).cpu().double() - exact
            assert_as_exact(f"{dtype} {shape} {name}", [error], spread, [exact], torch.finfo(FP32).eps)
    rounded = bias.to(way.device, BF16)
    rounded = torch.stack([rounded, torch.full_like(rounded, torch.nan)], 1)[:, 0]
    assert torch.equal(way(a, b, bias=rounded), way(a, b, bias=rounded.float()))
    if way.name == "triton":
        narrow = torch.empty(there.shape, dtype=dtype, device=way.device)
        assert torch.equal(way(a, b, narrow), way(a, b).to(dtype)) and dtype != FP32


def views(matrix, around=20):
    """Yield views of a matrix amid NaN: contiguous along either dimension, and strided along both."""
    for turned in (False, True):
        inner = matrix.t() if turned else matrix
        rows, columns = inner.shape
        room = matrix.new_full((rows + 2 * around, columns + 2 * around), torch.nan)
        inner = room[around:-around, around:-around].copy_(inner)
        yield inner.t() if turned else inner
    apart = matrix.new_full((matrix.shape[0], 3 * matrix.shape[1] + 1), torch.nan)[:, 1::3]
    yield apart.copy_(matrix)


@pytest.mark.slow
def test_elements_depend_on_row_and_column_only(way, monkeypatch):
    """Strides, memory around, other rows and columns, threads and multiprocessors change no bit."""
    large = (530, 1000, 600) if way.name == "best" else (100, 130, 300)
    threads = torch.get_num_threads()
    for dtype, shape in itertools.product(way.dtypes, ((3, 5, 7), (33, 70, 130))):
        a, b = way.draw(shape, dtype)
        whole = way(a, b)
        for left, right in itertools.product(views(a), views(b)):
            assert torch.equal(way(left, right), whole)
        around = torch.full((shape[0] + 2, shape[1] + 3), 7.0, device=way.device)
        assert torch.equal(way(a, b, around[1:-1, 2:-1]), whole)
        around[1:-1, 2:-1] = 7.0
        assert (around == 7.0).all()
    for dtype in way.dtypes:
        a, b = way.draw((37, 70, 200) if way.name == "triton" else large, dtype)
        whole = way(a, b)
        assert torch.equal(way(a[7:9], b[:, 1:60]), whole[7:9, 1:60])
        assert torch.equal(way(torch.cat([a.flip(0)] * 2), b), torch.cat([whole.flip(0)] * 2))
        for count in (1, 2, 8, 64):
            if way.name == "triton":
                monkeypatch.setattr(
                    "gspo_kernels.backends.triton.tiles.multiprocessors", lambda _, n=count: n
                )
            torch.set_num_threads(count)
            try:
                assert torch.equal(way(a, b), whole)
                assert torch.equal(way(a[:1], b), whole[:1]) and torch.equal(way(a, b[:, :3]), whole[:, :3])
            finally:
                torch.set_num_threads(threads)


def test_pieces_add_up_in_their_order(way):
    """A call has the bits of separate products added one after another, however calls share the pieces."""
    ends = [64, 192, 300] if way.name == "triton" else [1, 41, 41 + PIECE, 290, 301]
    for dtype, turned in itertools.product(way.dtypes, (False, True)):
        a, b = way.draw((40, 72, ends[-1]), dtype)
        a = a.t().contiguous().t() if turned else a
        there = torch.randn(40, 72, generator=generator(5)).to(way.device)
        whole = way(a, b, there.clone(), accumulate=True, ends=torch.tensor(ends))
        each = list(itertools.pairwise([0, *ends]))
        for parts in (each, [(0, ends[2]), *each[3:]], [(0, ends[1]), (ends[1], ends[-1])]):
            added = there.clone()
            for start, end in parts:
                local = torch.tensor([e - start for e in ends if start < e <= end])
                way(a[:, start:end], b[start:end], added, accumulate=True, ends=local)
            assert torch.equal(added, whole)
        if way.name != "triton":
            assert not torch.equal(way(a, b, there.clone(), accumulate=True), whole)


def test_infinities_stay_in_their_rows_and_columns(way):
    for dtype in way.dtypes:
        a, b = way.draw((30, 50, 77), dtype)
        a, b, clean = a.clone(), b.clone(), way(a, b)
        a[3, 5], a[17, 76], b[2, 9] = torch.nan, torch.inf, -torch.inf
        out, touched = way(a, b), torch.zeros(30, 50, dtype=torch.bool)
        touched[[3, 17]] = touched[:, 9] = True
        assert not out[touched].isfinite().any() and torch.equal(out[~touched], clean[~touched])
        assert out[3].isnan().all() and torch.equal(out[17, 10:].sign(), b[76, 10:].float().sign())


def test_operands_and_ends_that_do_not_fit_are_refused():
    a, b, out = torch.empty(2, 300), torch.empty(300, 3), torch.empty(2, 3)
    for ends in ([100, 300], [128, 256]):
        with pytest.raises(ValueError, match="multiples of 64, then 300"):
            Way("triton")(a, b, ends=torch.tensor(ends))
    for ends, message in (
        ([300], "no more than"),
        ([2, 2, 300], "ends must grow"),
        ([2, 3], "last of the ends"),
    ):
        with pytest.raises(RuntimeError, match=message):
            products.multiply(a, b, out, ends=torch.tensor(ends))
    for change in ({"b": torch.empty(5, 3)}, {"out": torch.empty(2, 4)}, {"bias": torch.empty(4)}):
        with pytest.raises(RuntimeError, match=r"shapes|bias"):
            products.multiply(**{"a": a, "b": b, "out": out} | change)


# --- instruction sets of the CPU


@pytest.mark.parametrize("depth", [40, 600])
def test_large_results_are_the_same(depth):
    """Results from 32 MiB on are streamed if rows begin at cache lines; a partial vector is left."""
    way = Way("best")
    for dtype in way.dtypes:
        a, b = way.draw((1100, 8007, depth), dtype)
        streamed = way(a, b, torch.full((1100, 8016), torch.nan)[:, :8007])
        assert all(
            torch.equal(way(rows, b), part)
            for rows, part in zip(a.split(300), streamed.split(300), strict=True)
        )
        added = way(a, b, streamed.clone(), accumulate=True)
        for rows, before, after in zip(*(each.split(300) for each in (a, streamed, added)), strict=True):
            assert torch.equal(way(rows, b, before.clone(), accumulate=True), after)


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        ("amx", "portable_amx", BF16),
        ("avx512_bf16", "portable", BF16),
        ("avx2", "portable", BF16),
        ("avx512", "avx2", FP32),
        ("avx512", "as fp32", BF16),
    ],
)
def test_instructions_of_equal_sums_have_equal_bits(one, other, dtype):
    """Without bf16 instructions, bf16 is multiplied as fp32, in pieces of the same number of values."""
    if not all(name == "as fp32" or has_instructions(name, dtype) for name in (one, other)):
        pytest.skip("this processor lacks one of them")
    for shape, turned in itertools.product(SMALL + LARGE, (False, True)):
        a, b = (each.clone() for each in draw(shape, dtype))
        a[0, 0], b[-1, -1] = torch.inf, -0.0
        if turned:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        want = Way("avx512")(a.float(), b.float()) if other == "as fp32" else Way(other)(a, b)
        torch.testing.assert_close(Way(one)(a, b), want, rtol=0, atol=0, equal_nan=True)


def test_amx_flushes_subnormals():
    smallest, subnormal = 2.0**-126, 2.0**-130
    a = torch.tensor([[subnormal, 1.0], [smallest, -1.0], [smallest, 0.0]], dtype=BF16)
    b = torch.tensor([[2.0**100], [smallest]], dtype=BF16)
    halved = torch.tensor([[0.5], [0.0]], dtype=BF16)
    for name in ("amx", "portable_amx"):
        if has_instructions(name, BF16):
            assert Way(name)(a, b).flatten().tolist() == [smallest, 2.0**-26 - smallest, 2.0**-26]
            assert (Way(name)(a, halved) == 0).all()
