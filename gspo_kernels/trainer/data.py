"""Prompts: where they come from, what they are in tokens, and in which order they are used."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.trainer.input_errors import DataError
from gspo_kernels.trainer.rewards.loading import RESERVED

Rows = Sequence[Mapping[str, Any]]


def load_prompts(
    source: str | Path, *, split: str | None = None, subset: str | None = None, prompt_column: str = "prompt"
) -> Rows:
    """Read rows with a prompt; all other columns are kept and reach the reward functions.

    A prompt is text, or a conversation: a list of messages ``{"role": ..., "content": ...}``.

    Args:
        source: a jsonl file (one JSON object per line, values of any type), a parquet file, a directory
            that ``save_to_disk`` wrote, a directory of data files, or the name of a dataset on the Hub.
        split: which split, "train" by default, or as datasets says it a part of one ("train[:1000]").
        subset: which configuration of a dataset on the Hub or of a directory of data files.
        prompt_column: the column that is the prompt; it is called "prompt" from here on.

    Raises:
        DataError: there is nothing to read, or rows are not prompts; names the source and the row.
    """
    path, name = Path(source), str(source)
    if path.is_dir() or not (path.exists() or path.suffix in (".json", ".jsonl", ".parquet")):
        rows = _load_dataset(path, name, split, subset)
    elif not path.is_file():
        raise DataError(f"there is no dataset file {name}")
    else:
        for option, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{name} is a single file and has no {option} {value!r}")
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if prompt_column != "prompt":
        rows = _rename(rows, prompt_column, name)
    check_rows(rows, name)
    return rows


def _read_jsonl(path: Path) -> Rows:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            form = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise DataError(f"{path}, line {number}: not valid {form} ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> Any:
    from datasets import Dataset
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        return Dataset(read_table(path))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _load_dataset(path: Path, name: str, split: str | None, subset: str | None) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    if not saved and not path.is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise DataError(f"there is no dataset file {name}")
    try:
        if not saved:
            return load_dataset(name, subset, split=split or "train")
        found = load_from_disk(name)
    except Exception as error:  # datasets lets through what its readers raise
        missing = "" if path.is_dir() else "there is no such file or directory, and from the Hub "
        raise DataError(f"dataset {name}: {missing}it cannot be loaded: {error!r}") from error
    if subset is not None:
        raise DataError(f"{name} was written by save_to_disk and has no subset {subset!r}")
    if isinstance(found, DatasetDict):
        wanted = split or ("train" if len(found) > 1 else next(iter(found), "train"))
        if wanted not in found:
            raise DataError(f"{name} has no split {wanted!r}; there are {', '.join(found) or 'none'}")
        return found[wanted]
    if split is not None:
        raise DataError(f"{name} holds a single dataset without splits, and so no {split!r}")
    return found


def _rename(rows: Any, column: str, name: str) -> Rows:
    for number, row in enumerate(rows, start=1):
        if column not in row:
            raise DataError(f"{name}, row {number}: no {column!r} among the columns ({', '.join(row)})")
    if hasattr(rows, "rename_column"):
        others = [other for other in rows.column_names if other != "prompt"]
        renamed: Rows = rows.select_columns(others).rename_column(column, "prompt")
        return renamed
    return [{**{k: v for k, v in row.items() if k != column}, "prompt": row[column]} for row in rows]


def check_rows(rows: Rows, name: str) -> None:
    """Raise a `DataError` unless there are rows and each has a prompt: text, or a list of messages."""
    if len(rows) == 0:
        raise DataError(f"{name} is empty: it has no prompts")
    for number, row in enumerate(rows, start=1):
        place = f"{name}, row {number}"
        if "prompt" not in row:
            columns = f"({', '.join(map(repr, row)) or 'none'}); data.prompt_column says which one it is"
            raise DataError(f"{place}: no 'prompt' among the columns {columns}")
        if taken := [repr(column) for column in RESERVED if column in row]:
            why = "because reward functions get an argument of that name"
            raise DataError(f"{place}: a column must not be called {', '.join(taken)}, {why}")
        prompt = row["prompt"]
        messages = isinstance(prompt, list) and prompt and all(map(_is_message, prompt))
        if not messages and not (isinstance(prompt, str) and prompt):
            wanted = "non-empty text, or a list of messages with a text as 'role' and as 'content'"
            raise DataError(f"{place}: 'prompt' must be {wanted}, got {prompt!r:.80}")
        texts = [message["content"] for message in prompt] if messages else [prompt]
        if any(re.search("[\ud800-\udfff]", text) for text in texts):
            raise DataError(f"{place}: 'prompt' holds half of a surrogate pair, which is no character")


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def column_names(rows: Rows) -> list[str]:
    """Return the names of all columns but the prompt that any of the rows has."""
    names = getattr(rows, "column_names", None) or dict.fromkeys(key for row in rows for key in row)
    return [name for name in names if name != "prompt"]


def columns_of(rows: Rows, names: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Return some columns, by default every one but the prompt, as lists; None where a row lacks it."""
    names = column_names(rows) if names is None else names
    return {name: [row.get(name) for row in rows] for name in names}


