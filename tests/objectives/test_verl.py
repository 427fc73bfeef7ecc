"""Losses and gradients from log-probs equal those of verl's own code, on ragged batches within its clamps.

TRL's code is compared in tests/integrations/test_trl.py, Liger's in tests/benchmarks/test_judging.py.
"""

from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.integrations import peers

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
NARROW = {"clip_low": 0.1, "clip_high": 0.15}
MASK = torch.arange(8) < torch.tensor((8, 3, 5, 6, 1, 0)).unsqueeze(1)
ADVANTAGES = torch.tensor([1.0, -0.5, -1.25, 0.75, 0.0, 2.0]).double()
SHIFT = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.1]).double().unsqueeze(1)
"""Centres of the sequences' log-ratios, which together reach all branches of all clips."""


def values(loss, logprobs):
    """Return the loss and its gradient."""
    leaf = logprobs.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), *torch.autograd.grad(value, leaf)


AGGREGATIONS = {
    "token-mean": {"aggregation": "token_mean"},
    "token-sum": {"aggregation": "sum"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean"},
    "seq-mean-token-sum": {"aggregation": "sequence_mean_token_sum"},
    "seq-mean-token-sum-norm": {"aggregation": "constant", "aggregation_constant": 8},
}
TOKEN_MEAN = AGGREGATIONS["token-mean"]
COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.9}  # all candidates: verl draws otherwise
KL_COV = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
VERL = [
    *(("vanilla", gk.GRPO(**CLIP, dual_clip=1.5, **AGGREGATIONS[each]), {"clip_ratio_c": 1.5}, each)
      for each in AGGREGATIONS),
    *(("gspo", gk.GSPOToken(**NARROW, **AGGREGATIONS[each]), NARROW, each) for each in AGGREGATIONS),
    # verl's default for GSPO, the mean over tokens, is not the paper's
    ("gspo", gk.GSPO(**NARROW), NARROW, "seq-mean-token-mean"),
    ("gpg", gk.GPG(), {}, "token-mean"),
    ("clip_cov", gk.ClipCov(**CLIP, **COV, **TOKEN_MEAN), COV, "token-mean"),
    ("kl_cov", gk.KLCov(**KL_COV, **TOKEN_MEAN), KL_COV, "token-mean"),
    ("cispo", gk.CISPO(min_ratio=0.8, max_ratio=1.28), {}, "token-mean"),
    ("sapo", gk.SAPO(tau_negative=1.05), {}, "seq-mean-token-mean"),
    ("dro", gk.DRO(beta=0.3), {"dro_beta": 0.3}, "token-mean"),
    *((f"dppo_{kind}", gk.DPPO(divergence=kind, bound_low=low, bound_high=high, max_ratio=1.4),
       {"clip_low": low, "clip_high": high, "clip_ratio_c": 1.4}, "token-mean")
      for kind, low, high in (("tv", 0.04, 0.06), ("kl", 0.02, 0.03))),
    # verl divides by all sequences, the empty ones too, and takes geometric means of weights
    ("geo_mean", gk.GMPO(log_clip_low=0.2, log_clip_high=0.28), {}, "token-mean"),
]  # fmt: skip


class Config(dict):
    """verl's configuration, as far as its losses read it: missing options are None."""

    __getattr__ = dict.get


@pytest.mark.parametrize(("name", "objective", "options", "aggregation"), VERL)
def test_verl(name, objective, options, aggregation):
    means = peers.source("verl", "verl/utils/torch_functional.py")
    verl = peers.extract(
        peers.source("verl", "verl/trainer/ppo/core_algos.py"), f"compute_policy_loss_{name}", "agg_loss",
        verl_F=SimpleNamespace(**peers.extract(means, "masked_sum", "masked_mean")),
        ActorConfig=Config, AlgoConfig=tuple, DictConfig=Config,
    )  # fmt: skip
    options = CLIP | options
    config = Config(
        clip_ratio_low=options.pop("clip_low"), clip_ratio_high=options.pop("clip_high"), tau_pos=1.0,
        tau_neg=1.05, global_batch_info={}, policy_loss=Config(options), **options,
    )  # fmt: skip
    rng = generator(4)

    def draw(make):
        return make(MASK.shape, generator=rng, dtype=torch.float64)

    logprobs = -draw(torch.rand) - 0.1
    old = (logprobs - SHIFT - 0.2 * draw(torch.randn)).clamp(max=-0.01)
    advantages, weights = ADVANTAGES, 0.5 + draw(torch.rand)
    if objective.takes_token_advantages:
        advantages = advantages.unsqueeze(1) + draw(torch.randn)
    else:
        weights = weights[:, 0]
    ours = values(
        lambda x: gk.policy_loss(
            x, old, advantages, loss_mask=MASK, rollout_weights=weights, objective=objective,
            normalizer=len(MASK) if name == "geo_mean" else None,
        ).loss,
        logprobs,
    )  # fmt: skip
    their_advantages, their_weights = (
        each if each.ndim == 2 else each.unsqueeze(1).repeat(1, 8) for each in (advantages, weights)
    )
    theirs = values(
        lambda x: verl[f"compute_policy_loss_{name}"](
            old, x, their_advantages, MASK.double(), aggregation, config, rollout_is_weights=their_weights
        )[0],
        logprobs,
    )
    # verl's means over a sequence divide by |y| + 1e-8
    guard = 5e-8 if aggregation == "seq-mean-token-mean" or name == "geo_mean" else 0.0
    torch.testing.assert_close(ours, theirs, rtol=1e-10 + guard, atol=1e-14 + guard)
    assert ours[1].any()
