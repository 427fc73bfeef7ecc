"""``python -m benchmarks report``: write results to docs/benchmarks.md and the README, and the plots.

In both files the text between two markers is replaced. With ``--results DIR`` the page and the plots of one
run are written to that folder.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity import table
from benchmarks.judging import CLIP_HIGH, CLIP_LOW
from benchmarks.tables import Row, aligned, between, floor_text, markdown, number, shape_text
from gspo_kernels.plots import BLUE, INK, style

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, README = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md", ROOT / "README.md"

TABLES = {
    "Loss and gradient from logits": ("logits",),
    "Loss and gradients from hidden states": ("hidden", "realistic", "scoring", "step"),
    "Larger problems": ("large",),
    "Peak memory": ("memory",),
    "Errors of log s, and flipped clip decisions": ("fidelity",),
    "Kernels and idle gaps": ("profile",),
    "The product with exponentials in its epilogue": ("exponentials",),
    "Products in a fixed order": ("fixed",),
}
"""The tables of a section by title, and the suites of each."""
YARDSTICK = "naive PyTorch"
"""The contestant that others are compared with in a case without bare operations."""
Record = dict[str, Any]
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
TRAINER = ("s per step", "s of rollout", "s of update", "tokens per s", "GiB")
"""What tests/gpu/test_trainer.py measures."""


# --- reading and comparing records


def ratios(case: Record) -> dict[str, dict[str, float]]:
    """Return the median, lowest and highest ratio of each contestant."""
    timed = {result["contestant"]: result for result in case["results"] if result.get("seconds")}
    if case["floor"]["probes"]:
        return {name: result["x_floor"] for name, result in timed.items()}
    if YARDSTICK not in timed:
        return {}
    base = timed[YARDSTICK]["seconds"]["both"]
    found = {}
    for name, result in timed.items():
        # a contestant that was timed once is compared with the yardstick's first round
        pairs = [mine / other for mine, other in zip(result["seconds"]["both"], base, strict=False)]
        found[name] = {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}
    return found


def load(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by suite.

    Raises:
        FileNotFoundError: the folder has no record.
    """
    records = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    found = {record["suite"]: record for record in records if "suite" in record}
    if not found:
        raise FileNotFoundError(f"{folder}: no results of `python -m benchmarks run --out {folder}`")
    return found


def compare(a: Path, b: Path) -> int:
    """Print the differences of two runs' ratios, which depend less on the machine than seconds.

    Two runs agree on a contestant if their spreads (lowest to highest over the rounds) overlap. Return 0 if
    at least one contestant was timed and the runs agree on all that either of them timed, otherwise 1.
    """
    first, second = outcomes(a), outcomes(b)
    rows: list[Row] = [["", "A", "B", "B / A", ""]]
    for label in dict.fromkeys([*first, *second]):
        one, other = first.get(label, "absent"), second.get(label, "absent")
        quotient, word = "", "not compared"
        if isinstance(one, dict) and isinstance(other, dict):
            times = other["median"] / one["median"]
            agrees = one["low"] <= other["high"] and other["low"] <= one["high"]
            quotient, word = number(times), "" if agrees else "slower" if times > 1 else "faster"
        elif isinstance(one, str) and isinstance(other, str):
            continue
        cells = (each if isinstance(each, str) else between(each) for each in (one, other))
        rows.append([label, *cells, quotient, word])
    compared = sum(bool(row[3]) for row in rows[1:])
    overlap = sum(not row[-1] for row in rows[1:])
    print(f"{aligned(rows)}\n\n{compared} ratios are in both runs; the spreads of {overlap} overlap")
    print(f"{len(rows) - 1 - compared} are in one run only")
    return 0 if 0 < overlap == len(rows) - 1 else 1


def outcomes(folder: Path) -> dict[str, dict[str, float] | str]:
    """Return the ratio of each contestant, or its status if it has none, by suite, case and name."""
    found: dict[str, dict[str, float] | str] = {}
    for suite, record in load(folder).items():
        for case in record.get("cases", []):
            known = ratios(case)
            for result in case["results"]:
                name = result["contestant"]
                found[f"{suite}, {case['name']}: {name}"] = known.get(name, result["status"])
    return found


