"""Products by tensor maps: a switch enables them, and a device's first use compares them."""

import copy
from threading import Thread

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import doctor
from gspo_kernels.backends import dispatch
from gspo_kernels.core import self_test
from gspo_kernels.core.self_test import VARIABLE, SelfTest
from gspo_kernels.hidden.matmul import exponentials
from tests.fake_gpu import FakeGpu

GPU = torch.device("cuda", 5)
OUTCOMES = {
    "right": (9, 0.3, None),
    "right on B200": (10, 1.0, None),
    "wrong": (10, 3.21, "its error is 3.2 times the bound"),
    "not a number": (9, float("nan"), "its error is nan times the bound"),
    "not compiled": (
        9, RuntimeError("PassManager::run failed"),
        "Triton can't compile it here: RuntimeError: PassManager::run failed",
    ),
    "old GPU": (8, None, "it needs the tensor maps and the shared memory of Hopper or B200"),
    "GeForce": (12, None, "it needs the tensor maps and the shared memory of Hopper or B200"),
}  # fmt: skip
"""The GPU's compute capability, what the comparison gives, and why the product does not serve."""


def raised(result):
    if isinstance(result, BaseException):
        raise result
    return result


def pretend(monkeypatch, capability=9):
    gk.enable_tensor_maps(True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    """Restore the default at the end; return the two ways to switch."""
    monkeypatch.setattr(self_test, "_enabled", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    by_variable = lambda on: monkeypatch.setenv(VARIABLE, str(int(on)))  # noqa: E731
    return {"variable": by_variable, "function": gk.enable_tensor_maps}


@pytest.mark.parametrize("way", ["variable", "function"])
def test_default_is_off_and_calls_follow_the_switch(way, switch, monkeypatch):
    """On Hopper, also calls whose checks are recalled. Nothing is compared before it is on."""
    pytest.importorskip("triton")
    compared = []
    monkeypatch.setattr(exponentials, "_SELF_TEST", SelfTest(lambda device: compared.append(device) or 0.5))
    leaves = [torch.ones(size).bfloat16().requires_grad_() for size in ((1, 3, 16), (24, 16))]
    given, options = (*leaves, torch.tensor([[1, 2, 3]]), None, torch.ones(1)), {"max_chunk_bytes": 2**12}
    centering = gk.ScoreCentering(torch.zeros(1, 3, 1, dtype=torch.int64), torch.full((1, 3, 1), -3.0))
    centered = options | {"objective": gk.GPG(), "centering": centering}  # which needs all logits
    gpu = FakeGpu(monkeypatch)
    with gpu, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        for count, on in enumerate((None, True, False, True)):
            if on is not None:
                switch[way](on)
            for asked, product in ((options, not on), (centered, True)):
                multiplied_by = gk.explain_schedule(*given, **asked).multiplied_by
                gpu.kernels.clear()
                gk.fused_linear_policy_loss(*given, **asked).loss.backward()
                assert (multiplied_by == "torch.mm") == ("exponentials_kernel" not in gpu.kernels) == product
            assert len(compared) == min(count, 1)


def test_the_function_overrides_the_variable(switch, monkeypatch):
    product = SelfTest(lambda device: 0.5)
    for wrong in ("", "true", "2"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE}: got '{wrong}', expected '0' or '1'"):
            product.unavailable_reason(GPU)
    with pytest.raises(TypeError, match="enabled: got int, expected a bool"):
        gk.enable_tensor_maps(1)
    switch["variable"](True)
    gk.enable_tensor_maps(False)
    assert f"{VARIABLE}=1" in product.unavailable_reason(GPU)


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_device_is_compared_once(name, monkeypatch, caplog):
    capability, result, reason = OUTCOMES[name]
    pretend(monkeypatch, capability)
    compared = []

    def excess(device):
        assert first.unavailable_reason(device) is None  # it serves its own comparison
        compared.append(device)
        return raised(result)

    first = SelfTest(excess)
    with monkeypatch.context() as patch:  # while a graph is captured, nothing is compared or settled
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert ("graph" in first.unavailable_reason(GPU)) == (result is not None) and not compared
    assert [first.unavailable_reason(GPU) for _ in range(2)] == [reason] * 2
    assert compared == [GPU] * (result is not None)
    assert len(caplog.messages) == (result is not None and reason is not None)
    assert first.unavailable_reason(torch.device("cpu")) == "it needs an NVIDIA GPU"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_other_errors_are_raised_and_retried(error, monkeypatch):
    """Also those of the driver, which is asked before."""
    pretend(monkeypatch)
    for asked in ("get_device_capability", "is_current_stream_capturing", None):
        results = [0.5, error("this once")]
        first = SelfTest(lambda _, asked=asked, results=results: 0.5 if asked else raised(results.pop()))
        with monkeypatch.context() as patch, pytest.raises(error, match="this once"):
            if asked is not None:
                patch.setattr(torch.cuda, asked, lambda *_, results=results: raised(results.pop()))
            first.unavailable_reason(GPU)
        assert first.unavailable_reason(GPU) is None


def test_other_threads_wait_for_the_self_test(monkeypatch):
    pretend(monkeypatch)
    answers = []
    other = Thread(target=lambda: answers.append(first.unavailable_reason(GPU)))

    def excess(device):
        other.start()
        other.join(0.1)
        assert not answers
        return 2.0

    first = SelfTest(excess)
    reason = first.unavailable_reason(GPU)
    other.join()
    assert reason is not None and answers == [reason]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compare the products on a GPU")
def test_self_tests_find_a_wrong_product(monkeypatch):
    """A factor of one row, a log-prob whose bits depend on what is stored, a sum of one kind of operand."""
    rows = pytest.importorskip("gspo_kernels.backends.triton.exponentials")
    matmul = pytest.importorskip("gspo_kernels.backends.triton.batch_invariant_matmul")
    right, known, device = rows.exponentials, {}, torch.device("cpu")
    faults = {
        "none": lambda head: None,
        "factor": lambda head: head.factors[16].mul_(1.02),
        "bits": lambda head: head.stats.logprobs[0, 16].mul_(1 + 1e-6),
    }
    for name, fault in faults.items():

        def product(*args, fault=fault, **options):
            stores = args[6] is not None
            if stores not in known:  # the interpreter is slow
                known[stores] = copy.deepcopy((right(*args, **options), args[6]))
            head, out = copy.deepcopy(known[stores])
            if stores:
                args[6].copy_(out)
                fault(head)
            return head

        monkeypatch.setattr(rows, "exponentials", product)
        assert (exponentials.excess(device) < 1) == (name == "none"), name
    for error in (0.0, 0.1, torch.nan):

        def add_sums(a, b, out, accumulate, error=error):
            out += a.float() @ b.float()
            out[135, 263] += error * (a.stride(1) != 1)
            return out

        monkeypatch.setattr(matmul, "batch_invariant_mm", add_sums)
        assert (matmul.excess(device) <= 1) == (error == 0)


def test_doctor_prints_results_of_self_tests(monkeypatch):
    matmul = pytest.importorskip("gspo_kernels.backends.triton.batch_invariant_matmul")
    monkeypatch.setattr(dispatch, "unavailable_reason", lambda *_: None)
    pretend(monkeypatch)
    for result, words in (
        (0.5, "passed"),
        (2.0, "2 times the bound"),
        (torch.OutOfMemoryError("full"), "full"),
    ):
        test = SelfTest(lambda _, result=result: raised(result))
        monkeypatch.setattr(exponentials, "_SELF_TEST", test)
        monkeypatch.setattr(matmul, "TENSOR_MAPS", test)
        assert all(words in line for line in doctor.gpu_matmuls(GPU))
