"""What the formula sheet leaves open: defaults, ties, draws, ambiguous shapes, a user's objectives."""

import math
from dataclasses import dataclass

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from gspo_kernels.objectives.sspo import LOG_GATES
from tests.cases import generator, offsets


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def coefficients(log_ratios, advantages, objective):
    """Return the coefficients for log-ratios [B, T]."""
    logprobs = torch.full_like(log_ratios, -20.0)
    return gk.policy_coefficients(logprobs, logprobs - log_ratios, advantages, objective=objective)


CLIP, LOG_CLIP = ("clip_low", "clip_high"), ("log_clip_low", "log_clip_high")
DEFAULTS = [
    (gk.GSPO, (*CLIP, "dual_clip", "aggregation"), (3e-4, 4e-4, None, "sequence_mean")),
    (gk.GSPOToken, (*CLIP, "dual_clip", "aggregation"), (3e-4, 4e-4, None, "sequence_mean")),
    (gk.GRPO, (*CLIP, "dual_clip", "aggregation"), (0.2, 0.2, None, "sequence_mean")),
    (gk.DAPO, (*CLIP, "aggregation"), (0.2, 0.28, "token_mean")),
    (gk.BNPO, (*CLIP, "aggregation"), (0.2, 0.2, "token_mean")),
    (gk.LUSPO, (*CLIP, "aggregation"), (2e-3, 2.5e-3, "sequence_mean_token_sum")),
    (gk.GMPO, LOG_CLIP, (0.4, 0.4)),
    (gk.SAPO, ("tau_positive", "tau_negative"), (1.0, 1.05)),
    (gk.VESPO, ("k_positive", "lambda_positive", "k_negative", "lambda_negative"), (2, 3, 3, 2)),
    (gk.AGRO, ("beta",), (0.1,)),
    (gk.DHPO, (*CLIP, "mix", "sequence_clip_low", "sequence_clip_high"), (0.2, 0.2, 0.5, 3e-4, 4e-4)),
    (gk.DPO, ("beta", "min_gap"), (0.1, 0.0)),
    (gk.EGSW, (*CLIP, "alpha", "temperature"), (0.2, 0.2, 1.0, 1.0)),
    (gk.ESPO, (*CLIP, "elbo_kl_beta"), (0.2, 0.2, 0.01)),
    (gk.FSPO, LOG_CLIP, (0.03, 0.03)),
    (gk.REBEL, ("eta",), (1.0,)),
    (gk.SSPO, ("gate", "tau_positive", "tau_negative"), ("sigmoid", 1.0, 1.05)),
    (gk.TLGRPO, CLIP, (3e-4, 4e-4)),
    (gk.TOPR, ("ratio_level", "aggregation"), ("sequence", "sequence_mean_token_sum")),
    (gk.ABCGRPO, ("positive_low", "positive_high", "negative_low", "negative_high"), (0.2, 0.2, 0.2, 0.2)),
    (gk.DRO, ("beta",), (0.1,)),
    (gk.DPPO, ("bound_low", "bound_high", "divergence", "max_ratio"), (0.2, 0.2, "tv", 20.0)),
    (gk.CISPO, ("min_ratio", "max_ratio"), (0.0, 5.0)),
    (gk.PrimeIPO, ("eps", "max_ratio", "kl_tau", "aggregation"), (0.3, 1e4, 0.0, "token_mean")),
    (gk.M2PO, ("threshold", "one_sided", "aggregation"), (0.04, True, "token_mean")),
    (gk.CTPO, (*LOG_CLIP, "power", "log_dual_clip"), (0.025, 0.05, 0.5, None)),
    (gk.FIPO, (*CLIP, "dual_clip", "half_life", "safe_ratio"), (0.2, 0.28, 10.0, 32.0, 10.0)),
    (gk.FIPO, ("influence_low", "influence_high"), (0.0, 0.2)),
    (gk.REAL, ("tau", "threshold"), (0.5, 0.5)),
    (gk.TRPA, ("beta", "anisotropy", "kl_coef"), (0.1, 2.5, 1e-3)),
    (gk.ClipCov, (*CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), (0.2, 0.2, 2e-4, 1.0, 5.0)),
    (gk.KLCov, ("kl_cov_ratio", "ppo_kl_coef"), (2e-4, 1.0)),
    (gk.Linear, ("aggregation",), ("sum",)),
]


def test_defaults():
    for cls, names, values in DEFAULTS:
        assert tuple(getattr(cls(), name) for name in names) == values, cls


def test_vespo_clamps_each_log_ratio_before_they_add_up():
    got = coefficients(fp64([1e4, -19.0]), fp64(1.0), gk.VESPO())
    assert got[0, 0].item() == pytest.approx(-math.exp(2 + 3 - 3 * math.exp(1)) / 2, rel=1e-12)


def test_m2po_leaves_out_all_of_equal_tokens_or_none():
    got = coefficients(fp64([0.2, 0.2, 0.1]), fp64(1.0), gk.M2PO(threshold=0.026))
    assert got.tolist() == [[0.0, 0.0, pytest.approx(-math.exp(0.1) / 3, rel=1e-12)]]


