"""Records as text: for the terminal, and as Markdown for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = Sequence[str]
PHASES = {"scoring": (), "training": ("rollout", "update")}
"""The parts of a time, by task; for other tasks forward and backward."""


def number(value: float | None, digits: int = 3) -> str:
    """A few significant digits, without exponents where people read them."""
    if value is None:
        return ""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}"
        return f"{float(text):,.0f}" if "e" in text else text
    return f"{value:.1e}"


def aligned(rows: Sequence[Row]) -> str:
    """Columns of text; the first is left-aligned, and so is a row's last cell if it is alone."""
    columns = max(len(row) for row in rows)
    full = [row for row in rows if len(row) == columns]
    widths = [max(len(row[i]) for row in (rows if i == 0 else full)) for i in range(columns)]
    lines = []
    for row in rows:
        rest = row[1:]
        if len(row) == columns:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        else:
            cells = list(rest)
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table; a short row's last cell stands in the second column."""
    columns = max(len(row) for row in rows)
    lines = []
    for index, row in enumerate(rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join([*cells, *[""] * (columns - len(cells))]) + " |")
        if index == 0:
            lines.append("|---|" + "---:|" * (columns - 1))
    return "\n".join(lines)


def between(spread: dict[str, float], unit: float = 1.0) -> str:
    """Median and spread."""
    return (
        f"{number(spread['median'] * unit)} "
        f"({number(spread['low'] * unit)} to {number(spread['high'] * unit)})"
    )


def result_rows(case: dict[str, Any], reasons: bool = True) -> list[Row]:
    """A header and a row per contestant."""
    timed = case["repeats"] > 0
    floor = bool(case["floor"]["probes"]) and timed
    phases = PHASES.get(case["task"], ("forward", "backward")) if timed else ()
    yardstick = case.get("yardstick")
    header = ["", *(["ms"] if timed else []), *phases]
    rates = any("tokens_per_second" in result for result in case["results"])
    header += [*(["tokens/s"] if rates else []), *([f"x {yardstick}"] if yardstick else [])]
    header += ["x floor"] if floor else []
    header += ["peak MiB", "error / allowed"]
    rows: list[Row] = [header]
    for result in case["results"]:
        if result["status"] != "right":
            if reasons:
                rows.append([result["contestant"], f"{result['status']}: {result['reason']}"])
            continue
        cells = [result["contestant"]]
        if timed:
            seconds = result["seconds"]
            cells.append(between(_spread(seconds["both"]), 1e3))
            cells += [number(1e3 * statistics.median(seconds[name])) for name in phases]
        if rates:
            cells.append(number(result["tokens_per_second"]["median"]))
        if yardstick:
            cells.append(
                number(1.0 if result["contestant"] == yardstick else result["x_contestants"].get(yardstick))
            )
        if floor:
            cells.append(between(result["x_floor"]))
        peak = result.get("peak_bytes")
        cells += ["" if peak is None else number(peak / 2**20), number(result["share"], 2)]
        rows.append(cells)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def heading(case: dict[str, Any]) -> str:
    """The case, its shape and its floor in one line."""
    shape = ", ".join(
        f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
        for key, value in case["shape"].items()
    )
    text = f"{case['name']}: {shape}"
    if case["floor"]["probes"] and case["floor"]["seconds"]:
        seconds = statistics.median(case["floor"]["seconds"])
        text += f"; floor ({case['floor']['name']}) {number(seconds * 1e3)} ms"
    return text


def case_table(case: dict[str, Any]) -> str:
    """What a run prints of a case."""
    return f"\n{heading(case)}\n{aligned(result_rows(case))}"
