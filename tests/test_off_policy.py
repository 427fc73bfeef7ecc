"""Rollout weights, what they do to a batch, and the off-policy mask: against loops and verl's code."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.off_policy import weight_metrics
from tests import oracle
from tests.cases import LAYOUTS, generator, make_case, offsets, replace, run
from tests.integrations import peers
from tests.test_docs import ROOT
from tests.test_docs import run as run_page

LENGTHS = (3, 0, 1, 4)
DIVERGENCES = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
REDUCED = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max}


def example(layout, dtype=torch.float64):
    rng = generator(0)
    tokens = sum(LENGTHS)
    old = -torch.rand(tokens, generator=rng, dtype=torch.float64)
    rollout = old - 0.3 * torch.randn(tokens, generator=rng, dtype=torch.float64)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[1], mask[3] = False, False  # a hole; the third sequence has nothing left
    if layout == "packed":
        return old.to(dtype), rollout.to(dtype), mask, offsets(LENGTHS)
    padded = []
    for value, fill in ((old, -9.0), (rollout, 5.0), (mask, False)):
        out = torch.full((len(LENGTHS), 5), fill, dtype=value.dtype)
        for i, (a, b) in enumerate(itertools.pairwise(offsets(LENGTHS).tolist())):
            out[i, : b - a] = value[a:b]
        padded.append(out)
    return padded[0].to(dtype), padded[1].to(dtype), padded[2], None


def by_loop(log_ratios, *, level="token", reduce="mean", mode="truncate", low=None, high=None):
    """The weights of a sequence's tokens, or the one of the sequence."""
    total = math.exp(REDUCED[reduce](log_ratios)) if reduce != "max" else None
    values = [math.exp(x) for x in log_ratios]
    if mode in DIVERGENCES:
        values = [DIVERGENCES[mode](x) for x in log_ratios]
        total = REDUCED[reduce](values)
    elif mode == "icepop":
        low, high = 0.5 if low is None else low, 5.0 if high is None else high
    values = values if level == "token" else [total]

    def inside(value):
        return (low is None or value >= low) and (high is None or value <= high)

    if mode == "truncate":
        return [min(max(value, low or 0.0), math.inf if high is None else high) for value in values]
    if mode == "sequence_mask":
        return [value * inside(total) for value in values]
    return [float(inside(value)) if mode in DIVERGENCES else value * inside(value) for value in values]


LEVELS = [{"level": "token"}, *({"level": "sequence", "reduce": reduce} for reduce in ("mean", "sum"))]
BOUNDS = [{"high": 1.1}, {"low": 0.9}, {"low": 0.9, "high": 1.1}, {"low": 0.0, "high": 0.0}]
FORMS = [
    *(
        {"mode": mode} | level | bounds
        for mode, level, bounds in itertools.product(("truncate", "mask"), LEVELS, BOUNDS)
    ),
    *({"mode": "icepop"} | bounds for bounds in ({}, {"low": 0.8, "high": 1.1}, {"high": 1.05})),
    {"mode": "icepop", "low": 0.9, "high": "between"},
    *({"mode": "sequence_mask", "reduce": reduce, "high": "between"} for reduce in ("mean", "sum")),
    {"mode": "sequence_mask", "low": "between"},
    *({"mode": mode, "high": "between"} for mode in DIVERGENCES),
    {"mode": "k1", "low": "between", "high": 9.0},
    *(
        {"mode": mode, "level": "sequence", "reduce": reduce, "high": "between"}
        for mode, reduce in itertools.product(DIVERGENCES, REDUCED)
    ),
]


