"""Small cases worked out by hand, and what objectives become in their limits."""

import math
from dataclasses import dataclass

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import PolicyBatch
from gspo_kernels.objectives.parts import running_sums
from gspo_kernels.objectives.sspo import LOG_GATES
from tests.draws import shifted_seed
from tests.objectives.sample_batches import make_batch

E = math.exp


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def run(log_ratios, advantages, objective, logp=-2.0, **terms):
    """Loss of [B, T] log-ratios, and the coefficients."""
    logprobs = torch.full_like(log_ratios, logp)
    arguments = (logprobs, logprobs - log_ratios, advantages)
    loss = gk.policy_loss(*arguments, objective=objective, **terms).loss.item()
    return loss, gk.policy_coefficients(*arguments, objective=objective, **terms).tolist()


def near(*values):
    return pytest.approx(list(values), rel=1e-12, abs=1e-15)


# --- by hand


def test_defaults():
    ipo, m2po, ctpo = gk.PrimeIPO(), gk.M2PO(), gk.CTPO()
    assert (ipo.eps, ipo.max_ratio, ipo.kl_tau, ipo.aggregation) == (0.3, 1e4, 0.0, "token_mean")
    assert (m2po.threshold, m2po.one_sided, m2po.aggregation) == (0.04, True, "token_mean")
    assert (ctpo.log_clip_low, ctpo.log_clip_high, ctpo.power, ctpo.log_dual_clip) == (0.025, 0.05, 0.5, None)
    fipo = gk.FIPO()
    assert (fipo.clip_low, fipo.clip_high, fipo.dual_clip, fipo.half_life) == (0.2, 0.28, 10.0, 32.0)
    assert (fipo.influence_low, fipo.influence_high, fipo.safe_ratio) == (0.0, 0.2, 10.0)
    assert gk.REAL().tau == gk.REAL().threshold == 0.5
    assert (gk.DAPO().clip_low, gk.DAPO().clip_high, gk.DAPO().aggregation) == (0.2, 0.28, "token_mean")
    assert (gk.BNPO().clip_low, gk.BNPO().clip_high, gk.BNPO().aggregation) == (0.2, 0.2, "token_mean")
    assert (gk.LUSPO().clip_low, gk.LUSPO().clip_high) == (2e-3, 2.5e-3)
    assert (gk.GMPO().log_clip_low, gk.GMPO().log_clip_high) == (0.4, 0.4)
    assert (gk.SAPO().tau_positive, gk.SAPO().tau_negative) == (1.0, 1.05)
    vespo = gk.VESPO()
    assert (vespo.k_positive, vespo.lambda_positive, vespo.k_negative, vespo.lambda_negative) == (2, 3, 3, 2)
    assert (gk.ESPO().clip_low, gk.ESPO().elbo_kl_beta) == (0.2, 0.01)
    assert gk.DRO().beta == 0.1 and gk.DPPO().max_ratio == 20.0 and gk.CISPO().max_ratio == 5.0


def test_dr_grpo():
    loss, (g,) = run(fp64([0.1, 0.5]), fp64(2.0), gk.DrGRPO(aggregation_constant=10))
    assert loss == pytest.approx(-2 * (E(0.1) + 1.2) / 10, rel=1e-12)
    assert g == near(-2 * E(0.1) / 10, 0.0)


@pytest.mark.parametrize(
    "bounds", [{"max_ratio": 1.5}, {"min_ratio": 0.8, "max_ratio": 1.5}, {"max_ratio": 0.2}]
)
def test_cispo(bounds):
    """TRL bounds the ratio from above alone, verl on both sides; clipped tokens keep a gradient."""
    low, high = bounds.get("min_ratio", 0.0), bounds["max_ratio"]
    loss, (g,) = run(fp64([0.1, 1.0, -1.0]), fp64(-3.0), gk.CISPO(**bounds))
    weights = [min(max(low, E(x)), high) for x in (0.1, 1.0, -1.0)]
    assert g == near(*(w * 3 / 3 for w in weights))
    assert loss == pytest.approx(-2.0 * sum(weights), rel=1e-12)


