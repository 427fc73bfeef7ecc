"""What every objective says of itself holds, and it is a value that can be written down."""

import dataclasses
import itertools
import math
from dataclasses import FrozenInstanceError

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import from_spec
from tests.objectives.every import ALONE, coefficients, every
from tests.objectives.formulas import FORMULAS
from tests.objectives.sample_batches import EVERY, NO_DEFAULTS, OPTIONS, make_batch


@every
def test_coefficients_depend_on_no_more_than_declared(objective):
    batch = make_batch(objective)
    before = coefficients(batch, objective)
    scope = objective.coefficient_scope
    for i, t in itertools.product(range(5), (0, 3)):
        if not batch.loss_mask[i, t]:
            continue
        moved = batch.logprobs.clone()
        moved[i, t] -= 0.4
        changed = coefficients(batch, objective, logprobs=moved) != before
        allowed = torch.zeros_like(changed)
        if scope == "token":
            allowed[i, t] = True
        elif scope == "turn":
            allowed[i] = batch.terms["turn_ids"][i] == batch.terms["turn_ids"][i, t]
        elif scope == "sequence":
            allowed[i] = True
        elif scope == "group":
            allowed[batch.terms["group_ids"] == batch.terms["group_ids"][i]] = True
        elif scope == "batch":
            allowed[:] = True
        assert not (changed & ~allowed).any()


@every
def test_zero_advantages(objective):
    if not objective.needs_advantages:
        pytest.skip("no advantages")
    batch = make_batch(objective)
    got = coefficients(batch, objective, advantages=torch.zeros_like(batch.advantages))
    if objective.zero_advantage_is_inactive or objective in ALONE:
        # within a group or a batch a zero may matter to others
        assert bool((got == 0).all()) == objective.zero_advantage_is_inactive


@every
def test_ratio_only(objective):
    batch = make_batch(objective)
    before, shifted = (
        coefficients(
            batch, objective, logprobs=batch.logprobs - shift, old_logprobs=batch.old_logprobs - shift
        )
        for shift in (0.0, 0.75)
    )
    if objective.ratio_only or objective.coefficient_scope == "nothing":
        torch.testing.assert_close(before, shifted, rtol=1e-10, atol=1e-13)
    # on-policy it is all known beforehand
    if objective.ratio_only:
        here = coefficients(batch, objective, old_logprobs=None)
        anywhere = coefficients(
            batch, objective, old_logprobs=None, logprobs=torch.zeros_like(batch.logprobs)
        )
        assert torch.equal(here, anywhere)


@every
def test_factorizes(objective):
    if not objective.factorizes:
        pytest.skip("coefficients are each token's own")
    batch = make_batch(objective, everything=True)
    got = coefficients(batch, objective) / batch.terms["token_weights"]
    for row, mask in zip(got, batch.loss_mask, strict=True):
        if mask.any():
            torch.testing.assert_close(
                row[mask], row[mask][:1].expand(int(mask.sum())), rtol=1e-12, atol=1e-15
            )


@every
def test_what_is_needed_is_asked_for_by_name(objective):
    batch = make_batch(objective)
    for needed in objective.needs:
        with pytest.raises(ValueError, match=f"{needed}: got None"):
            batch.call(gk.policy_loss, objective, **{needed: None})
    if not objective.takes_token_advantages:
        with pytest.raises(ValueError, match=r"advantages: .* takes one per sequence"):
            batch.call(gk.policy_loss, objective, advantages=batch.logprobs)


@every
def test_metrics_are_finite_and_fractions(objective):
    for old in (None, make_batch(objective).old_logprobs):
        metrics = make_batch(objective).call(gk.policy_loss, objective, old_logprobs=old).metrics
        assert all(math.isfinite(float(value)) for value in metrics.values())
        for name in ("clip_fraction/low", "clip_fraction/high", "clip_fraction/tokens", "active_fraction"):
            assert 0 <= metrics[name] <= 1


@every
def test_specs_round_trip(objective):
    again = from_spec(objective.spec)
    assert again == objective and hash(again) == hash(objective) and again.spec == objective.spec
    for name in ("needs", "coefficient_scope", "factorizes", "ratio_only", "zero_advantage_is_inactive"):
        assert getattr(again, name) == getattr(objective, name)
    with pytest.raises(FrozenInstanceError):
        objective.aggregation = "sum"


@every
def test_any_aggregation(objective):
    other = dataclasses.replace(objective, aggregation="sum", aggregation_constant=None)
    assert other.spec != objective.spec or objective.aggregation == "sum"
    assert make_batch(other).call(gk.policy_loss, other).loss.isfinite()


@pytest.mark.parametrize("name", EVERY)
def test_objectives_state_their_source_and_options(name):
    text = EVERY[name].__doc__
    assert "arXiv" in text or name == "Linear"
    names = {field.name for field in dataclasses.fields(EVERY[name])}
    own = names - {"aggregation", "aggregation_constant"}
    assert all(field in text for field in own), own
    assert not own or "Args:" in text


def test_the_tables_name_registered_objectives():
    assert OPTIONS.keys() | NO_DEFAULTS | FORMULAS.keys() <= EVERY.keys()
    assert set(gk.objectives.__all__) <= set(gk.__all__)
    for name in NO_DEFAULTS:
        with pytest.raises((TypeError, ValueError), match="aggregation_constant"):
            EVERY[name]()


def test_an_objective_made_in_compiled_code_declares_the_same():
    batch = make_batch(gk.TOPR())

    def step(logprobs):
        return batch.call(gk.policy_loss, gk.TOPR(ratio_level="token"), logprobs=logprobs).loss

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        logprobs = batch.logprobs.clone().requires_grad_()
        function(logprobs).backward()
        grads.append(logprobs.grad)
    assert torch.equal(*grads)