def quantities(form, log_ratios):
    """What a form compares with its bounds."""
    level = "sequence" if form["mode"] == "sequence_mask" else form.get("level", "token")
    each = [DIVERGENCES.get(form["mode"], lambda x: x)(x) for x in log_ratios]
    each = [REDUCED[form.get("reduce", "mean")](each)] if level == "sequence" else each
    return each if form["mode"] in DIVERGENCES else [math.exp(x) for x in each]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollout_weights_equal_the_loop(layout, form):
    """A bound "between" lies below the largest value, or above the least one, and cuts it off alone."""
    old, rollout, mask, cu_seqlens = example(layout)
    found = [(s, (s.pick(old) - s.pick(rollout)).tolist()) for s in oracle.sequences(mask, cu_seqlens)]
    values = sorted(value for _, log_ratios in found if log_ratios for value in quantities(form, log_ratios))
    between = {"low": (values[0] + values[1]) / 2, "high": (values[-1] + values[-2]) / 2}
    form = {name: between[name] if value == "between" else value for name, value in form.items()}
    got = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, **form)
    for sequence, log_ratios in found:
        mine = sequence.pick(got) if got.shape == old.shape else got[sequence.index].reshape(1)
        if log_ratios or got.shape != old.shape:
            expected = by_loop(log_ratios, **form) if log_ratios else [1.0]
            assert mine.tolist() == pytest.approx(expected, rel=1e-13)
    if got.shape == old.shape:
        assert (got[~mask] == 1).all()


