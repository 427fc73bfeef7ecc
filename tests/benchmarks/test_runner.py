"""The command line, comparing and reporting."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import compare, front_page, report, suites, traffic, verdict
from benchmarks.registry import CONTESTANTS, SUITES, contestant, suite
from benchmarks.rows import padded
from benchmarks.tables import number
from gspo_kernels.linear.schedule import SCHEDULES

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A rehearsal's results."""
    out = tmp_path_factory.mktemp("results")
    chosen = ["ours, auto", "ours, cpp", "ours, triton", "ours, two_pass", "naive PyTorch", "CCE, unfiltered"]
    options = ["--size", "tiny", "--repeats", "3", "--no-memory", "--contestants", *chosen]
    assert command_line.main(["run", "logits", "hidden", *options, "--out", str(out)]) == 0
    return out


def test_a_run_writes_what_was_found(folder):
    record = json.loads((folder / "hidden.json").read_text())
    assert {"device", "type", "versions", "title", "size", "wall_seconds"} <= set(record)
    assert record["versions"]["torch"] == torch.__version__
    assert [case["name"] for case in record["cases"]] == [
        "all active", "batch-invariant", "half inactive", "frozen head", "on-policy",
        "bf16, large vocabulary", "tiny",
    ]  # fmt: skip
    for case in record["cases"]:
        assert case["shape"]["V"] and len(case["floor"]["seconds"]) == case["repeats"] == 3
        assert set(case["rates"]) == {f"gemm_rate {name}" for name in suites.PRODUCTS}
        for result in case["results"]:
            timed = result["status"] == "right"
            assert timed == ("seconds" in result) and timed == (not result["reason"])
            if timed:
                assert {len(values) for values in result["seconds"].values()} == {3}
                assert result["x_floor"]["low"] <= result["x_floor"]["median"] <= result["x_floor"]["high"]
        names = {result["contestant"]: result["status"] for result in case["results"]}
        assert names["naive PyTorch"] == names["ours, auto"] == "right"
    missing = {one["contestant"]: one for one in record["cases"][0]["results"]}["CCE, unfiltered"]
    assert missing["status"] == "missing" and "cut_cross_entropy" in missing["reason"]


def test_rows_of_a_backbone_are_judged_by_padding(tmp_path, monkeypatch):
    def off(device):
        return lambda rows: 1.001 * padded(rows)

    name = "packed, mask by transformers"
    monkeypatch.setitem(CONTESTANTS, name, dataclasses.replace(CONTESTANTS[name], load=off))
    options = ["--size", "tiny", "--repeats", "1", "--no-memory", "--out", str(tmp_path)]
    assert command_line.main(["run", "rows", *options]) == 0
    for case in json.loads((tmp_path / "rows.json").read_text())["cases"]:
        found = {result["contestant"]: result for result in case["results"]}
        assert "gradients is off" in found.pop(name)["reason"]
        assert {one["status"] for one in found.values()} == {"right"} and len(found) == 3
        assert compare.ratios(case)["padded rows"]["median"] == 1.0
    assert "x padded rows" in report.section(tmp_path, ".")


def test_a_suite_without_cases_has_its_table_in_the_report(tmp_path):
    record = {"suite": "tuning", "table": [["kernel", "ms"], ["fold", "1.5"]], "versions": {}, "device": "it"}
    (tmp_path / "tuning.json").write_text(json.dumps(record))
    assert "| fold | 1.5 |" in report.section(tmp_path, ".")


def test_unknown_suites_are_refused(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["run", "no such suite"])
    assert "no such suite" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("command", (["run", "logits"], ["campaign", "--out", "nowhere"]))