# --- a section per machine


def cases_table(records: Sequence[Record]) -> str:
    """Return a table: a column per case, a row per contestant; a cell has the median time and the peak."""
    cases = [(record["suite"], case) for record in records for case in record["cases"]]
    columns = [_cells(case) for _, case in cases]
    ours = {one["contestant"]: one["ours"] for _, case in cases for one in case["results"]}
    names = dict.fromkeys(name for cells in columns for name in cells)
    floors = [statistics.median(case["floor"]["seconds"] or [0.0]) for _, case in cases]
    first = records[0]["suite"]
    rows: list[Row] = [["", *(case["name"] if suite == first else suite for suite, case in cases)]]
    rows.append(["shape", *(shape_text(case["shape"]) for _, case in cases)])
    if any(floors):
        what = "copy" if first == "logits" else "torch.mm"
        rows.append([f"{what} alone", *(number(1e3 * floor) if floor else "" for floor in floors)])
    for name in sorted(names, key=lambda name: not ours[name]):
        rows.append([name, *(cells.get(name, "") for cells in columns)])
    return markdown(rows)


def _cells(case: Record) -> dict[str, str]:
    """Return ``milliseconds · MiB`` by contestant, without missing contestants; the least values are bold."""
    found: dict[str, list[float]] = {}
    words = {}
    for result in case["results"]:
        name = result["contestant"]
        if _left_out(name) or result["status"] == "missing":
            continue
        if result["status"] == "right":
            times = [1e3 * statistics.median(result["seconds"]["both"])] if result.get("seconds") else []
            peaks = [result["peak_bytes"] / 2**20] if result.get("peak_bytes") is not None else []
            found[name] = [*times, *peaks]
        else:
            words[name] = result["status"]
    length = max(map(len, found.values()), default=0)
    least = [min(values[i] for values in found.values() if len(values) > i) for i in range(length)]

    def text(values: Sequence[float]) -> str:
        pairs = zip(values, least, strict=False)
        return " · ".join(f"**{number(value)}**" if value == low else number(value) for value, low in pairs)

    return {name: text(values) for name, values in found.items()} | words


def _left_out(name: str) -> bool:
    """Return whether tables and plots skip it: the reference, and schedules that ``auto`` selects."""
    return "reference" in name or name in ("ours, aligned", "ours, known", "ours, frozen")


def missing_line(records: Sequence[Record]) -> str:
    """List the contestants that ran in none of the records, with the reasons."""
    results = [result for record in records for case in record.get("cases", []) for result in case["results"]]
    ran = {one["contestant"] for one in results if one["status"] != "missing"}
    by_reason: dict[str, list[str]] = {}
    for name, reason in {one["contestant"]: one["reason"] for one in results}.items():
        if name not in ran:
            by_reason.setdefault(reason, []).append(name)
    listed = [f"`{'`, `'.join(names)}` ({reason})" for reason, names in sorted(by_reason.items())]
    return f"These implementations could not run: {', '.join(listed)}.\n" if listed else ""


def fidelity_text(record: Record) -> str:
    """Return a text with errors of log s and wrong clip decisions by contestant."""
    wrong, sequences = record["in_the_loss"]
    counted = sum(line["sequences"] for line in record["counted"])
    return (
        f"{markdown(table(record))}\n\n{counted:,} sequences; the fused loss decides {wrong} of the "
        f"{sequences} closest wrongly. {record['left_out']} more are too close to a bound for fp32 log-probs."
    )


def campaign_table(folder: Path) -> str:
    """Return a table of a campaign's stages and outcomes, and one of what the tests of the trainer measured;
    empty if the folder holds neither.
    """
    trainer, campaign = (folder / f"{name}.json" for name in ("trainer", "campaign"))
    rows: list[Row] = [["stage", "outcome", "seconds", "tests", "failed", "skipped"]]
    measured: list[Row] = [["trainer", *TRAINER]]
    failures = []
    for stage in json.loads(campaign.read_text())["stages"] if campaign.exists() else []:
        tests = stage["tests"]
        failed = tests["failures"] + tests["errors"] if tests else ""
        counts = (stage["took"], tests.get("tests", ""), failed, tests.get("skipped", ""))
        outcome = ", ".join(text for text in (stage["status"], stage["reason"]) if text)
        rows.append([stage["name"], outcome, *map(str, counts)])
        failures += [f"- {failure}" for failure in stage["failures"]]
    for name, record in json.loads(trainer.read_text()).items() if trainer.exists() else ():
        measured.append([name, *(number(record[key]) for key in TRAINER)])
    tables = [f"{markdown(each)}\n" for each in (rows, measured) if len(each) > 1]
    return "\n".join([*tables[:1], *failures, *tables[1:]])


