"""What holds for every registered objective: the formula sheet, its own declarations, all entry points."""

import dataclasses
import itertools
import math
from dataclasses import FrozenInstanceError

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.schedule import SCHEDULES
from gspo_kernels.objectives.base import from_spec
from tests.draws import shifted_seed
from tests.objectives.formulas import FORMULAS, Sequence, slopes, value
from tests.objectives.sample_batches import EVERY, NO_DEFAULTS, OPTIONS, examples, make_batch

ALL = examples()
ALONE = examples(max_scope="sequence")
"""Those whose coefficients don't look at other sequences."""


def options(objective):
    return {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)}


def name_of(objective):
    given = {k: v for k, v in options(objective).items() if v != getattr(type(objective), k, None)}
    return " ".join([type(objective).__name__, *(f"{k}={v}" for k, v in given.items())])


every = pytest.mark.parametrize("objective", ALL, ids=name_of)
alone = pytest.mark.parametrize("objective", ALONE, ids=name_of)
layouts = pytest.mark.parametrize("layout", ["padded", "packed"])


def coefficients(batch, objective, **changes):
    return batch.call(gk.policy_coefficients, objective, **changes)


# --- the formula sheet


def sequences(batch):
    """The counted tokens of each sequence of a padded batch."""
    for i, mask in enumerate(batch.loss_mask):
        count = int(mask.sum())

        def pick(values, default, i=i, mask=mask, count=count):
            if values is None:
                return (default,) * count
            return tuple(values[i][mask].tolist()) if values.ndim == 2 else (float(values[i]),) * count

        get = batch.terms.get
        lengths = get("lengths")
        yield Sequence(
            pick(batch.logprobs, 0.0), pick(batch.old_logprobs, 0.0), pick(batch.advantages, 0.0),
            count if lengths is None else float(lengths[i]), pick(get("token_weights"), 1.0),
            pick(get("ref_logprobs"), 0.0), pick(get("entropy"), 0.0), pick(get("turn_ids"), 0),
        )  # fmt: skip


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


# --- declarations


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


# --- extreme log-ratios


@every
@pytest.mark.parametrize("seed", range(2))
def test_extreme_log_ratios_never_give_nan(objective, seed):
    batch = make_batch(objective, seed=seed)
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    for size in (50.0, 1e4):
        # old log-probs far below or above: whole sequences, then single tokens
        for shape in ((6, 1), (6, 7)):
            log_ratio = size * (2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1)
            log_ratio[rng_zero(shape, rng)] = size
            old = batch.logprobs - log_ratio
            loss = batch.call(gk.policy_loss, objective, old_logprobs=old).loss
            got = coefficients(batch, objective, old_logprobs=old)
            assert not got.isnan().any()
            # without a clip both signs overflow
            assert not loss.isnan() or "identity" in vars(objective).values()
            if size == 50.0:
                assert loss.isfinite() and got.isfinite().all()
            if objective.zero_advantage_is_inactive and objective.coefficient_scope not in ("group", "batch"):
                assert not got[2].any()  # its advantage is 0


def rng_zero(shape, rng):
    return torch.rand(shape, generator=rng) < 0.3


BOUNDED = ("ABCGRPO", "CISPO", "DPPO", "TOPR", "VESPO", "SAPO", "GPG", "DRO")


@every
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_bounded_coefficients_stay_finite(objective, log_ratio):
    sigmoid = type(objective).__name__ == "SSPO" and objective.gate == "sigmoid"
    if type(objective).__name__ not in BOUNDED and not sigmoid:
        pytest.skip("an unclipped ratio overflows")
    batch = make_batch(objective)
    got = coefficients(batch, objective, old_logprobs=batch.logprobs - log_ratio)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "LUSPO", "GSPOToken", "GMPO"])
def test_clipped_ratios_have_no_gradient_however_far_off(name):
    objective = EVERY[name]()
    logprobs = torch.full((2, 3), -1e4, dtype=torch.float64)
    logprobs[0] = 0.0
    old = -1e4 - logprobs
    got = gk.policy_coefficients(logprobs, old, torch.tensor([1.0, -1.0]).double(), objective=objective)
    assert torch.equal(got, torch.zeros_like(got))


