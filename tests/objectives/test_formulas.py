"""Every objective is its formula on every path: from log-probs, from logits, from hidden states."""

import dataclasses
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import AGGREGATIONS, Case, generator, run
from tests.judging import expect
from tests.objectives import formulas
from tests.objectives.sample_batches import close, coefficients, every, make_batch


def assert_equals_the_formula(objective, batch):
    leaf = batch.logprobs.clone().requires_grad_()
    loss = batch.call(oracle.policy_loss, objective, logprobs=leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    for laid_out in (batch, batch.packed()):
        logprobs = laid_out.logprobs.clone().requires_grad_()
        got = laid_out.call(gk.policy_loss, objective, logprobs=logprobs).loss
        got.backward()
        assert got.item() == pytest.approx(loss.item(), rel=1e-11, abs=1e-14)
        torch.testing.assert_close(logprobs.grad.view_as(grad), grad, rtol=1e-10, atol=1e-14)
        assert torch.equal(coefficients(laid_out, objective), logprobs.grad)
    return logprobs.grad.view_as(grad), grad


@every
@pytest.mark.parametrize("kind", ["plain", "weighted", "by token", "far"])
def test_from_log_probs(objective, kind):
    by_token = kind == "by token"
    batch = make_batch(
        objective,
        length={"weighted": 19, "far": 3}.get(kind, 7),  # some sequences have one token
        spread=8.0 if kind == "far" else 0.25,  # beyond clamps at 20 and bounds of ratios at 1e4
        token_advantages=by_token and objective.takes_token_advantages,
        everything=kind in ("weighted", "by token"),
    )
    if by_token:
        weights = torch.rand(batch.logprobs.shape, generator=generator(1), dtype=torch.float64)
        batch.terms["rollout_weights"] = 0.5 + weights
    got, expected = assert_equals_the_formula(objective, batch)
    if kind != "far":
        assert expected.any() and not got[expected == 0].any()  # what is clipped is exactly 0


@every
def test_any_aggregation(objective):
    batch = make_batch(objective)
    for aggregation in AGGREGATIONS:
        constant = 5.0 if aggregation == "constant" else None
        other = replace(objective, aggregation=aggregation, aggregation_constant=constant)
        assert_equals_the_formula(other, batch)


def test_every_objective_has_a_formula():
    assert set(gk.objectives.__all__) == formulas.NAMES
    assert formulas.NAMES.issubset(gk.__all__)


@every
@pytest.mark.parametrize("how", ["padded", "packed", "on-policy"])
def test_from_logits_and_hidden_states(objective, how):
    """Losses from log-probs, from logits and by every schedule equal the formula on plain log-probs."""
    batch, rng = make_batch(objective), generator(1)
    batch = batch.packed() if how == "packed" else batch
    labels = torch.randint(23, batch.logprobs.shape, generator=rng)
    hidden = torch.randn(*labels.shape, 8, generator=rng, dtype=torch.float64)
    weight = 0.3 * torch.randn(23, 8, generator=rng, dtype=torch.float64)
    logits, old = hidden @ weight.T, None
    if how != "on-policy":  # ratios near 1 here too, so that not everything is clipped
        old = gk.token_logprobs(logits, labels).logprobs - (batch.logprobs - batch.old_logprobs)
    case = Case(
        "linear", labels, {"hidden": hidden, "weight": weight}, old, batch.advantages,
        cu_seqlens=batch.terms.get("cu_seqlens"), loss_mask=batch.loss_mask,
        terms={name: value for name, value in batch.terms.items() if name not in ("entropy", "cu_seqlens")},
        needs_entropy="entropy" in objective.needs,
    )  # fmt: skip
    from_logits = replace(case, kind="logits", inputs={"logits": logits})
    exact = expect(case, objective)

    def check(entry, case=case, exact=exact, **options):
        got = run(case, entry, objective, **options)
        for name in ("loss", *(f"grad {name}" for name in got.grads)):
            close(got.values()[name], exact.values()[name])
        return got

    one, other = (
        check(entry, from_logits, expect(from_logits, objective))
        for entry in ("token_logprobs", "fused_policy_loss")
    )
    for name, value in one.metrics.items():
        assert other.metrics[name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name
    served = set()
    for schedule in ("known", "aligned", "deferred", "two_pass", "auto"):
        try:
            check("fused_linear_policy_loss", schedule=schedule)
        except ValueError as error:
            assert "is not exact here" in str(error)
            continue
        served.add(schedule)
    assert served >= {"aligned", "two_pass", "auto"}
    if old is not None:
        assert ("known" in served) == (objective.coefficient_scope in ("nothing", "token"))
        assert ("deferred" in served) == objective.factorizes
    check("fused_linear_policy_loss", schedule="frozen")


@pytest.mark.parametrize("name", gk.objectives.__all__)
def test_docstrings_state_source_and_options(name):
    cls = getattr(gk.objectives, name)
    assert "arXiv" in cls.__doc__ or name == "Linear"
    shared = {"aggregation", "aggregation_constant"}
    options = {field.name for field in dataclasses.fields(cls)} - shared
    assert all(option in cls.__doc__ for option in options)
    assert not options or "Args:" in cls.__doc__
