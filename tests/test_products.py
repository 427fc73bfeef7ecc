"""Which library multiplies hidden states and weights on the CPU, and that losses don't notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import cpp, doctor
from gspo_kernels.cpp.products import multiplies
from gspo_kernels.linear import calibration, head, products
from gspo_kernels.linear.head import Head
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


# --- what is measured, and remembered


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own, a processor that has products, and what is measured: seconds to be set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GSPO_KERNELS_CALIBRATE", raising=False)
    monkeypatch.setattr(calibration, "multiplies", lambda dtype: True)
    measured = []
    seconds = {"torch": 2.0, "cpp": 1.0}

    def measure():
        measured.append(dict(seconds))
        return dict(seconds)

    monkeypatch.setattr(calibration, "measure", measure)
    calibration.choice.cache_clear()
    yield measured, seconds
    calibration.choice.cache_clear()


def chosen_by_another_process() -> str:
    calibration.choice.cache_clear()
    return calibration.fp32_library()


def test_a_processor_is_measured_once(cache):
    measured, seconds = cache
    assert calibration.fp32_library() == calibration.fp32_library() == "cpp" and len(measured) == 1
    seconds.update(cpp=5.0)
    assert chosen_by_another_process() == "cpp" and len(measured) == 1
    assert list(calibration.cache_file().parent.iterdir()) == [calibration.cache_file()]


@pytest.mark.parametrize(("ratio", "library"), [(0.99, "torch"), (1.01, "cpp")])
def test_it_takes_a_margin(cache, ratio, library):
    cache[1]["torch"] = ratio * calibration.MARGIN
    assert calibration.fp32_library() == library


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"seconds": {"torch": 1}}',
        b'{"seconds": {"torch": -1, "cpp": 0}}',
        b'{"seconds": {"torch": "x", "cpp": 1}}',
        b'{"seconds": null}',
    ],
)
def test_a_file_that_makes_no_sense_is_replaced(cache, content):
    measured, _ = cache
    calibration.cache_file().parent.mkdir()
    calibration.cache_file().write_bytes(content)
    assert calibration.fp32_library() == "cpp" and len(measured) == 1
    assert json.loads(calibration.cache_file().read_text())["seconds"] == measured[0]
    assert chosen_by_another_process() == "cpp" and len(measured) == 1


def test_who_keeps_a_measurement_first_decides_for_all(cache, monkeypatch):
    """Another process measures at the same time, finds otherwise, and is faster to write it down."""

    def measure():
        calibration.cache_file().parent.mkdir(exist_ok=True)
        calibration.cache_file().write_text('{"seconds": {"torch": 1.0, "cpp": 1.0}}')
        return {"torch": 2.0, "cpp": 1.0}

    monkeypatch.setattr(calibration, "measure", measure)
    assert calibration.fp32_library() == "torch" == chosen_by_another_process()


def test_a_cache_that_can_t_be_written_is_no_error(cache, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert calibration.fp32_library() == "cpp" == chosen_by_another_process()
    assert len(cache[0]) == 2


def test_switched_off(cache, monkeypatch):
    monkeypatch.setenv("GSPO_KERNELS_CALIBRATE", "0")
    assert calibration.choice() == ("torch", "GSPO_KERNELS_CALIBRATE=0") and not cache[0]
    assert not calibration.cache_file().exists()


def test_processors_without_products_are_not_measured(cache, monkeypatch):
    monkeypatch.setattr(calibration, "multiplies", lambda dtype: False)
    assert calibration.fp32_library() == "torch" and not cache[0]


def test_other_instructions_are_another_processor(cache, monkeypatch):
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    before = calibration.cache_file()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX512")
    assert calibration.cache_file() != before


@pytest.mark.parametrize("home", ["", "relative"])
def test_the_cache_is_the_user_s(monkeypatch, home, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.cache_file().parent == tmp_path / ".cache" / "gspo_kernels"


@here
def test_measuring_takes_both_libraries_through_the_three_products():
    seconds = calibration.measure()
    assert set(seconds) == set(calibration.LIBRARIES) and all(value > 0 for value in seconds.values())


def test_the_doctor_says_who_multiplies(cache):
    text = doctor.report()
    assert "products of fp32 by cpp: measured: torch 2000.00 ms, cpp 1000.00 ms" in text
    assert str(calibration.cache_file()) in text

    assert "products of bf16" in text


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
