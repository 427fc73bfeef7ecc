"""What the formula sheet leaves open: defaults, special terms, forms of launches, objectives of one's own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch
from gspo_kernels.objectives.parts import running_sums
from gspo_kernels.objectives.sspo import LOG_GATES
from tests.cases import LAYOUTS, call, generator, make_case, offsets, replace
from tests.cases import run as run_case
from tests.draws import shifted_seed

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


def test_defaults():
    ipo, m2po, ctpo = gk.PrimeIPO(), gk.M2PO(), gk.CTPO()
    assert (ipo.eps, ipo.max_ratio, ipo.kl_tau, ipo.aggregation) == (0.3, 1e4, 0.0, "token_mean")
    assert (m2po.threshold, m2po.one_sided, m2po.aggregation) == (0.04, True, "token_mean")
    assert (ctpo.log_clip_low, ctpo.log_clip_high, ctpo.power, ctpo.log_dual_clip) == (0.025, 0.05, 0.5, None)
    fipo = gk.FIPO()
    assert (fipo.clip_low, fipo.clip_high, fipo.dual_clip, fipo.half_life) == (0.2, 0.28, 10.0, 32.0)
    assert (fipo.influence_low, fipo.influence_high, fipo.safe_ratio) == (0.0, 0.2, 10.0)
    assert gk.REAL().tau == gk.REAL().threshold == 0.5
    for cls in (gk.GSPO, gk.GSPOToken):
        assert (cls().clip_low, cls().clip_high, cls().dual_clip) == (3e-4, 4e-4, None)
    assert (gk.GRPO().clip_low, gk.GRPO().clip_high, gk.GRPO().dual_clip) == (0.2, 0.2, None)
    assert all(cls().aggregation == "sequence_mean" for cls in (gk.GSPO, gk.GSPOToken, gk.GRPO))
    assert gk.Linear().aggregation == "sum"
    assert (gk.DAPO().clip_low, gk.DAPO().clip_high, gk.DAPO().aggregation) == (0.2, 0.28, "token_mean")
    assert (gk.BNPO().clip_low, gk.BNPO().clip_high, gk.BNPO().aggregation) == (0.2, 0.2, "token_mean")
    assert (gk.LUSPO().clip_low, gk.LUSPO().clip_high) == (2e-3, 2.5e-3)
    assert (gk.GMPO().log_clip_low, gk.GMPO().log_clip_high) == (0.4, 0.4)
    assert (gk.SAPO().tau_positive, gk.SAPO().tau_negative) == (1.0, 1.05)
    vespo = gk.VESPO()
    assert (vespo.k_positive, vespo.lambda_positive, vespo.k_negative, vespo.lambda_negative) == (2, 3, 3, 2)
    assert (gk.ESPO().clip_low, gk.ESPO().elbo_kl_beta) == (0.2, 0.01)
    assert gk.DRO().beta == 0.1 and gk.DPPO().max_ratio == 20.0 and gk.CISPO().max_ratio == 5.0


def test_vespo():
    _, ((better,), (worse,)) = run(fp64([0.5], [0.5]), fp64(1.0, -1.0), gk.VESPO())
    w = E(0.5)
    assert better == pytest.approx(-(w**2) * E(3 - 3 * w) / 2, rel=1e-12)
    assert worse == pytest.approx(w**3 * E(2 - 2 * w) / 2, rel=1e-12)
    # each log-ratio is clamped to 20 before they add up
    _, ((cut, _),) = run(fp64([1e4, -19.0]), fp64(1.0), gk.VESPO(), logp=-20.0)
    assert cut == pytest.approx(-E(2) * E(3 - 3 * E(1)) / 2, rel=1e-12)


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


def test_a_gate_of_ones_own(monkeypatch):
    monkeypatch.setitem(LOG_GATES, "halved", lambda log_ratio, tau: 0.5 * log_ratio)
    _, (g,) = run(fp64([0.2, 0.4]), fp64(1.0), gk.SSPO(gate="halved"))
    assert g == near(-0.5 * E(0.15) / 2, -0.5 * E(0.15) / 2)


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
def test_as_many_packed_tokens_as_sequences_are_one_advantage_and_weight_per_sequence(objective):
    """Three tokens in three sequences, one of them empty: [3] is [B], in every entry."""
    rng, ends = generator(0), offsets((2, 0, 1))
    hidden, weight, logits = (
        torch.randn(*shape, generator=rng).double() for shape in ((3, 5), (7, 5), (3, 7))
    )
    labels, advantages, weights = torch.tensor([1, 2, 3]), fp64(1.0, -2.0, 0.5), fp64(0.5, 2.0, 3.0)
    terms = {"cu_seqlens": ends, "rollout_weights": weights, "objective": objective}
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
    kept = gk.off_policy_mask(logprobs - 1, logprobs, fp64(-1.0, -1.0, 1.0), cu_seqlens=ends, delta=0.1)
    assert kept.tolist() == [0.0, 1.0, 1.0]


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


def test_token_weights_tell_gspo_from_gspo_token():
    """The same value, a different gradient: the sequence's mean weight, or each token's own."""
    terms = {"rollout_weights": fp64([0.5, 1.5])}
    assert run(fp64([0.0, 0.0]), fp64(1.0), gk.GSPO(), **terms) == (-1.0, [[-0.5, -0.5]])
    assert run(fp64([0.0, 0.0]), fp64(1.0), gk.GSPOToken(), **terms) == (-1.0, [[-0.25, -0.75]])


@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_linear_carries_coefficients_through_any_split(name, entry):
    """Coefficients of the whole batch, then micro-batches of ``Linear``: the gradient of the whole loss."""
    objective = getattr(gk, name)(aggregation="token_mean")
    kind = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "linear")
    case = make_case(kind, "padded", "kl_tensor", dtype=torch.float64)
    whole = run_case(case, entry, objective)
    coefficients = gk.policy_coefficients(
        whole.logprobs, case.old_logprobs, case.advantages, loss_mask=case.loss_mask, objective=objective,
        **case.terms,
    )  # fmt: skip
    total = {name: torch.zeros_like(value) for name, value in case.inputs.items()}
    for rows in ([0, 3], [1, 2], [4, 5]):
        part = replace(
            case, advantages=None, old_logprobs=None, labels=case.labels[rows],
            loss_mask=case.loss_mask[rows], terms={"token_weights": coefficients[rows]},
            inputs={k: v if k in ("weight", "bias") else v[rows] for k, v in case.inputs.items()},
        )  # fmt: skip
        for key, grad in run_case(part, entry, gk.Linear()).grads.items():
            if key in ("weight", "bias"):
                total[key] += grad
            else:
                total[key][rows] = grad
    for key, grad in whole.grads.items():
        torch.testing.assert_close(total[key], grad, rtol=1e-11, atol=1e-13)


def test_coefficients_are_exactly_zero_without_gradient():
    case = make_case("logprobs", "packed", "plain", advantages=(1.0, 1.0, 0.0, -1.3, 0.0, 0.0))
    got = gk.policy_coefficients(
        case.inputs["logprobs"], case.old_logprobs, case.advantages, cu_seqlens=case.cu_seqlens,
        objective=gk.GSPO(),
    )  # fmt: skip
    # clipped high, nothing, zero, clipped low, zero, zero
    assert torch.equal(got, torch.zeros_like(got))
    assert not got.requires_grad


@dataclass(frozen=True)
class Squared(Objective):
    """(log r - target)^2 / 2, in ten lines."""

    target: float = 0.1

    coefficient_scope: ClassVar[str] = "token"
    level: ClassVar[str] = "token"
    needs_advantages: ClassVar[bool] = False
    zero_advantage_is_inactive: ClassVar[bool] = False

    def evaluate(self, batch):
        never = torch.zeros_like(batch.mask)
        return ObjectiveLoss(0.5 * (batch.log_ratio - self.target) ** 2, batch.log_ratio, never, never)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_objective_of_ones_own_works_everywhere(layout, backend):
    if backend == "triton":
        layout = "packed"
    found = {}
    for entry in ("token_logprobs", "fused_policy_loss"):
        case = replace(make_case("logits", layout, "holes"), advantages=None)
        found[entry] = run_case(case, entry, Squared(target=0.2), backend)
        log_ratio = (found[entry].logprobs - case.old_logprobs)[case.counted].double()
        counts = case.counted.sum(1) if layout == "padded" else None
        if counts is not None:
            values = torch.zeros(case.labels.shape, dtype=torch.float64)
            values[case.counted] = 0.5 * (log_ratio - 0.2) ** 2
            means = values.sum(1)[counts > 0] / counts[counts > 0]
            assert found[entry].loss.item() == pytest.approx(float(means.mean()), rel=1e-6)
    torch.testing.assert_close(found["token_logprobs"].grads, found["fused_policy_loss"].grads)
    linear = replace(make_case("linear", layout, "holes"), advantages=None)
    for schedule in ("known", "two_pass"):
        found[schedule] = run_case(
            linear, "fused_linear_policy_loss", Squared(target=0.2), backend, schedule=schedule
        )
    torch.testing.assert_close(found["known"].grads, found["two_pass"].grads)


def test_an_objective_of_ones_own_compiles():
    case = replace(make_case("linear", "packed", "holes"), advantages=None)

    def step(leaves):
        return call(case, leaves, "fused_linear_policy_loss", Squared())

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = {name: value.detach().requires_grad_() for name, value in case.inputs.items()}
        function(leaves).loss.backward()
        grads.append({name: leaf.grad for name, leaf in leaves.items()})
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_ratio_of_a_million_tokens_is_still_exact():
    """fp64 inside: the mean of many small log-ratios doesn't drift."""
    count = 1_000_000
    log_ratios = 1e-4 * torch.randn(1, count, generator=generator(0))
    logprobs = torch.full((1, count), -3.0)
    output = gk.policy_loss(
        logprobs, logprobs - log_ratios, torch.tensor([1.0]), objective=gk.GSPO(clip_low=0.5)
    )
    stored = (logprobs.double() - (logprobs - log_ratios).double()).mean()
    assert output.metrics["ratio/mean"].item() == pytest.approx(math.exp(float(stored)), rel=1e-7)