def test_icepop_by_hand():
    """Two-sided, and what is kept is not truncated; a batch of one sequence stays a batch."""
    ratios = torch.tensor([[0.49, 0.5, 1.7, 5.0, 5.01]], dtype=torch.float64)
    got = gk.rollout_weights(
        ratios.log(), torch.zeros(1, 5).double(), mode="icepop", low=0.5 - 1e-9, high=5 + 1e-9
    )
    assert got.tolist() == [[0.0, pytest.approx(0.5), pytest.approx(1.7), pytest.approx(5.0), 0.0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_on_a_bound_is_kept(level):
    same = torch.tensor([[-1.0], [-2.0]])
    for bounds in ({"low": 1.0}, {"high": 1.0}, {"low": 1.0, "high": 1.0}):
        assert (gk.rollout_weights(same, same, level=level, mode="mask", **bounds) == 1).all()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_are_inert(level, mode):
    old, rollout, mask, _ = example("padded")
    clean = gk.rollout_weights(old, rollout, loss_mask=mask, level=level, mode=mode, high=1.1)
    for poison in (math.nan, math.inf, -math.inf):
        got = gk.rollout_weights(
            old.masked_fill(~mask, poison), rollout.masked_fill(~mask, math.nan), loss_mask=mask, level=level,
            mode=mode, high=1.1,
        )  # fmt: skip
        assert torch.equal(got, clean)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_overflow_is_bounded(level):
    old, rollout = torch.tensor([[0.0, -2e4]]), torch.tensor([[-1e4, -1e4]])
    for a, b, truncated, masked in (
        (old[:, :1], rollout[:, :1], 2.0, 0.0),
        (old[:, 1:], rollout[:, 1:], 0.0, 0.0),
    ):
        assert gk.rollout_weights(a, b, level=level, high=2.0).item() == truncated
        assert gk.rollout_weights(a, b, level=level, mode="mask", low=1e-3, high=2.0).item() == masked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_dtype_and_no_gradient(level, dtype):
    old, rollout, mask, cu_seqlens = example("packed", dtype)
    got = gk.rollout_weights(
        old.requires_grad_(), rollout.requires_grad_(), loss_mask=mask, cu_seqlens=cu_seqlens, level=level,
        high=2.0,
    )  # fmt: skip
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not got.requires_grad


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_fit_the_losses(layout, level, objective):
    old, rollout, mask, cu_seqlens = example(layout)
    weights = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, level=level, high=1.05)
    logprobs = (old + 0.0).requires_grad_()
    output = gk.policy_loss(
        logprobs, old, torch.ones(len(LENGTHS)), loss_mask=mask, cu_seqlens=cu_seqlens,
        rollout_weights=weights, objective=objective,
    )  # fmt: skip
    # ratio 1 and advantage 1: minus the mean weight
    means = [
        sequence.pick(weights).mean() if level == "token" else weights[sequence.index]
        for sequence in oracle.sequences(mask, cu_seqlens)
        if sequence.count
    ]
    assert output.loss.item() == pytest.approx(-float(sum(means)) / len(means), rel=1e-12)
    # the ratio itself never sees them
    assert output.metrics["ratio/mean"].item() == 1.0


VERLS = [
    ("token_k1", "0.8_1.3", {"low": math.log(0.8), "high": math.log(1.3)}),
    ("token_k2", "0.03", {"high": 0.03}),
    ("token_k3", "0.03", {"high": 0.03}),
    (
        "seq_sum_k1",
        "0.5_1.6",
        {"level": "sequence", "reduce": "sum", "low": math.log(0.5), "high": math.log(1.6)},
    ),
    ("seq_sum_k2", "0.3", {"level": "sequence", "reduce": "sum", "high": 0.3}),
    ("seq_sum_k3", "0.3", {"level": "sequence", "reduce": "sum", "high": 0.3}),
    ("seq_mean_k1", "0.95_1.05", {"level": "sequence", "low": math.log(0.95), "high": math.log(1.05)}),
    ("seq_mean_k2", "0.04", {"level": "sequence", "high": 0.04}),
    ("seq_mean_k3", "0.04", {"level": "sequence", "high": 0.04}),
    ("seq_max_k2", "0.2", {"level": "sequence", "reduce": "max", "high": 0.2}),
    ("seq_max_k3", "0.2", {"level": "sequence", "reduce": "max", "high": 0.2}),
]


@pytest.mark.parametrize(("name", "threshold", "options"), VERLS)
def test_rejections_are_verls_own(name, threshold, options):
    """Every one of verl's options, by its own code: the mask that it leaves."""
    means = peers.extract(
        peers.source("verl", "utils/torch_functional.py"), "masked_sum", "masked_mean", torch=torch
    )
    verl = peers.extract(
        peers.source("verl", "trainer/ppo/rollout_corr_helper.py"), "SAFETY_BOUND",
        "compute_rollout_rejection_mask", "_parse_rollout_rs_thresholds", torch=torch, math=math, Any=Any,
        Optional=Optional,
        verl_F=SimpleNamespace(**means), compute_rs_metrics=lambda **_: {},
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS={"token_k1", "token_k2", "token_k3"},
        SUPPORTED_ROLLOUT_RS_OPTIONS={each for each, *_ in VERLS},
    )  # fmt: skip
    rng = generator(5)
    log_ratio = 0.3 * torch.randn(40, 8, generator=rng, dtype=torch.float64)
    mask = torch.arange(8) < torch.randint(0, 9, (40, 1), generator=rng)
    theirs, _ = verl["compute_rollout_rejection_mask"](log_ratio, mask.double(), name, threshold)
    got = gk.rollout_weights(
        log_ratio, torch.zeros_like(log_ratio), loss_mask=mask, mode=name[-2:], **options
    )
    got = got.unsqueeze(1) if got.ndim == 1 else got
    assert torch.equal((got * mask).bool(), theirs.bool())
    assert 0 < theirs.sum() < mask.sum()


def log_ratios_of(old, rollout, mask, cu_seqlens):
    return [
        (s, (s.pick(old) - s.pick(rollout)).tolist()) for s in oracle.sequences(mask, cu_seqlens) if s.count
    ]


def weights(layout, **options):
    old, rollout, mask, cu_seqlens = example(layout)
    got = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, **options)
    return got, log_ratios_of(old, rollout, mask, cu_seqlens), mask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seq_mis_and_geo_mask_are_their_definitions(layout):
    """Of "Trust Region Optimization via Sequence Masking": rho below C; 1 for a geometric mean in between."""
    _, sequences, mask = weights(layout, high=9.0)
    product = {s.index: math.exp(sum(ls)) for s, ls in sequences}
    mean = {s.index: math.exp(sum(ls) / len(ls)) for s, ls in sequences}
    most = sum(product.values()) / 2  # of two with a counted token
    got, *_ = weights(layout, level="sequence", reduce="sum", mode="mask", high=most)
    expected = [1.0 if i not in product else product[i] * (product[i] <= most) for i in range(len(LENGTHS))]
    assert got.tolist() == pytest.approx(expected, rel=1e-13) and expected.count(0) == 1
    low, high = sum(mean.values()) / 2, 1.0
    got, *_ = weights(layout, level="sequence", mode="k1", low=-math.log(high), high=-math.log(low))
    inside = [low <= mean.get(i, low) <= high for i in range(len(LENGTHS))]
    assert got.tolist() == [float(each) for each in inside] and inside.count(False) == 1
    # and with truncated ratios of tokens
    got, *_ = weights(layout, mode="sequence_mask", low=low, high=high)
    got = got.clamp(max=1.1)
    for s, ls in sequences:
        expected = [min(math.exp(x), 1.1) * inside[s.index] for x in ls]
        assert s.pick(got).tolist() == pytest.approx(expected, rel=1e-13)
    assert (got[~mask] == 1).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_slimes_own(level, mode):
    """Its weights and its mask by its own code, with a veto."""
    names = (
        "masked_sum", "masked_mean", "masked_min", "masked_max", "calculate_veto_mask",
        "truncate", "clip", "mask",
    )  # fmt: skip
    slime = peers.extract(
        peers.source("slime", "examples/train_infer_mismatch_helper/mis.py"), *names, "compute_mis_weights",
        "metrics_append", torch=torch, Any=Any, add_ppl_metrics=lambda *_: None,
    )  # fmt: skip
    rng = generator(6)
    log_ratio = 0.3 * torch.randn(40, 8, generator=rng, dtype=torch.float64)
    counted = torch.arange(8) < torch.randint(1, 9, (40, 1), generator=rng)
    args = SimpleNamespace(
        use_tis=True, tis_level=level, tis_mode=mode, tis_lower_bound=0.7, tis_upper_bound=1.4, use_rs=True,
        rs_level=level, rs_lower_bound=0.8, rs_upper_bound=1.2, rs_veto_threshold=0.6,
        tis_batch_normalize=False,
    )  # fmt: skip
    zeros = torch.zeros_like(log_ratio)
    parts = {
        "train_log_probs": list(log_ratio), "rollout_log_probs": list(zeros), "loss_masks": list(counted),
    }  # fmt: skip
    theirs, masks, _ = slime["compute_mis_weights"](args, **parts)
    theirs = torch.stack(theirs) * torch.stack(masks)

    def ours(**options):
        if "level" not in options and level != "token":
            options |= {"level": "sequence", "reduce": "sum" if level == "sequence" else "mean"}
        got = gk.rollout_weights(log_ratio, zeros, loss_mask=counted, **options)
        return got.unsqueeze(1) if got.ndim == 1 else got

    low = None if mode == "truncate" else 0.7
    got = ours(mode="mask" if mode == "mask" else "truncate", low=low, high=1.4)
    got = got * (ours(mode="mask", low=0.8, high=1.2) != 0)
    got = got * ours(level="sequence", reduce="max", mode="k1", high=-math.log(0.6))
    torch.testing.assert_close(got * counted, theirs, rtol=1e-12, atol=0)
    mask = gk.off_policy.without_rejected(counted, got.expand_as(log_ratio))
    assert torch.equal(mask, torch.stack(masks).bool()) and 0 < mask.sum() < counted.sum()