def test_gmpo():
    """One-sided by the sign of the advantage: only 0.9 is cut for A > 0, only -0.6 for A < 0."""
    log_ratios = fp64([0.9, -0.6], [0.9, -0.6])
    loss, (first, second) = run(log_ratios, fp64(1.0, -1.0), gk.GMPO())
    better, worse = E((0.4 - 0.6) / 2), E((0.9 - 0.4) / 2)
    assert loss == pytest.approx((-better + worse) / 2, rel=1e-12)
    assert first == near(0.0, -better / 4) and second == near(worse / 4, 0.0)


def test_sapo():
    loss, (g,) = run(fp64([0.0, 0.3]), fp64(1.0), gk.SAPO())
    sig = 1 / (1 + E(-(E(0.3) - 1)))
    assert loss == pytest.approx(-(4 * 0.5 + 4 * sig) / 2, rel=1e-12)
    assert g == near(-1 / 2, -4 * sig * (1 - sig) * E(0.3) / 2)


def test_luspo():
    """GSPO's coefficient without the length: -s A."""
    loss, (g,) = run(fp64([0.1, 0.3]), fp64(2.0), gk.LUSPO(clip_high=0.5))
    assert loss == pytest.approx(-2 * 2 * E(0.2), rel=1e-12)
    assert g == near(-2 * E(0.2), -2 * E(0.2))


def test_vespo():
    _, ((better,), (worse,)) = run(fp64([0.5], [0.5]), fp64(1.0, -1.0), gk.VESPO())
    w = E(0.5)
    assert better == pytest.approx(-(w**2) * E(3 - 3 * w) / 2, rel=1e-12)
    assert worse == pytest.approx(w**3 * E(2 - 2 * w) / 2, rel=1e-12)
    # each log-ratio is clamped to 20 before they add up
    _, ((cut, _),) = run(fp64([1e4, -19.0]), fp64(1.0), gk.VESPO(), logp=-20.0)
    assert cut == pytest.approx(-E(2) * E(3 - 3 * E(1)) / 2, rel=1e-12)


def test_topr():
    log_ratios, advantages = fp64([0.5, -0.9], [0.5, -0.9], [0.5, 0.9]), fp64(1.0, -1.0, -1.0)
    loss, (better, worse, over) = run(log_ratios, advantages, gk.TOPR())
    w = E(-0.4)
    assert better == near(-1 / 3, -1 / 3) and worse == near(w / 3, w / 3) and over == near(1 / 3, 1 / 3)
    assert loss == pytest.approx((2 * 2 - 2 * 2 * w - 2 * 2) / 3, rel=1e-12)
    _, (_, worse, _) = run(log_ratios, advantages, gk.TOPR(ratio_level="token"))
    assert worse == near(1 / 3, E(-0.9) / 3)


def test_abc_grpo():
    """Unlike PPO's, both sides are closed for either sign."""
    log_ratios = fp64([1.0, -1.0, 0.1], [1.0, -1.0, 0.1])
    loss, (better, worse) = run(log_ratios, fp64(1.0, -1.0), gk.ABCGRPO(negative_high=0.5))
    assert better == near(0.0, 0.0, -E(0.1) / 6) and worse == near(0.0, 0.0, E(0.1) / 6)
    assert loss == pytest.approx((-(1.2 + 0.8) + (1.5 + 0.8)) / 6, rel=1e-12)


def test_sspo():
    """At ratio 1 the gate is 2 / tau and phi tau / 2; at another one they are SAPO's gate and its slope."""
    loss, (g,) = run(fp64([0.0, 0.0]), fp64(-2.0), gk.SSPO())
    assert loss == pytest.approx(2 * 2 / 1.05, rel=1e-12)
    assert g == near(1.0, 1.0)
    loss, (g,) = run(fp64([0.3]), fp64(1.0), gk.SSPO(tau_positive=2.0))
    sig = 1 / (1 + E(-2 * (E(0.3) - 1)))
    assert loss == pytest.approx(-2 * sig, rel=1e-12)
    assert g == near(-4 * sig * (1 - sig) * E(0.3))


