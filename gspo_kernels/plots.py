"""Plots: the common style, and the progress of a run (rewards, updates, speed and time)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]

INK, GRID = "#30343b", "#e4e6ea"
BLUE, ORANGE = "#2166ac", "#d95f0e"
COLUMNS = 3


def plot_progress(records: Sequence[Metrics], path: Path) -> None:
    """Draw the metrics of a run as a PNG file, with a panel for those that were measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = {key for record in records for key, value in record.items() if value is not None}
    rewards = {key: key.removeprefix("reward/") for key in sorted(measured) if key.startswith("reward/")}
    if len(rewards) == 2:  # a single reward, which the mean would hide
        rewards = {"reward/mean": "mean"}
    panels = [("Reward of the rollouts", rewards, ""), *PANELS]
    shown = [panel for panel in panels if measured.intersection(panel[1])]
    rows = max(-(-len(shown) // COLUMNS), 1)
    height = 3.4 * rows
    figure = Figure(figsize=(15, height), dpi=110, facecolor="white")
    # Automatic layouts draw all text a second time, which takes longer than the rest.
    figure.subplots_adjust(0.05, 0.6 / height, 0.985, 1 - 0.4 / height, wspace=0.22, hspace=0.42)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    for ax, (title, lines, scale) in zip(axes, shown, strict=False):
        style(ax, title, "step")
        _draw(ax, records, {key: label for key, label in lines.items() if key in measured}, scale)
        last = max(records[-1]["step"], 1)
        ax.set_xlim(-0.02 * last, 1.02 * last)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)
    if not shown:
        axes[0].text(0.5, 0.5, "no step was taken", transform=axes[0].transAxes, ha="center", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def style(ax: Any, title: str, label: str) -> None:
    """Apply the common style to a panel, with its title and the label of its x-axis."""
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8, y=1.0)
    ax.set_xlabel(label, color=INK)
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", colors=INK, length=0)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)


PANELS: list[tuple[str, dict[str, str], str]] = [
    ("Eval reward", {"eval/greedy_reward": "greedy", "eval/sampled_reward": "sampled"}, ""),
    ("Groups with equal rewards", {"groups_without_variance": "share of a rollout"}, "share"),
    ("Completions with an end token", {"completions/finished": "share of a rollout"}, "share"),
    ("Clip fraction", {"clip_fraction/low": "low", "clip_fraction/high": "high"}, "share"),
    ("Importance ratio", {"ratio/max": "maximum", "ratio/min": "minimum"}, ""),
    ("KL, nats per token", {"kl/old": "to the sampling policy", "kl/ref": "to the reference"}, ""),
    ("Entropy, nats per token", {"entropy": "policy"}, ""),
    ("Tokens per completion", {"completions/length": "mean"}, "zero"),
    ("Gradient norm before clipping", {"grad_norm": "mean of the minibatches"}, "zero"),
    ("Mismatch of log-probs, nats", {"mismatch/mean": "mean", "mismatch/max": "maximum"}, "log"),
    ("Completion tokens per second", {"tokens_per_second": "whole step"}, "zero"),
    ("Seconds per step", {"seconds/rollout": "rollout", "seconds/update": "update"}, "zero"),
]
"""The panels of the plot: a title, the label of each metric, and the scale."""


def smoothed(values: Sequence[float | None], width: int) -> list[float]:
    """Return running means over the last ``width`` values, without those that are None; NaN if all are."""
    ends = range(1, len(values) + 1)
    windows = [[v for v in values[max(0, end - width) : end] if v is not None] for end in ends]
    return [sum(window) / len(window) if window else math.nan for window in windows]


def _draw(ax: Any, records: Sequence[Metrics], lines: Mapping[str, str], scale: str) -> None:
    """Draw metrics as faint lines, and smoothed on top; "share" sets the axis if all values are in [0, 1]."""
    drawn = []
    for number, (key, label) in enumerate(lines.items()):
        color = (BLUE, ORANGE)[number] if number < 2 else f"C{number}"
        measured = [record for record in records if key in record]
        x, values = [record["step"] for record in measured], [record[key] for record in measured]
        drawn += [value for value in values if value is not None]
        ax.plot(x, [math.nan if v is None else v for v in values], color=color, alpha=0.25, linewidth=1)
        mean = smoothed(values, max(1, len(measured) // 30))
        ax.plot(x, mean, color=color, linewidth=1.8, label=label)
        gap = [True, *map(math.isnan, mean), True]
        alone = [i for i in range(len(mean)) if gap[i] and gap[i + 2]]  # points without a line
        ax.plot([x[i] for i in alone], [mean[i] for i in alone], "o", color=color, markersize=4)
    if scale == "zero":
        ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])
    elif scale == "log" and any(value > 0 for value in drawn):
        ax.set_yscale("log", nonpositive="mask")
    elif scale == "share" and all(0.0 <= value <= 1.0 for value in drawn):
        ax.set_ylim(-0.02, 1.02)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        ax.ticklabel_format(useOffset=False)
        ax.yaxis.get_offset_text().set_ha("right")  # left of the title
