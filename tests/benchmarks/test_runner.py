"""The command line: running, comparing and reporting."""

import copy
import json
import shutil

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import compare, report, suites
from benchmarks.registry import contestant, suite
from benchmarks.tables import number, shape_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the results of a small run."""
    out = tmp_path_factory.mktemp("results")
    chosen = ["ours, auto", "ours, cpp", "ours, two_pass", "naive PyTorch", "CCE, unfiltered"]
    cases = ["all active", "half inactive", "tiny", "bf16, large"]
    options = ["--size", "tiny", "--repeats", "3", "--no-memory", "--contestants", *chosen, "--cases", *cases]
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
        assert case["floor"]["probes"] == suites.PRODUCTS
        for result in case["results"]:
            timed, ratio = result["status"] == "right", result.get("x_floor")
            assert timed == ("seconds" in result) and timed == (not result["reason"])
            assert not timed or {len(values) for values in result["seconds"].values()} == {3}
            assert not timed or ratio["low"] <= ratio["median"] <= ratio["high"]
        names = {result["contestant"]: result["status"] for result in case["results"]}
        assert names["naive PyTorch"] == names["ours, auto"] == "right"
    missing = {one["contestant"]: one for one in record["cases"][0]["results"]}["CCE, unfiltered"]
    assert missing["status"] == "missing" and "cut_cross_entropy" in missing["reason"]


def test_wrong_calls_say_so(capsys):
    for command in (["run", "logits"], ["campaign", "--out", "nowhere"]):
        if not torch.cuda.is_available():
            assert command_line.main([*command, "--device", "cuda"]) == 2
            assert "no CUDA device" in capsys.readouterr().err
    for register, message in (
        (contestant("naive PyTorch", "hidden"), "registered before"),
        (contestant("new", "no such task"), "no task"),
        (suite("logits", "again"), "registered before"),
    ):
        with pytest.raises(ValueError, match=message):
            register(lambda device: None)


# --- comparing


def altered(folder, target, name, factor):
    """Write results in which the first case's ratio of one contestant is multiplied by ``factor``."""
    record = hidden_of(folder)
    for result in record["cases"][0]["results"]:
        if result["contestant"] == name:
            result["x_floor"] = {key: value * factor for key, value in result["x_floor"].items()}
    (target / "hidden.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("factor", "word"), ((1.0, ""), (1000.0, "slower"), (0.001, "faster")))
def test_what_changed_is_named(folder, tmp_path, factor, word, capsys):
    assert compare.main(tmp_path, folder) == 2
    assert "no results" in capsys.readouterr().out
    altered(folder, tmp_path, "ours, auto", factor)
    assert compare.main(folder, tmp_path) == (1 if word else 0)
    found = [line for line in capsys.readouterr().out.splitlines() if line.endswith(("slower", "faster"))]
    assert len(found) == bool(word)
    assert all(line.startswith("hidden, all active: ours, auto") and line.endswith(word) for line in found)


def test_without_a_floor_ratios_are_to_naive_pytorch(folder):
    case = copy.deepcopy(hidden_of(folder)["cases"][0])
    case["floor"]["probes"] = {}
    found = compare.ratios(case)
    assert found["naive PyTorch"] == {"median": 1, "low": 1, "high": 1}
    times = {one["contestant"]: one["seconds"]["both"] for one in case["results"] if "seconds" in one}
    pairs = sorted(a / b for a, b in zip(times["ours, auto"], times["naive PyTorch"], strict=True))
    assert found["ours, auto"] == pytest.approx(dict(zip(("low", "median", "high"), pairs, strict=True)))


@pytest.mark.parametrize(
    ("status", "name", "factor", "wrong"),
    [
        ("done", "ours, auto", 1.0, None), ("done", "ours, auto", 0.001, None),
        ("done", "ours, auto", 1000.0, "times as slow as before"),
        ("done", "naive PyTorch", 1000.0, None), ("failed", "ours, auto", 1.0, "the reason"),
    ],
)  # fmt: skip
def test_a_campaign_is_judged_by_its_stages_and_by_our_times(
    folder, tmp_path, status, name, factor, wrong, capsys
):
    altered(folder, tmp_path, name, factor)
    stages = [{"name": "hidden", "status": status, "reason": "the reason"}]
    (tmp_path / "campaign.json").write_text(json.dumps({"stages": stages}))
    command = ["verdict", str(tmp_path), "--last", str(folder)]
    assert command_line.main(command) == (0 if wrong is None else 1)
    printed = capsys.readouterr().out
    assert "nothing of ours is slower" in printed if wrong is None else wrong in printed
    if status == "done":
        assert compare.verdict(tmp_path, None) == 0
    assert compare.verdict(tmp_path / "nowhere", None) == 2 and "nowhere" in capsys.readouterr().err


# --- reporting


def test_the_page_is_up_to_date():
    assert command_line.main(["report", "--check"]) == 0, "run `python -m benchmarks report`"
    for folder in report.folders():
        assert report.PAGE.with_name(f"benchmarks_{folder.name}.png").exists()
        assert not any("unfinished" in record for record in compare.load(folder).values())


def result(name, seconds, mebibytes=None, status="right"):
    about = {"contestant": name, "ours": name.startswith("ours"), "status": status, "reason": ""}
    peak = {} if mebibytes is None else {"peak_bytes": mebibytes * 2**20}
    return {**about, "seconds": {"both": seconds}, **peak}


def test_a_table_has_the_least_of_each_column_in_bold():
    shape = {"dtype": "fp32", "sequences": 2, "length": 3, "V": 4000}
    results = [result("naive", [0.002, 0.001, 0.009], 7), result("ours, auto", [0.003], 5)]
    results += [result("TRL", [0.1], status="wrong"), result("CCE", [0.1], status="missing")]
    floor = {"probes": {"copy": 1.0}, "seconds": [0.0005]}
    cases = [{"name": "one", "shape": shape, "floor": floor, "results": results}]
    assert report.cases_table([{"suite": "hidden", "cases": cases}]).splitlines() == [
        "|  | one |", "|---|---:|", "| shape | fp32, 2 x 3 tokens, V=4,000 |", "| floor | 0.5 |",
        "| ours, auto | 3 · **5** |", "| naive | **2** · 7 |", "| TRL | wrong |",
    ]  # fmt: skip


def test_the_readmes_table_has_a_column_per_machine(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "hidden.json").write_text(json.dumps({**hidden_of(folder), "device": "another machine"}))
    (other / "logits.json").unlink()
    _, _, header, _, *lines = report.readme_table([folder, other]).splitlines()
    assert header.endswith("| another machine |")
    cells = {row[0]: row[1:] for row in (line.strip("|").split("|") for line in lines)}
    assert all(a == b and a.count(" / ") == 2 for name, (a, b) in cells.items() if "hidden" in name)
    assert [not b.strip() for name, (_, b) in cells.items() if "logits" in name] == [True, True]


def test_a_cell_of_the_readme():
    others = [result("TRL chunked log-probs", [3e-3]), result("CCE", [1e-3], status="wrong")]
    for mine, theirs, wanted in ((1.0, 2.0, "**1** / 2 / 3 (TRL)"), (3.5, 2.0, "3.5 / **2** / 3 (TRL)")):
        first = [result("ours, auto", [mine / 1e3]), result("naive PyTorch", [theirs / 1e3])]
        assert report.readme_cell({"results": first + others}, "ms") == wanted


def test_a_report_on_a_run(folder):
    assert command_line.main(["report", "--results", str(folder)]) == 0
    text = (folder / "benchmarks.md").read_text()
    assert "| all active | half inactive | bf16, large vocabulary | tiny |" in text
    assert "`CCE, unfiltered` (cut_cross_entropy is not installed)" in text
    assert (folder / f"benchmarks_{folder.name}.png").stat().st_size > 10_000


def test_numbers():
    values = {0.012345: "0.0123", 1.0: "1", 1234.5: "1,230", 12: "12", 2e-8: "2.0e-08", None: "", 0.0: "0"}
    assert {value: number(value) for value in values} == values
    assert shape_text({"dtype": "bf16", "V": 1000, "layers": 2}) == "bf16, V=1,000, layers=2"
