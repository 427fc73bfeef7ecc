"""Compare two runs: ``python -m benchmarks compare A B``.

Ratios to bare matmuls or copies are compared, not seconds, because seconds depend on the machine. Two runs
agree on a contestant if their spreads (lowest to highest over the rounds) overlap. In a case without bare
operations, times are divided by those of naive PyTorch in the same run.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.tables import Row, aligned, between, number

YARDSTICK = "naive PyTorch"
"""The contestant whose time divides the others' in a case without bare operations."""
Record = dict[str, Any]


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


def main(a: Path, b: Path) -> int:
    """Print a table and a summary; return 0 if all ratios agree, 1 if not, 2 without results."""
    try:
        first, second = load(a), load(b)
    except FileNotFoundError as error:
        print(error)
        return 2
    rows: list[Row] = [["", "A", "B", "B / A", ""]]
    for suite in sorted(first.keys() & second.keys()):
        cases = {case["name"]: ratios(case) for case in second[suite].get("cases", [])}
        for case in first[suite].get("cases", []):
            others = cases.get(case["name"], {})
            for name, one in ratios(case).items():
                if name in others:
                    other, quotient = others[name], others[name]["median"] / one["median"]
                    agrees = one["low"] <= other["high"] and other["low"] <= one["high"]
                    word = "" if agrees else "slower" if quotient > 1 else "faster"
                    label = f"{suite}, {case['name']}: {name}"
                    rows.append([label, between(one), between(other), number(quotient), word])
    differ = sum(bool(row[-1]) for row in rows)
    print(f"{aligned(rows)}\n\n{len(rows) - 1} ratios; the spreads of {len(rows) - 1 - differ} overlap")
    return 1 if differ else 0
