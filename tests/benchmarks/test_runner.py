"""The command line: running, comparing and reporting."""

import json
import shutil
import sys

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import hidden, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the results of a small run."""
    out = tmp_path_factory.mktemp("results")
    chosen = ["ours, auto", "ours, cpp", "ours, two_pass", "naive PyTorch", "CCE, unfiltered"]
    cases = ["all active", "half inactive"]
    options = ["--size", "tiny", "--repeats", "3", "--contestants", *chosen, "--cases", *cases]
    assert command_line.main(["run", "logits", "hidden", *options, "--out", str(out)]) == 0
    return out


def hidden_of(folder):
    return json.loads((folder / "hidden.json").read_text())


def test_a_run_writes_its_results(folder):
    record = hidden_of(folder)
    assert {"device", "type", "title", "size", "wall_seconds"} <= set(record)
    assert record["versions"]["torch"] == torch.__version__
    for case in record["cases"]:
        assert case["shape"]["V"] and len(case["floor"]["seconds"]) == case["repeats"] == 3
        assert case["floor"]["probes"] == hidden.PRODUCTS
        for result in case["results"]:
            timed, ratio = result["status"] == "right", result.get("x_floor")
            assert timed == ("seconds" in result) and timed == (not result["reason"])
            assert not timed or {len(values) for values in result["seconds"].values()} == {3}
            assert not timed or ratio["low"] <= ratio["median"] <= ratio["high"]
        names = {result["contestant"]: result["status"] for result in case["results"]}
        assert names["naive PyTorch"] == names["ours, auto"] == "right"
    missing = {one["contestant"]: one for one in record["cases"][0]["results"]}["CCE, unfiltered"]
    assert missing["status"] == "missing" and "cut_cross_entropy" in missing["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", (["run", "logits"], ["campaign", "--out", "nowhere"]))
def test_a_missing_device_is_named(command, capsys):
    assert command_line.main([*command, "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# --- comparing


def compared(folder, hidden, other):
    """Compare a folder with a copy that has a different record of the suite "hidden"."""
    shutil.copy(folder / "logits.json", other)
    (other / "hidden.json").write_text(json.dumps(hidden))
    return report.compare(folder, other)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda case, one: (one.update(status="wrong"), one.pop("x_floor"), one.pop("seconds")), "wrong"),
        (lambda case, one: case["results"].remove(one), "absent"),
        (lambda case, one: case.update(name="another"), "absent"),
    ],
    ids=["wrong", "gone", "another case"],
)
def test_contestants_of_one_run_are_unmatched(folder, tmp_path, change, seen, capsys):
    record = hidden_of(folder)
    case = record["cases"][0]
    change(case, next(one for one in case["results"] if one["contestant"] == "ours, auto"))
    assert compared(folder, record, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    found = next(line for line in lines if line.startswith("hidden, all active: ours, auto"))
    assert seen in found and found.endswith("not compared")
    assert compared(folder, hidden_of(folder) | {"cases": []}, tmp_path) == 1


@pytest.mark.parametrize(("factor", "word"), ((1.0, ""), (1000.0, "slower"), (0.001, "faster")))
def test_changes_are_named(folder, tmp_path, factor, word, capsys):
    record = hidden_of(folder)
    result = next(one for one in record["cases"][0]["results"] if one["contestant"] == "ours, auto")
    result["x_floor"] = {key: value * factor for key, value in result["x_floor"].items()}
    assert compared(folder, record, tmp_path) == (1 if word else 0)
    found = [line for line in capsys.readouterr().out.splitlines() if line.endswith(("slower", "faster"))]
    assert len(found) == bool(word)
    assert all(line.startswith("hidden, all active: ours, auto") and line.endswith(word) for line in found)


def test_without_a_floor_ratios_are_to_naive_pytorch():
    times = {"naive PyTorch": [2.0, 4.0], "ours, auto": [1.0, 1.0]}
    results = [{"contestant": name, "seconds": {"both": both}} for name, both in times.items()]
    found = report.ratios({"floor": {"probes": {}}, "results": results})
    assert found["ours, auto"] == {"median": 0.375, "low": 0.25, "high": 0.5}


# --- reporting


def test_the_page_is_up_to_date():
    """All tables of the page and of the README are what the committed results of four machines give."""
    assert command_line.main(["report", "--check"]) == 0, "run `python -m benchmarks report`"


def test_a_report_on_nothing_says_so(tmp_path, capsys):
    assert command_line.main(["report", "--results", str(tmp_path)]) == 2
    assert f"{tmp_path}: no results of" in capsys.readouterr().err


def test_a_report_on_a_run(folder, monkeypatch):
    """The text is there without matplotlib, too."""
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="matplotlib"):
        patch.setitem(sys.modules, "matplotlib.figure", None)
        command_line.main(["report", "--results", str(folder)])
    first = (folder / "benchmarks.md").read_text()
    assert command_line.main(["report", "--results", str(folder)]) == 0
    assert first == (folder / "benchmarks.md").read_text() and "| all active | half inactive |" in first
    assert "`CCE, unfiltered` (cut_cross_entropy is not installed)" in first
    assert (folder / f"benchmarks_{folder.name}.png").stat().st_size > 10_000
