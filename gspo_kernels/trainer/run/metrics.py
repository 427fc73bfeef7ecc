"""Metrics as JSON lines: one line per step, every value finite or null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.run.files import write_text

Record = dict[str, Any]


def finite(metrics: Mapping[str, float | int | None]) -> Record:
    """Return the metrics with everything that JSON has no number for replaced by None."""
    return {
        key: value if value is not None and math.isfinite(value) else None for key, value in metrics.items()
    }


def append_metrics(path: Path, metrics: Mapping[str, float | int | None]) -> None:
    """Append one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite(metrics), allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[Record]:
    """Read all whole lines; a line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after ``step``, which a resumed run writes again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
