"""Fixtures of every test of the C++ backend."""

import pytest
import torch

from tests.draws import shifted_seed


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(shifted_seed(0))
