"""The interpreter that the kernels' tests run in finds integers that their type doesn't hold."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")


@triton.jit
def sums_and_products(out_ptr, x: tl.int32, y: tl.int32):
    tl.store(out_ptr, x + y)
    tl.store(out_ptr + 1, x - y)
    tl.store(out_ptr + 2, x * y)


@pytest.mark.parametrize(
    ("x", "y"), [(2**31 - 1, 1), (-(2**31), 1), (2**16, 2**15)], ids=["add", "sub", "mul"]
)
def test_an_integer_that_overflows_is_found(request, x, y):
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {request.node.callspec.id}"):
        sums_and_products[(1,)](torch.zeros(3, dtype=torch.int32), x, y)


def test_integers_at_the_ends_of_their_type_are_not():
    out = torch.zeros(3, dtype=torch.int32)
    sums_and_products[(1,)](out, -(2**31) + 1, 1)
    assert out.tolist() == [-(2**31) + 2, -(2**31), -(2**31) + 1]
