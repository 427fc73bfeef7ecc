"""Numbers of a comparison against what they are by hand, and the sentences that follow from them."""

import json
import math

import pytest
import torch

from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.report import advise, explanation, make_report
from gspo_kernels.mismatch.scoring import Samples, Switched

CLIP = (3e-4, 4e-4)


def compared(*differences, clip=CLIP):
    """Sequences whose tokens differ by these numbers; the sampler's log-probs are -1, -2, ..."""
    flat = torch.tensor([each for sequence in differences for each in sequence], dtype=torch.float64)
    sampling = -1.0 - torch.arange(len(flat), dtype=torch.float64)
    lengths = torch.tensor([0, *(len(sequence) for sequence in differences)])
    return Comparison(sampling + flat, sampling, lengths.cumsum(0).int(), clip)


def switched(name, comparison, **change):
    return Switched(name, change, comparison, 0.0)


def test_sequences_and_their_range():
    # On the upper bound is inside, as a clip decides it.
    edge = math.log1p(4e-4)
    comparison = compared([1e-3, -1e-3], [edge - 1e-12], [edge + 1e-9], [-3e-4, -4e-4, -2.99e-4], [0.0] * 5)
    wanted = torch.tensor([0.0, edge, edge, -9.99e-4 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(comparison.log_s, wanted, rtol=0, atol=2e-9)
    assert comparison.outside.tolist() == [False, False, True, True, False]
    numbers = comparison.summary()
    assert numbers["sequences/outside"] == pytest.approx(2 / 5)
    assert numbers["sequences/outside_low"] == numbers["sequences/outside_high"] == pytest.approx(1 / 5)
    assert numbers["sequences/rms_log_s"] == pytest.approx(float(wanted.square().mean()) ** 0.5)
    assert numbers["tokens/max"] == pytest.approx(1e-3)


def test_tokens():
    sizes = [0.0, 0.2, -0.3, 0.01, -0.02]
    numbers = compared(sizes).summary()
    assert numbers["tokens/count"] == 5 and numbers["tokens/impossible"] == 0
    assert numbers["tokens/mean"] == pytest.approx(0.53 / 5)
    assert numbers["tokens/signed_mean"] == pytest.approx(-0.11 / 5)
    assert numbers["tokens/quantile_0.5"] == pytest.approx(0.02)
    assert numbers["tokens/quantile_0.99"] == numbers["tokens/max"] == pytest.approx(0.3)
    assert numbers["tokens/ratio_beyond_tenth"] == pytest.approx(2 / 5)


def test_impossible_tokens_are_counted_and_their_sequences_outside():
    comparison = compared([-math.inf, 0.0], [0.0], [1e-5])
    assert comparison.possible.tolist() == [False, True, True, True]
    assert comparison.outside.tolist() == [True, False, False]
    numbers = comparison.summary()
    assert numbers["tokens/impossible"] == 1 and numbers["tokens/max"] == pytest.approx(1e-5)
    both = Comparison(*(torch.tensor([-math.inf, -1.0]),) * 2, torch.tensor([0, 2]), CLIP)
    assert both.log_s.tolist() == [0.0]
    assert any("impossible to one side" in sentence for sentence in advise(comparison, []))


def test_the_range_that_holds():
    values = torch.linspace(-0.01, 0.02, 1001, dtype=torch.float64).tolist()
    low, high = compared(*([value] for value in values)).range_that_holds(0.9)
    assert low == pytest.approx(-math.expm1(-0.01 + 0.05 * 0.03), rel=0.01)
    assert high == pytest.approx(math.expm1(0.02 - 0.05 * 0.03), rel=0.01)


def test_corrections_respect_length_or_not():
    effects = compared([-0.01] * 100, [-0.01] * 300).corrections()
    token, mean, total = effects.values()
    assert [token["mean"], mean["mean"]] == pytest.approx([math.exp(-0.01)] * 2)
    assert total["mean"] == pytest.approx((math.exp(-1.0) + math.exp(-3.0)) / 2)
    assert total["ess"] < 0.7 < 0.99 < mean["ess"]
    assert any('reduce="sum"' in each for each in advise(compared([-0.01] * 100, [-0.01] * 300), []))


def test_the_cause_is_what_takes_the_difference_away():
    before = compared([1e-2, -1e-2], [2e-2])
    half, gone = compared([6e-3, -6e-3], [1.2e-2]), compared([1e-6, 0.0], [0.0])
    lost = compared([-math.inf, 0.0], [0.0])
    mean = before.summary()["tokens/mean"]
    rest = [switched("half", half, head="bf16"), switched("lost", lost, top_p=0.5)]
    assert explanation(rest, mean) is None
    assert explanation([*rest, switched("gone", gone, weights="bf16")], mean).name == "gone"
    assert explanation([switched("gone", compared([0.0]), head="bf16")], 0.0) is None
    said = advise(before, [switched("gone", gone, weights="bf16")])
    assert any("with gone, 0.0% of the mean difference is left" in sentence for sentence in said)
    assert any("No single switch explains it" in sentence for sentence in advise(before, rest))


def test_a_report_is_json_also_where_numbers_are_not_finite(tmp_path):
    comparison = compared([-math.inf, 0.1], [0.0])
    samples = Samples(None, [torch.tensor([5, 6]), torch.tensor([7])], comparison.sampling)
    report = make_report(samples, comparison, [], None, {"why": "a test"})
    written, picture = report.write(tmp_path)
    found = json.loads(written.read_text())
    assert found["per_token"]["training"] == [None, pytest.approx(-1.9), -3.0]
    assert found["log_s"] == [None, 0.0] and found["about"] == {"why": "a test"}
    assert [worst["token"] for worst in found["worst"]] == [5, 6]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "impossible to one side: 1" in report.text()


@pytest.mark.parametrize("difference", [0.0, -math.inf])
def test_a_picture_of_nothing(tmp_path, difference):
    """No difference at all, or no token that both sides find possible."""
    comparison = compared([difference])
    switch = switched("head in bf16", comparison, head="bf16")
    samples = Samples(None, [torch.tensor([5])], comparison.sampling)
    make_report(samples, comparison, [switch], None, {}).write(tmp_path)