@pytest.mark.parametrize("options", [{}, {"tau_positive": 0.5, "tau_negative": 3.0}, {"gate": "identity"}])
def test_sspo_on_policy_is_gspo(options):
    advantages = fp64(1.0, -1.0, 0.25)
    _, got = run(torch.zeros(3, 4).double(), advantages, gk.SSPO(**options))
    _, expected = run(torch.zeros(3, 4).double(), advantages, gk.GSPO())
    assert [near(*row) for row in expected] == got


def test_dhpo():
    objective = gk.DHPO(mix=0.25, sequence_clip_low=0.5, sequence_clip_high=0.5)
    loss, (g,) = run(fp64([0.1, 0.3]), fp64(1.0), objective)
    s = E(0.2)
    assert loss == pytest.approx(-(0.25 * (E(0.1) + 1.2) + 0.75 * 2 * s) / 2, rel=1e-12)
    assert g == near(-(0.25 * E(0.1) + 0.75 * s) / 2, -0.75 * s / 2)


def test_dhpo_guided_by_entropy():
    """alpha 0, 1 and 1/2; tokens of a sequence with one entropy take 1/2."""
    objective = gk.DHPO(mix="entropy", sequence_clip_low=0.5, sequence_clip_high=0.5)
    entropy = fp64([1.0, 3.0, 2.0], [7.0, 7.0, 7.0])
    log_ratios = fp64([0.1, 0.05, 0.15], [0.1, 0.05, 0.15])
    _, (g, even) = run(log_ratios, fp64(1.0, 1.0), objective, entropy=entropy)
    s = E(0.1)
    assert g == near(
        *(-(a * E(x) + 0.5 * s) / 6 for a, x in zip((0, 1, 0.5), (0.1, 0.05, 0.15), strict=True))
    )
    assert even == near(*(-(0.5 * E(x) + 0.5 * s) / 6 for x in (0.1, 0.05, 0.15)))


def test_espo():
    """E - E_old and E - E_ref weigh tokens by 1/p_mask; rollout weights leave the KL alone."""
    weights, lengths, advantage = fp64([2.0, 4.0]), fp64(10.0), fp64(1.5)
    terms = {"token_weights": weights, "lengths": lengths, "ref_logprobs": fp64([-2.5, -1.0])}
    loss, (g,) = run(fp64([0.1, 0.2]), advantage, gk.ESPO(), rollout_weights=fp64(0.5), **terms)
    rho, distance = E((2 * 0.1 + 4 * 0.2) / 10), 2 * 0.5 + 4 * -1.0
    assert loss == pytest.approx(-0.5 * 1.5 * rho + 0.01 * distance**2 / 20, rel=1e-12)
    c = (-0.5 * 1.5 * rho + 0.01 * distance) / 10
    assert g == near(2 * c, 4 * c)


def test_gpg_and_dro():
    log_ratios, advantages = fp64([0.1, -0.3]), fp64(2.0)
    assert run(log_ratios, advantages, gk.GPG())[1] == [near(-1.0, -1.0)]
    loss, (g,) = run(log_ratios, advantages, gk.DRO(beta=0.5))
    assert g == near((-2 + 0.05) / 2, (-2 - 0.15) / 2)
    assert loss == pytest.approx((4 + 0.25 * 0.01 + 4 + 0.25 * 0.09) / 2, rel=1e-12)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo(divergence):
    """The same ratio is outside at a likely token and inside at a rare one."""
    objective = gk.DPPO(divergence=divergence, bound_low=0.02, bound_high=0.02, max_ratio=1.1)
    up, down = fp64([0.3]), fp64([-0.3])
    for log_ratio, advantage, logp, expected in (
        (up, 1.0, -0.5, 0.0),
        (up, -1.0, -0.5, 1.1),
        (down, -1.0, -0.5, 0.0),
        (down, 1.0, -0.5, -E(-0.3)),
        (up, 1.0, -9.0, -1.1),
        (down, -1.0, -9.0, E(-0.3)),
    ):
        assert run(log_ratio, fp64(advantage), objective, logp)[1] == [near(expected)]


