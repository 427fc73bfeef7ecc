"""What a run keeps of its steps: metrics, a JSON line each, and completions, as JSON lines or parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.run.files import write_file, write_text

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


def check_format(form: str) -> None:
    """Raise a `ConfigError` where a format of completions cannot be written here."""
    if form == "parquet" and find_spec("pyarrow") is None:
        raise ConfigError("rollouts_format: parquet needs pyarrow, which is not installed; take jsonl")


def write_rollout(folder: Path, step: int, records: Sequence[Record], form: str) -> None:
    """Write the completions of a step, all or nothing, in the same columns for "jsonl" and "parquet"."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{step:06d}.{form}"
    if form == "jsonl":
        write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    else:
        write_file(path, lambda unfinished: _write_parquet(unfinished, records))


def _write_parquet(path: Path, records: Sequence[Record]) -> None:
    import pyarrow
    from pyarrow import parquet

    # Stated, as a column without any value in one step would have another type there than in the others.
    rewards = pyarrow.struct([(name, pyarrow.float64()) for name in records[0]["rewards"]])
    schema = pyarrow.schema(
        [
            ("row", pyarrow.int64()),
            ("prompt", pyarrow.string()),
            ("completion", pyarrow.string()),
            ("reward", pyarrow.float64()),
            ("rewards", rewards),
            ("token_ids", pyarrow.list_(pyarrow.int64())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("sampling_mask", pyarrow.list_(pyarrow.list_(pyarrow.int32()))),
        ]
    )
    parquet.write_table(pyarrow.Table.from_pylist(list(records), schema), path)
