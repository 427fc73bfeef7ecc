"""What only a GPU can show. ``GSPO_KERNELS_REHEARSE=1`` runs the code on tiny CPU tensors, interpreted."""

import os

import pytest
import torch

from tests.gpu.calls import Scale

REHEARSAL = os.environ.get("GSPO_KERNELS_REHEARSE") == "1" and not torch.cuda.is_available()


@pytest.fixture(scope="session")
def device():
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if REHEARSAL:
        return torch.device("cpu")
    pytest.skip("no CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(scope="session")
def scale(device):
    return Scale(4, 300, 32, 2) if device.type == "cpu" else Scale(512, 151936, 1024, 50)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
