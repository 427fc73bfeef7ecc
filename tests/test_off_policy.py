"""Rollout weights, their effect on a batch, and the off-policy mask, compared with loops."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.off_policy import off_policy_mask, weight_metrics, without_rejected
from tests import oracle
from tests.cases import LAYOUTS, generator, make_case, offsets

DIVERGENCES = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
REDUCED = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def example(layout):
    """Return log-probs, the rollout's, and a layout with a masked token, an empty and a masked sequence."""
    log_s = (0.3, 0.0, -0.4, 0.1, -0.1, 0.1)
    case = make_case("logprobs", layout, "holes", dtype=torch.float64, log_s=log_s)
    where = {"loss_mask": case.loss_mask, "cu_seqlens": case.cu_seqlens}
    return case.inputs["logprobs"], case.old_logprobs, where


def sequences(where):
    return oracle.sequences(where["loss_mask"], where["cu_seqlens"])


# --- weights and rejections


def by_loop(log_ratios, *, level="token", reduce="mean", mode="truncate", low=None, high=None):
    """Return a sequence's weights, per token or one, and the values that are compared with the bounds."""
    values = [math.exp(x) for x in log_ratios]
    of_sequence = level == "sequence" or mode == "sequence_mask"
    if mode in DIVERGENCES:
        compared = [DIVERGENCES[mode](x) for x in log_ratios]
        compared = [REDUCED[reduce](compared)] if of_sequence else compared
        values = [1.0] * len(compared)
    elif of_sequence:
        compared = [math.exp(REDUCED[reduce](log_ratios))]
        values = values if mode == "sequence_mask" else compared
    else:
        compared = values
    if mode == "icepop":
        low, high = 0.5 if low is None else low, 5.0 if high is None else high
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if mode == "truncate":
        return [min(max(value, low), high) for value in values], compared
    inside = [low <= value <= high for value in compared]
    inside = inside * len(values) if mode == "sequence_mask" else inside
    return [value * kept for value, kept in zip(values, inside, strict=True)], compared


