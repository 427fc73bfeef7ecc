"""Every objective is its formula on every path: from log-probs, from logits, from hidden states."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import AGGREGATIONS, generator, run, scores_of
from tests.judging import expect
from tests.objectives.sample_batches import (
    Batch,
    close,
    coefficients,
    declaring,
    every,
    every_declaration,
    examples,
    from_hidden_states,
    make_batch,
    name_of,
)


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


def test_cppo_on_many_sequences():
    """In few of them a token is kept or not depending on how the percentile is interpolated."""
    rng, shape = generator(0), (1000, 7)
    old, moved = -2 * torch.rand(2, *shape, generator=rng, dtype=torch.float64)
    mask = torch.rand(shape, generator=rng) < 0.6
    batch = Batch(0.8 * old + 0.2 * moved - 1e-3, old - 1e-3, torch.ones(len(mask)).double(), mask)
    objective = gk.CPPO(bound=0.03, prefix_bound_low=0.0, prefix_bound_high=1.0, min_weight=0.5)
    assert_equals_the_formula(objective, batch)


@every_declaration
def test_any_aggregation(objective):
    batch = make_batch(objective)
    # each objective of single sequences has half of them
    together = objective.coefficient_scope in ("group", "batch")
    first = len(type(objective).__name__) % 2
    for aggregation in AGGREGATIONS if together else AGGREGATIONS[first::2]:
        constant = 5.0 if aggregation == "constant" else None
        other = replace(objective, aggregation=aggregation, aggregation_constant=constant)
        groups = {"group_ids": torch.tensor([1, 4, 4, 1, 4, 1])} if aggregation == "prompt_mean" else {}
        assert_equals_the_formula(other, replace(batch, terms={**groups, **batch.terms}))


@pytest.mark.parametrize(
    ("objective", "how"),
    [(one, "packed") for one in examples()] + [(one, "on-policy") for one in declaring()],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_from_logits_and_hidden_states(objective, how):
    """Losses from log-probs, from logits and by every schedule equal the formula on plain log-probs."""
    batch = make_batch(objective)
    case = from_hidden_states(batch.packed() if how == "packed" else batch, objective, 23)
    case = replace(case, old_logprobs=None) if how == "on-policy" else case
    from_logits = replace(case, kind="logits", inputs={"logits": scores_of(case.inputs)})
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
    if how != "on-policy":
        assert ("known" in served) == (objective.coefficient_scope in ("nothing", "token"))
        assert ("deferred" in served) == objective.factorizes
    check("fused_linear_policy_loss", schedule="frozen")