@pytest.mark.parametrize("objective", [gk.GSPO(0.3, 0.3), gk.DAPO(0.3, 0.3)], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rejected_sequences_leave_the_divisor_where_the_caller_says_so(layout, objective):
    """As if they had not been there; else they count as zeros. Per sequence or per token the same mask."""
    old, rollout, mask, cu_seqlens = example(layout)
    options = {"level": "sequence", "mode": "mask", "high": 0.9}
    given = {"loss_mask": mask, "cu_seqlens": cu_seqlens}
    w = gk.rollout_weights(old, rollout, **given, **options)
    tokens = gk.rollout_weights(old, rollout, **given, mode="sequence_mask", high=0.9)
    kept = gk.off_policy.without_rejected(mask, w, cu_seqlens=cu_seqlens)
    assert kept.dtype == torch.bool and torch.equal(
        kept, gk.off_policy.without_rejected(mask, tokens, cu_seqlens=cu_seqlens)
    )
    advantages = torch.linspace(-1, 2, len(LENGTHS), dtype=torch.float64)
    given |= {"rollout_weights": w, "objective": objective}
    counts, zeros = gk.policy_coefficients(old, old - 0.1, advantages, **given), w == 0
    leaves = gk.policy_coefficients(old, old - 0.1, advantages, **given | {"loss_mask": kept})
    found = oracle.sequences(mask, cu_seqlens)
    present = [s for s in found if s.count]
    size = len if objective.aggregation == "sequence_mean" else lambda these: sum(s.count for s in these)
    share = size([s for s in present if not zeros[s.index]]) / size(present)
    assert 0 < share < 1
    torch.testing.assert_close(leaves * share, counts, rtol=1e-12, atol=1e-15)
    dropped = weight_metrics(w, advantages, loss_mask=mask, cu_seqlens=cu_seqlens)["weights/zero"]
    assert dropped.item() == pytest.approx(sum(bool(zeros[s.index]) for s in present) / len(present))


def test_without_rejected_names_the_wrong_argument():
    mask, weights = torch.ones(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"weights: got shape \(3,\)"):
        gk.off_policy.without_rejected(mask, torch.ones(3))
    with pytest.raises(TypeError, match="weights"):
        gk.off_policy.without_rejected(mask, weights.long())
    with pytest.raises((TypeError, ValueError), match="loss_mask"):
        gk.off_policy.without_rejected(mask[0], weights)


WRONG_FORMS = [
    ({"mode": "icepop", "level": "sequence"}, "level"),
    ({"mode": "sequence_mask", "level": "sequence", "high": 2.0}, "level"),
    ({"mode": "sequence_mask"}, "low, high"),
    ({"mode": "k3"}, "low, high"),
    ({"mode": "k3", "low": -0.1}, "low"),
    ({"mode": "k3", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "mask", "level": "sequence", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "truncate", "level": "sequence", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "icepop", "low": 6.0}, "low"),
    ({"mode": "drop", "high": 2.0}, "mode"),
]


@pytest.mark.parametrize(("options", "named"), WRONG_FORMS)
def test_options_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.rollout_weights(torch.zeros(1, 2), torch.zeros(1, 2), **options)


# --- what weights do to a batch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_equal_the_loop_and_the_losses_own_coefficients(layout, level):
    old, rollout, mask, cu_seqlens = example(layout)
    options = {"loss_mask": mask, "cu_seqlens": cu_seqlens, "level": level}
    free = gk.rollout_weights(old, rollout, **options, low=0.0)
    present = free[mask if level == "token" else [0, 3]]
    middle = float(present.min() + present.max()) / 2  # what lies above it is dropped
    got = gk.rollout_weights(old, rollout, **options, mode="mask", high=middle)
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.7], dtype=torch.float64)
    metrics = weight_metrics(got, advantages, loss_mask=mask, cu_seqlens=cu_seqlens)
    counted = [s for s in oracle.sequences(mask, cu_seqlens) if s.count]
    if level == "token":
        each = [w for s in counted for w in s.pick(got).tolist()]
    else:
        each = [got[s.index].item() for s in counted]
    assert 0 in each and len(set(each)) > 1
    expected = {
        "mean": sum(each) / len(each),
        "min": min(each),
        "max": max(each),
        "zero": each.count(0) / len(each),
        "ess": sum(each) ** 2 / (len(each) * sum(w * w for w in each)),
    }
    objective = gk.GSPO() if level == "sequence" else gk.GRPO()
    norms = [
        gk.policy_coefficients(
            old,
            None,
            advantages,
            loss_mask=mask,
            cu_seqlens=cu_seqlens,
            rollout_weights=given,
            objective=objective,
        ).norm()
        for given in (got, None)
    ]
    expected["gradient_norm"] = float(norms[0] / norms[1])
    for name, value in expected.items():
        assert metrics[f"weights/{name}"].item() == pytest.approx(value, rel=1e-12), name
    assert metrics.keys() == {f"weights/{name}" for name in expected}


