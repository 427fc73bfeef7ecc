"""Numbers in 16 bits, rounded to the nearest even by bits where no instruction does it."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gspo_kernels import kernels
from gspo_kernels.kernels.rows import narrowed
from gspo_kernels.types import RowStats
from tests.cases import generator
from tests.kernels.row_oracle import PLAIN

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run under the interpreter")


@triton.jit
def narrowing(values, out, COUNT: tl.constexpr, PLATFORM: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    tl.store(out + lanes, narrowed(tl.load(values + lanes), tl.bfloat16, PLATFORM))


@pytest.mark.parametrize("platform", ["interpreter", "hip"])
@pytest.mark.parametrize("low", [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_numbers_of_all_sizes_are_rounded_as_pytorch_rounds(platform, low):
    """Every upper half, with ties, subnormal numbers and NaN of many payloads among them."""
    bits = np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(low)
    values = torch.from_numpy(bits.view(np.float32))
    out = torch.empty(len(values), dtype=torch.bfloat16)
    narrowing[(1,)](values, out, len(values), platform)
    want = values.bfloat16()
    assert bool(((out == want) | (out.isnan() & want.isnan())).all())


def test_no_payload_of_a_nan_makes_it_a_number_on_amd(monkeypatch):
    """Scalars of a row may bring a NaN that rounding alone would carry into the sign."""
    for module in ("launch", "scale"):
        monkeypatch.setattr(f"gspo_kernels.kernels.{module}.platform", lambda: "hip")
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.randn(100, generator=generator(0)).bfloat16()
    kernels.scale_(values, nan[0])
    assert values.isnan().all()
    logits = torch.randn(1, 1, 100, generator=generator(0)).bfloat16()
    labels, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    stats = kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=-100, entropy=True)
    want = torch.softmax(logits.double(), -1) - torch.nn.functional.one_hot(labels, 100)
    for bad in (None, "coefficient", "lse", "entropy", "temperature"):
        transform = PLAIN._replace(row_temperature=nan.view(1, 1) if bad == "temperature" else one)
        lse = nan.double().view(1, 1) if bad == "lse" else stats.lse
        given = RowStats(stats.logprobs, lse, nan.view(1, 1) if bad == "entropy" else stats.entropy)
        grad = nan.view(1, 1) if bad == "coefficient" else -one
        grad_entropy = one if bad == "entropy" else None
        out = torch.zeros_like(logits)
        kernels.logprobs_backward(
            logits, labels, given, grad, grad_entropy, None, transform, ignore_index=-100, out=out
        )
        if bad is None:
            assert torch.allclose(out.double(), want, rtol=2.0**-8, atol=1e-6)
        else:
            # but for the label, whose gradient starts from its log-prob alone
            assert out[..., 1:].isnan().all(), bad
