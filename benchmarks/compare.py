"""``python -m benchmarks compare A B`` says whether two runs tell the same.

What is compared are ratios to the floor, not seconds: those are the machine's. Two runs agree on a contestant
where their spreads (lowest to highest over the interleaved rounds) overlap; where they don't, B is faster or
slower than A by the medians' quotient. Without a floor, the ratio is to the case's yardstick in the same run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import aligned, between, number

YARDSTICK = "naive PyTorch"
"""Whom times are divided by where a case has neither a floor nor a yardstick of its own."""


class Line(NamedTuple):
    """One contestant in one case, in two runs."""

    suite: str
    case: str
    contestant: str
    a: dict[str, float]
    b: dict[str, float]

    @property
    def agrees(self) -> bool:
        """Whether the spreads overlap."""
        return self.a["low"] <= self.b["high"] and self.b["low"] <= self.a["high"]

    @property
    def inside(self) -> bool:
        """Whether B's median lies within A's spread."""
        return self.a["low"] <= self.b["median"] <= self.a["high"]

    @property
    def quotient(self) -> float:
        """B's median over A's."""
        return self.b["median"] / self.a["median"]


def ratios(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ratio with its spread, by contestant."""
    timed = {result["contestant"]: result for result in case["results"] if result.get("seconds")}
    if case["floor"]["probes"]:
        return {name: result["x_floor"] for name, result in timed.items()}
    yardstick = case.get("yardstick", YARDSTICK)
    if yardstick not in timed:
        return {}
    base = timed[yardstick]["seconds"]["both"]
    found = {}
    for name, result in timed.items():
        # a contestant that was timed once is compared with the yardstick in that round, the first
        pairs = [mine / other for mine, other in zip(result["seconds"]["both"], base, strict=False)]
        found[name] = {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}
    return found


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of a folder by suite.

    Raises:
        FileNotFoundError: there is none.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and "suite" in record:
            found[record["suite"]] = record
    if not found:
        raise FileNotFoundError(f"{folder}: no results of `python -m benchmarks run --out {folder}`")
    return found


def lines(a: Path, b: Path) -> Iterator[Line]:
    """What both runs timed."""
    first, second = load(a), load(b)
    for suite in first.keys() & second.keys():
        cases = {case["name"]: case for case in second[suite].get("cases", [])}
        for case in first[suite].get("cases", []):
            other = ratios(cases[case["name"]]) if case["name"] in cases else {}
            for contestant, ratio in ratios(case).items():
                if contestant in other:
                    yield Line(suite, case["name"], contestant, ratio, other[contestant])


def main(a: Path, b: Path) -> int:
    """Print a table and a summary; 0 if all agree, 1 otherwise."""
    try:
        found = sorted(lines(a, b))
    except FileNotFoundError as error:
        print(error)
        return 2
    rows = [["", "A", "B", "B / A", ""]]
    for line in found:
        verdict = "" if line.agrees else "slower" if line.quotient > 1 else "faster"
        name = f"{line.suite}, {line.case}: {line.contestant}"
        rows.append([name, between(line.a), between(line.b), number(line.quotient), verdict])
    agree, inside = sum(line.agrees for line in found), sum(line.inside for line in found)
    print(aligned(rows))
    print(
        f"\n{len(found)} ratios; spreads overlap for {agree}; B's median lies within A's spread for {inside}"
    )
    return 0 if agree == len(found) else 1
