"""Matrix products of the C++ backend: values, strides, what an element may depend on, special values."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gspo_kernels import cpp
from gspo_kernels.cpp.products import INSTRUCTIONS, PIECE, has_instructions, multiplies, multiply
from tests.accuracy import Spread, assert_as_exact
from tests.cases import generator

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.bfloat16)
# Multiples of nothing, one more and one less than a tile, a block, a piece along K (128 or 256), odd K
SHAPES = (
    (1, 1, 1), (5, 7, 3), (10, 40, 127), (12, 32, 256), (13, 33, 257), (11, 31, 255), (100, 300, 513),
    (505, 961, 40), (3, 40, 2050), (600, 5, 77),
)  # fmt: skip


def require(instructions: str, dtype: torch.dtype) -> None:
    if not has_instructions(instructions, dtype):
        pytest.skip(f"{instructions} is not for {dtype}, or this processor has none")


def draw(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows, columns, depth = shape
    rng = generator(seed)
    a, b = torch.randn(rows, depth, generator=rng), torch.randn(depth, columns, generator=rng)
    return a.to(dtype), b.to(dtype)


def poisoned(a: Tensor, b: Tensor) -> Tensor:
    return torch.full((a.shape[0], b.shape[1]), torch.nan)


def assert_product(out: Tensor, a: Tensor, b: Tensor, there: Tensor | None = None) -> None:
    """As exact as fp32 PyTorch from the same operands, whose sums are taken in several orders; ``there`` is
    added to.
    """
    there = torch.zeros(()) if there is None else there
    expected, plain = there + a.double() @ b.double(), []
    for seed in range(8):
        order = torch.randperm(a.shape[1], generator=generator(seed))
        plain.append((there + a[:, order].float() @ b[order].float()).double() - expected)
    spread = Spread.of(plain, by_row=False)
    eps = torch.finfo(torch.float32).eps
    assert_as_exact("product", [out.double() - expected], spread, [expected], eps)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype, instructions):
    require(instructions, dtype)
    a, b = draw(shape, dtype)
    assert_product(multiply(a, b, poisoned(a, b), instructions=instructions), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(13, 33, 257), (30, 70, 1025)])
def test_strides_make_no_difference(shape, dtype):
    a, b = draw(shape, dtype)
    expected = multiply(a, b, poisoned(a, b))

    def layouts(matrix: Tensor) -> list[Tensor]:
        rows, columns = matrix.shape
        apart = torch.full((rows, 3 * columns + 1), torch.nan, dtype=dtype)[:, 1::3]
        wide = torch.full((rows, 2 * columns), torch.nan, dtype=dtype)[:, :columns]
        return [matrix, matrix.t().contiguous().t(), apart.copy_(matrix), wide.copy_(matrix)]

    for left in layouts(a):
        for right in layouts(b):
            assert torch.equal(multiply(left, right, poisoned(a, b)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_output_is_written(dtype):
    a, b = draw((13, 33, 40), dtype)
    around = torch.full((15, 40), 7.0)
    out = multiply(a, b, around[1:14, 3:36])
    assert torch.equal(out, multiply(a, b, poisoned(a, b)))
    around[1:14, 3:36] = 7.0
    assert (around == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_depends_on_its_row_and_its_column_alone(dtype):
    """Not on what is computed along with it, so that log-probs don't change with the size of a chunk."""
    a, b = draw((530, 1000, 600), dtype)
    whole = multiply(a, b, poisoned(a, b))
    rows, columns = slice(7, 40), slice(501, 777)
    part = multiply(a[rows], b[:, columns], torch.empty(33, 276))
    assert torch.equal(part, whole[rows, columns])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [40, 600])
def test_large_results_go_past_the_caches_and_are_the_same(dtype, depth):
    """From 32 MiB, where rows begin at cache lines; with a rest of columns that is no whole vector."""
    a, b = draw((1100, 8007, depth), dtype)
    streamed = multiply(a, b, torch.full((1100, 8016), torch.nan)[:, :8007])
    parts = [multiply(rows, b, torch.empty(len(rows), 8007)) for rows in a.split(300)]
    assert torch.equal(streamed, torch.cat(parts))
    added = multiply(a, b, streamed.clone(), accumulate=True)
    assert torch.equal(
        added,
        torch.cat(
            [
                multiply(x, b, y.clone(), accumulate=True)
                for x, y in zip(a.split(300), streamed.split(300), strict=True)
            ]
        ),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(530, 1000, 600), (1, 5000, 30), (5000, 3, 30)])
