"""The way through a call stays short: how many functions of the package it enters, and how deep."""

import pytest
import torch

from gspo_kernels.ops.backends import why_not
from tests.frames import calls, frames

MOST = {"policy_loss": (34, 8), "logits": (54, 8), "hidden": (120, 11)}
"""The most functions, and the largest depth."""


@pytest.mark.skipif(
    why_not("cpp", torch.device("cpu")) is not None, reason="counts the C++ backend's functions"
)
@pytest.mark.parametrize("name", MOST)
def test_the_way_is_short(name):
    seen = frames(calls()[name])
    assert len(seen) <= MOST[name][0] and max(seen.values()) <= MOST[name][1], "\n".join(seen)
