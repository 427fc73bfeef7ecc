"""The benchmarks are tested by small runs on the CPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Nothing here is worth a second thread, and waiting for one takes seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
