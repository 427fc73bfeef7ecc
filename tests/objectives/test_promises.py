"""Promises of every objective: what it declares, however a batch is cut and however far off policy it is."""

import math
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator, run
from tests.objectives.sample_batches import (
    close,
    coefficients,
    every,
    every_declaration,
    from_hidden_states,
    make_batch,
)


@every
def test_order_padding_and_micro_batches_are_neutral(objective):
    seed = len(repr(objective)) % 3
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

    group_ids, counts, counted = batch.terms.get("group_ids"), {}, objective.outer_divisor()[0]
    if counted == "tokens":
        counts = {"lengths": batch.terms.get("lengths")}
    if counted == "pairs":
        counts = {"advantages": batch.advantages, "group_ids": group_ids}
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
    return replace(
        batch,
        logprobs=batch.logprobs + log_ratio.clamp(max=0),
        old_logprobs=batch.logprobs - log_ratio.clamp(min=0),
    )


BOUNDED = ("ABCGRPO", "CISPO", "DPPO", "TOPR", "VESPO", "SAPO", "GPG", "DRO", "PrimeIPO")


@every
def test_gradients_far_off_policy(objective):
    """Gradients are never NaN. Where an fp64 gradient fits into fp32, the fp32 one is finite and equal."""
    batch = far_off(make_batch(objective), generator(0))
    # rounded once, so that both see the same numbers
    batch = batch.each(lambda x: x.float() if x.is_floating_point() else x)
    results = []
    for dtype in (torch.float32, torch.float64):
        cast = batch.each(lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x)
        logprobs = cast.logprobs.clone().requires_grad_()
        loss = cast.call(gk.policy_loss, objective, logprobs=logprobs).loss
        loss.backward()
        # CPPO and DRPO bound probabilities; without a bound of the ratio values of both signs overflow
        unclipped = "identity" in vars(objective).values() or isinstance(objective, gk.CPPO | gk.DRPO)
        assert not loss.isnan() or unclipped
        results.append(logprobs.grad)
    got, reference = results
    assert got.dtype == torch.float32 and not reference.isnan().any()
    fits = reference.abs() <= torch.finfo(torch.float32).max
    assert got[fits].isfinite().all() and not got[~batch.loss_mask].any()
    torch.testing.assert_close(got[fits].double(), reference[fits], rtol=1e-6, atol=1e-37)
    if type(objective).__name__ in BOUNDED:
        assert reference.isfinite().all()


@every_declaration
def test_nothing_counted(objective):
    batch = make_batch(objective)
    masked = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    for empty in (masked, batch.each(lambda x: x[:0])):
        logprobs = empty.logprobs.nan_to_num(0.0).requires_grad_()
        loss = empty.call(gk.policy_loss, objective, logprobs=logprobs).loss
        loss.backward()
        assert loss == 0 and not logprobs.grad.any()


@every_declaration
def test_declarations_are_true_and_tight(objective):
    """What isn't declared doesn't hold, so that no objective does work that it could skip."""
    gk.objectives.check(objective)
    batch = make_batch(objective, everything=True)
    if objective.coefficient_scope == "sequence":
        each = coefficients(batch, objective) / batch.terms["token_weights"]
        rows = [row[mask] for row, mask in zip(each, batch.loss_mask, strict=True) if mask.any()]
        alike = all(torch.allclose(row, row[:1], rtol=1e-9, atol=1e-12) for row in rows)
        identity = getattr(objective, "gate", None) == "identity"  # SSPO declares what holds for any gate
        assert alike == (objective.factorizes or identity)
    if objective.needs_advantages and objective.coefficient_scope not in ("group", "batch"):
        zero = coefficients(batch, objective, advantages=torch.zeros_like(batch.advantages))
        assert bool((zero == 0).all()) == objective.zero_advantage_is_inactive


def changed(base, **content):
    """Return an objective of a subclass with other methods or attributes."""
    return type(f"Changed{base.__name__}", (base,), content)()


def without_rollout_weights(self, batch):
    return gk.GRPO.evaluate(self, replace(batch, rollout_weights=None))


def with_squared_rollout_weights(self, batch):
    """No fused form squares them."""
    weights = batch.rollout_weights
    return gk.GSPO.evaluate(self, replace(batch, rollout_weights=None if weights is None else weights**2))


def over_rows(self, batch):
    """Add up the tokens of a row, which may hold several sequences."""
    loss = gk.GRPO.evaluate(self, batch)
    return loss._replace(loss=loss.loss * batch.logprobs.sum(1, keepdim=True))


