"""Objectives against the formula sheet by hand, and what they promise each other."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from tests.cases import LAYOUTS, call, generator, make_case, replace, run

E = math.exp


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_and_coefficients(log_ratios, advantages, objective, **terms):
    """Loss of [B, T] log-ratios and its gradient with respect to the log-probs, in fp64."""
    logprobs = torch.full_like(log_ratios, -2.0).requires_grad_()
    old = logprobs.detach() - log_ratios
    output = gk.policy_loss(logprobs, old, advantages, objective=objective, **terms)
    output.loss.backward()
    coefficients = gk.policy_coefficients(logprobs.detach(), old, advantages, objective=objective, **terms)
    assert torch.equal(coefficients, logprobs.grad)
    return output.loss.item(), logprobs.grad


# --- defaults are the papers'


def test_defaults():
    for cls in (gk.GSPO, gk.GSPOToken):
        assert (cls().clip_low, cls().clip_high, cls().dual_clip) == (3e-4, 4e-4, None)
    assert (gk.GRPO().clip_low, gk.GRPO().clip_high, gk.GRPO().dual_clip) == (0.2, 0.2, None)
    assert all(cls().aggregation == "sequence_mean" for cls in (gk.GSPO, gk.GSPOToken, gk.GRPO))
    assert gk.Linear().aggregation == "sum"


# --- closed forms


def test_gspo_by_hand():
    """Two sequences inside the range: loss = -mean s A, coefficient -s A / (L G)."""
    log_ratios, advantages = fp64([0.03, 0.01], [-0.02, -0.04]), fp64(2.0, -1.0)
    loss, coefficients = loss_and_coefficients(log_ratios, advantages, gk.GSPO(clip_low=0.1, clip_high=0.1))
    first, second = E(0.02), E(-0.03)
    assert loss == pytest.approx(-(first * 2.0 - second) / 2, rel=1e-14)
    assert coefficients.tolist() == [
        pytest.approx([-first * 2.0 / 4] * 2, rel=1e-14),
        pytest.approx([second / 4] * 2, rel=1e-14),
    ]


@pytest.mark.parametrize(
    ("log_s", "advantage", "loss", "coefficient"),
    [
        (0.5, 1.0, -1.2, 0.0),  # over the range, better: clipped
        (0.5, -1.0, E(0.5), E(0.5)),  # over the range, worse: the pessimistic side is unclipped
        (-0.5, 1.0, -E(-0.5), -E(-0.5)),
        (-0.5, -1.0, 0.9, 0.0),  # under the range, worse: clipped
        (0.0, 1.0, -1.0, -1.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_clip_branches_by_hand(name, log_s, advantage, loss, coefficient):
    objective = getattr(gk, name)(clip_low=0.1, clip_high=0.2)
    got, coefficients = loss_and_coefficients(fp64([log_s]), fp64(advantage), objective)
    assert got == pytest.approx(loss, rel=1e-14)
    assert coefficients.item() == pytest.approx(coefficient, rel=1e-14)


@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize(("log_s", "loss", "coefficient"), [(1.0, E(1), E(1)), (1.2, 3.0, 0.0)])
def test_dual_clip_by_hand(name, log_s, loss, coefficient):
    objective = getattr(gk, name)(dual_clip=3.0)
    got, coefficients = loss_and_coefficients(fp64([log_s]), fp64(-1.0), objective)
    assert (got, coefficients.item()) == pytest.approx((loss, coefficient), rel=1e-14)
    # only for negative advantages
    got, _ = loss_and_coefficients(fp64([log_s]), fp64(1.0), objective)
    assert got == pytest.approx(-(1 + objective.clip_high), rel=1e-14)


def test_grpo_by_hand():
    log_ratios, advantages = fp64([0.1, -0.1, 0.5]), fp64(2.0)
    loss, coefficients = loss_and_coefficients(log_ratios, advantages, gk.GRPO())
    assert loss == pytest.approx(-2.0 * (E(0.1) + E(-0.1) + 1.2) / 3, rel=1e-14)
    assert coefficients.tolist()[0] == pytest.approx([-2 * E(0.1) / 3, -2 * E(-0.1) / 3, 0.0], rel=1e-14)


def test_gspo_token_by_hand():
    """One ratio, clipped for each token by the sign of its own advantage."""
    log_ratios, advantages = fp64([0.1, 0.3, 0.2, 0.2]), fp64([1.0, -1.0, 0.0, -2.0])
    s = E(0.2)
    loss, coefficients = loss_and_coefficients(
        log_ratios, advantages, gk.GSPOToken(clip_low=0.1, clip_high=0.1)
    )
    assert loss == pytest.approx((-1.1 + s + 0.0 + 2 * s) / 4, rel=1e-14)
    assert coefficients.tolist()[0] == pytest.approx([0.0, s / 4, 0.0, 2 * s / 4], rel=1e-14)


def test_linear_by_hand():
    logprobs = fp64([-1.0, -2.0], [-3.0, -4.0]).requires_grad_()
    weights = fp64([0.5, -1.0], [2.0, 0.0])
    output = gk.policy_loss(logprobs, None, None, token_weights=weights, objective=gk.Linear())
    output.loss.backward()
    assert output.loss.item() == -0.5 + 2.0 - 6.0
    assert torch.equal(logprobs.grad, weights)


AGGREGATED = {
    # values 1, 2 and 4 of two sequences with two tokens and one
    "sequence_mean": ((1 + 2) / 2 + 4) / 2,
    "token_mean": (1 + 2 + 4) / 3,
    "sequence_mean_token_sum": (1 + 2 + 4) / 2,
    "constant": (1 + 2 + 4) / (2 * 8),
    "sum": 1 + 2 + 4,
}


@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_aggregations_by_hand(aggregation):
    constant = 8.0 if aggregation == "constant" else None
    objective = gk.GRPO(aggregation=aggregation, aggregation_constant=constant)
    advantages = -fp64([1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    loss, _ = loss_and_coefficients(zeros, advantages, objective, loss_mask=mask)
    assert loss == pytest.approx(AGGREGATED[aggregation], rel=1e-14)
    # a normalizer stands in for what the divisor counts
    counted = {"token_mean": 3, "sum": 1}.get(aggregation, 2)
    loss, _ = loss_and_coefficients(zeros, advantages, objective, loss_mask=mask, normalizer=5 * counted)
    assert loss == pytest.approx(AGGREGATED[aggregation] / 5, rel=1e-14)


def test_a_sequence_level_loss_counts_its_length_in_a_token_mean():
    objective = gk.GSPO(aggregation="token_mean")
    log_ratios, mask = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss, _ = loss_and_coefficients(log_ratios, fp64(-1.0, -5.0), objective, loss_mask=mask)
    assert loss == pytest.approx((3 * 1 + 1 * 5) / 4, rel=1e-14)
    loss, _ = loss_and_coefficients(
        log_ratios, fp64(-1.0, -5.0), objective, loss_mask=mask, lengths=fp64(6.0, 2.0)
    )
    assert loss == pytest.approx((6 * 1 + 2 * 5) / 8, rel=1e-14)


def test_kl_and_entropy_by_hand():
    logprobs, reference = fp64([-1.0, -2.0]).requires_grad_(), fp64([-1.5, -1.0])
    entropy = fp64([0.3, 0.5]).requires_grad_()
    d = (0.5, -1.0)
    values = {
        "k1": (d, (1.0, 1.0)),
        "k2": ([x * x / 2 for x in d], d),
        "k3": ([E(-x) + x - 1 for x in d], [1 - E(-x) for x in d]),
    }
    for estimator, (kl, slope) in values.items():
        logprobs.grad = entropy.grad = None
        output = gk.policy_loss(
            logprobs, None, fp64(0.0), ref_logprobs=reference, kl_beta=0.4, kl_estimator=estimator,
            entropy=entropy, entropy_coef=0.1,
        )  # fmt: skip
        output.loss.backward()
        assert output.loss.item() == pytest.approx(0.4 * sum(kl) / 2 - 0.1 * 0.4, rel=1e-14)
        assert logprobs.grad.tolist()[0] == pytest.approx([0.2 * x for x in slope], rel=1e-14)
        assert entropy.grad.tolist()[0] == pytest.approx([-0.05, -0.05], rel=1e-14)


def test_kl_ratio_weighted_has_the_cross_token_gradient():
    """sum_t k_t s / L: moving one token moves the ratio that weighs all."""
    log_ratios, reference = fp64([0.2, 0.4]), fp64([-2.5, -1.0])
    d, s = (0.5, -1.0), E(0.3)
    terms = {"ref_logprobs": reference, "kl_beta": 1.0, "kl_estimator": "k1", "kl_ratio_weighted": True}
    loss, coefficients = loss_and_coefficients(log_ratios, fp64(0.0), gk.GSPO(), **terms)
    assert loss == pytest.approx(s * sum(d) / 2, rel=1e-14)
    cross = s * sum(d) / 2 / 2
    assert coefficients.tolist()[0] == pytest.approx([s / 2 + cross, s / 2 + cross], rel=1e-14)


# --- coefficients


@pytest.mark.parametrize("terms", ["plain", "weighted", "kl_tensor", "kl_ratio_weighted", "token_weights"])
@pytest.mark.parametrize("name", ["GSPO", "GRPO"])
def test_coefficients_are_central_differences(name, terms):
    case = make_case("logprobs", "packed", terms, dtype=torch.float64, noise=0.05)
    objective = getattr(gk, name)(clip_low=0.3, clip_high=0.3, dual_clip=4.0)
    logprobs = case.inputs["logprobs"]
    arguments = {
        "loss_mask": case.loss_mask,
        "cu_seqlens": case.cu_seqlens,
        **case.terms,
        "objective": objective,
    }
    got = gk.policy_coefficients(logprobs, case.old_logprobs, case.advantages, **arguments)
    h = 1e-5
    for t in range(logprobs.numel()):
        step = torch.zeros_like(logprobs)
        step[t] = h
        up, down = (
            gk.policy_loss(logprobs + sign * step, case.old_logprobs, case.advantages, **arguments).loss
            for sign in (1, -1)
        )
        assert got[t].item() == pytest.approx(float(up - down) / (2 * h), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gspo_equals_gspo_token_with_equal_advantages(layout):
    case = make_case("logprobs", layout, "rollout_sequence", dtype=torch.float64)
    one, other = run(case, "policy_loss", gk.GSPO()), run(case, "policy_loss", gk.GSPOToken())
    assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-14)
    torch.testing.assert_close(one.grads["logprobs"], other.grads["logprobs"], rtol=1e-13, atol=0)


def test_token_weights_tell_gspo_from_gspo_token():
    """The same value, a different gradient: the sequence's mean weight, or each token's own."""
    log_ratios, advantages, weights = fp64([0.0, 0.0]), fp64(1.0), fp64([0.5, 1.5])
    terms = {"rollout_weights": weights}
    loss, coefficients = loss_and_coefficients(log_ratios, advantages, gk.GSPO(), **terms)
    token_loss, token_coefficients = loss_and_coefficients(log_ratios, advantages, gk.GSPOToken(), **terms)
    assert loss == token_loss == -1.0
    assert coefficients.tolist() == [[-0.5, -0.5]]
    assert token_coefficients.tolist() == [[-0.25, -0.75]]


@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_linear_carries_coefficients_through_any_split(name, entry):
    """Coefficients of the whole batch, then micro-batches of ``Linear``: the gradient of the whole loss."""
    objective = getattr(gk, name)(aggregation="token_mean")
    kind = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "linear")
    case = make_case(kind, "padded", "kl_tensor", dtype=torch.float64)
    whole = run(case, entry, objective)
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
        for key, grad in run(part, entry, gk.Linear()).grads.items():
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


# --- an objective of one's own


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
        found[entry] = run(case, entry, Squared(target=0.2), backend)
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
        found[schedule] = run(
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