def test_prime_ipo():
    """Moves of 0.25, 0.35 and -0.35 under either sign of A, and a ratio of 2.5e6."""
    old = fp64([0.5, 0.5, 0.5, 1e-7]).log()
    logp = fp64([0.75, 0.85, 0.15, 0.25]).log()
    for a in (2.0, -2.0):
        g = gk.policy_coefficients(logp, old, fp64(a), objective=gk.PrimeIPO())
        assert g.tolist()[0] == near(-1.5 * a / 4, 0.0, 0.0, -1e4 * a / 4)
        loss = gk.policy_loss(logp, old, fp64(a), objective=gk.PrimeIPO()).loss
        assert loss.item() == pytest.approx(-a * (1.5 + 1e4) / 4, rel=1e-12)
        # the pull is on all tokens, masked or not
        pulled = gk.policy_coefficients(logp, old, fp64(a), objective=gk.PrimeIPO(kl_tau=0.1))
        assert (pulled - g).tolist()[0] == near(*(0.2 * (logp - old) / 4).tolist()[0])


def test_m2po():
    """Squares 0.01, 0.04 and 0.25 of pushed tokens: the mean of two is 0.025, of three 0.1."""
    log_ratios, advantages = fp64([0.1, 0.5, -0.9, 0.0], [-0.2, 0.9, 3.0, 0.0]), fp64(1.0, -1.0)
    _, g = run(log_ratios, advantages, gk.M2PO())
    assert g[0] == near(-E(0.1) / 8, 0.0, -E(-0.9) / 8, -1 / 8)
    assert g[1] == near(E(-0.2) / 8, E(0.9) / 8, E(3.0) / 8, 1 / 8)
    _, g = run(log_ratios, advantages, gk.M2PO(threshold=0.0249))
    assert g[1] == near(0.0, E(0.9) / 8, E(3.0) / 8, 1 / 8)
    # all tokens: 0, 0, 0.01, 0.04, 0.25 have the mean 0.06
    _, g = run(log_ratios, advantages, gk.M2PO(threshold=0.06, one_sided=False))
    assert [x == 0 for row in g for x in row] == [False, False, True, False, False, True, True, False]
    # of equal ones all or none
    _, g = run(fp64([0.2, 0.2, 0.1]), fp64(1.0), gk.M2PO(threshold=0.026))
    assert g[0] == near(0.0, 0.0, -E(0.1) / 3)


def test_real():
    """Scores 0.2 and -0.2 of two successes, 0.4 of a failure; a group of failures has no loss."""
    ids = torch.tensor([0, 0, 0, 1, 1])
    log_ratios = fp64([0.2, 0.2], [-0.3, -0.1], [0.4, 0.4], [0.5, 0.5], [-0.5, 0.1])
    loss, g = run(log_ratios, fp64(1.0, 1.0, 0.0, 0.0, 0.0), gk.REAL(), group_ids=ids)
    plus, minus = 1 + E(-0.4) + E(0.4), 1 + E(0.8)
    assert loss == pytest.approx(3 * (math.log(plus) + math.log(minus)) / 5, rel=1e-12)
    share = 3 / 5 / 2 / 0.5  # of three copies of the loss in a mean over five, two tokens, tau
    assert g[0] == near(*[-share * E(-0.4) / plus] * 2) and g[1] == near(*[-share * E(0.4) / plus] * 2)
    assert g[2] == near(*[share * E(0.8) / minus] * 2) and g[3] == g[4] == [0.0, 0.0]


def test_fspo():
    """The band of four tokens is twice that of one; the ratio is of the sum, and no length divides it."""
    for log_ratio, inside in ((0.014, True), (0.016, False)):
        loss, (g,) = run(fp64([log_ratio] * 4), fp64(2.0), gk.FSPO())
        assert loss == pytest.approx(-2 * E(min(4 * log_ratio, 0.06)), rel=1e-12)
        assert g == near(*[-2 * E(4 * log_ratio) * inside] * 4)
    _, (g,) = run(fp64([-0.016] * 4), fp64(-2.0), gk.FSPO())
    assert g == near(0.0, 0.0, 0.0, 0.0)