def test_metrics_of_nothing():
    zero = torch.zeros(2)
    for mask in (torch.zeros(2, 3), torch.ones(2, 3)):
        got = weight_metrics(torch.ones(2), zero, loss_mask=mask)
        assert all(each.isfinite() and not each.requires_grad for each in got.values())
        assert got["weights/ess"] == got["weights/gradient_norm"] == 1
    dropped = weight_metrics(zero, torch.ones(2), loss_mask=torch.ones(2, 3))
    assert dropped["weights/ess"] == dropped["weights/gradient_norm"] == 0 and dropped["weights/zero"] == 1


def test_metrics_ignore_what_is_not_counted():
    mask = torch.tensor([1, 1, 0, 0, 1])
    offset = offsets((3, 1, 1))
    values, advantages = torch.tensor([1.0, 0.5, math.inf, math.nan, 2.0]), torch.tensor([1.0, math.nan, 0.0])
    got = weight_metrics(values, advantages, loss_mask=mask, cu_seqlens=offset)
    clean = weight_metrics(
        values.nan_to_num(7, 7), advantages.nan_to_num(3), loss_mask=mask, cu_seqlens=offset
    )
    assert got == clean
    assert got["weights/gradient_norm"].item() == pytest.approx(math.sqrt((1 + 0.25) / 2))


