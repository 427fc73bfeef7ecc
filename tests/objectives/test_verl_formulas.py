"""Objectives for which no adapter exists equal verl's own code, on ragged batches within its clamps."""

from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.integrations import peers

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
MASK = torch.arange(8) < torch.tensor((8, 3, 5, 6, 1, 0)).unsqueeze(1)
ADVANTAGES = torch.tensor([1.0, -0.5, -1.25, 0.75, 0.0, 2.0]).double()
SHIFT = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.1]).double().unsqueeze(1)
"""Centres of the sequences' log-ratios, which together reach all branches of all clips."""


def values(loss, logprobs):
    """Return the loss and its gradient."""
    leaf = logprobs.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), *torch.autograd.grad(value, leaf)


COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.9}  # all candidates: verl draws otherwise
KL_COV = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
VERL = [
    ("clip_cov", gk.ClipCov(**CLIP, **COV, aggregation="token_mean"), COV),
    ("kl_cov", gk.KLCov(**KL_COV, aggregation="token_mean"), KL_COV),
    (
        "dppo_kl",
        gk.DPPO(divergence="kl", bound_low=0.02, bound_high=0.03, max_ratio=1.4),
        {"clip_low": 0.02, "clip_high": 0.03, "clip_ratio_c": 1.4},
    ),
]


class Config(dict):
    """verl's configuration, as far as its losses read it: missing options are None."""

    __getattr__ = dict.get


@pytest.mark.parametrize(("name", "objective", "options"), VERL)
def test_equals_verls_formula(name, objective, options):
    means = peers.source("verl", "verl/utils/torch_functional.py")
    verl = peers.extract(
        peers.source("verl", "verl/trainer/ppo/core_algos.py"), f"compute_policy_loss_{name}", "agg_loss",
        verl_F=SimpleNamespace(**peers.extract(means, "masked_sum", "masked_mean")),
        ActorConfig=Config, AlgoConfig=tuple, DictConfig=Config,
    )  # fmt: skip
    options = CLIP | options
    config = Config(
        clip_ratio_low=options.pop("clip_low"), clip_ratio_high=options.pop("clip_high"),
        global_batch_info={}, policy_loss=Config(options), **options,
    )  # fmt: skip
    rng = generator(4)

    def draw(make):
        return make(MASK.shape, generator=rng, dtype=torch.float64)

    logprobs = -draw(torch.rand) - 0.1
    old = (logprobs - SHIFT - 0.2 * draw(torch.randn)).clamp(max=-0.01)
    advantages = ADVANTAGES.unsqueeze(1) + draw(torch.randn)
    weights = 0.5 + draw(torch.rand)
    terms = {"loss_mask": MASK, "rollout_weights": weights, "objective": objective}
    ours = values(lambda x: gk.policy_loss(x, old, advantages, **terms).loss, logprobs)
    theirs = values(
        lambda x: verl[f"compute_policy_loss_{name}"](
            old, x, advantages, MASK.double(), "token-mean", config, rollout_is_weights=weights
        )[0],
        logprobs,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    assert ours[1].any()
