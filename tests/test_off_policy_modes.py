"""IcePop, sequence masks and rejections of rollout weights."""

import math
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import LAYOUTS, generator, offsets
from tests.integrations import peers
from tests.test_off_policy import LENGTHS, bounded, example

DIVERGENCES = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
REDUCED = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max}
OF_SEQUENCES = [
    (mode, reduce) for mode in DIVERGENCES for reduce in REDUCED if (mode, reduce) != ("k1", "max")
]


def log_ratios_of(old, rollout, mask, cu_seqlens):
    return [
        (s, (s.pick(old) - s.pick(rollout)).tolist()) for s in oracle.sequences(mask, cu_seqlens) if s.count
    ]


def weights(layout, **options):
    old, rollout, mask, cu_seqlens = example(layout)
    got = gk.rollout_weights(old, rollout, loss_mask=mask, cu_seqlens=cu_seqlens, **options)
    return got, log_ratios_of(old, rollout, mask, cu_seqlens), mask


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.8, 1.1), (None, 1.05)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_icepop_keeps_ratios_between_its_bounds(layout, low, high):
    got, sequences, mask = weights(layout, mode="icepop", low=low, high=high)
    for sequence, log_ratios in sequences:
        expected = [
            bounded(math.exp(x), "mask", 0.5 if low is None else low, 5.0 if high is None else high)
            for x in log_ratios
        ]
        assert sequence.pick(got).tolist() == pytest.approx(expected, rel=1e-13)
    assert (got[~mask] == 1).all()


def test_icepop_by_hand():
    """Two-sided, the bounds themselves kept, and what is kept is not truncated."""
    ratios = torch.tensor([[0.49, 0.5, 1.7, 5.0, 5.01]], dtype=torch.float64)
    got = gk.rollout_weights(
        ratios.log(), torch.zeros(1, 5).double(), mode="icepop", low=0.5 - 1e-9, high=5 + 1e-9
    )
    assert got.tolist() == [[0.0, pytest.approx(0.5), pytest.approx(1.7), pytest.approx(5.0), 0.0]]


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequence_mask_drops_whole_sequences_and_leaves_the_rest_alone(layout, reduce):
    _, sequences, _ = weights(layout, high=9.0)
    totals = {s.index: math.exp(REDUCED[reduce](ls)) for s, ls in sequences}
    low, high = min(totals.values()) - 1e-9, max(totals.values()) - 1e-9  # all but the largest
    got, sequences, mask = weights(layout, mode="sequence_mask", reduce=reduce, low=low, high=high)
    dropped = [index for index, total in totals.items() if total > high]
    assert len(dropped) == 1 and len(totals) == 2
    for sequence, log_ratios in sequences:
        expected = [0.0 if sequence.index in dropped else math.exp(x) for x in log_ratios]
        assert sequence.pick(got).tolist() == pytest.approx(expected, rel=1e-13)
    assert (got[~mask] == 1).all()


@pytest.mark.parametrize("mode", DIVERGENCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_rejected_by_their_divergence(layout, mode):
    _, sequences, _ = weights(layout, high=9.0)
    values = sorted(DIVERGENCES[mode](x) for _, ls in sequences for x in ls)
    high = (values[-1] + values[-2]) / 2
    low = (values[0] + values[1]) / 2 if mode == "k1" else None
    got, sequences, mask = weights(layout, mode=mode, low=low, high=high)
    for sequence, log_ratios in sequences:
        kept = [
            (low is None or DIVERGENCES[mode](x) >= low) and DIVERGENCES[mode](x) <= high for x in log_ratios
        ]
        assert sequence.pick(got).tolist() == [float(each) for each in kept]
    assert int((got == 0).sum()) == (2 if mode == "k1" else 1)
    assert (got[~mask] == 1).all()


@pytest.mark.parametrize(("mode", "reduce"), OF_SEQUENCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_are_rejected_by_their_divergence(layout, mode, reduce):
    _, sequences, _ = weights(layout, high=9.0)
    values = {s.index: REDUCED[reduce]([DIVERGENCES[mode](x) for x in ls]) for s, ls in sequences}
    high = sum(values.values()) / len(values)
    got, _, _ = weights(layout, mode=mode, level="sequence", reduce=reduce, high=high)
    assert got.tolist() == [float(values.get(i, high) <= high) for i in range(len(LENGTHS))]
    assert (got == 0).sum() == 1


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


WRONG = [
    ({"mode": "icepop", "level": "sequence"}, "level"),
    ({"mode": "sequence_mask", "level": "sequence", "high": 2.0}, "level"),
    ({"mode": "sequence_mask"}, "low, high"),
    ({"mode": "k3"}, "low, high"),
    ({"mode": "k3", "low": -0.1}, "low"),
    ({"mode": "k3", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "mask", "level": "sequence", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "k1", "level": "sequence", "reduce": "max", "high": 1.0}, "reduce"),
    ({"mode": "icepop", "low": 6.0}, "low"),
    ({"mode": "drop", "high": 2.0}, "mode"),
]


@pytest.mark.parametrize(("options", "named"), WRONG)
def test_options_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.rollout_weights(torch.zeros(1, 2), torch.zeros(1, 2), **options)
