"""Losses of frameworks that are several calls of ours, as docs/integrations/coming_from.md says.

The formulas are those of the sources of prime-rl (559b447) and Tinker. Losses that are a single objective are
in test_formulas.py, those of recipes in tests/examples/frameworks.
"""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator

MASK = torch.arange(9) < torch.tensor([9, 4, 7, 1]).unsqueeze(1)


def dppo_tv(logp, engine, old, advantages):
    moved = logp.exp() - engine.exp()
    cut = torch.where(advantages > 0, moved > 0.1, moved < -0.15)
    return -torch.where(cut, 0.0, advantages * (logp - engine).exp()) + 0.05 * (logp - engine) ** 2


def ref_kl(logp, engine, old, advantages):
    kept = logp.exp() - engine.exp() >= -0.2
    return -(old - logp).detach() * (logp - engine).exp() * kept


def tinker_gspo(logp, engine, old, advantages):
    mean = ((logp.detach() - engine) * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
    ratio = (mean + logp - logp.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)


KNOWN_AS = {
    "prime-rl `default`": (dppo_tv, lambda logp, engine, old, advantages: {
        "advantages": advantages, "objective": gk.DPPO(0.15, 0.1, max_ratio=1e6, aggregation="sum"),
        "ref_logprobs": engine, "kl_beta": 0.1, "kl_estimator": "k2",
    }),
    "prime-rl `ref_kl`": (ref_kl, lambda logp, engine, old, advantages: {
        "advantages": gk.advantages.reverse_kl(logp.detach(), old),
        "objective": gk.CISPO(0.0, 1e4, aggregation="sum"),
        "loss_mask": MASK & (logp.detach().exp() - engine.exp() >= -0.2),
    }),
    "Tinker `gspo`": (tinker_gspo, lambda logp, engine, old, advantages: {
        "advantages": advantages, "objective": gk.GSPOToken(0.2, 0.3, aggregation="sum"),
    }),
}  # fmt: skip
"""Their formula per token, and what ``policy_loss`` gets in its place."""


@pytest.mark.parametrize("name", KNOWN_AS)
def test_equals_the_frameworks_formula(name):
    rng = generator(5)
    logp = -torch.rand(4, 9, generator=rng, dtype=torch.float64) * 2 - 0.05
    moved = logp + 0.4 * torch.randn(2, 4, 9, generator=rng, dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, 0.0, -2.0]).double().unsqueeze(1).expand(4, 9)
    given, leaf = (*moved.clamp(max=-0.01), advantages), logp.requires_grad_()
    formula, terms = KNOWN_AS[name]
    exact = (formula(leaf, *given) * MASK).sum()
    ours = gk.policy_loss(leaf, given[0], **{"loss_mask": MASK} | terms(leaf, *given)).loss
    (want,), (got,) = (torch.autograd.grad(loss, leaf) for loss in (exact, ours))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    assert got.any()
    # the values of prime-rl's have a ratio without gradient times the log-prob, or the other way round
    if name.startswith("Tinker"):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-13)
