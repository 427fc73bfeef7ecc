"""Products by tensor maps: a device's first use compares them, and ``gspo doctor`` says what came of it."""

import pytest
import torch

from gspo_kernels import doctor
from gspo_kernels.first_use import FirstUse
from gspo_kernels.linear.products import exponentials
from gspo_kernels.ops import backends

GPU = torch.device("cuda", 5)
OUTCOMES = {
    "right": (9, 0.3, None),
    "right on B200": (10, 1.0, None),
    "wrong": (10, 3.21, "it is off by 3.2 times what roundings allow"),
    "not a number": (9, float("nan"), "it is off by nan times what roundings allow"),
    "fails": (9, OSError("no driver"), "it fails here: OSError: no driver"),
    "old GPU": (8, None, "it needs the tensor maps and the shared memory of Hopper or B200"),
    "GeForce": (12, None, "it needs the tensor maps and the shared memory of Hopper or B200"),
}
"""The GPU's compute capability, what the comparison gives, and why the product does not serve."""


@pytest.fixture(params=OUTCOMES)
def outcome(request, monkeypatch):
    """Return what is planted, and a function that makes a first use of it."""
    capability, result, reason = OUTCOMES[request.param]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def planted():
        compared = []

        def excess(device):
            assert first.why_not(device) is None  # it serves its own comparison
            compared.append(device)
            if isinstance(result, Exception):
                raise result
            return result

        first = FirstUse(excess)
        return first, compared

    return planted, result, reason


def test_a_device_is_compared_once(outcome, monkeypatch):
    planted, result, reason = outcome
    first, compared = planted()
    with monkeypatch.context() as patch:  # while a graph is captured, nothing is compared or settled
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert ("graph" in first.why_not(GPU)) == (result is not None) and not compared
    assert [first.why_not(GPU) for _ in range(2)] == [reason] * 2
    assert compared == [GPU] * (result is not None)
    assert first.why_not(torch.device("cpu")) == "it is for NVIDIA GPUs"


@pytest.mark.parametrize("asked", ["get_device_capability", "is_current_stream_capturing"])
def test_a_driver_that_fails_leaves_the_loss_to_another_product(asked, monkeypatch):
    def fails(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, asked, fails)
    assert FirstUse(lambda device: 0.0).why_not(GPU) == "it fails here: RuntimeError: no driver"


def test_doctor_compares_and_says_what_came_of_it(outcome, monkeypatch):
    pytest.importorskip("triton")
    from gspo_kernels.kernels import products

    planted, _, reason = outcome
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    of_device = reason if reason and reason.startswith("it needs") else None
    names = ("Triton's product with exponentials", "Triton's product by tensor maps")
    for reasons in ((reason, of_device), (of_device, reason)):
        uses = [planted()[0] if why else FirstUse(lambda _: 0.5) for why in reasons]
        monkeypatch.setattr(exponentials, "_FIRST_USE", uses[0])
        monkeypatch.setattr(products, "TENSOR_MAPS", uses[1])
        for line, name, why in zip(doctor.own_products(GPU), names, reasons, strict=True):
            equal = f" by {name}: compared here with PyTorch's, it differs by roundings alone"
            assert line.endswith(equal if why is None else f", not by {name}: {why}")
