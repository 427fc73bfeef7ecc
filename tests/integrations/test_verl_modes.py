"""verl's losses that go their own way about modes and weights, by verl's own code where its sources are."""

import typing
from types import SimpleNamespace

import pytest
import torch

from gspo_kernels.integrations import verl as adapter
from tests.integrations import peers
from tests.integrations.verl_cases import MASK, MODES, assert_equal, batch, config, quietly, values

GUARD = 5e-8
"""Of verl's means over a sequence, which divide by |y| + 1e-8."""


@pytest.fixture(scope="module")
def verls():
    """verl's SAPO and GMPO, and what they call."""
    means = peers.extract(
        peers.source("verl", "utils/torch_functional.py"), "masked_sum", "masked_mean", torch=torch
    )
    return peers.extract(
        peers.source("verl", "trainer/ppo/core_algos.py"), "agg_loss", "compute_policy_loss_sapo",
        "compute_policy_loss_geo_mean", torch=torch, verl_F=SimpleNamespace(**means), Any=typing.Any,
        Optional=typing.Optional, ActorConfig=SimpleNamespace, AlgoConfig=type("AlgoConfig", (), {}),
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_sapo_is_the_mean_over_sequences_in_every_mode(mode, verls):
    """So ``gk_sapo`` is verl's whatever the mode, and ``gk_sapo_config``, which follows it, in one."""
    start, old, advantages, weights = batch()
    call = {"mode": mode, "config": config()}
    expected = values(verls["compute_policy_loss_sapo"], start, old, advantages, weights, **call)
    assert_equal(
        quietly(adapter.LOSSES["gk_sapo"], start, old, advantages, weights, **call)[:2], expected[:2], GUARD
    )
    follows = quietly(adapter.LOSSES["gk_sapo_config"], start, old, advantages, weights, **call)
    if mode == "seq-mean-token-mean":
        assert_equal(follows[:2], expected[:2], GUARD)
    else:
        assert abs(follows[0] - expected[0]) > 1e-3


def test_geo_mean_takes_the_geometric_mean_of_weights_per_token(verls):
    """One weight per sequence: the same. One per token: this package takes their mean, verl the geometric."""
    start, old, advantages, weights = batch()
    call = {"mode": "seq-mean-token-mean", "config": config()}
    theirs, ours = verls["compute_policy_loss_geo_mean"], adapter.LOSSES["gk_gmpo"]
    by_sequence = weights[:, :1].expand(MASK.shape)
    for same in (None, by_sequence):
        got = quietly(ours, start, old, advantages, same, **call)
        assert_equal(got[:2], values(theirs, start, old, advantages, same, **call)[:2], GUARD)
    weights = torch.where(MASK, weights, 1.0)
    expected = values(theirs, start, old, advantages, weights, **call)
    assert abs(quietly(ours, start, old, advantages, weights, **call)[0] - expected[0]) > 1e-4
    geometric = ((weights.log() * MASK).sum(1) / MASK.sum(1)).exp().unsqueeze(1).expand(MASK.shape)
    assert_equal(quietly(ours, start, old, advantages, geometric, **call)[:2], expected[:2], GUARD)
