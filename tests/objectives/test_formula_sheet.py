"""Loss and coefficients of every objective are those of the formula sheet."""

import pytest
import torch

import gspo_kernels as gk
from tests.objectives.every import ALL, ALONE, close, coefficients, name_of, sequences
from tests.objectives.formulas import FORMULAS, slopes, value
from tests.objectives.sample_batches import make_batch


def shares(objective, sequence, found):
    """What a token's value, and a sequence's value, weigh in the loss."""
    count = sum(bool(one.l) for one in found)
    divisor = {
        "sequence_mean": count,
        "sequence_mean_token_sum": count,
        "token_mean": sum(one.length for one in found if one.l),
        "constant": count * (objective.aggregation_constant or 1),
        "sum": 1,
    }[objective.aggregation]
    if objective.aggregation == "sequence_mean":
        return 1 / sequence.length / divisor, 1 / divisor
    return 1 / divisor, sequence.length / divisor


def weigh(objective, sequence, found, values):
    token, whole = shares(objective, sequence, found)
    return whole * values if objective.level == "sequence" else token * sum(values)


def stated(objective, batch):
    """Loss and coefficients by the sheet."""
    found = list(sequences(batch))
    rollout = batch.terms.get("rollout_weights", torch.ones(len(found)))
    loss, out = 0.0, torch.zeros_like(batch.loss_mask, dtype=torch.float64)
    for i, one in enumerate(found):
        if one.l:
            loss += float(rollout[i]) * weigh(objective, one, found, value(objective, one, one))
            share = shares(objective, one, found)[objective.level == "sequence"]
            per_token = [float(rollout[i]) * share * g for g in slopes(objective, one)]
            out[i][batch.loss_mask[i]] = torch.tensor(per_token, dtype=torch.float64)
    return loss, out


sheet = pytest.mark.parametrize("objective", [o for o in ALL if type(o).__name__ in FORMULAS], ids=name_of)


@sheet
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("token_advantages", [False, True])
def test_loss_and_coefficients_are_the_formula_sheets(objective, everything, token_advantages):
    if token_advantages and not (objective.takes_token_advantages and objective.needs_advantages):
        pytest.skip("advantages per token are refused")
    if everything and type(objective).__name__ == "ESPO" and objective.elbo_kl_beta:
        pytest.skip("rollout weights leave its KL alone: tested by hand")
    batch = make_batch(objective, everything=everything, token_advantages=token_advantages)
    loss, expected = stated(objective, batch)
    logprobs = batch.logprobs.clone().requires_grad_()
    output = batch.call(gk.policy_loss, objective, logprobs=logprobs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-11, abs=1e-14)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-10, atol=1e-14)
    assert expected.count_nonzero() > 0
    packed = batch.packed()
    if not (token_advantages or objective.needs_advantages is False):
        close(coefficients(packed, objective).view_as(expected), coefficients(batch, objective))


@sheet
def test_stated_coefficients_are_central_differences(objective):
    """Of the formula with everything under a stop-gradient held fast."""
    batch, h = make_batch(objective), 1e-6
    got = coefficients(batch, objective)
    found = list(sequences(batch))
    for i, one in enumerate(found):
        share = got[i][batch.loss_mask[i]].tolist()
        for t in range(len(one.l)):
            up, down = (
                weigh(objective, one, found, value(objective, one.moved(t, step), one)) for step in (h, -h)
            )
            assert share[t] == pytest.approx((up - down) / (2 * h), rel=1e-6, abs=1e-9)


def test_no_objective_without_a_formula():
    """Objectives over groups and batches have tests of their own; the others are in the table."""
    missing = {type(o).__name__ for o in ALONE} - FORMULAS.keys()
    assert not missing, missing