def test_ctpo():
    """Log-ratios so far 0.04, 0.08, 0.02, 0.08 in bands up to 0.05 (1, 1.41, 1.73, 2)."""
    loss, (g,) = run(fp64([0.04, 0.04, -0.06, 0.06]), fp64(2.0), gk.CTPO())
    assert loss == pytest.approx(-(E(0.04) + E(0.05 * 2**0.5) + E(0.02) + E(0.08)) / 2, rel=1e-12)
    assert g == near(-E(0.04) / 2, 0.0, -E(0.02) / 2, -E(0.08) / 2)
    _, (g,) = run(fp64([0.04, 0.04, -0.06, 0.06]), fp64(-2.0), gk.CTPO(log_dual_clip=0.05))
    assert g == near(E(0.04) / 2, 0.0, E(0.02) / 2, E(0.08) / 2)


def test_fipo():
    """A half-life of one token: F = 0.05 + 0.5 (0.02 + 0.5 * -0.5), 0.02 - 0.25, -0.5."""
    objective = gk.FIPO(half_life=1.0, influence_low=0.1, influence_high=0.2)
    _, (g,) = run(fp64([0.05, 0.02, -0.5]), fp64(3.0), objective)
    assert g == near(-E(0.05 - 0.115) * E(0.05), -0.9 * E(0.02), -0.9 * E(-0.5))
    # only a first token beyond the dual clip is left out of its sum
    _, (g,) = run(fp64([2.4, 0.1]), fp64(-3.0), gk.FIPO(half_life=1.0))
    assert g == near(0.0, 1.5 * E(0.1) * E(0.1))
    # a large ratio is never amplified where it is pushed down
    _, (g,) = run(fp64([0.2, 0.1]), fp64(-3.0), gk.FIPO(safe_ratio=1.15))
    assert g == near(1.5 * E(0.2), 1.5 * E(0.1) * E(0.1))


def test_running_sums_keep_sequences_apart():
    """However long, padded or packed, with holes, and where a neighbour is infinite."""
    mask = torch.rand(3, 37, generator=torch.Generator().manual_seed(shifted_seed(3))) < 0.7
    values = torch.arange(111, dtype=torch.float64).view(3, 37) / 7
    values[1] = math.inf
    for padded in (True, False):
        layout = (
            layout_of(values, None)
            if padded
            else layout_of(values.view(1, -1), torch.tensor([0, 37, 74, 111]))
        )
        shape = (3, 37) if padded else (1, 111)
        empty = torch.zeros(shape, dtype=torch.float64)
        batch = PolicyBatch(layout, mask.view(shape), torch.ones(3), empty, empty, empty)
        for onwards in (False, True):
            got = running_sums(batch, values.view(shape), 0.9, onwards=onwards).view(3, 37)
            for i in (0, 2):
                here = torch.nonzero(mask[i]).flatten().tolist()
                for place, t in enumerate(here):
                    others = here[place:] if onwards else here[place::-1]
                    expected = sum(0.9**k * values[i, u] for k, u in enumerate(others))
                    assert got[i, t].item() == pytest.approx(float(expected), rel=1e-13)


def test_tl_grpo():
    """Turns 7 and 2 have a ratio each, wherever their tokens are; a token of no turn has ratio 1."""
    log_ratios, turns = fp64([0.1, 0.2, 0.3, 0.5, 9.0]), torch.tensor([[7, 2, 7, 2, -1]])
    advantages = fp64([1.0, -1.0, 1.0, -1.0, 0.5])
    objective = gk.TLGRPO(clip_low=0.3, clip_high=0.3)
    loss, (g,) = run(log_ratios, advantages, objective, turn_ids=turns)
    first, second = E(0.2), E(0.35)
    assert g == near(-first / 5, second / 5, -first / 5, second / 5, -0.5 / 5)
    assert loss == pytest.approx((-2 * first + 2 * second - 0.5) / 5, rel=1e-12)


