"""Prompts: their rows, their tokens and their order."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from gspo_kernels.trainer.config import DataConfig, InputError, reason

RESERVED = ("prompts", "completions", "completion_ids")
"""Names of the arguments of reward functions that are not columns; no column may have such a name."""

Rows = Sequence[Mapping[str, Any]]


def load_prompts(
    source: str | Path, *, split: str | None = None, subset: str | None = None, prompt_column: str = "prompt"
) -> Rows:
    """Read rows with a prompt; all other columns reach the reward functions.

    A prompt is text, or a conversation: a list of messages ``{"role": ..., "content": ...}``. ``source`` is a
    jsonl, json, csv or parquet file, a directory of such files or of datasets' ``save_to_disk``, or a name on
    the Hub. ``split`` has the syntax of datasets; a file is the split "train". Returned rows call the
    ``prompt_column`` "prompt".
    """
    path, name = Path(source), str(source)
    if not name:
        raise InputError("dataset: got '', expected a file, a directory or a name on the Hub")
    is_file = path.suffix in (".json", ".jsonl", ".parquet", ".csv")
    if not path.exists() and (is_file or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise InputError(f"there is no dataset file {name}")
    faults = []
    if path.is_file() and subset is not None:
        faults.append(f"{name} is a file and has no subset {subset!r}: set data.subset to null")
    if path.is_file() and path.suffix not in (".parquet", ".csv"):
        rows = _read_json(path)
    else:
        rows = _load_dataset(path, name, split, subset)
    if path.is_file() and split not in (None, "train"):
        try:
            rows = _selected({"train": rows}, split)
        except ValueError as error:
            expected = "expected null, 'train' or a slice of it, because it is a file"
            faults.append(f"{name}: got the split {split!r}, {expected} ({reason(error)})")
    try:
        check_rows(rows, name, prompt_column)
    except InputError as error:
        faults.append(str(error))
    if faults:
        raise InputError("; ".join(faults))
    if prompt_column == "prompt":
        return rows
    if any("prompt" in row for row in rows):
        lost = f"the column {prompt_column!r} replaces the column 'prompt', which rewards do not receive"
        warnings.warn(f"{name}: {lost}", stacklevel=2)
    renamed = [{**row, "prompt": row[prompt_column]} for row in rows]
    return [{key: value for key, value in row.items() if key != prompt_column} for row in renamed]


def _read_json(path: Path) -> Any:
    """Read rows by ``json``, which allows values of several types in a column, as datasets does not."""
    rows, place = [], str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json" and text.lstrip().startswith("["):
            return json.loads(text)
        for number, line in enumerate(text.split("\n"), start=1):
            place = f"{path}, line {number}"
            if line := line.strip("\ufeff \t\r"):  # concatenated files have several byte-order marks
                rows.append(json.loads(line))
    except ValueError as error:
        raise InputError(f"{place}: not valid JSON in UTF-8 ({error})") from error
    return rows


def _selected(splits: Mapping[str, Any], split: str) -> Any:
    """Return the rows that a split in the syntax of datasets selects."""
    from datasets import ReadInstruction, concatenate_datasets

    parts = ReadInstruction.from_spec(split).to_absolute({key: len(rows) for key, rows in splits.items()})
    if not all(hasattr(rows, "select") for rows in splits.values()):
        return [row for p in parts for row in splits[p.splitname][p.from_ : p.to]]
    return concatenate_datasets([splits[p.splitname].select(range(p.from_, p.to)) for p in parts])


def _load_dataset(path: Path, name: str, split: str | None, subset: str | None) -> Any:
    from datasets import load_dataset, load_from_disk

    try:
        if path.is_file():
            return load_dataset(path.suffix[1:], data_files=name, split="train")
        if subset is None and any((path / file).exists() for file in ("state.json", "dataset_dict.json")):
            saved = load_from_disk(name)
            return _selected(saved if isinstance(saved, dict) else {"train": saved}, split or "train")
        return load_dataset(name, subset, split=split or "train")
    except Exception as error:  # the readers' errors have many types
        missing = "" if path.exists() else "there is no such file or directory, and from the Hub "
        raise InputError(f"dataset {name}: {missing}it cannot be loaded: {reason(error)}") from error


def check_rows(rows: Rows, name: str, column: str = "prompt") -> None:
    """Raise an `InputError` unless there are rows, each with a prompt: text, or a list of messages."""
    if len(rows) == 0:
        raise InputError(f"{name} is empty: it has no prompts")
    for number, row in enumerate(rows, start=1):
        place = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise InputError(f"{place}: expected a mapping of columns to values, got {type(row).__name__}")
        if column not in row:
            columns = f"({', '.join(map(repr, row)) or 'none'})"
            choose = "rename the one to use, or name it in data.prompt_column of gspo train"
            raise InputError(f"{place}: no {column!r} among the columns {columns}; {choose}")
        if taken := [repr(each) for each in RESERVED if each in row]:
            why = "because reward functions get an argument of that name"
            raise InputError(f"{place}: a column must not be called {', '.join(taken)}, {why}")
        prompt = row[column]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt or None}]
        parts = [message if isinstance(message, Mapping) else {} for message in messages]
        texts = [part.get(key) for part in parts for key in ("role", "content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            expected = "non-empty text, or a list of messages with a text as 'role' and as 'content'"
            raise InputError(f"{place}: {column!r} must be {expected}, got {prompt!r:.80}")
        if re.search("[\ud800-\udfff]", "".join(map(str, texts))):
            raise InputError(f"{place}: {column!r} has half of a surrogate pair, an invalid character")


def column_names(rows: Rows) -> list[str]:
    """Return the names of all columns that any row has, except the prompt."""
    names = getattr(rows, "column_names", None) or dict.fromkeys(key for row in rows for key in row)
    return [name for name in names if name != "prompt"]


def columns_of(rows: Rows, names: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Return some columns as lists, by default all but the prompt; None where a row lacks the column."""
    names = column_names(rows) if names is None else names
    return {name: [row.get(name) for row in rows] for name in names}


