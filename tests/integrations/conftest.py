"""Fixtures of every test of the adapters."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are so small that a second thread only makes them wait when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