# --- limits


def coefficients(objective, **changes):
    batch = make_batch(objective, seed=3)
    return batch.call(gk.policy_coefficients, objective, **changes)


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cls", [gk.DAPO, gk.BNPO, gk.DrGRPO])
def test_grpo_up_to_aggregation(cls):
    ours = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0, "aggregation": "token_mean"}
    same(coefficients(cls(**ours)), coefficients(gk.GRPO(**ours)))


def test_dhpo_at_its_ends_is_its_branches():
    clips = {"clip_low": 0.15, "clip_high": 0.1}
    same(coefficients(gk.DHPO(mix=1.0, **clips)), coefficients(gk.GRPO(**clips)))
    theirs = {f"sequence_{name}": value for name, value in clips.items()}
    same(coefficients(gk.DHPO(mix=0, **theirs)), coefficients(gk.GSPO(**clips)))


def test_sapo_at_ratio_one_is_the_policy_gradient():
    for tau in (0.3, 1.0, 5.0):
        objective = gk.SAPO(tau_positive=tau, tau_negative=tau, aggregation="token_mean")
        same(coefficients(objective, old_logprobs=None), coefficients(gk.GPG()))


def test_abc_grpo_inside_its_bounds_is_the_policy_gradient():
    bounds = dict.fromkeys(("positive_low", "negative_low"), 0.9) | dict.fromkeys(
        ("positive_high", "negative_high"), 9.0
    )
    inside = coefficients(gk.ABCGRPO(**bounds, aggregation="token_mean"))
    same(inside, coefficients(gk.CISPO(max_ratio=99.0)))


def test_sspo_with_an_identity_gate_is_gspo_without_a_clip():
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    same(coefficients(gk.SSPO(gate="identity")), coefficients(gk.GSPO(**wide)))


def test_a_gate_of_ones_own(monkeypatch):
    monkeypatch.setitem(LOG_GATES, "halved", lambda log_ratio, tau: 0.5 * log_ratio)
    _, (g,) = run(fp64([0.2, 0.4]), fp64(1.0), gk.SSPO(gate="halved"))
    assert g == near(-0.5 * E(0.15) / 2, -0.5 * E(0.15) / 2)


def test_one_turn_is_gspo_token_and_a_turn_per_token_grpo():
    clips = {"clip_low": 0.1, "clip_high": 0.1}
    turns = torch.zeros(6, 7, dtype=torch.int64)
    same(coefficients(gk.TLGRPO(**clips), turn_ids=turns), coefficients(gk.GSPOToken(**clips)))
    turns = torch.arange(42).view(6, 7)
    same(coefficients(gk.TLGRPO(**clips), turn_ids=turns), coefficients(gk.GRPO(**clips)))