def test_without_a_gpu_it_says_so(command, capsys):
    assert command_line.main([*command, "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_names_are_registered_once():
    with pytest.raises(ValueError, match="registered before"):
        contestant("naive PyTorch", "hidden")(lambda device: None)
    with pytest.raises(ValueError, match="no task"):
        contestant("new", "no such task")(lambda device: None)
    with pytest.raises(ValueError, match="registered before"):
        suite("logits", "again")(lambda options: {})
    for name in (
        "logits",
        "hidden",
        "scoring",
        "fidelity",
        "rounding",
        "memory",
        "traffic",
        "realistic",
        "step",
        "scaling",
    ):
        assert SUITES[name].everything
    assert {f"ours, {schedule}" for schedule in SCHEDULES} <= CONTESTANTS.keys()


def test_the_listing_names_everyone():
    text = command_line.listing()
    assert all(name in text for name in [*CONTESTANTS, *SUITES])


# --- comparing


def altered(folder, tmp_path, factor):
    """The results with our times in one case changed."""
    record = json.loads((folder / "hidden.json").read_text())
    ratio = record["cases"][0]["results"][0]["x_floor"]
    ratio.update({key: value * factor for key, value in ratio.items()})
    (tmp_path / "hidden.json").write_text(json.dumps(record))
    return record["cases"][0]["results"][0]["contestant"]


def test_a_run_agrees_with_itself(folder, capsys):
    assert compare.main(folder, folder) == 0
    assert "slower" not in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "word"), ((1000.0, "slower"), (0.001, "faster")))
def test_what_changed_is_named(folder, tmp_path, factor, word, capsys):
    name = altered(folder, tmp_path, factor)
    assert compare.main(folder, tmp_path) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.endswith(word)]
    assert name in line and line.startswith("hidden, all active")


def test_nothing_to_compare(tmp_path, capsys):
    assert compare.main(tmp_path, tmp_path) == 2
    assert "no results" in capsys.readouterr().out


def test_without_a_floor_ratios_are_to_naive_pytorch(folder):
    case = copy.deepcopy(json.loads((folder / "hidden.json").read_text())["cases"][0])
    case["floor"]["probes"] = {}
    found = compare.ratios(case)
    assert found["naive PyTorch"] == {"median": 1, "low": 1, "high": 1}
    times = {one["contestant"]: one["seconds"]["both"] for one in case["results"] if "seconds" in one}
    pairs = sorted(a / b for a, b in zip(times["ours, auto"], times["naive PyTorch"], strict=True))
    assert found["ours, auto"] == pytest.approx(dict(zip(("low", "median", "high"), pairs, strict=True)))


def stage(folder, status):
    stages = [{"name": "hidden", "status": status, "reason": "the reason"}]
    (folder / "campaign.json").write_text(json.dumps({"stages": stages}))


@pytest.mark.parametrize(
    ("status", "factor", "wrong"),
    [
        ("done", 1.0, None),
        ("done", 0.001, None),
        ("done", 1000.0, "times its"),
        ("failed", 1.0, "the reason"),
    ],
    ids=["the same", "faster", "slower", "a failed stage"],
)
def test_a_campaign_is_judged_by_its_stages_and_by_what_of_ours_is_slower(
    folder, tmp_path, status, factor, wrong, capsys
):
    name = altered(folder, tmp_path, factor)
    assert CONTESTANTS[name].ours
    stage(tmp_path, status)
    command = ["verdict", str(tmp_path), "--last", str(folder)]
    assert command_line.main(command) == (0 if wrong is None else 1)
    said = capsys.readouterr().out
    assert "nothing of ours is slower" in said if wrong is None else wrong in said


def test_others_may_become_slower(folder, tmp_path):
    record = json.loads((folder / "hidden.json").read_text())
    for one in record["cases"][0]["results"]:
        if one["contestant"] == "naive PyTorch":
            one["x_floor"] = {key: value * 1000 for key, value in one["x_floor"].items()}
    (tmp_path / "hidden.json").write_text(json.dumps(record))
    stage(tmp_path, "done")
    assert compare.main(folder, tmp_path) == 1 and verdict.main(tmp_path, folder) == 0


def test_a_first_campaign_has_nothing_to_be_compared_with(tmp_path, capsys):
    stage(tmp_path, "done")
    assert verdict.main(tmp_path, None) == 0
    assert verdict.main(tmp_path, tmp_path) == 2
    assert verdict.main(tmp_path / "nowhere", None) == 2
    assert "no results" in capsys.readouterr().err


# --- reporting


