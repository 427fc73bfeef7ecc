"""The picture of a run: what it learned, whether its updates were sound, and where its time went."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.run.metrics import Record

INK, GRID = "#30343b", "#e4e6ea"
BLUE, ORANGE = "#2166ac", "#d95f0e"
COLUMNS = 3

Lines = dict[str, str | None]
"""What a panel draws: by metric its label."""


def plot_progress(records: Sequence[Record], path: Path) -> None:
    """Draw the metrics of a run into a PNG file; what was not measured gets no panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(records)
    rows = max(-(-len(shown) // COLUMNS), 1)
    height = 3.4 * rows
    figure = Figure(figsize=(15, height), dpi=110, facecolor="white")
    # Automatic layouts draw all text once more, which takes longer than the rest.
    figure.subplots_adjust(0.05, 0.6 / height, 0.985, 1 - 0.4 / height, wspace=0.22, hspace=0.42)
    FigureCanvasAgg(figure)
    last = records[-1]["step"] if records else 0
    axes = figure.subplots(rows, min(COLUMNS, max(len(shown), 1)), squeeze=False).flatten()
    for ax, (title, draw) in zip(axes, shown, strict=False):
        ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8, y=1.0)
        draw(ax)
        for number, step in enumerate(r["step"] for r in records if r.get("phase") == 1.0):
            label = "steps of DPO" if ax is axes[0] and number == 0 else None
            ax.axvspan(step - 0.5, step + 0.5, color=GRID, alpha=0.6, linewidth=0, zorder=0, label=label)
        ax.set_xlim(0, max(last, 1))
        ax.set_xlabel("step", color=INK)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=INK, length=0)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    if not shown:
        axes[0].text(0.5, 0.5, "no step was taken", transform=axes[0].transAxes, ha="center", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smoothed(values: Sequence[float | None], width: int) -> list[float]:
    """Return the mean over the last ``width`` values that are there, NaN before the first."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else float("nan"))
    return means


def panels(records: Sequence[Record]) -> list[tuple[str, Callable[[Any], None]]]:
    """Return the title of every panel that has something to show, and what draws it."""
    records = [record | _derived(record) for record in records]
    steps = [record for record in records if "reward/mean" in record]
    dpo = [record for record in records if record.get("phase") == 1.0]
    timed = [record for record in records if "seconds/update" in record]
    evaluations = [record for record in records if "eval/greedy_accuracy" in record]
    to_reference = any(record.get("kl/ref") is not None for record in steps)
    kl, whose = ("kl/ref", "reference") if to_reference else ("kl/old", "policy that sampled")
    ratios: Lines = {"ratio/max": "largest", "ratio/min": "smallest"}
    mismatch: Lines = {"mismatch/mean": "mean", "mismatch/max": "largest"}
    shares: Lines = {
        "groups_without_variance": "groups without variance",
        "completions/truncated": "truncated completions",
    }
    candidates: list[tuple[str, Sequence[Record], Lines, str]] = [
        ("Mean reward of the rollouts", steps, _rewards(steps), ""),
        ("Accuracy on held-out prompts", evaluations, _accuracies(evaluations), "share"),
        ("Shares of a rollout", steps, shares, "share"),
        ("Clipped share by minibatch", steps, _clipped(steps), "share"),
        ("Largest and smallest ratio of a step", steps, ratios, ""),
        (f"KL to the {whose}, nats per token", steps, {kl: None}, ""),
        ("Entropy, nats per token", steps, {"entropy": None}, ""),
        ("Tokens per completion", steps, {"completions/length": None}, "zero"),
        ("Gradient norm before clipping", steps, {"grad_norm": None}, "zero"),
        ("Sampling against training, nats per token", steps, mismatch, "log"),
        ("DPO's loss", dpo, {"loss": "0.693: no preference"}, ""),
        ("Completion tokens per second", steps, {"tokens_per_second": None}, "zero"),
        ("Seconds per step", timed, {"seconds/rollout": "rollout", "seconds/update": "update"}, "zero"),
    ]
    return [
        (title, partial(_draw, records=chosen, lines=lines, scale=scale))
        for title, chosen, lines, scale in candidates
        if any(record.get(key) is not None for record in chosen for key in lines)
    ]


def _derived(record: Record) -> Record:
    """Return what is drawn of a record and not in it: truncated completions, clipped shares of both sides."""
    finished = record.get("completions/finished")
    found = {} if finished is None else {"completions/truncated": 1.0 - finished}
    for key, low in record.items():
        if key.startswith("minibatch_") and key.endswith("/clip_fraction/low"):
            high = record.get(key.removesuffix("low") + "high")
            clipped = None if low is None or high is None else low + high
            found[key.replace("clip_fraction/low", "clipped")] = clipped
    return found


def _rewards(steps: Sequence[Record]) -> Lines:
    parts = sorted({key for record in steps for key in record if key.startswith("reward/")} - {"reward/mean"})
    if not 1 < len(parts) <= 6:
        return {"reward/mean": None}
    return {"reward/mean": "weighted sum", **{key: key.removeprefix("reward/") for key in parts}}


def _accuracies(evaluations: Sequence[Record]) -> Lines:
    lines: Lines = {}
    for name in ("greedy", "sampled"):
        values = [v for r in evaluations if (v := r.get(f"eval/{name}_accuracy")) is not None]
        gain = f"  {values[0]:.0%} to {values[-1]:.0%}" if values else ""
        lines[f"eval/{name}_accuracy"] = f"{name}{gain}"
    return lines


def _clipped(steps: Sequence[Record]) -> Lines:
    keys = {key for record in steps for key in record if key.endswith("/clipped")}
    numbers = sorted(int(key.split("/")[0].removeprefix("minibatch_")) for key in keys)
    named = numbers if len(numbers) <= 8 else [numbers[0], numbers[-1]]
    return {f"minibatch_{n}/clipped": f"minibatch {n}" if n in named else None for n in numbers}


def _draw(ax: Any, records: Sequence[Record], lines: Lines, scale: str) -> None:
    """Draw metrics, smoothed and above their faint selves; a share is one only if all values are."""
    x, drawn = [record["step"] for record in records], []
    for number, (key, label) in enumerate(lines.items()):
        color = (BLUE, ORANGE)[number] if number < 2 else f"C{number}"
        values = [record.get(key) for record in records]
        drawn += [value for value in values if value is not None]
        ax.plot(x, [math.nan if v is None else v for v in values], color=color, alpha=0.25, linewidth=1)
        mean = smoothed(values, max(1, len(records) // 30))
        ax.plot(x, mean, color=color, linewidth=1.8, label=label)
    if scale == "zero":
        ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])
    elif scale == "log":
        ax.set_yscale("log", nonpositive="mask")
    elif scale == "share" and all(0.0 <= value <= 1.0 for value in drawn):
        ax.set_ylim(-0.02, 1.02)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        ax.ticklabel_format(useOffset=False)