def section(folder: Path, link: str) -> str:
    """Return the section of a folder of results; ``link`` leads to the folder."""
    records = load(folder)
    first = next(iter(records.values()))
    packages = [name for name in ("torch", "triton", "trl", "liger-kernel") if name in first["versions"]]
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in packages)
    parts = [f"## {first['device']}\n\n{versions}. Files: [{folder.name}]({link}).\n"]
    note = folder / "note.txt"
    parts += [note.read_text()] if note.exists() else []
    parts += [campaign_table(folder)] if campaign_table(folder) else []
    if main_cases(records):
        parts.append(f"![Times relative to the bare operations](benchmarks_{folder.name}.png)\n")
    for title, suites in TABLES.items():
        shown = [records[name] for name in suites if name in records]
        # a contestant may break the device before there is anything to show
        shown = [one for one in shown if "broken" not in one or one.keys() & {"cases", "table"}]
        if not shown:
            continue
        names = ", ".join(f"`{record['suite']}`" for record in shown)
        parts.append(f"### {title}: {names}\n")
        if "fidelity" in suites:
            parts.append(f"![{title}](benchmarks_{folder.name}_fidelity.png)\n\n{fidelity_text(*shown)}\n")
        else:
            parts.append((cases_table(shown) if "cases" in shown[0] else markdown(shown[0]["table"])) + "\n")
    return "\n".join(parts)


def folders() -> list[Path]:
    """Return the committed folders of results, one per machine, GPUs first."""
    found = (path for path in RESULTS.iterdir() if path.is_dir() and any(path.glob("*.json")))
    return sorted(found, key=lambda path: (path.name.startswith("cpu"), path.name))


def on_page(folder: Path) -> bool:
    """Return whether docs/benchmarks.md shows a machine: every GPU, and the README's CPU."""
    return not folder.name.startswith("cpu") or folder.name in README_FOLDERS


def page() -> str:
    """Return docs/benchmarks.md with today's results."""
    every = [record for folder in folders() for record in load(folder).values()]
    sections = [section(each, f"../benchmarks/results/{each.name}") for each in folders() if on_page(each)]
    return replaced(PAGE, "\n".join([missing_line(every), *sections]))


def replaced(path: Path, text: str) -> str:
    """Return a file's content with the text between the markers replaced."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path.name}: no place for the results, {BEGIN.strip()} ... {END.strip()}")
    return before + begin + text + end + after


# --- the README's table

OURS = ("ours, auto", "ours, triton", "ours, cpp")
"""The contestants that are equivalent to a call without options, by task and device."""
README_ROWS = (
    ("from hidden states: ms", "hidden", "all active"),
    ("from logits: ms", "logits", "bf16, all active"),
    ("from hidden states, half of the sequences without gradient: ms", "hidden", "half inactive"),
    ("from hidden states, peak memory: MiB", "memory", "from hidden states"),
    ("a small model's training step: ms", "step", "step"),
)
"""The rows of the README's table: words that end with the unit, suite, case."""
README_FOLDERS = ("nvidia_h200", "cpu_two_cores_amx")
"""The columns of the README's table."""
FIDELITY_FOLDER = "cpu_two_cores_avx2"
"""The machine of the plot in docs/precision.md."""