OTHER_CLIP, OTHER_WEIGHT = gk.GRPO().ratio_form(), gk.CISPO().ratio_weight()
PLANTED = [
    (gk.GRPO(), "coefficient_scope", "nothing"), (gk.GSPO(0.1, 0.1), "coefficient_scope", "token"),
    (gk.GSPO(0.1, 0.1), "coefficient_scope", "turn"), (gk.REAL(), "coefficient_scope", "sequence"),
    (gk.TLGRPO(), "coefficient_scope", "token"), (gk.KLCov(), "coefficient_scope", "group"),
    (gk.DPPO(), "ratio_only", True), (gk.DHPO(mix="entropy"), "ratio_only", True),
    (gk.AGRO(), "ratio_only", True), (gk.DRO(), "zero_advantage_is_inactive", True),
    (gk.ESPO(), "zero_advantage_is_inactive", True), (gk.ClipCov(), "zero_advantage_is_inactive", True),
    (gk.GRPO(), "factorizes", True), (gk.TOPR(ratio_level="token"), "factorizes", True),
    (gk.FIPO(), "needs_token_order", False), (gk.CTPO(), "needs_token_order", False),
    (gk.GSPO(), "level", "token"), (gk.GRPO(), "level", "sequence"), (gk.DPO(), "needs", ("group_ids",)),
    (gk.GSPO(), "takes_token_advantages", True), (gk.Linear(), "needs", ()),
    # fused or centered with other bounds than their own
    (changed(gk.GRPO, ratio_form=lambda _: OTHER_CLIP._replace(log_high=0.5)), "ratio_form", None),
    (changed(gk.CISPO, ratio_weight=lambda _: OTHER_WEIGHT._replace(high=1.2)), "ratio_weight", None),
    (changed(gk.GSPO, evaluate=with_squared_rollout_weights, ratio_form=lambda _: gk.GSPO().ratio_form()),
     "ratio_form", None),
    (changed(gk.GRPO, evaluate=without_rollout_weights, coefficient_scope="token"), "rollout_weights", None),
    (changed(gk.GRPO, evaluate=over_rows), "packed", None),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "name", "value"), PLANTED, ids=lambda each: str(each).split("(")[0])
def test_a_wrong_declaration_is_found(objective, name, value):
    objective = replace(objective)  # a copy
    if value is not None:
        objective._declare(**{name: value})
    with pytest.raises(ValueError, match=rf"^objective: .*\n- .*\b{name}\b"):
        gk.objectives.check(objective)


def squares(self, batch):
    """Return a loss whose coefficient depends on the log-probs of the whole batch, for any advantage."""
    total = torch.where(batch.mask, batch.logprobs, 0.0).sum()
    values = batch.weighted(batch.logprobs**2 * total)
    return gk.objectives.base.ObjectiveLoss(values, batch.log_ratio)


@pytest.mark.parametrize("base", [gk.objectives.base.Objective, gk.GSPOToken])
def test_objectives_without_declarations(base):
    """Missing declarations and those of a base class with a different loss are not inherited."""
    objective = changed(base, evaluate=squares)
    gk.objectives.check(objective)
    batch = make_batch(objective)
    case = replace(from_hidden_states(batch, objective, 23), advantages=torch.zeros(6), old_logprobs=None)
    leaf = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
    logprobs = gk.token_logprobs(leaf["hidden"] @ leaf["weight"].T, case.labels).logprobs
    counted = torch.where(case.loss_mask, logprobs, 0.0)
    means = (counted**2 * counted.sum()).sum(1) / case.loss_mask.sum(1).clamp(min=1)
    (means.sum() / case.loss_mask.any(1).sum()).backward()
    for skip in ("backward", "none"):
        got = run(case, "fused_linear_policy_loss", objective, skip_inactive=skip)
        for name, value in leaf.items():
            close(got.grads[name], value.grad)
    with pytest.raises(ValueError, match=r"skip_inactive"):
        run(case, "fused_linear_policy_loss", objective, skip_inactive="all")


def test_nan_is_refused_where_rollout_weights_are_0():
    """NaN among old log-probs used to take the gradient of all sequences whose rollout weight is 0."""
    batch = make_batch(objective := gk.ESPO())
    old = batch.old_logprobs.clone()
    old[2] = math.nan
    with pytest.raises(ValueError, match="old_logprobs: got NaN at position"):
        coefficients(batch, objective, old_logprobs=old, rollout_weights=torch.zeros(6, dtype=torch.float64))


@every_declaration
def test_missing_inputs_are_named(objective):
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
        # a sequence without tokens may have any
        close(
            *(
                batch.call(gk.policy_loss, objective, group_ids=torch.tensor([0, 0, 1, 1, 0, last])).loss
                for last in (1, 2)
            )
        )


@every
def test_metrics_are_finite_and_fractions(objective):
    batch = make_batch(objective)
    for old in (None, batch.old_logprobs):
        metrics = batch.call(gk.policy_loss, objective, old_logprobs=old).metrics
        assert all(math.isfinite(float(value)) for value in metrics.values())
        for name in ("clip_fraction/low", "clip_fraction/high", "clip_fraction/tokens", "active_fraction"):
            assert 0 <= metrics[name] <= 1
