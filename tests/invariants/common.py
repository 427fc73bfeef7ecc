"""What tests of invariants share."""

import torch

from tests.cases import FUSED_ENTRIES, call, device_of

ENTRIES = ("policy_loss", *FUSED_ENTRIES)
LOSSES = ("policy_loss", "fused_policy_loss", "fused_linear_policy_loss")
SHORT = {"lengths": (2, 0, 1, 2), "log_s": (5e-3, 0.0, 0.4, -5e-3), "advantages": (1.0, 1.0, -0.5, -1.0)}


def leaves_of(case, backend="auto"):
    device = device_of(backend)
    return {name: value.detach().to(device).requires_grad_() for name, value in case.inputs.items()}


def on_device(backend):
    device = device_of(backend)
    return lambda value: value.to(device) if isinstance(value, torch.Tensor) else value


def forward(case, entry, objective, backend="auto", leaves=None, **options):
    leaves = leaves_of(case, backend) if leaves is None else leaves
    return leaves, call(case, leaves, entry, objective, backend, on_device(backend), **options)


def assert_same_bits(one, other):
    assert one.values().keys() == other.values().keys()
    for name, value in one.values().items():
        assert torch.equal(value, other.values()[name]), name
