"""Plots of result files: ratios with their spreads, growth, and clip decisions."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.compare import YARDSTICK, ratios
from benchmarks.tables import number

INK, GRID, OURS, OTHER = "#30343b", "#e4e6ea", "#2166ac", "#b9bec6"


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _clean(ax: Any, axis: str) -> None:
    ax.grid(color=GRID, linewidth=0.8, axis=axis)
    ax.set_axisbelow(True)
    ax.tick_params(colors=INK, length=0, labelsize=9)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)


def main_cases(records: dict[str, dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The cases that the bars show, by suite and the end of their names."""
    return [
        (records[name], case)
        for name, which in (
            ("logits", "fp32, all active"), ("logits", "bf16, all active"), ("hidden", "all active"),
            ("scoring", "all tokens"), ("realistic", "realistic"), ("step", "step"),
            ("training", "every prompt counts"),
        )
        if name in records
        for case in records[name]["cases"]
        if case["name"].endswith(which)
    ]  # fmt: skip


def plot_bars(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Ratios to the floor (steps: to a yardstick) of the main cases of each suite, with spreads."""
    chosen = main_cases(records)
    shown = [{n: ratio for n, ratio in ratios(case).items() if "reference" not in n} for _, case in chosen]
    counts = [len(found) for found in shown]
    rows = [max(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    figure = _figure(12, 1.0 * len(rows) + 0.27 * sum(rows))
    axes = figure.subplots(len(rows), 2, height_ratios=[r + 2 for r in rows], squeeze=False).flatten()
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    for ax, (record, case), bars in zip(axes, chosen, shown, strict=False):
        found = sorted(bars.items(), key=lambda item: -item[1]["median"])
        mine = {one["contestant"]: one["ours"] for one in case["results"]}
        names = [name for name, _ in found]
        medians = [ratio["median"] for _, ratio in found]
        errors = [[r["median"] - r["low"] for _, r in found], [r["high"] - r["median"] for _, r in found]]
        ax.barh(names, medians, color=[OURS if mine[name] else OTHER for name in names], height=0.66)
        ax.errorbar(medians, names, xerr=errors, fmt="none", ecolor=INK, elinewidth=1)
        for name, ratio in found:
            ax.annotate(
                number(ratio["median"]), (ratio["high"], name), (4, 0), textcoords="offset points",
                va="center", fontsize=8.5, color=INK,
            )  # fmt: skip
        floor = case["floor"]["name"] if case["floor"]["probes"] else case.get("yardstick", YARDSTICK)
        label = f", {case['name'].split(', ')[0]}" if record["suite"] == "training" else ""
        label = f", {case['name'].split(',')[0]}" if record["suite"] == "logits" else label
        ax.set_title(f"{record['title']}{label}", loc="left", fontsize=10.5, color=INK)
        ax.set_xlabel(f"time / {floor}", fontsize=9, color=INK)
        ax.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        ax.set_xlim(0, 1.12 * max(ratio["high"] for _, ratio in found))
        _clean(ax, "x")
    figure.savefig(path)


def plot_scaling(record: dict[str, Any], path: Path) -> None:
    """Time and memory of each sweep."""
    sweeps = list(dict.fromkeys(case["name"].split()[0] for case in record["cases"]))
    figure = _figure(12, 6)
    axes = figure.subplots(2, len(sweeps), squeeze=False)
    for column, sweep in enumerate(sweeps):
        cases = [case for case in record["cases"] if case["name"].startswith(sweep)]
        names = list(dict.fromkeys(one["contestant"] for case in cases for one in case["results"]))
        for row, what in enumerate(("time, ms", "peak memory, MiB")):
            ax = axes[row][column]
            for name in names:
                points = []
                for case in cases:
                    one = next(result for result in case["results"] if result["contestant"] == name)
                    value = (
                        1e3 * statistics.median(one["seconds"]["both"]) if row == 0 and one.get("seconds")
                        else one.get("peak_bytes", 0) / 2**20 if row else 0
                    )  # fmt: skip
                    if value:
                        points.append((int(case["name"].split()[1]), value))
                color = OURS if name.startswith("ours") else "#8a9099"
                ax.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.minorticks_off()
            low, high = ax.get_ylim()
            if high < 10 * low:
                ax.set_ylim(low / 4, high * 4)  # a curve that stays the same should look flat
            ax.set_xlabel(sweep if sweep != "length" else "length (tokens fixed)", fontsize=9, color=INK)
            ax.set_title(what, loc="left", fontsize=10.5, color=INK)
            _clean(ax, "both")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def plot_fidelity(record: dict[str, Any], path: Path, low: float, high: float) -> None:
    """Errors of log s beside the clip range, and clip decisions by their distance from a bound.

    Args:
        record: of the suite ``fidelity``.
        path: of the image.
        low, high: the clip range below and above 1.
    """
    lengths = [int(length) for length in record["log_s"]]
    names = {"ours, 16-bit logits": ("bf16 logits", "#8a9099"), "ours, float32 logits": ("fp32 logits", OURS)}
    figure = _figure(12, 4.2)
    errors, decisions = figure.subplots(1, 2)
    for name, (label, color) in names.items():
        found = [record["log_s"][str(length)][name] for length in lengths]
        errors.plot(lengths, found, marker="o", markersize=5, color=color, label=label)
    for bound, word, place in ((high, "above", "bottom"), (low, "below", "top")):
        errors.axhline(bound, color=INK, linewidth=0.8, linestyle=":")
        errors.annotate(
            f"clip range {word} 1: {bound:.0e}", (lengths[0], bound), (0, 2 if place == "bottom" else -2),
            textcoords="offset points", ha="left", va=place, fontsize=8.5, color=INK,
        )  # fmt: skip
    errors.set_xscale("log", base=2)
    errors.set_yscale("log")
    errors.set_xticks(lengths, [str(length) for length in lengths])
    errors.set_xlabel("tokens in a sequence", fontsize=9, color=INK)
    errors.set_title("RMS error of log s, in nats", loc="left", fontsize=10.5, color=INK)
    for length, style in zip(lengths, ("-", "--", ":"), strict=True):
        lines = [one for one in (*record["below"], *record["counted"]) if one["length"] == length]
        for name, (label, color) in names.items():
            points = [
                ((one["nearest"] * one["farthest"]) ** 0.5, 100 * one["wrong"][name] / one["sequences"])
                for one in lines
            ]
            decisions.plot(
                *zip(*points, strict=True), linestyle=style, marker="o", markersize=4, color=color,
                label=f"{label}, {length} tokens",
            )  # fmt: skip
    decisions.set_xscale("log")
    decisions.set_ylim(-2, 60)
    decisions.set_xlabel("distance of log s from a clip bound, in nats", fontsize=9, color=INK)
    decisions.set_title("clip decisions that differ from fp64's, %", loc="left", fontsize=10.5, color=INK)
    for ax in (errors, decisions):
        _clean(ax, "both")
        ax.legend(frameon=False, fontsize=8.5, loc="center")
    figure.savefig(path)


def plot_rounding(record: dict[str, Any], path: Path, low: float) -> None:
    """RMS of log s and flipped clip decisions against length; a style of line for each source.

    Args:
        record: of the suite ``rounding``.
        path: of the image.
        low: the clip range below 1.
    """
    names = {
        "bf16 logits and bf16 log-softmax": ("bf16 log-softmax", "#c0392b"),
        "ours, 16-bit logits": ("bf16 logits", "#8a9099"),
        "fp16 logits": ("fp16 logits", "#d95f0e"),
        "ours, float32 logits": ("fp32 logits", OURS),
    }
    figure = _figure(12, 4.6)
    axes = figure.subplots(1, 2)
    for (source, paths), style in zip(record["sources"].items(), ("-", "--"), strict=True):
        for name, (label, color) in names.items():
            lengths = [int(length) for length in paths[name]]
            rms = [cell["rms"] for cell in paths[name].values()]
            flipped = [100 * cell["flipped"] for cell in paths[name].values()]
            look = {"linestyle": style, "marker": "o", "markersize": 4, "color": color}
            axes[0].plot(lengths, rms, **look)
            axes[1].plot(lengths, flipped, label=f"{label}, {source.split(',')[0]}", **look)
    axes[0].axhline(low, color=INK, linewidth=0.8, linestyle=":")
    axes[0].annotate(
        f"clip range below 1: {low:.0e}", (lengths[-1], low), (0, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=8.5, color=INK,
    )  # fmt: skip
    axes[0].set_yscale("log")
    axes[0].set_title("RMS of log s with identical weights, in nats", loc="left", fontsize=10.5, color=INK)
    axes[1].set_title("clip decisions that differ from fp64's, %", loc="left", fontsize=10.5, color=INK)
    for ax in axes:
        ax.set_xscale("log", base=4)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.set_xlabel("tokens in a sequence", fontsize=9, color=INK)
        ax.minorticks_off()
        _clean(ax, "both")
    axes[1].legend(frameon=False, fontsize=9, loc="upper right", labelcolor=INK)
    figure.savefig(path)
