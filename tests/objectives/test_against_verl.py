"""The same losses and gradients as verl's registered policy losses, on ragged batches inside its clamps.

Where verl differs by choice, the difference itself is tested.
"""

import importlib.util

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is missing; it needs transformers < 5.11, so an environment of its own",
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {
    "vanilla": (gk.GRPO(**CLIP, dual_clip=1.5, aggregation="token_mean"), {"clip_ratio_c": 1.5}),
    "gspo": (gk.GSPOToken(clip_low=0.1, clip_high=0.15, aggregation="token_mean"), {"clip": (0.1, 0.15)}),
    "gpg": (gk.GPG(), {}),
    # every candidate is drawn: verl's draw is another one (see below)
    "clip_cov": (
        gk.ClipCov(**CLIP, clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=0.9, aggregation="token_mean"),
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.9},
    ),
    "kl_cov": (
        gk.KLCov(kl_cov_ratio=0.2, ppo_kl_coef=0.7, aggregation="token_mean"),
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    ),
    "cispo": (gk.CISPO(min_ratio=0.8, max_ratio=1.28), {}),
    "sapo": (gk.SAPO(tau_negative=1.05), {}),  # verl takes the mean over sequences whatever it is told
    "dro": (gk.DRO(beta=0.3), {"dro_beta": 0.3}),
    "dppo_tv": (
        gk.DPPO(bound_low=0.04, bound_high=0.06, max_ratio=1.4),
        {"clip": (0.04, 0.06), "clip_ratio_c": 1.4},
    ),
    "dppo_kl": (
        gk.DPPO(divergence="kl", bound_low=0.02, bound_high=0.03, max_ratio=1.4),
        {"clip": (0.02, 0.03), "clip_ratio_c": 1.4},
    ),
}
LENGTHS = (8, 3, 5, 6, 1, 0)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)


def verl_loss(
    name, logprobs, old, advantages, mask=MASK, *, weights=None, aggregation="token-mean", **options
):
    """verl's loss; advantages as tokens, the mask in fp64 because verl divides by its sums."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    low, high = options.pop("clip", (0.2, 0.28))
    outer = {key: options.pop(key) for key in ("clip_ratio_c",) if key in options}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low,
        clip_ratio_high=high, policy_loss=PolicyLossConfig(loss_mode=name, **options), **outer,
    )  # fmt: skip
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1).expand_as(logprobs).contiguous()
    return get_policy_loss_fn(name)(
        old_log_prob=old, log_prob=logprobs, advantages=advantages, response_mask=mask.double(),
        loss_agg_mode=aggregation, config=config, rollout_is_weights=weights,
    )[0]  # fmt: skip


def batch(seed=4):
    """Log-probs, old ones, advantages per sequence and per token, and rollout weights per token."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    start = -torch.rand(MASK.shape, generator=rng, dtype=torch.float64) - 0.1
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.1]).double().unsqueeze(1)
    old = start - shift - 0.2 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0, 2.0], dtype=torch.float64)
    per_token = advantages.unsqueeze(1) + torch.randn(MASK.shape, generator=rng, dtype=torch.float64)
    weights = 0.5 + torch.rand(MASK.shape, generator=rng, dtype=torch.float64)
    return start, old.clamp(max=-0.01), advantages, per_token, weights


def ours(objective, logprobs, old, advantages, mask=MASK, **terms):
    return gk.policy_loss(logprobs, old, advantages, loss_mask=mask, objective=objective, **terms).loss


def values(function, logprobs):
    """The loss, and its gradient."""
    logprobs = logprobs.clone().requires_grad_()
    loss = function(logprobs)
    loss.backward()
    return loss.detach(), logprobs.grad


GUARD = 5e-8
"""Of verl's means over a sequence, which divide by |y| + 1e-8."""


def assert_equal(one, other, guard=0.0):
    torch.testing.assert_close(one, other, rtol=1e-10 + guard, atol=1e-14 + guard)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_verl(name, seed, per_token, weighted):
    objective, options = SETTINGS[name]
    start, old, advantages, tokens, weights = batch(seed)
    advantages = tokens if per_token else advantages
    weights = weights if weighted else None
    got = values(lambda x: ours(objective, x, old, advantages, rollout_weights=weights), start)
    expected = values(lambda x: verl_loss(name, x, old, advantages, weights=weights, **options), start)
    assert_equal(got, expected, GUARD if name == "sapo" else 0.0)
    assert got[1].count_nonzero() > 0