@dataclass(frozen=True)
class Prompts:
    """Rows, the token ids of their prompts, and the names of the columns that reward functions get."""

    rows: Rows
    tokens: list[list[int]]
    columns: list[str]
    asked: Sequence[Any] = ()  # the rows' prompts with system prompt and template, before tokenization

    @cached_property
    def digest(self) -> str:
        """The number of rows and a hash of their contents in order, regardless of their source."""

        def hash_of(value: object) -> str:
            from datasets.fingerprint import Hasher  # only for values that are not JSON

            return str(Hasher.hash(value))

        content = sha256()
        for row in self.rows:
            items = sorted(row.items(), key=lambda item: item[0])
            content.update(json.dumps(items, skipkeys=True, default=hash_of).encode() + b"\n")
        return f"{len(self.rows)} rows {content.hexdigest()[:12]}"


def prepare_prompts(
    tokenizer: Any,
    rows: Rows,
    name: str,
    *,
    longest: int | None,
    embedded: int | None = None,
    options: DataConfig | None = None,
    say: Callable[[str], object] = print,
) -> Prompts:
    """Tokenize prompts by `encode_prompt`; an `InputError` names a row that does not fit.

    ``longest`` is the maximum length of a prompt, and ``embedded`` the number of ids that the model embeds;
    None: no limit. ``say`` prints how many prompts ``options.max_prompt_tokens`` skips.
    """
    if longest is not None and longest < 1:
        raise InputError(f"{name}: rollout.max_new_tokens leaves no space in the model's context for prompts")
    options, selected = options or DataConfig(), []
    asked = [_ask(row["prompt"], tokenizer, options) for row in rows]
    template = options.template_options
    tokens = [encode_prompt(tokenizer, p, f"{name}, row {n}", template) for n, p in enumerate(asked, 1)]
    for number, ids in enumerate(tokens, start=1):
        place = f"{name}, row {number}: the prompt has"
        if not ids:
            raise InputError(f"{name}, row {number}: the prompt tokenizes to nothing")
        if embedded is not None and max(ids) >= embedded:
            known = f"the model embeds only {embedded}; the tokenizer belongs to another model"
            raise InputError(f"{place} token {max(ids)}, but {known}")
        if options.max_prompt_tokens is not None and len(ids) > options.max_prompt_tokens:
            continue
        selected.append(number - 1)
        if longest is not None and len(ids) > longest:
            space = f"rollout.max_new_tokens leaves space for {longest} in the model's context"
            raise InputError(f"{place} {len(ids)} tokens, but {space}")
    if len(selected) < len(tokens):
        longer = f"prompts are longer than data.max_prompt_tokens = {options.max_prompt_tokens}"
        if not selected:
            raise InputError(f"{name}: all {len(tokens)} {longer}")
        say(f"{name}: {len(tokens) - len(selected)} of {len(tokens)} {longer} and are skipped")
        rows = rows.select(selected) if hasattr(rows, "select") else [rows[i] for i in selected]
        asked, tokens = ([each[i] for i in selected] for each in (asked, tokens))
    texts = [(prompt, ids) for prompt, ids in zip(asked, tokens, strict=True) if isinstance(prompt, str)]
    end = tokenizer.eos_token
    if any(ids[-1] == tokenizer.eos_token_id and not text.endswith(end) for text, ids in texts):
        why = "where completions start; set add_eos_token to false in tokenizer_config.json"
        warnings.warn(f"{name}: the tokenizer appends its end token {end} to prompts, {why}", stacklevel=2)
    start = getattr(tokenizer, "bos_token_id", None)
    if start is not None and any(ids[:2] == [start, start] for ids in tokens):
        cure = "remove one from the texts, or set add_bos_token to false in tokenizer_config.json"
        warnings.warn(f"{name}: prompts start with two {tokenizer.bos_token} tokens; {cure}", stacklevel=2)
    contents = [prompt[-1]["content"] for prompt in asked if not isinstance(prompt, str)]
    if contents and (end := _end_of_turn(tokenizer, template)) and any(end in text for text in contents):
        cure = "set data.prompt_template to '{prompt}', or remove it from the prompts"
        warnings.warn(f"{name}: prompts have the chat template, and get it twice; {cure}", stacklevel=2)
    return Prompts(rows, tokens, column_names(rows), asked)


