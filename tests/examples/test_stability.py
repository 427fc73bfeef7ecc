"""The stability study on a few tokens: all factors run, routing is replayed, the page agrees with results."""

import functools
import json

import pytest
import torch

from examples.stability import __main__ as command
from examples.stability import report, study
from examples.stability.study import Routers, hidden_states, make_model, make_prompts


@pytest.fixture
def few_tokens(monkeypatch):
    for name, value in (("DIGITS", 4), ("PROMPTS", 2), ("GROUP", 4), ("UPDATES", 4)):
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "make_start", functools.cache(make_model))


def test_every_factor_runs_and_is_run_once(few_tokens, monkeypatch, tmp_path):
    alone = {name: values[-1:] for name, values in command.FACTORS.items()} | {"updates": (1,)}
    monkeypatch.setattr(command, "FACTORS", alone)
    monkeypatch.setattr(command, "INTERACTIONS", ({"old": "engine", "updates": 2},))
    monkeypatch.setattr(command, "SMALLER_STEPS", ({"warm_up": 10**6},))
    results = tmp_path / "results.jsonl"
    for part in ("0/2", "1/2", "0/1"):
        command.main(["--results", str(results), "--seeds", "1", "--part", part])
    records = command.read(results)
    assert len(records) == len(list(command.settings(1))) == 2 * (1 + 5 + 1) + 1 + 2
    by_change = {(report.varied(record), record["model"]): record for record in records}
    assert len(by_change) == len(records)
    for record in records:
        assert len(record["reward"]) == study.UPDATES // record["updates"]
        assert all(0 <= reward <= 1 for reward in record["reward"]) and max(record["mismatch"]) > 0
        # Old log-probs that are computed like the new ones equal them exactly.
        assert (max(record["spread"]) > 1e-6) == (record["old"] == "engine")
        assert (max(record["experts_changed"]) > 0) <= (record["model"] == "moe")
    # With an endless warm-up no update moves a ratio.
    assert by_change["warm-up", "dense"]["clipped"] == [0.0] < by_change[report.BASELINE, "dense"]["clipped"]
    assert json.dumps(command.rounded(records[0])) == json.dumps(records[0])
    page = report.renewed("<!-- facts -->\n<!-- end -->\n<!-- runs -->\n<!-- end -->\n", records)
    assert f"{len(records)} runs" in page and page.count("\n| ") == 1 + len(report.by_change(records))
    report.draw(records, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_replayed_experts_are_those_that_were_recorded(few_tokens):
    model, other = make_model("moe", 0), make_model("moe", 1)
    prompts, answers = make_prompts(3, torch.Generator().manual_seed(0))
    routers, others = Routers(model), Routers(other)
    with routers.recorded():
        expected = hidden_states(model, prompts, answers)
    choices = routers.choices
    with routers.replaying(choices):
        torch.testing.assert_close(hidden_states(model, prompts, answers), expected)
    with others.replaying(choices), others.recorded():
        hidden_states(other, prompts, answers)
    with others.recorded():
        hidden_states(other, prompts, answers)
    assert any((a != b).any() for a, b in zip(others.choices, choices, strict=True))


def test_numbers_of_the_report():
    """For one degree of freedom t = 12.71; the standard deviation of 0.1 and 0.3 is 0.2 / sqrt(2)."""
    assert report.collapsed([0.2, 0.8, 0.3]) and not report.collapsed([0.2, 0.8, 0.3, 0.5])
    baseline = {("dense", seed): {"reward": float(seed)} for seed in range(5)}
    runs = {("dense", seed): {"reward": seed + 0.1 * seed} for seed in (1, 3)} | {("moe", 1): {"reward": 9.0}}
    differences = report.against_baseline(runs, baseline)
    assert differences == {("dense", 1): pytest.approx(0.1), ("dense", 3): pytest.approx(0.3)}
    assert report.interval(list(differences.values())) == (pytest.approx(0.2), pytest.approx(12.71 * 0.1))
    assert report.interval([0.5]) == (0.5, None)


def test_the_page_says_what_the_results_say():
    text = (report.DOCS / "stability.md").read_text()
    records = command.read(command.HERE / "results.jsonl")
    assert report.renewed(text, records) == text, "run `python -m examples.stability --report`"