def test_metrics_name_the_wrong_argument():
    ones, mask = torch.ones(2), torch.ones(2, 3)
    for given, named in (
        ((torch.ones(3), ones), "weights"),
        ((ones, torch.ones(3)), "advantages"),
        ((ones.long(), ones), "weights"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{named}: "):
            weight_metrics(*given, loss_mask=mask)
    with pytest.raises(ValueError, match=r"^loss_mask: "):
        weight_metrics(ones, ones, loss_mask=mask + 1)


# --- the length


def expected_weight(variance, most):
    """E[min(w, most)] of a sequence whose log-ratios add up to N(-variance / 2, variance), where E[w] = 1."""

    def normal(x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    sd, log = math.sqrt(variance), math.log(most)
    return normal((log - variance / 2) / sd) + most * (1 - normal((log + variance / 2) / sd))


def test_a_sum_weakens_a_batch_17_fold_and_a_mean_does_not():
    """The case of NeMo-RL #2269: 9,000 tokens, ratios of tokens at 1, truncated likelihood ratios of 0.0596.

    A token's log-ratio with a standard deviation of 0.04274 gives that by the closed form; the function does
    as the closed form says, and with the mean it leaves the batch as it is.
    """
    tokens, sd, sequences = 9_000, 0.04274, 256
    variance = tokens * sd**2
    assert 1 / expected_weight(variance, 2.0) == pytest.approx(16.8, abs=0.1)
    rng = generator(7)
    found = {"mean": [], "sum": []}
    advantages = torch.ones(sequences, dtype=torch.float64)
    log_ratios = sd * torch.randn(sequences, tokens, generator=rng, dtype=torch.float64) - sd**2 / 2
    mask = torch.ones_like(log_ratios, dtype=torch.bool)
    for reduce in found:
        weights = gk.rollout_weights(
            log_ratios, torch.zeros_like(log_ratios), level="sequence", reduce=reduce, high=2.0
        )
        found[reduce] = weights
        metrics = weight_metrics(weights, advantages, loss_mask=mask)
        if reduce == "mean":
            assert metrics["weights/ess"] > 1 - 1e-5
            assert abs(metrics["weights/gradient_norm"] - 1) < 2 * sd**2
        else:
            assert metrics["weights/ess"] < 0.2
    error = found["sum"].std() / math.sqrt(sequences)
    assert abs(found["sum"].mean() - expected_weight(variance, 2.0)) < 4.5 * error
    by_token = gk.rollout_weights(log_ratios, torch.zeros_like(log_ratios), high=2.0)
    assert abs(by_token.mean() - 1) < 1e-3


def test_the_table_of_the_page_is_what_its_code_prints(capsys):
    run_page("docs/off_policy.md")
    printed = capsys.readouterr().out.rpartition("|\n")[0] + "|\n"
    assert printed.count("|\n") == 4 and printed in (ROOT / "docs/off_policy.md").read_text()


# --- the off-policy mask


def kept_by_loop(logprobs, old, advantages, mask, cu_seqlens, delta):
    """One number per sequence, or per token where the advantages are."""
    per_token = advantages.shape == logprobs.shape
    out = torch.ones(advantages.shape, dtype=torch.float64)
    for sequence in oracle.sequences(mask, cu_seqlens):
        gaps = (sequence.pick(old) - sequence.pick(logprobs)).tolist()
        if not gaps or sum(gaps) / len(gaps) <= delta:
            continue
        if per_token:
            out[sequence.where] = 1.0 - (sequence.counted & (advantages[sequence.where] < 0)).double()
        elif advantages[sequence.index] < 0:
            out[sequence.index] = 0.0
    return out


@pytest.mark.parametrize("delta", [-0.2, 0.0, 0.02, 0.3])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_policy_mask_equals_the_loop(layout, per_token, delta):
    old, logprobs, mask, cu_seqlens = example(layout)
    shape = old.shape if per_token else (len(LENGTHS),)
    for seed in range(4):
        advantages = torch.randn(shape, generator=generator(seed))
        got = gk.off_policy.off_policy_mask(
            logprobs, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, delta=delta
        )
        expected = kept_by_loop(logprobs, old, advantages, mask, cu_seqlens, delta)
        assert torch.equal(got, expected)


def test_off_policy_mask_by_hand():
    old = torch.tensor([[-1.0, -1.0]] * 5)
    # mean(old - logp): 0.5, 0.5, 0.25, -0.5, 0.5
    gap = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.0], [-0.5, -0.5], [0.5, 0.5]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0])
    got = gk.off_policy.off_policy_mask(old - gap, old, advantages, delta=0.25)
    # far and worse; far but better; exactly at delta; moved the other way; far but indifferent
    assert got.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_off_policy_mask_ignores_what_is_masked():
    old, logprobs, mask, cu_seqlens = example("packed")
    advantages = torch.tensor([-1.0, math.nan, -1.0, -1.0])
    clean = gk.off_policy.off_policy_mask(
        logprobs, old, advantages, loss_mask=mask, cu_seqlens=cu_seqlens, delta=0.0
    )
    for poison in (math.nan, math.inf, -math.inf):
        got = gk.off_policy.off_policy_mask(
            logprobs.masked_fill(~mask, poison), old.masked_fill(~mask, -poison), advantages, loss_mask=mask,
            cu_seqlens=cu_seqlens, delta=0.0,
        )  # fmt: skip
        assert torch.equal(got, clean)
    assert clean[1] == clean[2] == 1  # nothing counted


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_off_policy_mask_drops_sequences_from_every_loss(entry, layout, objective):
    """No gradient for what is dropped, the others' unchanged: the divisor doesn't shrink."""
    kind = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "linear")
    case = make_case(kind, layout, "holes", dtype=torch.float64, log_s=(1e-4, 0.0, -0.4, -5e-5, -0.3, 0.1))
    whole = run(case, entry, objective)
    logprobs = whole.logprobs
    weights = gk.off_policy.off_policy_mask(
        logprobs, case.old_logprobs, case.advantages, loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens,
        delta=0.1,
    )  # fmt: skip
    assert weights.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    masked = run(replace(case, terms={"rollout_weights": weights}), entry, objective)
    key = {"policy_loss": "logprobs", "fused_policy_loss": "logits"}.get(entry, "hidden")
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        got, before = (result.grads[key][sequence.where] for result in (masked, whole))
        if weights[sequence.index] == 0:
            assert (got == 0).all()
        else:
            torch.testing.assert_close(got, before, rtol=1e-12, atol=0)


