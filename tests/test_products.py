"""Which library multiplies hidden states and weights on the CPU, and that losses don't notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp, doctor
from gspo_kernels.cpp.products import best_instructions, multiplies
from gspo_kernels.linear import head
from gspo_kernels.linear.head import Head
from gspo_kernels.ops import products
from tests.cases import generator, make_case, run
from tests.judging import assert_equals_oracle

ROOT = Path(__file__).parent.parent
ENTRY = "fused_linear_policy_loss"
here = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)


@pytest.fixture
def in_blocks(monkeypatch):
    """Every fp32 and bf16 product of a head by the C++ backend, on any processor and for any weight."""
    monkeypatch.setattr(products, "multiplies", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(products, "fp32_library", lambda: "cpp")
    monkeypatch.setattr(products, "SMALL", 0)


@pytest.fixture
def not_in_blocks(monkeypatch):
    """The same by torch."""
    monkeypatch.setattr(products, "multiplies", lambda dtype: False)
    monkeypatch.setattr(products, "fp32_library", lambda: "torch")


@here
@pytest.mark.parametrize("schedule", ["aligned", "deferred", "two_pass", "known"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("library", ["in_blocks", "not_in_blocks"])
def test_losses_equal_the_oracle_whoever_multiplies(request, library, backend, dtype, schedule):
    request.getfixturevalue(library)
    case = make_case("linear", "packed", "on_policy" if schedule == "known" else "holes", dtype=dtype)
    chunk = 4 * 4 * case.inputs["weight"].shape[0]
    got = run(case, ENTRY, gk.GSPO(), backend, schedule=schedule, max_chunk_bytes=chunk)
    assert_equals_oracle(got, case, gk.GSPO())


@here
@pytest.mark.parametrize("logits_dtype", ["float32", "input"])
def test_bf16_rows_share_the_memory_of_their_logits(in_blocks, logits_dtype):
    head = Head(torch.empty(50, 8, dtype=torch.bfloat16), None, logits_dtype)
    assert head.rows_dtype == torch.bfloat16
    assert head.row_bytes == 50 * head.dtype.itemsize


def test_without_native_products_rows_stay_fp32(not_in_blocks):
    head = Head(torch.empty(50, 8, dtype=torch.bfloat16), None, "input")
    assert head.rows_dtype == torch.float32 and head.row_bytes == 50 * (2 + 4)


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_the_same_bits_in_chunks_of_any_size(in_blocks, dtype):
    rng = generator(3)
    hidden, weight = torch.randn(4, 25, 40, generator=rng), torch.randn(300, 40, generator=rng)
    labels = torch.randint(0, 300, (4, 25), generator=rng)
    bias = torch.randn(300, generator=rng).to(dtype)
    found = [
        gk.linear_token_logprobs(
            hidden.to(dtype), weight.to(dtype), labels, bias=bias, max_chunk_bytes=rows * 300 * 4
        ).logprobs
        for rows in (100, 37, 1)
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("known", [True, False])
def test_rounded_logits_where_onednn_knows_their_dtype_and_where_not(
    not_in_blocks, monkeypatch, dtype, known
):
    """PyTorch's product, or that of fp32 copies, rounded."""
    asked = []
    monkeypatch.setattr(head, "onednn_multiplies", lambda dtype: asked.append(dtype) or known)
    rng = generator(4)
    hidden, weight = torch.randn(5, 40, generator=rng), torch.randn(2048 + 77, 40, generator=rng)
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), torch.randn(2048 + 77, generator=rng).to(dtype)
    wide = Head(weight, bias, "float32").logits(hidden, torch.empty(5, 2048 + 77))
    rounded = Head(weight, bias, "input").logits(hidden, torch.empty(5, 2048 + 77, dtype=dtype))
    expected = wide.to(dtype) if not known else torch.addmm(bias, hidden, weight.t())
    assert torch.equal(rounded, expected) and asked == [dtype]


@here
def test_small_weights_and_other_dtypes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(products, "fp32_library", lambda: "cpp")
    monkeypatch.setattr(products, "multiplies", lambda dtype: dtype == torch.bfloat16)
    big, small = torch.empty(products.SMALL, 1), torch.empty(products.SMALL - 1, 1)
    assert products.in_blocks(big) and not products.in_blocks(small)
    assert not products.in_blocks(big.to(torch.float16)) and not products.in_blocks(big.double())
    assert products.in_blocks(small.to(torch.bfloat16))
    assert not products.in_blocks(torch.empty(products.SMALL, 1, device="meta"))


@pytest.mark.parametrize(
    ("intel", "has", "library"), [(True, True, "torch"), (False, True, "cpp"), (False, False, "torch")]
)
def test_the_library_of_fp32_products_is_a_rule_by_vendor(monkeypatch, intel, has, library):
    monkeypatch.setattr(products, "on_intel", lambda: intel)
    monkeypatch.setattr(products, "multiplies", lambda dtype: has)
    assert products.fp32_library() == library


@here
def test_the_doctor_says_what_multiplies():
    text = doctor.report()
    assert f"products of fp32 by {products.fp32_library()}" in text and "products of bf16" in text
    if multiplies(torch.bfloat16):
        assert f"by cpp with {best_instructions(torch.bfloat16)}" in text


@pytest.mark.slow
@here
def test_lesser_instruction_sets_take_today_s_products():
    """In a process whose PyTorch is held to AVX2, as on a processor that has no more."""
    code = (
        "import torch; from gspo_kernels.linear.head import Head\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    head = Head(torch.empty(2**14, 2**7, dtype=dtype), None, 'float32')\n"
        "    print(head.in_blocks, head.rows_dtype)"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.splitlines() == ["False torch.float32"] * 2


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="this processor doesn't multiply bf16")
def test_native_products_are_chosen_here():
    assert Head(torch.empty(50, 8, dtype=torch.bfloat16), None, "float32").in_blocks
