"""The report as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.mismatch.measure import Comparison, Split
from gspo_kernels.mismatch.switches import Switched
from gspo_kernels.trainer.run.plot import BLUE, GRID, INK, ORANGE


def draw(
    comparison: Comparison, switched: Sequence[Switched], splits: dict[str, list[Split]], path: Path
) -> None:
    """Draw distributions, what each switch leaves, and splits, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    figure.subplots_adjust(0.05, 0.08, 0.985, 0.94, wspace=0.3, hspace=0.38)
    _sizes(axes[0], comparison)
    _sequences(axes[1], comparison)
    box = axes[2].get_position()
    names = 0.07  # room for the names of the switches
    axes[2].set_position([box.x0 + names, box.y0, box.width - names, box.height])
    _switches(axes[2], comparison, switched)
    for ax, (title, each) in zip(axes[3:], splits.items(), strict=False):
        _split(ax, title, each)
    for ax in axes[3 + len(splits) :]:
        ax.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _framed(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", colors=INK, length=0)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _sizes(ax: Any, comparison: Comparison) -> None:
    sizes = comparison.difference[comparison.possible].abs()
    some = sizes[sizes > 0]
    mean = float(comparison.difference[comparison.possible].mean()) if len(sizes) else math.nan
    title = f"Tokens: |training - sampling|; with its sign {mean:.1e} in the mean"
    _framed(ax, title, "nats", "tokens")
    ax.grid(color=GRID, linewidth=0.8)
    if len(some) == 0:
        _note(ax, "all log-probs are equal")
        return
    low, high = some.min().log10().item(), some.max().log10().item()
    edges = torch.logspace(max(low, high - 8), high + 1e-6, 41, dtype=torch.float64).tolist()
    ax.hist(some.tolist(), bins=edges, color=BLUE)
    ax.set_xscale("log")
    _sparse_ticks(ax.xaxis, edges[0], edges[-1])
    if equal := len(sizes) - len(some):
        ax.text(
            0.02,
            0.95,
            f"{equal:,} of {len(sizes):,} are equal",
            transform=ax.transAxes,
            color=INK,
            fontsize=9,
        )


def _sequences(ax: Any, comparison: Comparison) -> None:
    log_s = comparison.log_s[comparison.log_s.isfinite()]
    low, high = (
        math.log1p(-comparison.clip[0]) if comparison.clip[0] < 1 else -math.inf,
        math.log1p(comparison.clip[1]),
    )
    outside = float(comparison.outside.double().mean())
    _framed(ax, f"Sequences: log s; {outside:.1%} outside of the clip range", "log s, nats", "sequences")
    ax.grid(color=GRID, linewidth=0.8)
    if len(log_s) == 0:
        _note(ax, "no sequence has a finite log s")
        return
    shown = max(1.5 * max(-low, high) if low > -math.inf else high, float(log_s.abs().max()) * 1.05)
    ax.axvspan(max(low, -shown), high, color=ORANGE, alpha=0.25, linewidth=0, label="clip range")
    ax.hist(log_s.tolist(), bins=41, range=(-shown, shown), color=BLUE)
    ax.set_xlim(-shown, shown)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
    ax.locator_params(axis="x", nbins=5)
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)


def _switches(ax: Any, comparison: Comparison, switched: Sequence[Switched]) -> None:
    _framed(ax, "One thing switched", "mean |training - sampling|, nats", "")
    if not switched:
        _note(ax, "nothing was switched")
        return
    rows = [("as it is", comparison), *((each.name, each.comparison) for each in switched)]
    sizes = [each.summary()["tokens/mean"] for _, each in rows]
    positive = [size for size in sizes if size > 0]
    if not positive:
        _note(ax, "all log-probs are equal")
        return
    floor = min(positive) / 3
    for place, ((_, each), size) in enumerate(zip(rows, sizes, strict=True)):
        ax.barh(place, max(size, floor), left=0, color=ORANGE if place == 0 else BLUE, height=0.65)
        lost = int((~each.possible).sum())
        text = f" {size:.1e}" + (f", {lost:,} impossible" if lost else "")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        ax.text(max(size, floor), place, text, va="center", fontsize=8, color=INK, bbox=box)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(floor, max(positive) * 30)
    ax.axvline(sizes[0] or floor, color=ORANGE, linewidth=1)
    ax.grid(color=GRID, linewidth=0.8, axis="x")


def _split(ax: Any, title: str, splits: Sequence[Split]) -> None:
    shown = [split for split in splits if split.tokens]
    _framed(ax, title, "range, and how many tokens are in it", "|training - sampling|, nats")
    ax.grid(color=GRID, linewidth=0.8, axis="y")
    places = range(len(shown))
    for values, color, label in (
        ([split.largest for split in shown], ORANGE, "largest"),
        ([split.mean for split in shown], BLUE, "mean"),
    ):
        positive = [value if value > 0 else math.nan for value in values]  # a logarithm has no place for 0
        ax.plot(places, positive, "o-", color=color, label=label, markersize=4)
    sizes = [size for split in shown for size in (split.mean, split.largest) if size > 0]
    if sizes:
        ax.set_yscale("log")
        _sparse_ticks(ax.yaxis, min(sizes), max(sizes))
    ax.set_xticks(places, [f"{split.label}\n{split.tokens:,}" for split in shown], fontsize=8)
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)


def _sparse_ticks(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis within less than two decades at 1, 2 and 5, in few characters."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.set_minor_formatter(NullFormatter())


def _note(ax: Any, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", color=INK)
    ax.set_xticks([])
    ax.set_yticks([])
