"""Promises of every objective: what it declares, however a batch is cut and however far off policy it is."""

import dataclasses
import math

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.objectives.sample_batches import close, coefficients, every, make_batch


@every
@pytest.mark.parametrize("seed", range(3))
def test_order_padding_and_micro_batches_change_nothing(objective, seed):
    batch = make_batch(objective, seed=seed, length=(7, 1, 4)[seed], everything=seed == 2)
    rng, whole = generator(seed), coefficients(batch, objective)
    order = torch.randperm(len(whole), generator=rng)
    close(coefficients(batch.each(lambda x: x[order]), objective), whole[order])

    width = whole.shape[1]
    columns = torch.randperm(width + 3, generator=rng)[:width].sort().values
    poison = (math.nan, math.inf, -math.inf)[seed]

    def padded(values, content=None):
        if values.ndim == 1:
            return values
        if content is None:
            content = poison if values.is_floating_point() else 7 * (values.dtype != torch.bool)
        return values.new_full((len(values), width + 3), content).index_copy(1, columns, values)

    close(coefficients(batch.each(padded), objective), padded(whole, 0.0))

    group_ids, counts = batch.terms.get("group_ids"), {"lengths": batch.terms.get("lengths")}
    if objective.outer_divisor()[0] == "pairs":
        counts |= {"advantages": batch.advantages, "group_ids": group_ids}
    normalizer = gk.normalizer(objective, batch.loss_mask, **counts)
    together = torch.zeros_like(whole)
    if objective.coefficient_scope == "batch":
        with pytest.raises(ValueError, match=r"normalizer: .*policy_coefficients of the whole batch.*Linear"):
            coefficients(batch, objective, normalizer=normalizer)
        for rows in order.split(2):
            leaf = batch.logprobs[rows].requires_grad_()
            terms = {"loss_mask": batch.loss_mask[rows], "token_weights": whole[rows]}
            gk.policy_loss(leaf, None, None, **terms, objective=gk.Linear()).loss.backward()
            together[rows] = leaf.grad
    else:
        parts = torch.randint(3, (len(whole),), generator=rng) if group_ids is None else group_ids
        for part in parts.unique():
            rows = parts == part
            together[rows] = coefficients(batch.each(lambda x: x[rows]), objective, normalizer=normalizer)  # noqa: B023
    close(together, whole)


def far_off(batch, rng):
    """Return the batch with log-ratios up to 1e4, a sequence's of one sign or of both, and log-probs <= 0."""
    rows, width = batch.logprobs.shape
    sizes = torch.tensor([0.3, 20.0, 88.0, 300.0, 700.0, 1e4])[torch.randint(6, (rows, 1), generator=rng)]
    signs = torch.randint(2, (rows, width), generator=rng) * 2.0 - 1
    signs = torch.where(torch.rand(rows, 1, generator=rng) < 0.5, signs, signs[:, :1])
    log_ratio = sizes * signs * (0.5 + torch.rand(rows, width, generator=rng) / 2)
    return dataclasses.replace(
        batch,
        logprobs=batch.logprobs + log_ratio.clamp(max=0),
        old_logprobs=batch.logprobs - log_ratio.clamp(min=0),
    )


BOUNDED = ("ABCGRPO", "CISPO", "DPPO", "TOPR", "VESPO", "SAPO", "GPG", "DRO", "PrimeIPO")