def longest_prompt(model_config: Any, max_new_tokens: int) -> int | None:
    """Return the maximum length of a prompt in the model's context; None: no limit."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return None if context is None else context - max_new_tokens


def prepare_datasets(
    tokenizer: Any,
    dataset: Rows,
    eval_dataset: Rows | None,
    *,
    say: Callable[[str], object] = print,
    **limits: Any,
) -> tuple[Prompts, Prompts | None]:
    """Tokenize both datasets by `prepare_prompts`; print the first prompt, and warn of prompts in both."""
    train, held_out = prepare_prompts(tokenizer, dataset, "the training dataset", say=say, **limits), None
    if eval_dataset is not None:
        held_out = prepare_prompts(tokenizer, eval_dataset, "the eval dataset", say=say, **limits)
    first = tokenizer.decode(train.tokens[0])
    say(f"the first prompt, as the model sees it:\n{shortened(first, 2000)}")
    distinct = {tuple(ids) for ids in held_out.tokens} if held_out else set()
    if shared := distinct.intersection(map(tuple, train.tokens)):
        both = f"{len(shared)} of {len(distinct)} eval prompts are in the training dataset too"
        say(f"warning: {both}: the eval reward is not that of unseen prompts")
    return train, held_out


def shortened(text: str, longest: int = 400) -> str:
    """Return a text, without its middle if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


def _ask(prompt: Any, tokenizer: Any, options: DataConfig) -> Any:
    """Return a prompt with system prompt and template; with a chat template, text becomes a conversation."""
    system, template = options.system_prompt, options.prompt_template
    if isinstance(prompt, str):
        if template is not None:
            return template.replace("{prompt}", prompt)
        if system is None and getattr(tokenizer, "chat_template", None) is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if system is None or prompt[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _end_of_turn(tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Return what the chat template writes after a user's message, or "" if that is not known."""
    message = [{"role": "user", "content": "content 0123"}]
    for opens_next in (False, True):
        turn = {"add_generation_prompt": opens_next, **options}
        with suppress(Exception):  # of a template that does not accept a single message
            text = tokenizer.apply_chat_template(message, tokenize=False, **turn)
            if end := text.rpartition("content 0123")[2].strip():
                return str(end)
    return ""


def encode_prompt(tokenizer: Any, prompt: Any, place: str, options: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt; ``place`` names it in errors.

    Text gets the special tokens that the tokenizer adds. The chat template formats a conversation; it starts
    the assistant's turn, or continues the last message if that is the assistant's.
    """
    from jinja2 import TemplateError

    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        needs = "the prompt is a conversation, or there is data.system_prompt"
        raise InputError(f"{place}: {needs}, but the tokenizer has no chat template")
    continued = prompt[-1]["role"] == "assistant"
    # Arrow fills missing keys of a message with None.
    messages = [{key: value for key, value in m.items() if value is not None} for m in prompt]
    turn = {"add_generation_prompt": not continued, "continue_final_message": continued}
    try:
        return list(tokenizer.apply_chat_template(messages, return_dict=False, **turn, **options))
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError(f"{place}: the chat template does not accept the conversation: {error}") from error


def prompt_order(num_rows: int, seed: int, start: int, count: int) -> list[int]:
    """Return ``count`` rows of an endless shuffled order, from position ``start`` on.

    Each epoch is a permutation drawn from (seed, epoch), so the position is the only state.
    """
    first, last = start // num_rows, (start + count - 1) // num_rows
    epochs = [np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in range(first, last + 1)]
    offset = start - first * num_rows
    order: list[int] = np.concatenate(epochs)[offset : offset + count].tolist() if epochs else []
    return order