TOKENS = torch.zeros(2, 3)
WRONG_MASKS = [
    ((torch.zeros(3), TOKENS, torch.zeros(2)), {"delta": 0.1}, ValueError, "logprobs"),
    ((TOKENS, torch.zeros(2, 2), torch.zeros(2)), {"delta": 0.1}, ValueError, "old_logprobs"),
    ((TOKENS, None, torch.zeros(2)), {"delta": 0.1}, TypeError, "old_logprobs"),
    ((TOKENS, TOKENS, torch.zeros(3)), {"delta": 0.1}, ValueError, "advantages"),
    ((TOKENS, TOKENS, torch.zeros(2, dtype=torch.int64)), {"delta": 0.1}, TypeError, "advantages"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": "0.1"}, TypeError, "delta"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": math.nan}, ValueError, "delta"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": 0.1, "loss_mask": torch.ones(2)}, ValueError, "loss_mask"),
    ((TOKENS, TOKENS, torch.zeros(2)), {"delta": 0.1, "loss_mask": TOKENS + 2}, ValueError, "loss_mask"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "named"), WRONG_MASKS)
def test_off_policy_mask_errors_name_the_argument(arguments, options, kind, named):
    with pytest.raises(kind, match=f"^{named}: "):
        gk.off_policy.off_policy_mask(*arguments, **options)
