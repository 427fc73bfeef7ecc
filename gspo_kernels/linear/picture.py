"""The picture of a plan: tokens in chunks, the time of each schedule, memory beside that of all logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

INK, GRID, CHOSEN, OTHER = "#30343b", "#e4e6ea", "#2166ac", "#b9bec6"
STRATEGIES = {
    "aligned": "#2166ac", "known": "#2166ac", "deferred": "#5aae61", "frozen": "#5aae61", "cached": "#e08214",
    "two_pass": "#b2182b", "forward": "#8a9099",
}  # fmt: skip
MEBI = 2**20


def draw(
    path: Path,
    title: str,
    parts: Mapping[str, int],
    chunk_rows: int,
    times: Mapping[str, float | str],
    memory: Mapping[str, int],
) -> None:
    """Write a PNG.

    Args:
        path: of the file.
        title: one line above all.
        parts: rows by strategy.
        chunk_rows: rows of logits that exist at once.
        times: seconds by schedule, the chosen one first, or why it can't be.
        memory: bytes by what takes them, the first one for comparison.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(times) + len(memory)
    figure = Figure(figsize=(9, 1.9 + 0.34 * rows), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    heights = [1.6, len(times) + 1, len(memory) + 1]
    strip, seconds, takes = figure.subplots(3, 1, height_ratios=heights)
    _strip(strip, parts, chunk_rows)
    shown = {name: value * 1e3 for name, value in times.items() if not isinstance(value, str)}
    refused = {name: value for name, value in times.items() if isinstance(value, str)}
    _bars(seconds, "by the cost model, ms", shown, next(iter(times)), refused)
    sizes = {name: value / MEBI for name, value in memory.items()}
    _bars(takes, "memory beyond inputs and gradients, MiB", sizes, [*sizes][-1], {})
    figure.savefig(path)


def _strip(ax: Any, parts: Mapping[str, int], chunk_rows: int) -> None:
    """Tokens from left to right, coloured by how they are worked through, with a line between chunks."""
    start, total = 0, max(sum(parts.values()), 1)
    for strategy, rows in parts.items():
        if not rows:
            continue
        ax.barh([0], [rows], left=start, color=STRATEGIES[strategy], height=0.8)
        if rows > 0.08 * total:
            box = {"facecolor": STRATEGIES[strategy], "edgecolor": "none", "pad": 1.5}
            ax.text(
                start + rows / 2, 0, strategy, ha="center", va="center", color="white", fontsize=9, bbox=box
            )
        ends = range(chunk_rows, rows, chunk_rows) if chunk_rows and rows / chunk_rows < 200 else ()
        ax.vlines([start + end for end in ends], -0.4, 0.4, color="white", linewidth=1)
        start += rows
    ax.set_xlim(0, total)
    ax.set_yticks([])
    _clean(ax, "counted tokens, in chunks")


def _bars(ax: Any, title: str, values: Mapping[str, float], chosen: str, refused: Mapping[str, str]) -> None:
    names = [*refused, *reversed([*values])]
    most = max(values.values(), default=0.0) or 1.0
    for place, name in enumerate(names):
        if name in values:
            ax.barh(place, values[name], color=CHOSEN if name == chosen else OTHER, height=0.62)
            ax.text(
                values[name] + 0.01 * most, place, f"{values[name]:.4g}", va="center", fontsize=8.5, color=INK
            )
        else:
            reason = refused[name] if len(refused[name]) < 100 else refused[name][:97] + "..."
            ax.text(0.005 * most, place, reason, va="center", fontsize=7.5, color=INK)
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(0, 1.12 * most)
    ax.set_ylim(-0.7, len(names) - 0.4)
    ax.grid(color=GRID, linewidth=0.8, axis="x")
    _clean(ax, title)


def _clean(ax: Any, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=9.5, color=INK)
    ax.set_axisbelow(True)
    ax.tick_params(colors=INK, length=0, labelsize=9)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
