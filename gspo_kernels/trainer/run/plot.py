"""The picture of a run: what it learned, whether its updates were sound, and where its time went."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.run.metrics import Record

INK, GRID = "#30343b", "#e4e6ea"
BLUE, ORANGE = "#2166ac", "#d95f0e"
COLUMNS = 3


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
        _shade_dpo(ax, records, label="steps of DPO" if ax is axes[0] else None)
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
    steps = [record for record in records if "reward/mean" in record]
    dpo = [record for record in records if record.get("phase") == 1.0]
    timed = [record for record in records if "seconds/update" in record]
    evaluations = [record for record in records if "eval/greedy_accuracy" in record]
    to_reference = _measured(steps, "kl/ref")
    candidates: list[tuple[str, bool, Callable[[Any], None]]] = [
        ("Mean reward of the rollouts", bool(steps), lambda ax: _draw_rewards(ax, steps)),
        ("Accuracy on held-out prompts", bool(evaluations), lambda ax: _draw_accuracy(ax, evaluations)),
        (
            "Shares of a rollout",
            _measured(steps, "groups_without_variance"),
            lambda ax: _draw_shares(ax, steps),
        ),
        (
            "Clipped share by minibatch",
            _measured(steps, "minibatch_1/clip_fraction/low"),
            lambda ax: _draw_clipping(ax, steps),
        ),
        (
            "Largest and smallest ratio of a step",
            _measured(steps, "ratio/min"),
            lambda ax: _draw_ratios(ax, steps),
        ),
        (
            f"KL to the {'reference' if to_reference else 'policy that sampled'}, nats per token",
            to_reference or _measured(steps, "kl/old"),
            lambda ax: _draw_line(ax, steps, "kl/ref" if to_reference else "kl/old"),
        ),
        (
            "Entropy, nats per token",
            _measured(steps, "entropy"),
            lambda ax: _draw_line(ax, steps, "entropy"),
        ),
        (
            "Tokens per completion",
            _measured(steps, "completions/length"),
            lambda ax: _draw_from_zero(ax, steps, "completions/length"),
        ),
        (
            "Gradient norm before clipping",
            _measured(steps, "grad_norm"),
            lambda ax: _draw_from_zero(ax, steps, "grad_norm"),
        ),
        (
            "Sampling against training, nats per token",
            _measured(steps, "mismatch/mean"),
            lambda ax: _draw_mismatch(ax, steps),
        ),
        ("DPO's loss", _measured(dpo, "loss"), lambda ax: _draw_dpo(ax, dpo)),
        (
            "Completion tokens per second",
            _measured(steps, "tokens_per_second"),
            lambda ax: _draw_from_zero(ax, steps, "tokens_per_second"),
        ),
        ("Seconds per step", bool(timed), lambda ax: _draw_seconds(ax, timed)),
    ]
    return [(title, draw) for title, there, draw in candidates if there]


def _measured(records: Sequence[Record], key: str) -> bool:
    return any(record.get(key) is not None for record in records)


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    return (
        [record["step"] for record in records],
        [float("nan") if record.get(key) is None else record[key] for record in records],
    )


def _width(steps: Sequence[Record]) -> int:
    return max(1, len(steps) // 30)


def _draw_line(
    ax: Any, steps: Sequence[Record], key: str, *, color: str = BLUE, label: str | None = None
) -> None:
    """Draw a metric, smoothed and above its faint self."""
    x, y = _series(steps, key)
    ax.plot(x, y, color=color, alpha=0.25, linewidth=1)
    mean = smoothed([record.get(key) for record in steps], _width(steps))
    ax.plot(x, mean, color=color, linewidth=1.8, label=label)


def _draw_from_zero(ax: Any, steps: Sequence[Record], key: str) -> None:
    _draw_line(ax, steps, key)
    ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])


def _draw_rewards(ax: Any, steps: Sequence[Record]) -> None:
    from matplotlib import colormaps

    parts = sorted({key for record in steps for key in record if key.startswith("reward/")} - {"reward/mean"})
    for number, key in enumerate(parts if 1 < len(parts) <= 6 else []):
        x, _ = _series(steps, key)
        mean = smoothed([record.get(key) for record in steps], _width(steps))
        color = colormaps["tab10"](number + 1)
        ax.plot(x, mean, color=color, linewidth=1, label=key.removeprefix("reward/"))
    _draw_line(ax, steps, "reward/mean", label="weighted sum" if 1 < len(parts) <= 6 else None)


def _draw_accuracy(ax: Any, evaluations: Sequence[Record]) -> None:
    for label, color in (("greedy", BLUE), ("sampled", ORANGE)):
        x, y = _series(evaluations, f"eval/{label}_accuracy")
        gain = f"  {y[0]:.0%} to {y[-1]:.0%}"
        ax.plot(x, y, color=color, linewidth=2, marker="o", markersize=3.5, label=f"{label}{gain}")
    values = [r.get(f"eval/{label}_accuracy") for r in evaluations for label in ("greedy", "sampled")]
    if all(value is not None and 0.0 <= value <= 1.0 for value in values):
        _as_share(ax)


def _draw_shares(ax: Any, steps: Sequence[Record]) -> None:
    _draw_line(ax, steps, "groups_without_variance", label="groups without variance")
    truncated = [
        {"step": record["step"], "truncated": 1.0 - record["completions/finished"]}
        for record in steps
        if record.get("completions/finished") is not None
    ]
    _draw_line(ax, truncated, "truncated", color=ORANGE, label="truncated completions")
    _as_share(ax)


def _draw_clipping(ax: Any, steps: Sequence[Record]) -> None:
    from matplotlib import colormaps

    numbers = _minibatches(steps)
    for position, number in enumerate(numbers):
        sides = [
            [record.get(f"minibatch_{number}/clip_fraction/{side}") for side in ("low", "high")]
            for record in steps
        ]
        both = [None if low is None or high is None else low + high for low, high in sides]
        color = colormaps["viridis"](0.15 + 0.7 * position / max(len(numbers) - 1, 1))
        label = f"minibatch {number}" if len(numbers) <= 8 or number in (numbers[0], numbers[-1]) else None
        x = [record["step"] for record in steps]
        ax.plot(x, smoothed(both, _width(steps)), color=color, linewidth=1.8, label=label)
    _as_share(ax)


def _draw_ratios(ax: Any, steps: Sequence[Record]) -> None:
    x, low = _series(steps, "ratio/min")
    _, high = _series(steps, "ratio/max")
    ax.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, high, color=BLUE, linewidth=1, label="largest")
    ax.plot(x, low, color=ORANGE, linewidth=1, label="smallest")
    ax.axhline(1.0, color=INK, linewidth=0.8)
    ax.ticklabel_format(useOffset=False)


def _draw_mismatch(ax: Any, steps: Sequence[Record]) -> None:
    _draw_line(ax, steps, "mismatch/mean", label="mean")
    _draw_line(ax, steps, "mismatch/max", color=ORANGE, label="largest")
    ax.set_yscale("log", nonpositive="mask")


def _draw_dpo(ax: Any, dpo: Sequence[Record]) -> None:
    x, y = _series(dpo, "loss")
    ax.plot(x, y, color=BLUE, linewidth=0, marker="o", markersize=3.5)
    ax.axhline(math.log(2), color=INK, linewidth=0.8, label="no preference")


def _draw_seconds(ax: Any, steps: Sequence[Record]) -> None:
    x, rollout = _series(steps, "seconds/rollout")
    _, update = _series(steps, "seconds/update")
    ax.stackplot(x, rollout, update, colors=(BLUE, ORANGE), alpha=0.6, labels=("rollout", "update"))
    ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])


def _as_share(ax: Any) -> None:
    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _shade_dpo(ax: Any, records: Sequence[Record], label: str | None) -> None:
    for record in records:
        if record.get("phase") == 1.0:
            ends = (record["step"] - 0.5, record["step"] + 0.5)
            ax.axvspan(*ends, color=GRID, alpha=0.6, linewidth=0, zorder=0, label=label)
            label = None


def _minibatches(steps: Sequence[Record]) -> list[int]:
    names = {key.split("/")[0] for record in steps for key in record if key.startswith("minibatch_")}
    return sorted(int(name.removeprefix("minibatch_")) for name in names)