@every
@pytest.mark.parametrize("seed", range(4))
def test_gradients_far_off_policy(objective, seed):
    """Gradients are never NaN. Where an fp64 gradient fits into fp32, the fp32 one is finite and equal."""
    batch = far_off(make_batch(objective, seed=seed), generator(seed))
    # rounded once, so that both see the same numbers
    batch = batch.each(lambda x: x.float() if x.is_floating_point() else x)
    results = []
    for dtype in (torch.float32, torch.float64):
        cast = batch.each(lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x)
        logprobs = cast.logprobs.clone().requires_grad_()
        loss = cast.call(gk.policy_loss, objective, logprobs=logprobs).loss
        loss.backward()
        # without a clip, both signs overflow, and a sum of infinities is NaN
        assert not loss.isnan() or "identity" in vars(objective).values()
        results.append(logprobs.grad)
    got, reference = results
    assert got.dtype == torch.float32 and not reference.isnan().any()
    fits = reference.abs() <= torch.finfo(torch.float32).max
    assert got[fits].isfinite().all() and not got[~batch.loss_mask].any()
    torch.testing.assert_close(got[fits].double(), reference[fits], rtol=1e-6, atol=1e-37)
    if type(objective).__name__ in BOUNDED:
        assert reference.isfinite().all()


@every
def test_nothing_counted(objective):
    batch = make_batch(objective)
    masked = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    for empty in (masked, batch.each(lambda x: x[:0])):
        logprobs = empty.logprobs.nan_to_num(0.0).requires_grad_()
        loss = empty.call(gk.policy_loss, objective, logprobs=logprobs).loss
        loss.backward()
        assert loss == 0 and not logprobs.grad.any()


@every
def test_what_is_declared_of_coefficients(objective):
    batch = make_batch(objective, everything=True)
    if objective.coefficient_scope == "sequence":
        each = coefficients(batch, objective) / batch.terms["token_weights"]
        rows = [row[mask] for row, mask in zip(each, batch.loss_mask, strict=True) if mask.any()]
        alike = all(torch.allclose(row, row[:1], rtol=1e-9, atol=1e-12) for row in rows)
        identity = getattr(objective, "gate", None) == "identity"  # SSPO declares what holds for any gate
        assert alike == (objective.factorizes or identity)
    if objective.needs_advantages:
        zero = coefficients(batch, objective, advantages=torch.zeros_like(batch.advantages))
        # within a group or a batch a zero may matter to others
        if objective.zero_advantage_is_inactive or objective.coefficient_scope not in ("group", "batch"):
            assert bool((zero == 0).all()) == objective.zero_advantage_is_inactive
    if objective.ratio_only or objective.coefficient_scope == "nothing":
        moved = {"logprobs": batch.logprobs - 0.75, "old_logprobs": batch.old_logprobs - 0.75}
        close(coefficients(batch, objective, **moved), coefficients(batch, objective))
    if objective.ratio_only:  # on-policy, coefficients are known beforehand
        anywhere = torch.full_like(batch.logprobs, -1.0)
        here = coefficients(batch, objective, old_logprobs=None)
        assert torch.equal(here, coefficients(batch, objective, old_logprobs=None, logprobs=anywhere))


@every
def test_what_is_needed_is_asked_for_by_name(objective):
    batch = make_batch(objective)
    for needed in objective.needs:
        with pytest.raises(ValueError, match=f"{needed}: got None"):
            batch.call(gk.policy_loss, objective, **{needed: None})
    if not objective.takes_token_advantages:
        with pytest.raises(ValueError, match=r"advantages: .* takes one per sequence"):
            batch.call(gk.policy_loss, objective, advantages=batch.logprobs)
    if "group_ids" in objective.needs:
        with pytest.raises(ValueError, match=r"group_ids: group 2 has a single sequence.*Linear"):
            batch.call(gk.policy_loss, objective, group_ids=torch.tensor([0, 0, 1, 1, 2, 1]))


@every
def test_metrics_are_finite_and_fractions(objective):
    batch = make_batch(objective)
    for old in (None, batch.old_logprobs):
        metrics = batch.call(gk.policy_loss, objective, old_logprobs=old).metrics
        assert all(math.isfinite(float(value)) for value in metrics.values())
        for name in ("clip_fraction/low", "clip_fraction/high", "clip_fraction/tokens", "active_fraction"):
            assert 0 <= metrics[name] <= 1
