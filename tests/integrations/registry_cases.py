"""Batches and calls of losses that verl and SkyRL keep in a registry."""

import math
import warnings

import pytest
import torch

from gspo_kernels.integrations import hooks
from tests.draws import shifted_seed

LENGTHS = (8, 3, 5, 6, 1, 4)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)
STALE = ("ctpo", "fspo", "prime_ipo")  # these have bounds of other kinds
NO_RANGE = {f"gk_{name}" for name in ("gpg", "topr", "vespo", "sapo", "sspo", "dro", *STALE)}
"""Objectives that take no clip range."""


@pytest.fixture(autouse=True)
def warn_anew():
    hooks.warn_once.cache_clear()


def batch(seed=0, dtype=torch.float64):
    """Log-probs, old ones, advantages (one per sequence), weights, the engine's log-probs."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    start = -torch.rand(MASK.shape, generator=rng, dtype=torch.float64) - 0.2
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.6]).double().unsqueeze(1)
    old = (start - shift - 0.2 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0, -2.0]).double().unsqueeze(1).expand(MASK.shape)
    weights = 0.5 + torch.rand(MASK.shape, generator=rng, dtype=torch.float64)
    rollout = old - 0.3 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)
    values = (start, old, advantages, weights, rollout)
    return tuple(torch.where(MASK, each, 0.0).to(dtype) for each in values)


def quiet(values):
    """``values`` without warnings."""

    def quietly(*arguments, **keywords):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return values(*arguments, **keywords)

    return quietly


def assert_equal(one, other, guard=0.0):
    torch.testing.assert_close(one, other, rtol=1e-10 + guard, atol=1e-14 + guard)


def clipped_by_hand():
    """Two sequences, the first of them clipped at 1.05: (start, old, mask, loss, gradient, ratios)."""
    start = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -2.2, -0.5], [-1.5, -1.2, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    first, second = math.exp(0.3 / 3), math.exp(0.2 / 2)
    gradient = torch.tensor([[0, 0, 0], [second / 4, second / 4, 0]], dtype=torch.float64)
    return start, old, mask, (-1.05 * 2.0 + second) / 2, gradient, (first, second)