BOTH = {"low": "between", "high": "between"}
OF_SEQUENCES = [{"level": "sequence", "reduce": reduce} for reduce in REDUCED]
FORMS = [
    *({"mode": mode} | level | BOTH for mode in ("truncate", "mask") for level in ({}, *OF_SEQUENCES[:2])),
    *({"mode": "truncate", "low": 0.0, "high": 0.0} | level for level in ({}, {"level": "sequence"})),
    *({"mode": "icepop"} | bounds for bounds in ({}, {"high": "between"}, BOTH)),
    *({"mode": "sequence_mask", "reduce": reduce, "high": "between"} for reduce in ("mean", "sum")),
    {"mode": "sequence_mask", "low": "between"},
    {"mode": "k1", "low": "between", "high": 9.0},
    *({"mode": mode, "high": "between"} | level for mode in DIVERGENCES for level in ({}, *OF_SEQUENCES)),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
@layouts
def test_rollout_weights_equal_the_loop(layout, form):
    """A bound "between" cuts off the largest value alone, or the least one alone."""
    old, rollout, where = example(layout)
    found = [(s, (s.pick(old) - s.pick(rollout)).tolist()) for s in sequences(where)]
    free = {name: value for name, value in form.items() if value != "between"}
    values = sorted(
        value for _, log_ratios in found if log_ratios for value in by_loop(log_ratios, **free)[1]
    )
    between = {"low": (values[0] + values[1]) / 2, "high": (values[-1] + values[-2]) / 2}
    form = {name: between[name] if value == "between" else value for name, value in form.items()}
    got = gk.rollout_weights(old, rollout, **where, **form)
    by_token = got.shape == old.shape
    for s, log_ratios in found:
        mine = s.pick(got) if by_token else got[s.index].reshape(1)
        expected = by_loop(log_ratios, **form)[0] if log_ratios else [1.0][by_token:]
        assert mine.tolist() == pytest.approx(expected, rel=1e-13)
    assert not by_token or (got[~where["loss_mask"]] == 1).all()
    spoiled = (x.masked_fill(~where["loss_mask"], math.nan) for x in (old, rollout))
    assert torch.equal(gk.rollout_weights(*spoiled, **where, **form), got)


def test_bounds_by_hand():
    """IcePop's default bounds; a weight on a bound is kept; the largest k1 is over counted tokens; an
    overflow is bounded.
    """
    ratios = torch.tensor([[0.49, 0.51, 1.7, 4.99, 5.01]], dtype=torch.float64)
    got = gk.rollout_weights(ratios.log() - 2, torch.full_like(ratios, -2.0), mode="icepop")
    assert got[0].tolist() == pytest.approx([0.0, 0.51, 1.7, 4.99, 0.0])
    same, far = torch.tensor([[-1.0], [-2.0]]), torch.tensor([[0.0], [-1e4]])
    for level in ("token", "sequence"):
        for bounds in ({"low": 1.0}, {"high": 1.0}, {"low": 1.0, "high": 1.0}):
            assert (gk.rollout_weights(same, same, level=level, mode="mask", **bounds) == 1).all()
        assert gk.rollout_weights(far, far.flip(0), level=level, high=2.0).flatten().tolist() == [2.0, 0.0]
        assert not gk.rollout_weights(far, far.flip(0), level=level, mode="mask", low=1e-3, high=2.0).any()
    for dtype, of_result in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        got = gk.rollout_weights(same.to(dtype).requires_grad_(), same.to(dtype), high=2.0)
        assert got.dtype == of_result and not got.requires_grad
    first = {"loss_mask": torch.tensor([[True, False]]), "level": "sequence", "reduce": "max"}
    got = gk.rollout_weights(torch.tensor([[0.5, 0.0]]), torch.zeros(1, 2), **first, mode="k1", high=-0.2)
    assert got.tolist() == [1.0]


@pytest.mark.parametrize("objective", [gk.GSPO(0.3, 0.3), gk.DAPO(0.3, 0.3)], ids=lambda o: type(o).__name__)
@layouts
def test_rejected_sequences_and_the_divisor(layout, objective):
    """Rejected sequences change nothing if they also leave the mask; otherwise they count as zeros in the
    divisor. Weights per sequence and per token reject the same tokens.
    """
    old, rollout, where = example(layout)
    mask, cu_seqlens = where["loss_mask"], where["cu_seqlens"]
    weights = gk.rollout_weights(old, rollout, **where, level="sequence", mode="mask", high=0.95)
    tokens = gk.rollout_weights(old, rollout, **where, mode="sequence_mask", high=0.95)
    kept = without_rejected(mask, weights, cu_seqlens=cu_seqlens)
    assert kept.dtype == torch.bool
    assert torch.equal(kept, without_rejected(mask, tokens, cu_seqlens=cu_seqlens))
    advantages = torch.linspace(-1, 2, 6, dtype=torch.float64)
    terms = where | {"rollout_weights": weights, "objective": objective}
    as_zeros = gk.policy_coefficients(old, old - 0.1, advantages, **terms)
    left_out = gk.policy_coefficients(old, old - 0.1, advantages, **terms | {"loss_mask": kept})
    present = [s for s in sequences(where) if s.count]
    size = len if objective.aggregation == "sequence_mean" else lambda these: sum(s.count for s in these)
    share = size([s for s in present if weights[s.index] != 0]) / size(present)
    assert 0 < share < 1
    torch.testing.assert_close(left_out * share, as_zeros, rtol=1e-12, atol=1e-15)


# --- effects of weights on a batch


@layouts
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weight_metrics_equal_the_loop(layout, level):
    old, rollout, where = example(layout)
    got = gk.rollout_weights(old, rollout, **where, level=level, mode="mask", high=1.0)
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.7, 0.3, 2.0], dtype=torch.float64)
    counted = [s for s in sequences(where) if s.count]
    each = [
        w for s in counted for w in (s.pick(got) if level == "token" else got[s.index : s.index + 1]).tolist()
    ]
    assert 0 in each and len(set(each)) > 1
    objective = gk.GSPO() if level == "sequence" else gk.GRPO()
    with_weights, without = (
        gk.policy_coefficients(old, None, advantages, **where, rollout_weights=w, objective=objective).norm()
        for w in (got, None)
    )
    expected = {
        "mean": sum(each) / len(each),
        "min": min(each),
        "max": max(each),
        "zero": each.count(0) / len(each),
        "ess": sum(each) ** 2 / (len(each) * sum(w * w for w in each)),
        "gradient_norm": float(with_weights / without),
    }
    metrics = weight_metrics(got, advantages, **where)
    assert {name: value.item() for name, value in metrics.items()} == {
        f"weights/{name}": pytest.approx(value, rel=1e-12) for name, value in expected.items()
    }