def readme_cell(case: Record, unit: str) -> str:
    """Return ours, plain PyTorch and the best peer by name, then the dtype; the least value is bold."""

    def value(result: Record) -> float:
        if unit == "MiB":
            return float(result["peak_bytes"]) / 2**20
        return 1e3 * statistics.median(result["seconds"]["both"])

    right = [result for result in case["results"] if result["status"] == "right"]
    known = {result["contestant"]: value(result) for result in right}
    others = {one["contestant"] for one in right if not one["ours"]} - {YARDSTICK}
    ours = next((name for name in OURS if name in known), "")
    best = min(others, key=known.__getitem__, default="")
    shown = [known.get(name) for name in (ours, YARDSTICK, best)]
    least = min((each for each in shown if each is not None), default=None)
    parts = [
        "-" if each is None else f"**{number(each)}**" if each == least else number(each) for each in shown
    ]
    who = best if best.startswith(("naive", "torch ")) else best.partition(" ")[0].rstrip(",")
    return " / ".join(parts) + (f" ({who})" if best else "") + f", {case['shape']['dtype']}"


def readme() -> str:
    """Return the README with the table of today's results: a column per machine, a row per case."""
    columns = [load(RESULTS / name) for name in README_FOLDERS]
    rows: list[Row] = [["forward and backward"]]
    devices, shapes = list[str](), list[str]()
    for each in columns:
        record = next(iter(each.values()))
        rows[0].append(f"{record['device']}{', commit ' * ('commit' in record)}{record.get('commit', '')}")
        devices.append(record["device"].partition(", ")[0])
    for words, suite, name in README_ROWS:
        found = [case for each in columns for case in each[suite]["cases"] if case["name"] == name]
        rows.append([words, *(readme_cell(case, words[-3:].strip(": ")) for case in found)])
        texts = [shape_text(case["shape"]).partition(", ")[2] for case in found]  # cells have the dtype
        shapes.append("; ".join(f"{t} on the {device}" for t, device in zip(texts, devices, strict=True)))
    first, memory = shapes[0], shapes[[row[1] for row in README_ROWS].index("memory")]
    legend = f"The first row is for {first}. Memory was measured with other shapes: {memory}."
    return replaced(README, f"{legend}\n\n{markdown(rows)}\n")


# --- plots

GRAY = "#b9bec6"
MAIN = (
    ("logits", "fp32, all active"), ("logits", "bf16, all active"), ("hidden", "all active"),
    ("hidden", "bf16, large vocabulary"), ("large", "all active, V=151,936"), ("realistic", "realistic"),
    ("step", "step"),
)  # fmt: skip
"""The cases that the bars show."""


def main_cases(records: dict[str, Record]) -> list[tuple[Record, Record]]:
    """Return the records and cases of ``MAIN`` that are there and whose ratios are known."""
    return [
        (records[name], case)
        for name, which in MAIN
        if name in records
        for case in records[name]["cases"]
        if case["name"] == which and ratios(case)
    ]


