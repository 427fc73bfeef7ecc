"""Tables of records: aligned text for the terminal, Markdown for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = Sequence[str]


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with a few significant digits; from 1e-3 to 1e5 without an exponent."""
    if value is None:
        return ""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}"
        return f"{float(text):,.0f}" if "e" in text else text
    return f"{value:.1e}"


def aligned(rows: Sequence[Row]) -> str:
    """Align columns of text, the first one left. Short rows only count for the first column's width."""
    columns = max(len(row) for row in rows)
    full = [row for row in rows if len(row) == columns]
    widths = [max(len(row[i]) for row in (rows if i == 0 else full)) for i in range(columns)]
    lines = []
    for first, *rest in rows:
        if len(rest) == columns - 1:
            rest = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """Format rows as a Markdown table; short rows are filled with empty cells."""
    columns = max(len(row) for row in rows)
    lines = []
    for index, row in enumerate(rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join([*cells, *[""] * (columns - len(cells))]) + " |")
        if index == 0:
            lines.append("|---|" + "---:|" * (columns - 1))
    return "\n".join(lines)


def between(values: dict[str, float], unit: float = 1.0) -> str:
    """Format the median, the lowest and the highest value."""
    median, low, high = (number(values[name] * unit) for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest value."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def shape_text(shape: dict[str, Any]) -> str:
    """Return a shape in words: dtype, sequences x tokens, V, H and all other sizes of the case."""
    rest = {key: value for key, value in shape.items() if key not in ("dtype", "sequences", "length")}
    parts = [shape["dtype"]] if "dtype" in shape else []
    parts += [f"{shape['sequences']} x {shape['length']:,} tokens"] if "sequences" in shape else []
    return ", ".join([*parts, *(f"{key}={value:,}" for key, value in rest.items())])


def floor_text(probes: dict[str, float]) -> str:
    """Describe the floor: a copy of the logits, or ``torch.mm`` over the counted tokens."""
    if "copy" in probes:
        return f"a copy of {2 * probes['copy']:g} accesses per logit"
    return "one torch.mm" if len(probes) == 1 else "three torch.mm of these shapes"


def case_table(case: dict[str, Any]) -> str:
    """Return the text that a run prints for a case: a row per contestant."""
    probes, floors = case["floor"]["probes"], case["floor"]["seconds"]
    text = f"{case['name']}: {shape_text(case['shape'])}"
    if floors:
        text += f"; {floor_text(probes)}: {number(1e3 * statistics.median(floors))} ms"
    ratio = f"/ {floor_text(probes)}" if probes else "/"
    rows: list[Row] = [["", "ms", "forward", "backward", ratio, "peak MiB", "error / allowed"]]
    for result in case["results"]:
        if result["status"] != "right":
            rows.append([result["contestant"], f"{result['status']}: {result['reason']}"])
            continue
        cells = [""] * 4
        if seconds := result.get("seconds"):
            phases = [number(1e3 * statistics.median(seconds[name])) for name in ("forward", "backward")]
            phases = ["", ""] if case["task"] == "scoring" else phases
            divided = between(result["x_floor"]) if "x_floor" in result else ""
            cells = [between(spread(seconds["both"]), 1e3), *phases, divided]
        peak = result.get("peak_bytes")
        rows.append([result["contestant"], *cells, number(peak and peak / 2**20), number(result["share"], 2)])
    return f"\n{text}\n{aligned(rows)}"
