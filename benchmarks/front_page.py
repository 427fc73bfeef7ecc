"""The README's table: the main cases, a column per machine, from the files under benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import load
from benchmarks.tables import markdown, number

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
OURS = ("ours, auto", "ours, triton", "ours, cpp", "ours, policy_loss", "ours, packed rows")
"""What a call without options is, by task."""
PLAIN = ("naive PyTorch", "plain PyTorch loop")


class Row(NamedTuple):
    """A line of the table: words, suite, the end of a case's name, and what is shown of it."""

    words: str
    suite: str
    case: str
    unit: str


ROWS = (
    Row("from logits", "logits", "fp32, all active", "ms"),
    Row("from logits", "logits", "bf16, all active", "ms"),
    Row("from hidden states", "hidden", "all active", "x products"),
    Row("from hidden states", "hidden", "bf16, large vocabulary", "x products"),
    Row("half of the sequences at zero advantage", "hidden", "half inactive", "x products"),
    Row("frozen head, as with LoRA", "hidden", "frozen head", "x products"),
    Row("from hidden states", "large", "all active, V=151,936", "x products"),
    Row("a padded batch as training meets it", "realistic", "realistic", "x products"),
    Row("from hidden states", "hidden", "tiny", "ms"),
    Row("from log-probs", "logprobs", "tiny", "ms"),
    Row("a whole training step", "training", "V=32,000, every prompt counts", "s"),
    Row("a whole training step", "training", "V=256, every prompt counts", "s"),
    Row("peak memory, from hidden states", "memory", "from hidden states", "MiB"),
)


def value(result: dict[str, Any], unit: str) -> float | None:
    """A contestant's median in this unit, if it has one."""
    if result["status"] != "right":
        return None
    if unit == "MiB":
        return float(result["peak_bytes"]) / 2**20 if "peak_bytes" in result else None
    if unit == "x products":
        return float(result["x_floor"]["median"]) if "x_floor" in result else None
    return statistics.median(result["seconds"]["both"]) * (1e3 if unit == "ms" else 1.0)


def label(row: Row, shape: dict[str, Any]) -> str:
    """What was measured, with its shape."""
    parts = [row.words]
    if "sequences" in shape:
        parts.append(f"{shape['sequences']} x {shape['length']:,} tokens")
    parts += [f"{key}={shape[key]:,}" for key in ("V", "H") if key in shape]
    if shape["dtype"] != "fp32":
        parts.append(shape["dtype"])
    return f"{', '.join(parts)}: {row.unit}"


def cell(case: dict[str, Any], unit: str) -> str:
    """Ours, plain PyTorch, and the best of the others by name; the least is set in bold."""
    found = {one["contestant"]: value(one, unit) for one in case["results"]}
    known = {name: amount for name, amount in found.items() if amount is not None}
    mine = {one["contestant"] for one in case["results"] if one["ours"]}
    others = {name: amount for name, amount in known.items() if name not in (*mine, *PLAIN)}
    shown = [next((name for name in names if name in known), None) for names in (OURS, PLAIN)]
    shown.append(min(others, key=others.__getitem__, default=None))
    least = min((known[name] for name in shown if name), default=None)
    parts = []
    for name in shown:
        text = "-" if name is None else number(known[name])
        parts.append(f"**{text}**" if name and known[name] == least else text)
    who = f" ({_short(shown[2])})" if shown[2] else ""
    return " / ".join(parts) + who


def _short(name: str) -> str:
    return "naive, packed" if name.startswith("naive") else name.split()[0]


def table(folders: Sequence[Path]) -> str:
    """Markdown; a case whose shape differs between machines has a line for each shape."""
    columns = [load(folder) for folder in folders]
    titles = [next(iter(records.values()))["device"] for records in columns]
    lines: dict[str, list[str]] = {}
    for column, records in enumerate(columns):
        for row in ROWS:
            for case in records.get(row.suite, {}).get("cases", []):
                if case["name"] == row.case:
                    cells = lines.setdefault(label(row, case["shape"]), ["not run"] * len(columns))
                    cells[column] = cell(case, row.unit)
    return markdown([["", *titles], *([name, *cells] for name, cells in lines.items())])


def page(folders: Sequence[Path]) -> str:
    """The README with the table of today's results."""
    before, found, rest = README.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"README.md: no place for the table, {BEGIN.strip()} ... {END.strip()}")
    return before + BEGIN + table(folders) + "\n" + END + after