AGGREGATIONS = {
    "token-mean": {"aggregation": "token_mean"},
    "token-sum": {"aggregation": "sum"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean"},
    "seq-mean-token-sum": {"aggregation": "sequence_mean_token_sum"},
    "seq-mean-token-sum-norm": {"aggregation": "constant", "aggregation_constant": 8},
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "cls"), [("vanilla", gk.GRPO), ("gspo", gk.GSPOToken)])
def test_aggregations_are_verls(name, cls, aggregation):
    """Sequences without a counted token don't count in either."""
    start, old, advantages, _, _ = batch()
    objective = cls(**CLIP, **({"dual_clip": 3.0} if name == "vanilla" else {}), **AGGREGATIONS[aggregation])
    got = values(lambda x: ours(objective, x, old, advantages), start)
    expected = values(lambda x: verl_loss(name, x, old, advantages, aggregation=aggregation), start)
    assert_equal(got, expected, GUARD)


def test_gspo_itself_is_verls_with_the_mean_over_sequences():
    """verl's default for GSPO, the mean over tokens, is not the paper's."""
    start, old, advantages, _, _ = batch()
    got = values(lambda x: ours(gk.GSPO(**CLIP), x, old, advantages), start)
    arguments = {"old": old, "advantages": advantages}
    paper = values(lambda x: verl_loss("gspo", x, aggregation="seq-mean-token-mean", **arguments), start)
    assert_equal(got, paper, GUARD)
    assert abs(verl_loss("gspo", start, **arguments) - got[0]) > 1e-3


def test_gspo_with_weights_per_token():
    """GSPO takes their mean over the sequence, verl keeps each: equal values, other gradients."""
    start, old, advantages, _, weights = batch()
    got = values(lambda x: ours(gk.GSPO(**CLIP), x, old, advantages, rollout_weights=weights), start)
    mode = {"weights": weights, "aggregation": "seq-mean-token-mean"}
    expected = values(lambda x: verl_loss("gspo", x, old, advantages, **mode), start)
    assert_equal(got[0], expected[0], GUARD)
    assert (got[1] - expected[1]).abs().max() > 1e-3
    torch.testing.assert_close(got[1].sum(1), expected[1].sum(1), rtol=GUARD, atol=GUARD)


@pytest.mark.parametrize("weighted", [False, True])
def test_geo_mean(weighted):
    """verl divides by all sequences, the empty ones too, so here by a normalizer."""
    start, old, advantages, _, weights = batch()
    objective = gk.GMPO(log_clip_low=0.2, log_clip_high=0.28)
    of_sequence = weights[:, 0]
    terms = {"rollout_weights": of_sequence} if weighted else {}
    weights = of_sequence.unsqueeze(1).expand(MASK.shape) if weighted else None
    got = values(lambda x: ours(objective, x, old, advantages, normalizer=len(LENGTHS), **terms), start)
    expected = values(lambda x: verl_loss("geo_mean", x, old, advantages, weights=weights), start)
    assert_equal(got, expected, GUARD)
    without = ours(objective, start, old, advantages, **terms)
    assert_equal(without * 5 / 6, got[0])


def test_clip_cov_draws_as_many_of_the_same_candidates(monkeypatch):
    """verl shuffles candidates by position with the global generator: fed our shuffle, it is the same."""
    start, old, advantages, _, _ = batch()
    counted = MASK.sum()
    bounds = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.02, "clip_cov_ub": 0.9}
    objective = gk.ClipCov(**CLIP, **bounds, seed=3, aggregation="token_mean")
    got = values(lambda x: ours(objective, x, old, advantages), start)
    gains = advantages.unsqueeze(1).expand_as(start)
    centred = [x - x[MASK].sum() / counted for x in (gains, start)]
    covariance, ratio = centred[0] * centred[1], (start - old).exp()
    clipped = ((gains > 0) & (ratio > 1.28)) | ((gains < 0) & (ratio < 0.8))
    candidates = covariance[MASK & ~clipped & (covariance > 0.02) & (covariance < 0.9)]
    shuffled = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(3))
    assert len(candidates) > int(0.1 * counted)
    monkeypatch.setattr(torch, "randperm", lambda n: candidates.argsort()[shuffled])
    expected = values(lambda x: verl_loss("clip_cov", x, old, advantages, **bounds), start)
    assert_equal(got, expected)
