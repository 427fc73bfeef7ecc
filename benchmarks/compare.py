"""Compare two runs: ``python -m benchmarks compare A B``.

Ratios to bare matmuls or copies are compared, not seconds, because seconds depend on the machine. Two runs
agree on a contestant if their spreads (lowest to highest over the rounds) overlap. In a case without bare
operations, times are divided by those of naive PyTorch in the same run.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import aligned, between, number

YARDSTICK = "naive PyTorch"
"""The contestant whose time divides the others' in a case without bare operations."""
Record = dict[str, Any]


class Line(NamedTuple):
    """The ratios of one contestant in one case of two runs."""

    suite: str
    case: str
    contestant: str
    a: dict[str, float]
    b: dict[str, float]
    ours: bool

    @property
    def agrees(self) -> bool:
        """Whether the spreads overlap."""
        return self.a["low"] <= self.b["high"] and self.b["low"] <= self.a["high"]

    @property
    def quotient(self) -> float:
        """B's median over A's."""
        return self.b["median"] / self.a["median"]


def ratios(case: Record) -> dict[str, dict[str, float]]:
    """Return the median, lowest and highest ratio of each contestant."""
    timed = {result["contestant"]: result for result in case["results"] if result.get("seconds")}
    if case["floor"]["probes"]:
        return {name: result["x_floor"] for name, result in timed.items()}
    if YARDSTICK not in timed:
        return {}
    base = timed[YARDSTICK]["seconds"]["both"]
    found = {}
    for name, result in timed.items():
        # a contestant that was timed once is compared with the yardstick's first round
        pairs = [mine / other for mine, other in zip(result["seconds"]["both"], base, strict=False)]
        found[name] = {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}
    return found


def load(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by suite.

    Raises:
        FileNotFoundError: the folder has no record.
    """
    records = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    found = {record["suite"]: record for record in records if "suite" in record}
    if not found:
        raise FileNotFoundError(f"{folder}: no results of `python -m benchmarks run --out {folder}`")
    return found


def lines(a: Path, b: Path) -> list[Line]:
    """Return the ratios of all contestants and cases that both runs timed."""
    first, second, found = load(a), load(b), []
    for suite in sorted(first.keys() & second.keys()):
        cases = {case["name"]: case for case in second[suite].get("cases", [])}
        for case in first[suite].get("cases", []):
            other = ratios(cases[case["name"]]) if case["name"] in cases else {}
            ours = {result["contestant"]: result["ours"] for result in case["results"]}
            found += [
                Line(suite, case["name"], name, ratio, other[name], ours[name])
                for name, ratio in ratios(case).items()
                if name in other
            ]
    return found


def main(a: Path, b: Path) -> int:
    """Print a table and a summary; return 0 if all ratios agree, 1 if not, 2 without results."""
    try:
        found = lines(a, b)
    except FileNotFoundError as error:
        print(error)
        return 2
    rows = [["", "A", "B", "B / A", ""]]
    for line in found:
        word = "" if line.agrees else "slower" if line.quotient > 1 else "faster"
        name = f"{line.suite}, {line.case}: {line.contestant}"
        rows.append([name, between(line.a), between(line.b), number(line.quotient), word])
    agree = sum(line.agrees for line in found)
    print(f"{aligned(rows)}\n\n{len(found)} ratios; the spreads of {agree} overlap")
    return 0 if agree == len(found) else 1