# --- all entry points, all schedules


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@every
@layouts
def test_all_entry_points_agree(objective, layout):
    batch = make_batch(objective)
    if layout == "packed":
        batch = batch.packed()
    rng = torch.Generator().manual_seed(shifted_seed(1))
    shape, width, vocabulary = tuple(batch.logprobs.shape), 8, 23
    labels = torch.randint(vocabulary, shape, generator=rng)
    start = {
        "hidden": torch.randn(*shape, width, generator=rng, dtype=torch.float64),
        "weight": 0.3 * torch.randn(vocabulary, width, generator=rng, dtype=torch.float64),
    }

    def leaves():
        return {name: value.clone().requires_grad_() for name, value in start.items()}

    inputs = leaves()
    logits = inputs["hidden"] @ inputs["weight"].T
    tokens = gk.token_logprobs(logits, labels, return_entropy=True)
    # ratios near 1 here too, so that not everything is clipped
    old = tokens.logprobs.detach() - torch.where(batch.loss_mask, batch.logprobs - batch.old_logprobs, 0.0)
    given = {"loss_mask": batch.loss_mask, **batch.terms, "objective": objective}
    given.pop("entropy", None)
    entropy = {"entropy": tokens.entropy} if "entropy" in objective.needs else {}
    output = gk.policy_loss(tokens.logprobs, old, batch.advantages, **given, **entropy)
    output.loss.backward()
    expected = [output.loss.detach(), inputs["hidden"].grad, inputs["weight"].grad]

    inputs = leaves()
    fused = gk.fused_policy_loss(
        inputs["hidden"] @ inputs["weight"].T, labels, old, batch.advantages, **given
    )
    fused.loss.backward()
    close([fused.loss.detach(), inputs["hidden"].grad, inputs["weight"].grad], expected)
    for name, number in output.metrics.items():
        assert fused.metrics[name].item() == pytest.approx(number.item(), rel=1e-9, abs=1e-12)

    served = set()
    for schedule in (*SCHEDULES, "auto"):
        inputs = leaves()
        try:
            loss = gk.fused_linear_policy_loss(
                inputs["hidden"], inputs["weight"], labels, old, batch.advantages, **given, schedule=schedule
            ).loss
        except ValueError as error:
            assert "is not exact here" in str(error)
            continue
        served.add(schedule)
        loss.backward()
        close([loss.detach(), inputs["hidden"].grad, inputs["weight"].grad], expected)
    assert served >= {"aligned", "cached", "two_pass", "auto"}
    assert ("known" in served) == (objective.coefficient_scope in ("nothing", "token"))
    assert ("deferred" in served) == objective.factorizes

    frozen = start["hidden"].clone().requires_grad_()
    gk.fused_linear_policy_loss(
        frozen, start["weight"], labels, old, batch.advantages, **given, schedule="frozen"
    ).loss.backward()
    close(frozen.grad, expected[1])


@alone
def test_on_policy_through_every_entry(objective):
    """``old_logprobs=None`` equals old log-probs that are the current ones."""
    batch = make_batch(objective)
    rng = torch.Generator().manual_seed(shifted_seed(2))
    start = torch.randn(*batch.logprobs.shape, 23, generator=rng, dtype=torch.float64)
    labels = torch.randint(23, start.shape[:2], generator=rng)
    given = {"loss_mask": batch.loss_mask, **batch.terms, "objective": objective}
    given.pop("entropy", None)
    grads = []
    for old in (None, gk.token_logprobs(start, labels).logprobs):
        logits = start.clone().requires_grad_()
        gk.fused_policy_loss(logits, labels, old, batch.advantages, **given).loss.backward()
        grads.append(logits.grad)
    close(*grads)


# --- invariances


@alone
def test_micro_batches_with_a_normalizer_add_up(objective):
    batch = make_batch(objective, everything=True)
    found = list(sequences(batch))
    normalizer = {
        "token_mean": sum(one.length for one in found if one.l),
        "sum": 1,
    }.get(objective.aggregation, sum(bool(one.l) for one in found))
    whole = coefficients(batch, objective)
    parts = [
        coefficients(batch.rows(rows), objective, normalizer=float(normalizer))
        for rows in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    close(torch.cat(parts), whole)


@every
def test_sequences_in_any_order(objective):
    batch = make_batch(objective, everything=True)
    order = torch.tensor([3, 5, 0, 4, 2, 1])
    close(coefficients(batch.rows(order), objective), coefficients(batch, objective)[order])


@alone
def test_padding_is_inert(objective):
    batch = make_batch(objective, everything=True)

    def wider(values):
        return torch.cat([values, values[:, :3]], 1) if values is not None and values.ndim == 2 else values

    mask = torch.cat([batch.loss_mask, torch.zeros(6, 3, dtype=torch.bool)], 1)
    changes = {name: wider(tensor) for name, tensor in batch.terms.items()}
    got = coefficients(
        batch, objective, logprobs=wider(batch.logprobs), old_logprobs=wider(batch.old_logprobs),
        loss_mask=mask, **changes,
    )  # fmt: skip
    close(got[:, :-3], coefficients(batch, objective))
    assert not got[:, -3:].any()


@alone
def test_no_counted_token(objective):
    batch = make_batch(objective)
    logprobs = batch.logprobs.nan_to_num(0.0).requires_grad_()
    loss = batch.call(
        gk.policy_loss, objective, logprobs=logprobs, loss_mask=torch.zeros_like(batch.loss_mask)
    ).loss
    loss.backward()
    assert loss == 0 and not logprobs.grad.any()


NOT_HOMOGENEOUS = ("DRO", "ESPO", "Linear")


@alone
def test_coefficients_scale_with_the_advantages(objective):
    if type(objective).__name__ in NOT_HOMOGENEOUS:
        pytest.skip("a term without advantage")
    batch = make_batch(objective)
    scaled = coefficients(batch, objective, advantages=3.5 * batch.advantages)
    close(scaled, 3.5 * coefficients(batch, objective))


# --- objectives as values


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
