"""Losses that frameworks give different names are calls of ours, as docs/integrations/coming_from.md says.

The formulas are those of Tinker's page of losses and of the sources of SkyRL (a956457), prime-rl (559b447;
``icepop``, ``ppo`` and ``cispo`` are of its main branch in November 2026) and NeMo-RL (7ea279a).
"""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator

MASK = torch.arange(9) < torch.tensor([9, 4, 7, 1]).unsqueeze(1)


def draw():
    """Return log-probs, the sampler's, the old policy's, and advantages per token, of which one is 0."""
    rng = generator(5)
    logp = -torch.rand(4, 9, generator=rng, dtype=torch.float64) * 2 - 0.05
    engine, old = (
        (logp + 0.4 * torch.randn(4, 9, generator=rng, dtype=torch.float64)).clamp(max=-0.01)
        for _ in range(2)
    )
    advantages = torch.tensor([1.5, -0.5, 0.0, -2.0]).double().unsqueeze(1).expand(4, 9)
    return logp, engine, old, advantages


def ours(logp, old, advantages, objective, **terms):
    return gk.policy_loss(
        logp, old, advantages, loss_mask=MASK, normalizer=1.0, objective=objective, **terms
    ).loss


def of_ratio(loss):
    """Return the sum over counted tokens of ``loss(ratio to the engine, advantages, logp, engine)``."""
    return lambda logp, engine, old, a: (loss((logp - engine).exp(), a, logp, engine) * MASK).sum()


def clipped(ratio, advantages, *_):
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)


def dppo_tv(ratio, advantages, logp, engine):
    moved = logp.exp() - engine.exp()
    cut = torch.where(advantages > 0, moved > 0.1, moved < -0.15)
    return -torch.where(cut, 0.0, advantages * ratio) + 0.05 * (logp - engine) ** 2


def prime_ipo(ratio, advantages, logp, engine):
    cut = (logp.exp() - engine.exp()).abs() > 0.1
    return -torch.where(cut, 0.0, advantages * ratio) + 0.05 * (logp - engine) ** 2


def ref_kl(logp, engine, old, _):
    kept = logp.exp() - engine.exp() >= -0.2
    return -((old - logp).detach() * (logp - engine).exp() * (kept & MASK)).sum()


def ours_of_ref_kl(logp, engine, old, _):
    mask = MASK & (logp.detach().exp() - engine.exp() >= -0.2)
    towards = gk.advantages.reverse_kl(logp.detach(), old)
    objective = gk.CISPO(0.0, 1e4, aggregation="sum")
    return gk.policy_loss(logp, engine, towards, loss_mask=mask, objective=objective).loss


def icepop(logp, engine, old, advantages):
    weight = (old - engine).exp()
    weight = torch.where((weight < 0.7) | (weight > 1.4), 0.0, weight)
    return (weight * clipped((logp - old).exp(), advantages) * MASK).sum()


BOUNDS = {"positive_low": 0.2, "positive_high": 0.3, "negative_low": 0.2, "negative_high": 0.3}
RATIO_LOSSES = {
    "Tinker, SkyRL `importance_sampling`": (
        lambda ratio, advantages, *_: -ratio * advantages,
        gk.GRPO(1.0, 1e6, aggregation="sum"),
    ),
    "Tinker, prime-rl `ppo`": (clipped, gk.GRPO(0.2, 0.3, aggregation="sum")),
    "Tinker, prime-rl `cispo`": (
        lambda ratio, advantages, logp, _: -ratio.clamp(0.9, 1.2).detach() * advantages * logp,
        gk.CISPO(0.9, 1.2, aggregation="sum"),
    ),
    "prime-rl `ipo`": (prime_ipo, gk.PrimeIPO(eps=0.1, kl_tau=0.05, aggregation="sum")),
    "prime-rl `icepop`, SkyRL `rollout_is`": (
        lambda ratio, advantages, *_: -torch.where((ratio >= 0.8) & (ratio <= 1.3), ratio, 0.0) * advantages,
        gk.ABCGRPO(**BOUNDS, aggregation="sum"),
    ),
}
KNOWN_AS = {
    name: (of_ratio(loss), lambda logp, engine, old, a, objective=objective: ours(logp, engine, a, objective))
    for name, (loss, objective) in RATIO_LOSSES.items()
} | {
    "prime-rl `default`": (
        of_ratio(dppo_tv),
        lambda logp, engine, old, a: ours(
            logp, engine, a, gk.DPPO(0.15, 0.1, max_ratio=1e6, aggregation="sum"),
            ref_logprobs=engine, kl_beta=0.1, kl_estimator="k2",
        ),
    ),
    "prime-rl `ref_kl`": (ref_kl, ours_of_ref_kl),
    "NeMo-RL, OpenRLHF `icepop`": (
        icepop,
        lambda logp, engine, old, a: ours(
            logp, old, a, gk.GRPO(0.2, 0.3, aggregation="sum"),
            rollout_weights=gk.rollout_weights(old, engine, loss_mask=MASK, mode="icepop", low=0.7, high=1.4),
        ),
    ),
}  # fmt: skip
ONLY_GRADIENT = ("prime-rl `default`", "prime-rl `icepop`, SkyRL `rollout_is`", "prime-rl `ref_kl`")
"""Their values are not ours: a ratio without gradient times the log-prob, where ours has the ratio, or the
other way round; or 0 where ours has the bound."""


@pytest.mark.parametrize("name", KNOWN_AS)
def test_equals_the_frameworks_formula(name):
    logp, *rest = draw()
    results = []
    for loss in KNOWN_AS[name]:
        leaf = logp.clone().requires_grad_()
        value = loss(leaf, *rest)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    (value, gradient), (our_value, our_gradient) = results
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-10, atol=1e-13)
    assert (our_gradient != 0).any()
    if name not in ONLY_GRADIENT:
        torch.testing.assert_close(our_value, value, rtol=1e-10, atol=1e-13)