def test_any_number_of_threads_gives_the_same_bits(shape, dtype):
    a, b = draw(shape, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(multiply(a, b, poisoned(a, b)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        ("amx", "portable_amx", torch.bfloat16),
        ("avx512_bf16", "portable", torch.bfloat16),
        ("avx2", "portable", torch.bfloat16),
        ("avx512", "avx2", torch.float32),
    ],
)
def test_instructions_with_the_same_sums_have_the_same_bits(one, other, dtype):
    require(one, dtype)
    require(other, dtype)
    for shape, turned in itertools.product(SHAPES, (False, True)):
        a, b = draw(shape, dtype)
        a[0, 0], b[-1, -1] = float("inf"), -0.0
        if turned:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        results = [multiply(a, b, poisoned(a, b), instructions=way) for way in (one, other)]
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_amx_takes_subnormal_numbers_for_zero_and_leaves_none():
    smallest, subnormal = 2.0**-126, 2.0**-130
    a = torch.tensor([[subnormal, 1.0], [smallest, -1.0], [smallest, 0.0]], dtype=torch.bfloat16)
    b = torch.tensor([[2.0**100], [smallest]], dtype=torch.bfloat16)
    halved = torch.tensor([[0.5], [0.0]], dtype=torch.bfloat16)
    for way in ("amx", "portable_amx"):
        if has_instructions(way, torch.bfloat16):
            sums = multiply(a, b, poisoned(a, b), instructions=way)
            assert sums.flatten().tolist() == [smallest, 2.0**-26 - smallest, 2.0**-26]
            assert (multiply(a, halved, poisoned(a, halved), instructions=way) == 0).all()


def test_bf16_without_instructions_of_its_own_is_multiplied_as_fp32():
    """Piece by piece: those of "avx512" have as many values of either dtype."""
    require("avx512", torch.float32)
    for shape in SHAPES:
        a, b = draw(shape, torch.bfloat16)
        for left, right in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
            widened = multiply(a.float(), b.float(), poisoned(a, b), instructions="avx512")
            assert torch.equal(multiply(left, right, poisoned(a, b), instructions="avx512"), widened)


def test_amx_products_go_between_those_of_pytorch():
    """oneDNN configures the same registers of the same threads."""
    require("amx", torch.bfloat16)
    a, b = draw((300, 500, 600), torch.bfloat16)
    ours, theirs = multiply(a, b, poisoned(a, b)), a @ b
    for _ in range(20):
        assert torch.equal(multiply(a, b, poisoned(a, b)), ours)
        assert torch.equal(a @ b, theirs)


def test_onednn_s_limit_leaves_amx_out():
    code = (
        "import torch; from gspo_kernels.cpp.products import best_instructions\n"
        "print(best_instructions(torch.bfloat16), torch.ops.gspo_kernels_cpp.amx_unavailable())"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    instructions, reason = ran.stdout.split(maxsplit=1)
    assert instructions != "amx"
    expected = "ONEDNN_MAX_CPU_ISA leaves it out" if has_instructions("amx", torch.bfloat16) else "none"
    assert expected in reason or reason.startswith("this build")


@pytest.mark.parametrize("instructions", ["portable_amx", "amx", "avx512"])
def test_pieces_of_bf16_end_where_they_are_told_whatever_multiplies(instructions):
    require(instructions, torch.bfloat16)
    a, b = draw((33, 276, 301), torch.bfloat16)
    ends = [1, 41, 41 + PIECE, 290, 301]
    expected = torch.zeros(33, 276)
    for start, end in itertools.pairwise([0, *ends]):
        multiply(a[:, start:end], b[start:end], expected, accumulate=True, instructions=instructions)
    out = multiply(a, b, poisoned(a, b), ends=torch.tensor(ends), instructions=instructions)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_that_end_where_they_are_told_to_add_up_in_their_order(dtype):
    """As products of their own that are added one after another, whichever of them one call takes."""
    ends = [1, 41, 41 + PIECE, 290, 301]
    a, b = draw((70, 50, ends[-1]), dtype)
    there = torch.randn(70, 50, generator=generator(5))
    expected, start = there.clone(), 0
    for end in ends:
        multiply(a[:, start:end], b[start:end], expected, accumulate=True)
        start = end
    cut = multiply(a, b, there.clone(), accumulate=True, ends=torch.tensor(ends))
    assert torch.equal(cut, expected)
    half, early, late = ends[2], torch.tensor(ends[:3]), torch.tensor(ends[3:])
    parted = multiply(a[:, :half], b[:half], there.clone(), accumulate=True, ends=early)
    multiply(a[:, half:], b[half:], parted, accumulate=True, ends=late - half)
    assert torch.equal(parted, expected)
    assert not torch.equal(cut, multiply(a, b, there.clone(), accumulate=True))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_stay_in_their_rows_and_columns(dtype, instructions):
    require(instructions, dtype)
    a, b = draw((30, 50, 77), dtype)
    clean = multiply(a, b, poisoned(a, b), instructions=instructions)
    a[3, 5], a[17, 76], b[2, 9] = float("nan"), float("inf"), float("-inf")
    out = multiply(a, b, poisoned(a, b), instructions=instructions)
    touched = torch.zeros(30, 50, dtype=torch.bool)
    touched[[3, 17]] = True
    touched[:, 9] = True
    assert not out[touched].isfinite().any()
    assert torch.equal(out[~touched], clean[~touched])
    assert out[3].isnan().all() and torch.equal(out[17, 10:].sign(), b[76, 10:].float().sign())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [40, 1100])
def test_adding_to_what_is_there_and_to_a_bias(dtype, depth):
    a, b = draw((13, 70, depth), dtype)
    bias, there = torch.randn(70, generator=generator(1)), torch.randn(13, 70, generator=generator(2))
    assert_product(multiply(a, b, there.clone(), accumulate=True), a, b, there)
    assert_product(multiply(a, b, poisoned(a, b), bias=bias), a, b, bias)
    rounded = multiply(a, b, poisoned(a, b), bias=bias.to(torch.bfloat16)[:, None].expand(70, 2)[:, 0])
    assert torch.equal(rounded, multiply(a, b, poisoned(a, b), bias=bias.to(torch.bfloat16).float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_multiply(dtype):
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype)

    bias = torch.arange(3.0)
    assert multiply(empty(0, 4), empty(4, 3), torch.empty(0, 3)).shape == (0, 3)
    assert multiply(empty(4, 3), empty(3, 0), torch.empty(4, 0)).shape == (4, 0)
    assert (multiply(empty(2, 0), empty(0, 3), torch.full((2, 3), torch.nan)) == 0).all()
    assert torch.equal(multiply(empty(2, 0), empty(0, 3), torch.empty(2, 3), bias=bias), bias.expand(2, 3))
    assert (multiply(empty(2, 0), empty(0, 3), torch.full((2, 3), 5.0), accumulate=True) == 5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.empty(5, 3)}, "shapes"),
        ({"out": torch.empty(2, 4)}, "shapes"),
        ({"out": torch.empty(3, 2).t()}, "contiguous along its rows"),
        ({"out": torch.empty(2, 3, dtype=torch.float64)}, "fp32"),
        ({"b": torch.empty(4, 3, dtype=torch.bfloat16)}, "one dtype"),
        ({"a": torch.empty(2, 4).double(), "b": torch.empty(4, 3).double()}, "fp32 or bf16"),
        ({"ends": torch.tensor([2, 3])}, "last of the ends"),
        ({"ends": torch.tensor([2, 2, 4])}, "ends must grow"),
        ({"a": torch.empty(2, 300), "b": torch.empty(300, 3), "ends": torch.tensor([300])}, "no more than"),
        ({"bias": torch.empty(4)}, "bias"),
        ({"bias": torch.empty(3), "accumulate": True}, "bias"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    call = {"a": torch.empty(2, 4), "b": torch.empty(4, 3), "out": torch.empty(2, 3)} | change
    with pytest.raises(RuntimeError, match=message):
        multiply(**call)


def test_processors_that_pytorch_may_not_use_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not any(multiplies(dtype) for dtype in DTYPES)
    monkeypatch.setattr(cpp, "_why_not_loaded", lambda: "the reason")
    assert not any(multiplies(dtype) for dtype in DTYPES)


def test_other_dtypes_are_not_multiplied():
    assert not any(multiplies(dtype) for dtype in (torch.float64, torch.float16, torch.int8))
