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

Lines = dict[str, tuple[Any, str | None]]
"""What a panel draws: by metric its color and its label."""


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
    both: Lines = {"seconds/rollout": (BLUE, "rollout"), "seconds/update": (ORANGE, "update")}
    mismatch: Lines = {"mismatch/mean": (BLUE, "mean"), "mismatch/max": (ORANGE, "largest")}
    shares: Lines = {
        "groups_without_variance": (BLUE, "groups without variance"),
        "completions/truncated": (ORANGE, "truncated completions"),
    }
    candidates: list[tuple[str, Callable[..., None], Sequence[Record], Lines]] = [
        ("Mean reward of the rollouts", _lines, steps, _rewards(steps)),
        ("Accuracy on held-out prompts", _accuracy, evaluations, {"eval/greedy_accuracy": (BLUE, None)}),
        ("Shares of a rollout", _shares, steps, shares),
        ("Clipped share by minibatch", _shares, steps, _clipped(steps)),
        ("Largest and smallest ratio of a step", _ratios, steps, {"ratio/min": (BLUE, None)}),
        (f"KL to the {whose}, nats per token", _lines, steps, {kl: (BLUE, None)}),
        ("Entropy, nats per token", _lines, steps, {"entropy": (BLUE, None)}),
        ("Tokens per completion", _from_zero, steps, {"completions/length": (BLUE, None)}),
        ("Gradient norm before clipping", _from_zero, steps, {"grad_norm": (BLUE, None)}),
        ("Sampling against training, nats per token", _logarithmic, steps, mismatch),
        ("DPO's loss", _preferences, dpo, {"loss": (BLUE, None)}),
        ("Completion tokens per second", _from_zero, steps, {"tokens_per_second": (BLUE, None)}),
        ("Seconds per step", _from_zero, timed, both),
    ]
    return [
        (title, partial(draw, records=chosen, lines=lines))
        for title, draw, chosen, lines in candidates
        if any(record.get(key) is not None for record in chosen for key in lines)
    ]


def _derived(record: Record) -> Record:
    """Return what is drawn of a record and not in it: truncated completions, clipped shares of both sides."""
    finished = record.get("completions/finished")
    found = {} if finished is None else {"completions/truncated": 1.0 - finished}
    for key, low in record.items():
        high = record.get(key.removesuffix("low") + "high")
        if key.startswith("minibatch_") and key.endswith("/clip_fraction/low"):
            clipped = None if low is None or high is None else low + high
            found[key.replace("clip_fraction/low", "clipped")] = clipped
    return found


def _rewards(steps: Sequence[Record]) -> Lines:
    from matplotlib import colormaps

    parts = sorted({key for record in steps for key in record if key.startswith("reward/")} - {"reward/mean"})
    if not 1 < len(parts) <= 6:
        return {"reward/mean": (BLUE, None)}
    colors = colormaps["tab10"]
    own: Lines = {key: (colors(n), key.removeprefix("reward/")) for n, key in enumerate(parts, start=1)}
    return own | {"reward/mean": (BLUE, "weighted sum")}


def _clipped(steps: Sequence[Record]) -> Lines:
    from matplotlib import colormaps

    keys = {key for record in steps for key in record if key.endswith("/clipped")}
    numbers = sorted(int(key.split("/")[0].removeprefix("minibatch_")) for key in keys)
    named = numbers if len(numbers) <= 8 else [numbers[0], numbers[-1]]
    return {
        f"minibatch_{number}/clipped": (
            colormaps["viridis"](0.15 + 0.7 * place / max(len(numbers) - 1, 1)),
            f"minibatch {number}" if number in named else None,
        )
        for place, number in enumerate(numbers)
    }


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    values = [record.get(key) for record in records]
    return [record["step"] for record in records], [math.nan if v is None else v for v in values]


def _lines(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    """Draw metrics, smoothed and above their faint selves."""
    for key, (color, label) in lines.items():
        x, y = _series(records, key)
        ax.plot(x, y, color=color, alpha=0.25, linewidth=1)
        mean = smoothed([record.get(key) for record in records], max(1, len(records) // 30))
        ax.plot(x, mean, color=color, linewidth=1.8, label=label)


def _from_zero(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    _lines(ax, records, lines)
    ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])


def _logarithmic(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    _lines(ax, records, lines)
    ax.set_yscale("log", nonpositive="mask")


def _shares(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    _lines(ax, records, lines)
    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _accuracy(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    values = []
    for name, color in (("greedy", BLUE), ("sampled", ORANGE)):
        x, y = _series(records, f"eval/{name}_accuracy")
        label = f"{name}  {y[0]:.0%} to {y[-1]:.0%}"
        ax.plot(x, y, color=color, linewidth=2, marker="o", markersize=3.5, label=label)
        values += y
    if all(0.0 <= value <= 1.0 for value in values):
        _shares(ax, [], {})


def _ratios(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    (x, low), (_, high) = _series(records, "ratio/min"), _series(records, "ratio/max")
    ax.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, high, color=BLUE, linewidth=1, label="largest")
    ax.plot(x, low, color=ORANGE, linewidth=1, label="smallest")
    ax.axhline(1.0, color=INK, linewidth=0.8)
    ax.ticklabel_format(useOffset=False)


def _preferences(ax: Any, records: Sequence[Record], lines: Lines) -> None:
    ax.plot(*_series(records, "loss"), color=BLUE, linewidth=0, marker="o", markersize=3.5)
    ax.axhline(math.log(2), color=INK, linewidth=0.8, label="no preference")
