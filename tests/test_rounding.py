"""The suite ``rounding``: its numbers against what errors of a known size must give."""

import pytest
import torch

import benchmarks.contestants  # noqa: F401  (registers them)
from benchmarks import fidelity, registry, rounding

OURS, BF16, SOFTMAX = "ours, float32 logits", "ours, 16-bit logits", "bf16 logits and bf16 log-softmax"


@pytest.mark.parametrize("moved", [0.0, 1e-7, 1e-4, -1e-4, 3.5e-4, -2e-3])
def test_flipped_decisions_are_those_between_log_s_and_the_bound(moved):
    """Of values spread evenly over 2e-3, a shift by d carries d / 2e-3 over a bound, if there are so many."""
    low, high = fidelity.BOUNDS
    reach = [abs(moved)] * 2
    if moved > 0:  # of those below the bound, at most the ones down to -1e-3
        reach = [min(moved, high + 1e-3), min(moved, low + 1e-3)]
    elif moved < 0:
        reach = [min(-moved, 1e-3 - high), min(-moved, 1e-3 - low)]
    want = sum(reach) / 2 / 2e-3
    sequences = 200
    got = rounding.flipped(torch.full((sequences,), moved, dtype=torch.float64))
    assert got == pytest.approx(want, abs=4 * (want / (2 * rounding._DRAWS * sequences)) ** 0.5)


def test_lengths_take_stretches():
    errors = torch.cat([torch.full((64,), 5e-4), torch.full((64,), -5e-4), torch.zeros(192)]).double()
    found = rounding.by_length({"one": errors})["one"]
    assert list(found) == [64, 256]
    assert found[64]["sequences"] == 5 and found[256]["sequences"] == 1
    assert found[64]["rms"] == pytest.approx(5e-4 * (2 / 5) ** 0.5) and found[64]["outside"] == 2 / 5
    assert found[256]["rms"] == pytest.approx(0.0, abs=1e-18) and found[256]["outside"] == 0


@pytest.fixture(scope="module", params=["random", "trained"])
def found(request):
    rows = fidelity.pool(4096, 2048, 128)
    if request.param == "trained":
        pytest.importorskip("transformers")
        rows = rounding.trained(4096, 30, torch.device("cpu"))
    errors, missing = rounding.errors(rows, registry.Options(torch.device("cpu"), only=(OURS, BF16)))
    assert missing == {}
    return rounding.by_length(errors)


def test_only_fp32_logits_leave_decisions_alone(found):
    for length, cell in found[OURS].items():
        assert cell["rms"] < 1e-6 and cell["outside"] == 0 and cell["flipped"] < 1e-3, length
    assert found[SOFTMAX][64]["rms"] > found["fp16 logits"][64]["rms"] > 10 * found[OURS][64]["rms"]
    assert found[SOFTMAX][64]["flipped"] > 0.01


def test_hidden_states_are_those_of_the_model():
    pytest.importorskip("transformers")
    rows = rounding.trained(100, 1, torch.device("cpu"))
    hidden, weight = rows.inputs
    assert hidden.shape[:2] == rows.labels.shape == rows.logprobs.shape == (1, 100)
    want = (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, rows.labels[..., None])[..., 0]
    assert torch.equal(want, rows.logprobs)
    assert len(hidden[0].unique(dim=0)) > 50