def _figure(height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plot_bars(records: dict[str, Record], path: Path) -> None:
    """Draw ratios to the matmuls or copies of the main cases (of steps: to naive PyTorch), with spreads."""
    chosen = main_cases(records)
    shown = [{n: ratio for n, ratio in ratios(case).items() if not _left_out(n)} for _, case in chosen]
    counts = [len(found) for found in shown]
    rows = [max(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    figure = _figure(1.0 * len(rows) + 0.27 * sum(rows))
    axes = figure.subplots(len(rows), 2, height_ratios=[r + 2 for r in rows], squeeze=False).flatten()
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    for ax, (record, case), bars in zip(axes, chosen, shown, strict=False):
        found = sorted(bars.items(), key=lambda item: -item[1]["median"])
        ours = {one["contestant"]: one["ours"] for one in case["results"]}
        names, medians = [name for name, _ in found], [ratio["median"] for _, ratio in found]
        errors = [[r["median"] - r["low"] for _, r in found], [r["high"] - r["median"] for _, r in found]]
        ax.barh(names, medians, color=[BLUE if ours[name] else GRAY for name in names], height=0.66)
        ax.errorbar(medians, names, xerr=errors, fmt="none", ecolor=INK, elinewidth=1)
        for name, ratio in found:
            ax.annotate(
                number(ratio["median"]), (ratio["high"], name), (4, 0), textcoords="offset points",
                va="center", fontsize=8.5, color=INK, bbox={"fc": "white", "ec": "none", "pad": 0.8},
            )  # fmt: skip
        floor = floor_text(case["floor"]["probes"]) if case["floor"]["probes"] else YARDSTICK
        shape = shape_text({k: v for k, v in case["shape"].items() if k != "layers"})
        style(ax, f"{record['title']}\n{shape}", f"time / {floor}")
        ax.grid(axis="y", visible=False)
        ax.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        ax.set_xlim(0, 1.12 * max(ratio["high"] for _, ratio in found))
    figure.savefig(path)


def plot_fidelity(record: Record, path: Path) -> None:
    """Draw errors of log s next to the clip range, and wrong clip decisions by distance from a bound."""
    lengths = [int(length) for length in record["log_s"]]
    names = {"ours, 16-bit logits": ("bf16 logits", "#8a9099"), "ours, float32 logits": ("fp32 logits", BLUE)}
    figure = _figure(4.2)
    errors, decisions = figure.subplots(1, 2)
    lines = [*record["below"], *record["counted"]]
    for name, (label, color) in names.items():
        errors.plot(lengths, [one[name] for one in record["log_s"].values()], "o-", color=color, label=label)
        for length, line in zip(lengths, ("-", "--", ":"), strict=True):
            points = [
                ((one["nearest"] * one["farthest"]) ** 0.5, 100 * one["wrong"][name] / one["sequences"])
                for one in lines
                if one["length"] == length and one["sequences"]
            ]
            words = f"{label}, {length} tokens"
            decisions.plot(*zip(*points, strict=True), marker="o", ms=4, ls=line, color=color, label=words)
    for bound, word, place in ((CLIP_HIGH, "above", "bottom"), (CLIP_LOW, "below", "top")):
        errors.axhline(bound, color=INK, linewidth=0.8, linestyle=":")
        errors.annotate(
            f"clip range {word} 1: {bound:.0e}", (lengths[0], bound), (0, 2 if place == "bottom" else -2),
            textcoords="offset points", ha="left", va=place, fontsize=8.5, color=INK,
        )  # fmt: skip
    errors.set_xscale("log", base=2)
    errors.set_yscale("log")
    errors.set_xticks(lengths, [str(length) for length in lengths])
    style(errors, "RMS error of log s, in nats", "tokens in a sequence")
    decisions.set_xscale("log")
    decisions.set_ylim(-2, 60)
    style(decisions, "clip decisions that differ from fp64's, %", "distance of log s from a bound, in nats")
    for ax in (errors, decisions):
        ax.legend(frameon=False, fontsize=8.5, loc="center")
    figure.savefig(path)


def plots(folder: Path, target: Path) -> list[Path]:
    """Draw the plots that ``section`` shows, into the folder ``target``; return their paths."""
    records, drawn = load(folder), []
    if main_cases(records):
        drawn.append(target / f"benchmarks_{folder.name}.png")
        plot_bars(records, drawn[-1])
    if "fidelity" in records:
        drawn.append(target / f"benchmarks_{folder.name}_fidelity.png")
        plot_fidelity(records["fidelity"], drawn[-1])
    return drawn


def main(results: Path | None = None, check: bool = False) -> int:
    """Write page and plots; with ``check``, return 1 if the docs' page or the README's table is stale."""
    if check:
        texts = {PAGE: page(), README: readme()}
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        print(f"stale: {', '.join(stale)}; run `python -m benchmarks report`" if stale else "up to date")
        return 1 if stale else 0
    if results is not None:
        where, records = results / "benchmarks.md", list(load(results).values())
        where.write_text(f"{section(results.resolve(), '.')}\n{missing_line(records)}")
        drawn = plots(results.resolve(), results)  # last, as a rented machine may lack matplotlib
    else:
        where, drawn = PAGE, [PAGE.with_name(f"benchmarks_{FIDELITY_FOLDER}_fidelity.png")]
        plot_fidelity(load(RESULTS / FIDELITY_FOLDER)["fidelity"], drawn[0])
        for folder in filter(on_page, folders()):
            drawn += plots(folder, PAGE.parent)
        PAGE.write_text(page())
        README.write_text(readme())
    print("wrote", *(str(path) for path in (where, *drawn)), sep="\n  ")
    return 0
