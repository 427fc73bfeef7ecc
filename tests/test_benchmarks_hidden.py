"""The benchmark from hidden states: everyone is listed, nobody is timed without a right answer."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))
hidden = importlib.import_module("benchmarks.hidden")
judge = importlib.import_module("benchmarks.judge")
problem = importlib.import_module("benchmarks.problem")

SHAPE = (48, 130, 16)


@pytest.fixture(autouse=True)
def one_thread():
    """Nothing here is worth a second thread, and waiting for one takes seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("situation", problem.SITUATIONS)
def test_the_reference_is_that_of_autograd(situation):
    case = problem.draw(*SHAPE, 8, torch.float32).situation(situation)
    wide = dataclasses.replace(
        case,
        hidden=case.hidden.double(),
        weight=case.weight.double(),
        advantages=case.advantages.double(),
        old_logprobs=None if case.old_logprobs is None else case.old_logprobs.double(),
    )
    exact, autograd = problem.exact(case), problem.plain(wide, "input")
    for name in ("loss", "hidden", "weight"):
        wanted, got = getattr(autograd, name), getattr(exact, name)
        assert (got is None) == (wanted is None) == (situation == "frozen head" and name == "weight")
        if wanted is not None:
            assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_nothing_is_clipped_when_all_are_active():
    case = problem.draw(*SHAPE, 8, torch.bfloat16)
    _, coefficients = problem.exact_losses(case)
    assert bool((coefficients != 0).all())
    assert problem.exact_losses(case.situation("half inactive"))[1].count_nonzero() == SHAPE[0] // 2


def test_command_line(tmp_path, capsys):
    arguments = [
        "--shape",
        *map(str, SHAPE),
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "here" / "times.json"),
    ]
    record = hidden.main(arguments)
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "here" / "times.json").read_text()) == record
    assert {"device", "cpu_capability", "versions", "repeats"} <= set(record)
    assert record["versions"]["torch"] == torch.__version__
    assert [run["dtype"] for run in record["runs"]] == ["fp32", "bf16"]
    for run in record["runs"]:
        assert (run["tokens"], run["vocabulary"], run["width"]) == SHAPE
        expected = {
            (entrant.name, situation)
            for situation in problem.SITUATIONS
            for entrant in hidden.contestants(situation, problem.DTYPES[run["dtype"]])
        }
        listed = {(line["name"], line["situation"]) for line in run["contestants"]}
        floors = {name for name, _ in listed - expected}
        assert listed >= expected
        assert all(name.startswith((hidden.FLOOR, hidden.FRESH)) for name in floors)
        assert len(floors) == (2 if run["dtype"] == "fp32" else 3)
        for line in run["contestants"]:
            assert line["name"] in printed
            must_run = line["name"].startswith(("ours, auto", "ours, two_pass", "naive", hidden.FLOOR))
            assert line["status"] == "right" or (not must_run and line["status"] != "wrong"), line
            assert (len(line["seconds"]) == 2) == (line["status"] == "right")
            assert line["to_floor"] > 0 if line["seconds"] else line["reason"]
            if not line["seconds"]:
                assert f"{line['status']}: {line['reason']}" in printed


def test_every_schedule_and_every_peer_is_asked():
    names = [entrant.name for entrant in hidden.contestants("all active", torch.float32)]
    for schedule in ("auto", *hidden.SCHEDULES):
        assert f"ours, {schedule}, float32 logits" in names
    assert set(hidden.PEERS) <= set(names)
    inactive = [entrant.name for entrant in hidden.contestants("half inactive", torch.bfloat16)]
    for logits in ("float32", "input"):
        assert {f"ours, auto, skip {skip}, {logits} logits" for skip in ("backward", "all")} <= set(inactive)


def test_a_missing_peer_says_why(monkeypatch):
    monkeypatch.setitem(
        hidden.PEERS, "TRL chunked log-probs", lambda: importlib.import_module("not_installed_here")
    )
    missing = next(entrant for entrant in hidden.peers("all active") if entrant.name.startswith("TRL"))
    assert missing.call is None
    assert "not_installed_here" in missing.missing


def spoil(**changes):
    """Plain PyTorch with some results changed."""

    def call(case):
        result = problem.plain(case, "input")
        return dataclasses.replace(result, **{name: f(getattr(result, name)) for name, f in changes.items()})

    return call


WRONG = {
    "gradient off by a thousandth": ("hidden", lambda grad: grad * 1.001),
    "gradient of another sign": ("weight", lambda grad: -grad),
    "no gradient of the weight": ("weight", lambda grad: None),
    "one row lost": ("hidden", lambda grad: grad.index_fill(1, torch.tensor([3]), 0.0)),
    "loss not a number": ("loss", lambda loss: loss * float("nan")),
    "no loss": ("loss", lambda loss: None),
}


def test_a_wrong_contestant_is_refused_its_time(capsys):
    entrants = [judge.Contestant("honest", "all active", "input", spoil())]
    for name, (what, change) in WRONG.items():
        entrants.append(judge.Contestant(name, "all active", "input", spoil(**{what: change})))
    arguments = ["--shape", *map(str, SHAPE), "--repeats", "1", "--dtypes", "fp32", "--contestants"]
    record = hidden.main([*arguments, "honest", *WRONG], extra=entrants)
    lines = {line["name"]: line for line in record["runs"][0]["contestants"]}
    assert set(lines) == {hidden.FLOOR, hidden.FRESH, "honest", *WRONG}
    assert lines["honest"]["status"] == "right"
    printed = capsys.readouterr().out
    for name, (what, _) in WRONG.items():
        assert lines[name]["status"] == "wrong"
        assert lines[name]["seconds"] == []
        assert f"{what} is off by" in lines[name]["reason"]
        assert f"wrong: {lines[name]['reason']}" in printed


def test_unequal_sequences_are_refused():
    with pytest.raises(ValueError, match="equal length"):
        problem.draw(10, 20, 4, 3, torch.float32)


def test_the_slow_are_timed_once():
    outcomes = hidden.run(SHAPE, torch.float32, repeats=3, patience=0.0, wanted=["naive PyTorch"])
    assert {outcome.name for outcome in outcomes} == {
        hidden.FLOOR,
        hidden.FRESH,
        "naive PyTorch, float32 logits",
    }
    assert all(len(outcome.seconds) == 1 for outcome in outcomes)