def test_unbounded_weights_on_policy_are_the_policy_gradient():
    plain = coefficients(gk.GPG())
    for objective in (gk.CISPO(), gk.VESPO(), gk.DPPO(), gk.DRO(), gk.TOPR(aggregation="token_mean")):
        same(coefficients(objective, old_logprobs=None), plain)


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
def test_as_many_packed_tokens_as_sequences_are_one_advantage_and_weight_per_sequence(objective):
    """Three tokens in three sequences, one of them empty: [3] is [B], in every entry."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    hidden, weight, logits = (
        torch.randn(*shape, generator=rng).double() for shape in ((3, 5), (7, 5), (3, 7))
    )
    labels, advantages, weights = torch.tensor([1, 2, 3]), fp64(1.0, -2.0, 0.5), fp64(0.5, 2.0, 3.0)
    terms = {"cu_seqlens": offsets, "rollout_weights": weights, "objective": objective}
    logprobs = gk.token_logprobs(logits, labels).logprobs
    outputs = (
        gk.policy_loss(logprobs, None, advantages, **terms),
        gk.fused_policy_loss(logits, labels, None, advantages, **terms),
        gk.fused_linear_policy_loss(hidden, weight, labels, None, advantages, **terms),
    )
    for output in outputs:
        assert output.loss.item() == pytest.approx(-(0.5 * 1.0 + 3.0 * 0.5) / 2, rel=1e-12)
    got = gk.policy_coefficients(logprobs, None, advantages, **terms)
    assert got.tolist() == near(-0.5 / 4, -0.5 / 4, -1.5 / 2)
    kept = gk.off_policy_mask(logprobs - 1, logprobs, fp64(-1.0, -1.0, 1.0), cu_seqlens=offsets, delta=0.1)
    assert kept.tolist() == [0.0, 1.0, 1.0]


# --- options


@pytest.mark.parametrize(
    ("cls", "options", "match"),
    [
        (gk.CISPO, {"min_ratio": 1.5}, "min_ratio"),
        (gk.CISPO, {"max_ratio": 0.0}, "max_ratio: got 0"),
        (gk.CISPO, {"min_ratio": 0.8, "max_ratio": 0.5}, "max_ratio: got 0.5.* at least 0.8"),
        (gk.GMPO, {"log_clip_low": -0.1}, "log_clip_low"),
        (gk.SAPO, {"tau_positive": 0.0}, "tau_positive"),
        (gk.ABCGRPO, {"positive_low": 1.1}, "positive_low"),
        (gk.TOPR, {"ratio_level": "turn"}, "ratio_level"),
        (gk.VESPO, {"lambda_negative": math.nan}, "lambda_negative"),
        (gk.DRO, {"beta": math.inf}, "beta"),
        (gk.DPPO, {"divergence": "js"}, "divergence"),
        (gk.SSPO, {"gate": "none"}, "gate"),
        (gk.DHPO, {"mix": 1.5}, "mix"),
        (gk.DHPO, {"mix": "more"}, "mix"),
        (gk.ESPO, {"elbo_kl_beta": -1.0}, "elbo_kl_beta"),
        (gk.DrGRPO, {}, "aggregation_constant"),
        (gk.PrimeIPO, {"max_ratio": 0.9}, "max_ratio"),
        (gk.M2PO, {"threshold": -0.1}, "threshold"),
        (gk.REAL, {"tau": 0.0}, "tau"),
        (gk.FSPO, {"log_clip_high": -0.1}, "log_clip_high"),
        (gk.CTPO, {"power": 1.5}, "power"),
        (gk.CTPO, {"log_dual_clip": 0.01}, "log_dual_clip: got 0.01.* at least 0.05"),
        (gk.FIPO, {"half_life": 0.0}, "half_life"),
        (gk.FIPO, {"safe_ratio": 0.5}, "safe_ratio"),
    ],
)
def test_options_are_validated(cls, options, match):
    with pytest.raises(ValueError, match=match):
        cls(**options)


def test_forms_of_single_launches():
    form = gk.LUSPO().ratio_form()
    assert form.count_tokens and form.divisor == "sequences" and form.divisor_scale == 1.0
    assert form.level == "sequence" and gk.ESPO().ratio_form() is None
    form = gk.DrGRPO(aggregation_constant=7.0).ratio_form()
    assert form.count_tokens and form.divisor == "sequences" and form.divisor_scale == 7.0
    assert form.level == "token" and gk.TLGRPO().ratio_form() is None


@pytest.mark.parametrize("form", (gk.GSPO, gk.GRPO, gk.LUSPO))
def test_who_evaluates_otherwise_has_no_form_of_its_base(form):
    @dataclass(frozen=True)
    class Renamed(form):
        pass

    @dataclass(frozen=True)
    class Doubled(form):
        def evaluate(self, batch):
            found = super().evaluate(batch)
            return found._replace(loss=2 * found.loss)

    assert Renamed().ratio_form() == form().ratio_form() is not None and Doubled().ratio_form() is None
    logits, labels = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    old, advantages = torch.full((2, 3), -1.5), torch.tensor([1.0, -1.0])
    once, twice = (
        gk.fused_policy_loss(logits, labels, old, advantages, objective=one()).loss for one in (form, Doubled)
    )
    torch.testing.assert_close(twice, 2 * once)