def test_the_page_is_up_to_date():
    assert command_line.main(["report", "--check"]) == 0, "run `python -m benchmarks report`"
    for folder in report.folders():
        assert report.PAGE.with_name(f"benchmarks_{folder.name}.png").exists()
        assert not any("unfinished" in record for record in compare.load(folder).values())


def test_the_page_names_where_others_win():
    def result(name, milliseconds):
        seconds = {"both": [ms / 1e3 for ms in milliseconds]}
        return {"contestant": name, "ours": name.startswith("ours"), "seconds": seconds}

    results = [
        result("ours, auto", (5.0, 5.2, 9.0)),
        result("ours, aligned", (4.0, 4.1, 4.2)),
        result("fast", (3.9, 3.9, 20.0)),
        result("slow", (1.0, 4.3, 4.4)),
        {"contestant": "absent", "ours": False},
    ]
    alone = {"name": "alone", "results": results[2:]}
    record = {"cases": [{"name": "small", "results": results}, alone]}
    assert report.wins({"hidden": record}) == ["- fast in hidden, small: 3.9 ms, our best 4.1 ms"]


def test_the_readmes_table_has_a_column_per_machine(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    record = json.loads((other / "hidden.json").read_text())
    record["device"] = "another machine"
    (other / "hidden.json").write_text(json.dumps(record))
    (other / "logits.json").unlink()
    header, _, *lines = front_page.table([folder, other]).splitlines()
    assert header.endswith("| another machine |")
    cells = {
        name: (a, b) for name, a, b in (line.strip("| ").split(" | ") for line in lines if "hidden" in line)
    }
    assert cells and all(a == b and a.count(" / ") == 2 for a, b in cells.values())
    assert all(line.endswith("| not run |") for line in lines if "from logits" in line)


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"), ((1.0, 2.0, "**1** / 2 / 3 (TRL)"), (3.5, 2.0, "3.5 / **2** / 3 (TRL)"))
)
def test_a_cell_sets_the_least_in_bold(mine, theirs, wanted):
    def one(name, seconds, ours=False):
        return {"contestant": name, "ours": ours, "status": "right", "seconds": {"both": [seconds]}}

    others = [one("TRL chunked log-probs", 3.0), one("Liger", 4.0), {**one("CCE", 1.0), "status": "wrong"}]
    case = {"results": [one("ours, auto", mine, True), one("naive PyTorch", theirs), *others]}
    assert front_page.cell(case, "s") == wanted


def test_a_report_on_a_run(folder, capsys):
    assert command_line.main(["report", "--results", str(folder)]) == 0
    text = (folder / "benchmarks.md").read_text()
    for case in ("all active", "batch-invariant", "half inactive", "tiny"):
        assert f"**{case}: " in text
    assert "Missing: CCE, unfiltered (cut_cross_entropy is not installed)" in text
    assert (folder / f"benchmarks_{folder.name}.png").stat().st_size > 10_000


def test_numbers():
    values = {0.012345: "0.0123", 1.0: "1", 1234.5: "1,230", 12: "12", 2e-8: "2.0e-08", None: "", 0.0: "0"}
    assert {value: number(value) for value in values} == values


def test_slopes_are_those_of_growth():
    def case(n, seconds, peak):
        result = {"contestant": "it", "seconds": {"both": [seconds]}, "peak_bytes": peak}
        return {"name": f"tokens {n}", "results": [result]}

    found = suites.slopes([case(n, 1e-3 * n**2 + (n < 100), 7 * n) for n in (10, 100, 1000, 10000)])
    assert found == {"tokens": {"it": pytest.approx({"time": 2.0, "memory": 1.0})}}


# --- traffic


def test_traffic_of_plain_operators():
    """exp reads and writes, gather touches an element per row, a view nothing."""
    x = torch.randn(4, 1000)
    index = torch.zeros(4, 1, dtype=torch.int64)
    with traffic.Operators(2000) as operators:
        x.exp()
    assert operators.bytes == 2 * 4 * x.numel()
    with traffic.Operators(2000) as operators:
        x.view(2, 2000).gather(1, index[:2])
    assert operators.bytes == 0
