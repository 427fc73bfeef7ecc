"""What holds for every registered objective on whatever batch: order, padding, splits, scale, finiteness."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo_kernels as gk
from tests.draws import shifted_seed
from tests.objectives.every import close, coefficients, every
from tests.objectives.sample_batches import Batch

bounded = settings(deadline=None, max_examples=6, derandomize=True, database=None)
SIZES = (0.0, 0.05, 0.3, 20.0, 88.0, 300.0, 700.0, 1e4)
"""Of log-ratios: inside and outside clips, about the end of fp32 and of fp64, far beyond."""


@st.composite
def batches(draw, *, most=0.3):
    """A function that makes a batch for an objective, with sequences of any length and holes in masks.

    Groups have two or more sequences with counted tokens; another sequence has none. No two tokens have the
    same covariance with the advantage: they would with two tokens, or with all advantages 0.
    """
    lengths = draw(st.lists(st.integers(1, 6), min_size=3, max_size=6))
    count, width = len(lengths) + 1, max(lengths)
    sizes = draw(st.lists(st.sampled_from([x for x in SIZES if x <= most]), min_size=count, max_size=count))
    signs = draw(st.lists(st.sampled_from([1.0, -1.0, 0.0]), min_size=count, max_size=count))
    mixed, everything = draw(st.booleans()), draw(st.booleans())
    rng = torch.Generator().manual_seed(shifted_seed(draw(st.integers(0, 2**20))))

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape):
        return 0.5 + torch.rand(*shape, generator=rng, dtype=torch.float64)

    shape = (count, width)
    mask = torch.arange(width) < torch.tensor([*lengths, 0]).unsqueeze(1)
    mask[:, 1:] &= torch.rand(count, width - 1, generator=rng) < 0.8
    logprobs = -normal(*shape).abs() - 0.05
    # one sign for a sequence's tokens, or any
    direction = normal(*shape).sign() if mixed else normal(count, 1).sign()
    log_ratio = torch.tensor(sizes).double().unsqueeze(1) * direction * uniform(*shape).clamp(max=1.0)
    advantages = torch.tensor([1.0, *signs[1:]]).double() * uniform(count)
    log_ratio = log_ratio + 0.02 * normal(*shape)
    if most < 1:
        old = (logprobs - log_ratio).clamp(max=-1e-3)
    else:  # neither side above 0
        logprobs, old = logprobs + log_ratio.clamp(max=0), logprobs - log_ratio.clamp(min=0)
    has = {
        "token_weights": uniform(*shape),
        "lengths": mask.sum(1) + 2.5,
        "ref_logprobs": old + 0.1 * normal(*shape),
        "turn_ids": torch.randint(-1, 2, shape, generator=rng),
        "group_ids": torch.tensor([*(min(i // 2, len(lengths) // 2 - 1) for i in range(count - 1)), 0]),
        "entropy": uniform(*shape),
        "rollout_weights": uniform(count),
    }

    def make(objective):
        wanted = {*objective.needs, *(("token_weights", "rollout_weights") if everything else ())}
        terms = {name: value for name, value in has.items() if name in wanted}
        return Batch(logprobs, old, advantages if objective.needs_advantages else None, mask, terms)

    return make


@every
@bounded
@given(make=batches(), data=st.data())
def test_order_of_sequences(objective, make, data):
    batch = make(objective)
    order = torch.tensor(data.draw(st.permutations(range(len(batch.logprobs)))))
    close(coefficients(batch.rows(order), objective), coefficients(batch, objective)[order])


@every
@bounded
@given(make=batches(), data=st.data())
def test_padding(objective, make, data):
    """Masked positions anywhere, of any content."""
    batch = make(objective)
    width = batch.logprobs.shape[1]
    columns = torch.tensor(sorted(data.draw(st.permutations(range(width + 3)))[:width]))

    def wider(value, content):
        if value is None or value.ndim == 1:
            return value
        out = value.new_full((len(value), width + 3), content)
        out[:, columns] = value
        return out

    poison = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, 3.0]))
    padded = Batch(
        wider(batch.logprobs, poison), wider(batch.old_logprobs, poison), batch.advantages,
        wider(batch.loss_mask, False),
        {k: wider(v, poison if v.is_floating_point() else 7) for k, v in batch.terms.items()},
    )  # fmt: skip
    got = coefficients(padded, objective)
    close(got, wider(coefficients(batch, objective), 0.0))


@every
@bounded
@given(make=batches(), data=st.data())
def test_split_into_micro_batches(objective, make, data):
    """By the whole batch's divisor; where other sequences matter, by the whole batch's coefficients."""
    batch = make(objective)
    rows = len(batch.logprobs)
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    whole = coefficients(batch, objective)
    counts = batch.terms.get("lengths", batch.loss_mask.sum(1))
    present = batch.loss_mask.any(1)
    divisor = {"token_mean": float(counts[present].sum()), "sum": 1.0}
    got = torch.zeros_like(whole)
    for part in part_of.unique():
        mine = part_of == part
        if objective.coefficient_scope in ("group", "batch"):
            logprobs = batch.logprobs[mine].requires_grad_()
            gk.policy_loss(
                logprobs, None, None, loss_mask=batch.loss_mask[mine], token_weights=whole[mine],
                objective=gk.Linear(),
            ).loss.backward()  # fmt: skip
            got[mine] = logprobs.grad
        else:
            normalizer = divisor.get(objective.aggregation, float(present.sum()))
            got[mine] = coefficients(batch.rows(mine), objective, normalizer=normalizer)
    close(got, whole)


NOT_HOMOGENEOUS = {
    "AGRO": "a reference besides rewards",
    "DPO": "advantages are levels",
    "DRO": "a term without advantage",
    "EGSW": "a softmax of advantages",
    "ESPO": "a KL without advantage",
    "Linear": "no advantages",
    "REAL": "rewards are labels",
    "REBEL": "a ratio besides rewards",
    "TRPA": "advantages are levels",
}


def scaled(objective, factor):
    """What in an objective is in units of the advantage."""
    units = {"ClipCov": ("clip_cov_lb", "clip_cov_ub"), "KLCov": ("ppo_kl_coef",), "PrimeIPO": ("kl_tau",)}
    names = units.get(type(objective).__name__, ())
    return dataclasses.replace(objective, **{name: factor * getattr(objective, name) for name in names})


@every
@bounded
@given(make=batches(), factor=st.floats(1e-3, 1e3))
def test_scale_of_advantages(objective, make, factor):
    reason = NOT_HOMOGENEOUS.get(type(objective).__name__)
    if reason and getattr(objective, "elbo_kl_beta", 1.0):
        pytest.skip(reason)
    batch = make(objective)
    got = coefficients(batch, scaled(objective, factor), advantages=factor * batch.advantages)
    close(got / factor, coefficients(batch, objective))


@every
@bounded
@given(make=batches(most=1e4))
def test_fp32_gradients_are_finite_wherever_fp64_ones_fit(objective, make):
    batch = make(objective)

    def gradient(dtype):
        def cast(value):
            # rounded once, so that both see the same numbers
            return value.float().to(dtype) if value.is_floating_point() else value

        logprobs = cast(batch.logprobs).requires_grad_()
        terms = {name: cast(value) for name, value in batch.terms.items()}
        changes = {"old_logprobs": cast(batch.old_logprobs), "logprobs": logprobs, **terms}
        if batch.advantages is not None:
            changes["advantages"] = cast(batch.advantages)
        batch.call(gk.policy_loss, objective, **changes).loss.backward()
        return logprobs.grad

    got, reference = gradient(torch.float32), gradient(torch.float64)
    assert got.dtype == torch.float32 and not reference.isnan().any()
    fits = reference.abs() <= torch.finfo(torch.float32).max
    assert got[fits].isfinite().all()
    torch.testing.assert_close(got[fits].double(), reference[fits], rtol=1e-6, atol=1e-37)
    assert not got[~batch.loss_mask].any()
