"""Losses of frameworks that are several calls of ours, as docs/integrations/coming_from.md says.

The formulas are those of the sources of prime-rl (559b447) and NeMo-RL (7ea279a). Losses that are a single
objective are in test_formulas.py.
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


def tinker_gspo(logp, engine, old, advantages):
    mean = ((logp.detach() - engine) * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
    return (clipped((mean + logp - logp.detach()).exp(), advantages) * MASK).sum()


KNOWN_AS = {
    "prime-rl `default`": (
        of_ratio(dppo_tv),
        lambda logp, engine, old, a: ours(
            logp, engine, a, gk.DPPO(0.15, 0.1, max_ratio=1e6, aggregation="sum"),
            ref_logprobs=engine, kl_beta=0.1, kl_estimator="k2",
        ),
    ),
    "prime-rl `ref_kl`": (ref_kl, ours_of_ref_kl),
    "Tinker `gspo`": (
        tinker_gspo,
        lambda logp, engine, old, a: ours(logp, engine, a, gk.GSPOToken(0.2, 0.3, aggregation="sum")),
    ),
    "NeMo-RL, OpenRLHF `icepop`": (
        icepop,
        lambda logp, engine, old, a: ours(
            logp, old, a, gk.GRPO(0.2, 0.3, aggregation="sum"),
            rollout_weights=gk.rollout_weights(old, engine, loss_mask=MASK, mode="icepop", low=0.7, high=1.4),
        ),
    ),
}  # fmt: skip
ONLY_GRADIENT = ("prime-rl `default`", "prime-rl `ref_kl`")
"""Their values are not ours: a ratio without gradient times the log-prob, where ours has the ratio, or the
other way round."""


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