def test_metrics_without_counted_tokens():
    zero = torch.zeros(2)
    for mask in (torch.zeros(2, 3), torch.ones(2, 3)):
        got = weight_metrics(torch.ones(2), zero, loss_mask=mask)
        assert all(each.isfinite() and not each.requires_grad for each in got.values())
        assert got["weights/ess"] == got["weights/gradient_norm"] == 1
    dropped = weight_metrics(zero, torch.ones(2), loss_mask=torch.ones(2, 3))
    assert dropped["weights/ess"] == dropped["weights/gradient_norm"] == 0 and dropped["weights/zero"] == 1
    # masked tokens, and the sequence that has no others, have no effect
    where = {"loss_mask": torch.tensor([1, 1, 0, 0, 1]), "cu_seqlens": offsets((3, 1, 1))}
    values, advantages = torch.tensor([1.0, 0.5, math.inf, math.nan, 2.0]), torch.tensor([1.0, math.nan, 0.0])
    got = weight_metrics(values, advantages, **where)
    assert got == weight_metrics(values.nan_to_num(7, 7), advantages.nan_to_num(3), **where)
    assert got["weights/gradient_norm"].item() == pytest.approx(math.sqrt((1 + 0.25) / 2))
    # a weight without a bound may be infinite where the advantage is 0
    got = weight_metrics(torch.tensor([math.inf, 1.0]), torch.tensor([0.0, 1.0]), loss_mask=torch.ones(2, 3))
    assert got["weights/gradient_norm"] == 1


# --- the off-policy mask


@pytest.mark.parametrize("per_token", [False, True])
@layouts
def test_off_policy_mask_equals_the_loop(layout, per_token):
    old, logprobs, where = example(layout)
    shape = old.shape if per_token else (6,)
    for seed, delta in enumerate((-0.2, 0.0, 0.02, 0.2)):
        advantages = torch.randn(shape, generator=generator(seed))
        expected = torch.ones(shape, dtype=torch.float64)
        for s in sequences(where):
            gaps = (s.pick(old) - s.pick(logprobs)).tolist()
            if gaps and sum(gaps) / len(gaps) > delta:
                if per_token:
                    expected[s.where] = 1.0 - (s.counted & (advantages[s.where] < 0)).double()
                elif advantages[s.index] < 0:
                    expected[s.index] = 0.0
        assert torch.equal(off_policy_mask(logprobs, old, advantages, **where, delta=delta), expected)
        if not per_token:
            advantages[1] = torch.nan  # of a sequence without tokens
        for poison in (math.nan, math.inf, -math.inf):
            spoiled = (x.masked_fill(~where["loss_mask"], poison * k) for x, k in ((logprobs, 1), (old, -1)))
            assert torch.equal(off_policy_mask(*spoiled, advantages, **where, delta=delta), expected)
