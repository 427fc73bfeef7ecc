"""Prompts: where they come from and in which order they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.trainer.errors import DataError

Rows = Sequence[Mapping[str, Any]]


def load_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read a jsonl file: one JSON object per line, with the text of a prompt under ``"prompt"``.

    Empty lines are skipped. All other columns are kept and reach the reward functions.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no dataset file {path}")
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            rows.append(row)
    check_rows(rows, str(path))
    return rows


def check_rows(rows: Rows, name: str) -> None:
    """Raise a `DataError` unless there are rows and each has a prompt that is plain text."""
    if len(rows) == 0:
        raise DataError(f"{name} is empty: it has no prompts")
    for number, row in enumerate(rows, start=1):
        if "prompt" not in row:
            columns = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{name}, row {number}: no 'prompt' among the columns ({columns})")
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DataError(
                f"{name}, row {number}: 'prompt' must be non-empty text, got {row['prompt']!r:.80}"
                + (" (apply the chat template first)" if isinstance(row["prompt"], list) else "")
            )


def columns_of(rows: Rows) -> dict[str, list[Any]]:
    """Return every column but the prompt as a list; None where a row lacks it."""
    names = dict.fromkeys(key for row in rows for key in row if key != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


def encode_prompts(tokenizer: Any, rows: Rows, name: str, longest: int | None) -> list[list[int]]:
    """Return the token ids of every prompt; refuse one that is empty or longer than ``longest`` tokens."""
    texts = [row["prompt"] for row in rows]
    encoded: list[list[int]] = tokenizer(texts)["input_ids"] if texts else []
    for number, tokens in enumerate(encoded, start=1):
        if not tokens:
            raise DataError(f"{name}, row {number}: the tokenizer makes no token of the prompt")
        if longest is not None and len(tokens) > longest:
            raise DataError(
                f"{name}, row {number}: the prompt has {len(tokens)} tokens, but the model's context leaves "
                f"room for {longest} beside rollout.max_new_tokens"
            )
    return encoded


class PromptOrder:
    """An endless shuffled order over the rows that needs no state but the number of prompts used so far.

    Every epoch is a permutation of its own, drawn from (seed, epoch).
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        """Prepare the order over ``num_rows`` rows."""
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def indices(self, start: int, count: int) -> list[int]:
        """Return the rows number ``start`` to ``start + count`` of the order."""
        picked = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, self.num_rows)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._permutation = torch.randperm(self.num_rows, generator=generator).tolist()
                self._epoch = epoch
            picked.append(self._permutation[offset])
        return picked