@dataclass(frozen=True)
class Prompts:
    """Rows and the token ids of their prompts."""

    rows: Rows
    tokens: list[list[int]]
    dropped: int  # rows that were left out because their prompt is too long
    columns: list[str]  # beside the prompt, which the reward functions get


def prepare_prompts(
    tokenizer: Any,
    rows: Rows,
    name: str,
    longest: int | None,
    *,
    embedded: int | None = None,
    too_long: str = "error",
    template_options: Mapping[str, Any] | None = None,
) -> Prompts:
    """Turn prompts into tokens.

    Text is encoded as it is, with the special tokens that the tokenizer adds by itself. A conversation goes
    through the tokenizer's chat template, which opens the assistant's turn; one that ends with a message of
    the assistant is continued there.

    Args:
        tokenizer: a transformers tokenizer.
        rows: what `check_rows` accepts, and ``name``, what messages call them.
        embedded: how many tokens the model knows, or None to look at none.
        longest: tokens that a prompt may have, or None for any number; ``too_long``: "error", or "drop" to
            leave out rows with longer prompts.
        template_options: keyword arguments of the chat template (Qwen3: ``{"enable_thinking": False}``).

    Raises:
        DataError: a prompt is too long, makes no token or one that the model doesn't know, or the template
            does not take it; names the row.
    """
    if too_long not in ("error", "drop"):
        raise DataError(f"too_long must be 'error' or 'drop', got {too_long!r}")
    room = "the model's context leaves"
    if longest is not None and longest < 1:
        raise DataError(f"{name}: {room} no room for a prompt beside rollout.max_new_tokens")
    tokens = tokens_of(tokenizer, [row["prompt"] for row in rows], name, template_options or {})
    for number, ids in enumerate(tokens, start=1):
        if not ids:
            raise DataError(f"{name}, row {number}: the tokenizer makes no token of the prompt")
        if embedded is not None and max(ids) >= embedded:
            known = f"the model embeds only {embedded}; the tokenizer belongs to another model"
            raise DataError(f"{name}, row {number}: the prompt has token {max(ids)}, but {known}")
        if longest is not None and len(ids) > longest and too_long == "error":
            beside = f"room for {longest} beside rollout.max_new_tokens; data.too_long: drop leaves it out"
            raise DataError(f"{name}, row {number}: the prompt has {len(ids)} tokens, but {room} {beside}")
    kept = [i for i, ids in enumerate(tokens) if longest is None or len(ids) <= longest]
    if tokens and not kept:
        raise DataError(f"{name}: every prompt is longer than the {longest} tokens that there is room for")
    if len(kept) == len(tokens):
        return Prompts(rows, tokens, 0, column_names(rows))
    selected = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept]
    return Prompts(selected, [tokens[i] for i in kept], len(tokens) - len(kept), column_names(rows))


def tokens_of(
    tokenizer: Any, prompts: Sequence[Any], name: str, template_options: Mapping[str, Any]
) -> list[list[int]]:
    """Return the token ids of prompts, text or conversations, as `prepare_prompts` encodes them."""
    texts = [
        prompt
        if isinstance(prompt, str)
        else _render(tokenizer, prompt, f"{name}, row {row}", template_options)
        for row, prompt in enumerate(prompts, start=1)
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    # A template writes its special tokens itself.
    for plain in (True, False):
        chosen = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
        if chosen:
            encoded = tokenizer([texts[i] for i in chosen], add_special_tokens=plain)["input_ids"]
            for i, ids in zip(chosen, encoded, strict=True):
                tokens[i] = ids
    return tokens


def _render(tokenizer: Any, messages: list[Any], name: str, options: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(f"{name}: the prompt is a conversation, but the tokenizer has no chat template")
    continued = messages[-1]["role"] == "assistant"
    # Arrow fills the keys that a message lacks with None.
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **options,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise DataError(f"{name}: the chat template does not take the conversation: {error}") from error
    return text


class PromptOrder:
    """An endless shuffled order over the rows that needs no state but the number of prompts used so far.

    Every epoch is a permutation of its own, drawn from (seed, epoch).
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed

    def indices(self, start: int, count: int) -> list[int]:
        """Return the rows number ``start`` to ``start + count`` of the order."""
        first, last = start // self.num_rows, (start + count - 1) // self.num_rows
        order = [row for epoch in range(first, last + 1) for row in self._permutation(epoch)]
        offset = start - first * self.num_rows
        return order[offset : offset + count]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_rows, generator=generator).tolist()
