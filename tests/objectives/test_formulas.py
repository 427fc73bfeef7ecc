"""Every objective is its formula on every path: from log-probs, from logits, from hidden states."""

import dataclasses
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import AGGREGATIONS, generator
from tests.objectives import formulas
from tests.objectives.sample_batches import close, coefficients, every, make_batch


def sequences(batch):
    """Those of a padded batch that have a counted token."""
    values = batch.terms | {"logp": batch.logprobs, "old": batch.old_logprobs, "advantage": batch.advantages}

    def of(i, mask):
        count = int(mask.sum())

        def tokens(name, default=0.0):
            value = values.get(name)
            if value is None:
                return torch.full((count,), default, dtype=torch.float64)
            return value[i][mask] if value.ndim == 2 else value[i].expand(count)

        return formulas.Sequence(
            logp=tokens("logp"), old=tokens("old"), advantage=tokens("advantage"),
            rollout=tokens("rollout_weights", 1.0), weight=tokens("token_weights", 1.0),
            ref=tokens("ref_logprobs"), entropy=tokens("entropy"), turn=tokens("turn_ids"),
            length=float(values["lengths"][i]) if "lengths" in values else float(count),
            group=int(values["group_ids"][i]) if "group_ids" in values else 0,
        )  # fmt: skip

    return [of(i, mask) for i, mask in enumerate(batch.loss_mask) if mask.any()]


def assert_equals_the_formula(objective, batch):
    leaf = batch.logprobs.clone().requires_grad_()
    loss = formulas.loss(objective, sequences(replace(batch, logprobs=leaf)))
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
    """Plain PyTorch from hidden states to the formula, the same from log-probs, logits, and by schedules."""
    batch, rng = make_batch(objective), generator(1)
    labels = torch.randint(23, batch.logprobs.shape, generator=rng)
    start = {
        "hidden": torch.randn(*labels.shape, 8, generator=rng, dtype=torch.float64),
        "weight": 0.3 * torch.randn(23, 8, generator=rng, dtype=torch.float64),
    }

    def run(function, **frozen):
        """The loss and its gradients; ``function`` takes hidden states and weight."""
        leaves = {name: value.clone().requires_grad_() for name, value in start.items()} | frozen
        result = function(*leaves.values())
        result.backward()
        return [result.detach(), *(leaf.grad for leaf in leaves.values() if leaf.requires_grad)]

    def by_formula(hidden, weight):
        log_p = (hidden @ weight.T).log_softmax(-1)
        logprobs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        terms = dict(batch.terms)
        if "entropy" in terms:
            terms["entropy"] = -(log_p.exp() * log_p).sum(-1).detach()
        before = logprobs.detach() if old is None else old
        same = replace(batch, logprobs=logprobs, old_logprobs=before, terms=terms)
        return formulas.loss(objective, sequences(same))

    old = None
    if how != "on-policy":  # ratios near 1 here too, so that not everything is clipped
        now = gk.token_logprobs(start["hidden"] @ start["weight"].T, labels).logprobs
        old = now - (batch.logprobs - batch.old_logprobs)
    expected = run(by_formula)

    if how == "packed":
        batch, labels, old = batch.packed(), labels.flatten(), old.flatten()
        start["hidden"] = start["hidden"].flatten(0, 1)
        expected[1] = expected[1].flatten(0, 1)
    shared = {"loss_mask": batch.loss_mask, **batch.terms, "objective": objective}
    shared.pop("entropy", None)
    metrics = []

    def from_log_probs(hidden, weight):
        tokens = gk.token_logprobs(hidden @ weight.T, labels, return_entropy=True)
        entropy = tokens.entropy if "entropy" in objective.needs else None
        output = gk.policy_loss(tokens.logprobs, old, batch.advantages, entropy=entropy, **shared)
        metrics.append(output.metrics)
        return output.loss

    def from_logits(hidden, weight):
        output = gk.fused_policy_loss(hidden @ weight.T, labels, old, batch.advantages, **shared)
        metrics.append(output.metrics)
        return output.loss

    def by_schedule(schedule):
        return lambda hidden, weight: (
            gk.fused_linear_policy_loss(
                hidden, weight, labels, old, batch.advantages, **shared, schedule=schedule
            ).loss
        )

    close(run(from_log_probs), expected)
    close(run(from_logits), expected)
    for name, value in metrics[0].items():
        assert metrics[1][name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name
    served = set()
    for schedule in ("known", "aligned", "deferred", "two_pass", "auto"):
        try:
            got = run(by_schedule(schedule))
        except ValueError as error:
            assert "is not exact here" in str(error)
            continue
        served.add(schedule)
        close(got, expected)
    assert served >= {"aligned", "two_pass", "auto"}
    if old is not None:
        assert ("known" in served) == (objective.coefficient_scope in ("nothing", "token"))
        assert ("deferred" in served) == objective.factorizes
    close(run(by_schedule("frozen"), weight=start["weight"]), expected[:2])


@pytest.mark.parametrize("name", gk.objectives.__all__)
def test_docstrings_state_source_and_options(name):
    cls = getattr(gk.objectives, name)
    assert "arXiv" in cls.__doc__ or name == "Linear"
    shared = {"aggregation", "aggregation_constant"}
    options = {field.name for field in dataclasses.fields(cls)} - shared
    assert all(option in cls.__doc__ for option in options)
    assert not options or "Args:" in cls.__doc__
