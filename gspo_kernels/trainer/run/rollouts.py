"""Completions that a run keeps: one file for each step, as JSON lines or parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.run.files import write_file, write_text
from gspo_kernels.trainer.run.metrics import Record


def check_format(form: str) -> None:
    """Raise a `ConfigError` where a format cannot be written here."""
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
        ]
    )
    parquet.write_table(pyarrow.Table.from_pylist(list(records), schema), path)
