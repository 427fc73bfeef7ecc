"""The picture of a run: reward, held-out accuracy, clipping by minibatch, and the extremes of the ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.metrics import Record

INK, GRID = "#30343b", "#e4e6ea"
BLUE, ORANGE = "#2166ac", "#d95f0e"


def plot_progress(records: Sequence[Record], path: Path) -> None:
    """Draw the metrics of a run into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    steps = [record for record in records if "reward/mean" in record]
    _draw_rewards(axes[0], steps)
    _draw_accuracy(axes[1], [record for record in records if "eval/greedy_accuracy" in record])
    _draw_clipping(axes[2], steps)
    _draw_ratios(axes[3], steps)
    last = records[-1]["step"] if records else 0
    for ax in axes:
        ax.set_xlim(0, max(last, 1))
        ax.set_xlabel("step", color=INK)
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(colors=INK, length=0)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smoothed(values: Sequence[float | None], width: int) -> list[float]:
    """Return the mean over the last ``width`` values that are there, NaN before the first."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else float("nan"))
    return means


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    return (
        [record["step"] for record in records],
        [float("nan") if record.get(key) is None else record[key] for record in records],
    )


def _title(ax: Any, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=11, color=INK, pad=10)


def _draw_rewards(ax: Any, steps: Sequence[Record]) -> None:
    _title(ax, "Mean reward of the rollouts")
    x, y = _series(steps, "reward/mean")
    width = max(1, len(steps) // 30)
    ax.plot(x, y, color=BLUE, alpha=0.25, linewidth=1)
    ax.plot(x, smoothed([record.get("reward/mean") for record in steps], width), color=BLUE, linewidth=2)


def _draw_accuracy(ax: Any, evaluations: Sequence[Record]) -> None:
    _title(ax, "Accuracy on held-out prompts")
    for label, color in (("greedy", BLUE), ("sampled", ORANGE)):
        x, y = _series(evaluations, f"eval/{label}_accuracy")
        gain = f"  {y[0]:.0%} to {y[-1]:.0%}" if y else ""
        ax.plot(x, y, color=color, linewidth=2, marker="o", markersize=3.5, label=f"{label}{gain}")
    if not evaluations:
        ax.text(0.5, 0.5, "no eval dataset", transform=ax.transAxes, ha="center", color=INK)
        return
    values = [r[f"eval/{label}_accuracy"] for r in evaluations for label in ("greedy", "sampled")]
    if all(value is not None and 0.0 <= value <= 1.0 for value in values):
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend(frameon=False, loc="lower right", labelcolor=INK)


def _draw_clipping(ax: Any, steps: Sequence[Record]) -> None:
    from matplotlib import colormaps

    _title(ax, "Clipped share by minibatch")
    numbers = _minibatches(steps)
    colors = colormaps["viridis"]
    width = max(1, len(steps) // 30)
    for position, number in enumerate(numbers):
        sides = [
            (
                record.get(f"minibatch_{number}/clip_fraction/low"),
                record.get(f"minibatch_{number}/clip_fraction/high"),
            )
            for record in steps
        ]
        both = [None if low is None or high is None else low + high for low, high in sides]
        color = colors(0.15 + 0.7 * position / max(len(numbers) - 1, 1))
        x = [record["step"] for record in steps]
        ax.plot(x, smoothed(both, width), color=color, linewidth=1.8, label=f"minibatch {number}")
    ax.set_ylim(-0.02, 1)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if 0 < len(numbers) <= 8:
        ax.legend(frameon=False, loc="upper right", ncols=2, fontsize=9, labelcolor=INK)


def _draw_ratios(ax: Any, steps: Sequence[Record]) -> None:
    _title(ax, "Largest and smallest ratio of a step")
    x, low = _series(steps, "ratio/min")
    _, high = _series(steps, "ratio/max")
    ax.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, high, color=BLUE, linewidth=1, label="max")
    ax.plot(x, low, color=ORANGE, linewidth=1, label="min")
    ax.axhline(1.0, color=INK, linewidth=0.8)
    ax.ticklabel_format(useOffset=False)
    ax.legend(frameon=False, loc="upper left", ncols=2, labelcolor=INK)


def _minibatches(steps: Sequence[Record]) -> list[int]:
    names = {key.split("/")[0] for record in steps for key in record if key.startswith("minibatch_")}
    return sorted(int(name.removeprefix("minibatch_")) for name in names)
