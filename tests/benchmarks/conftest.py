"""The benchmarks are a package beside this one, not installed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent.parent))


@pytest.fixture(autouse=True)
def one_thread():
    """Nothing here is worth a second thread, and waiting for one takes seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
