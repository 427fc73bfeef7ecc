"""bf16 models: log s is exact to 1e-6, and clip decisions are those of fp64. The benchmark measures more."""

import pytest
import torch

from benchmarks import fidelity, measure

NAIVE = "naive PyTorch"


@pytest.fixture(scope="module")
def report():
    paths = (fidelity.OURS, "ours, 16-bit logits", NAIVE)
    options = measure.Options(torch.device("cpu"), only=paths)
    return fidelity.run(options, rows=1024, vocabulary=4096, width=128, sequences=3000)


def test_error_of_log_s(report):
    for errors in report["log_s"].values():
        assert errors[fidelity.OURS] <= 1e-6
        # errors that the default avoids; if they were small, too, the measurement would show nothing
        assert errors[NAIVE] > 1e-4 and errors["ours, 16-bit logits"] > 1e-4


def test_clip_decisions_are_equal(report):
    sequences = sum(line["sequences"] for line in report["counted"])
    assert sequences > 0.99 * 3000 and report["left_out"] < 0.01 * sequences
    assert report["resolution"] <= 1e-6
    for line in report["counted"]:
        assert line["sequences"] >= 250
        assert line["wrong"][fidelity.OURS] == 0
    assert sum(line["wrong"][NAIVE] for line in report["counted"]) > 0.1 * sequences
    assert report["in_the_loss"] == (0, 256)  # the fused loss decides like fp64


@pytest.mark.parametrize("length", (5, 64))
def test_measured_errors_equal_planted_ones(length):
    rows = fidelity.pool(64, 50, 8)
    drawn = fidelity.draw(rows, 400, length, 1e-6, 1e-5, 3)
    assert 0.2 < drawn.clipped.double().mean() < 0.8
    stored = rows.logprobs[0].float()
    # fp32 copies of the truth never decide wrongly where a sequence counts; 2e-5 more always crosses a bound
    assert not (fidelity.wrong(stored, drawn) & drawn.counts).any()
    off = fidelity.wrong(stored + 2e-5, drawn)
    assert torch.equal(off, drawn.clipped == (drawn.advantages < 0))