def test_dpo_pairs_only_what_differs_enough():
    """Levels 1, 2, 3.5 in one group: gaps 1, 1.5 and 2.5. With min_gap=1.5, the middle one has no pair."""
    ref, d = torch.zeros(3, 1, dtype=torch.float64), fp64([0.4], [0.1], [-0.2])
    levels, group_ids, here = fp64(1.0, 2.0, 3.5), torch.zeros(3, dtype=torch.int64), torch.ones(3) > 0
    for gap, pairs in ((1.0, [(0, 2), (1, 2)]), (1.5, [(0, 2)]), (2.5, [])):
        dpo, leaf = gk.DPO(beta=0.5, min_gap=gap), (ref + d).requires_grad_()
        loss = gk.policy_loss(leaf, None, levels, ref_logprobs=ref, group_ids=group_ids, objective=dpo).loss
        loss.backward()
        losses = [math.log1p(math.exp(-0.5 * float(d[i] - d[j]))) for i, j in pairs]
        assert loss.item() == pytest.approx(sum(losses) / max(len(losses), 1), rel=1e-14)
        paired = [any(i in pair for pair in pairs) for i in range(3)]
        assert dpo.paired(levels, group_ids, here).tolist() == paired
        assert dpo.count_pairs(levels, group_ids, here) == len(pairs)
        assert (leaf.grad.flatten() != 0).tolist() == paired
    # a sequence without counted tokens is in no pair
    assert gk.DPO().paired(levels, group_ids, torch.tensor([True, False, True])).tolist() == [
        True,
        False,
        True,
    ]


def test_clip_cov_draws_by_its_seed_and_between_its_bounds():
    """Covariances 0.5, -0.5, -0.5, 0.5: two candidates, one is drawn; the fourth has no gradient to lose."""
    logprobs, advantages = fp64([-1.0, -3.0], [-1.0, -3.0]), fp64(1.0, 0.0)

    def lost(**options):
        """Return which tokens have another coefficient than GRPO's."""
        both = (
            gk.policy_coefficients(logprobs, logprobs, advantages, objective=one)
            for one in (gk.ClipCov(**options), gk.GRPO())
        )
        return tuple(torch.ne(*both).flatten().tolist())

    drawn = [lost(clip_cov_lb=0.1, seed=seed) for seed in range(20)]
    assert set(drawn) == {(True, False, False, False), (False,) * 4}
    assert drawn == [lost(clip_cov_lb=0.1, seed=seed) for seed in range(20)]
    for low, high in ((0.5, 0.6), (0.4, 0.5), (0.6, 9.0)):  # a bound itself is outside
        assert not any(lost(clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high))


def test_a_gate_of_ones_own(monkeypatch):
    monkeypatch.setitem(LOG_GATES, "halved", lambda log_ratio, tau: 0.5 * log_ratio)
    got = coefficients(fp64([0.2, 0.4]), fp64(1.0), gk.SSPO(gate="halved"))
    assert got.tolist() == [pytest.approx([-0.25 * math.exp(0.15)] * 2, rel=1e-12)]


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
def test_as_many_packed_tokens_as_sequences_are_one_advantage_and_weight_per_sequence(objective):
    """With three tokens in three sequences, one of them empty, every function reads [3] as [B]."""
    rng, ends = generator(0), offsets((2, 0, 1))
    hidden, weight, logits = (
        torch.randn(*shape, generator=rng).double() for shape in ((3, 5), (7, 5), (3, 7))
    )
    labels, advantages, weights = torch.tensor([1, 2, 3]), fp64(1.0, -2.0, 0.5), fp64(0.5, 2.0, 3.0)
    terms = {"cu_seqlens": ends, "rollout_weights": weights, "objective": objective}
    logprobs = gk.token_logprobs(logits, labels).logprobs
    for output in (
        gk.policy_loss(logprobs, None, advantages, **terms),
        gk.fused_policy_loss(logits, labels, None, advantages, **terms),
        gk.fused_linear_policy_loss(hidden, weight, labels, None, advantages, **terms),
    ):
        assert output.loss.item() == pytest.approx(-(0.5 * 1.0 + 3.0 * 0.5) / 2, rel=1e-12)
    got = gk.policy_coefficients(logprobs, None, advantages, **terms)
    assert got.tolist() == pytest.approx([-0.5 / 4, -0.5 / 4, -1.5 / 2], rel=1e-12)
    kept = gk.off_policy_mask(logprobs - 1, logprobs, fp64(-1.0, -1.0, 1.0), cu_seqlens=ends, delta=0.1)
    assert kept.tolist() == [0.0, 1.0, 1.0]


def test_a_wrong_level_is_refused():
    """With as many sequences as positions, the shape alone could be that of another level."""

    @dataclass(frozen=True)
    class Wrong(Objective):
        coefficient_scope = "token"
        level = "sequence"
        needs_advantages = False

        def evaluate(self, batch):
            return ObjectiveLoss(0.5 * batch.log_ratio**2, batch.log_ratio)

    with pytest.raises(ValueError, match=r"Wrong has level='sequence', but its loss has shape \(2, 2\)"):
        gk.policy_loss(torch.zeros(2, 2), None, None, objective=Wrong())


def test_ratio_of_a_million_tokens_is_still_exact():
    """Sums are in fp64, so that the mean of many small log-ratios doesn't drift."""
    log_ratios = 1e-4 * torch.randn(1, 1_000_000, generator=generator(0))
    logprobs = torch.full_like(log_ratios, -3.0)
    old = logprobs - log_ratios
    output = gk.policy_loss(logprobs, old, torch.tensor([1.0]), objective=gk.GSPO(clip_low=0.5))
    exact = (logprobs.double() - old.double()).mean().exp()
    assert output.metrics["ratio/mean"].item() == pytest.approx(exact.item(), rel=1e-7)
