"""Prompts: where they come from, what they are in tokens, and in which order they are used."""

from __future__ import annotations

import json
import re
import warnings
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from gspo_kernels.trainer.config import DataConfig, InputError, reason

RESERVED = ("prompts", "completions", "completion_ids")
"""Names of the arguments that reward functions get besides the columns; no column may have such a name."""

Rows = Sequence[Mapping[str, Any]]


def load_prompts(
    source: str | Path, *, split: str | None = None, subset: str | None = None, prompt_column: str = "prompt"
) -> Rows:
    """Read rows with a prompt; all other columns are kept and reach the reward functions.

    A prompt is text, or a conversation: a list of messages ``{"role": ..., "content": ...}``.

    Args:
        source: a jsonl file (one JSON object per line, values of any type), a .json file (the same, or one
            array of objects), a parquet or csv file, a directory of data files or of datasets'
            ``save_to_disk``, or the name of a dataset on the Hub.
        split: the split, "train" by default, or a part of one in the syntax of datasets ("train[:1000]").
        subset: the configuration of a dataset on the Hub or of a directory of data files.
        prompt_column: the column with the prompt; the returned rows call it "prompt".
    """
    path, name = Path(source), str(source)
    is_file = path.suffix in (".json", ".jsonl", ".parquet", ".csv")
    if not path.exists() and (is_file or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise InputError(f"there is no dataset file {name}")
    for option, value in (("split", split), ("subset", subset)):
        if path.is_file() and value is not None:
            raise InputError(f"{name} is a single file and has no {option} {value!r}")
    is_json = path.is_file() and path.suffix not in (".parquet", ".csv")
    rows = _read_json(path) if is_json else _load_dataset(path, name, split, subset)
    if prompt_column != "prompt":
        for number, row in enumerate(rows, start=1):
            if prompt_column not in row:
                columns = ", ".join(row)
                raise InputError(f"{name}, row {number}: no {prompt_column!r} among the columns ({columns})")
        dropped = (prompt_column, "prompt")
        others = [{k: v for k, v in row.items() if k not in dropped} for row in rows]
        rows = [{**other, "prompt": row[prompt_column]} for other, row in zip(others, rows, strict=True)]
    check_rows(rows, name)
    return rows


def _read_json(path: Path) -> Rows:
    content = path.read_bytes().removeprefix(BOM_UTF8)
    rows: list[Any] = []
    is_array = path.suffix == ".json" and content.lstrip().startswith(b"[")
    for number, part in enumerate([content] if is_array else content.splitlines(), start=1):
        try:
            text = part.removeprefix(BOM_UTF8).decode("utf-8")
            value = json.loads(text) if text.strip() else []
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            form = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            place = path if is_array else f"{path}, line {number}"
            raise InputError(f"{place}: not valid {form} ({error})") from error
        rows += value if is_array or not text.strip() else [value]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {number}: expected a JSON object, got {type(row).__name__}")
    return rows


def _load_dataset(path: Path, name: str, split: str | None, subset: str | None) -> Any:
    from datasets import ReadInstruction, concatenate_datasets, load_dataset, load_from_disk

    try:
        if path.is_file():
            return load_dataset(path.suffix[1:], data_files=name, split="train")
        if subset is None and any((path / file).exists() for file in ("state.json", "dataset_dict.json")):
            saved = load_from_disk(name)
            splits = saved if isinstance(saved, dict) else {"train": saved}
            chosen = ReadInstruction.from_spec(split or "train")
            parts = chosen.to_absolute({key: len(each) for key, each in splits.items()})
            return concatenate_datasets([splits[p.splitname].select(range(p.from_, p.to)) for p in parts])
        return load_dataset(name, subset, split=split or "train")
    except Exception as error:  # datasets passes on whatever its readers raise
        missing = "" if path.exists() else "there is no such file or directory, and from the Hub "
        raise InputError(f"dataset {name}: {missing}it cannot be loaded: {reason(error)}") from error


def check_rows(rows: Rows, name: str) -> None:
    """Raise an `InputError` unless there are rows and each has a prompt: text, or a list of messages."""
    if len(rows) == 0:
        raise InputError(f"{name} is empty: it has no prompts")
    for number, row in enumerate(rows, start=1):
        place = f"{name}, row {number}"
        if "prompt" not in row:
            columns = f"({', '.join(map(repr, row)) or 'none'}); data.prompt_column names the one to use"
            raise InputError(f"{place}: no 'prompt' among the columns {columns}")
        if taken := [repr(column) for column in RESERVED if column in row]:
            why = "because reward functions get an argument of that name"
            raise InputError(f"{place}: a column must not be called {', '.join(taken)}, {why}")
        prompt = row["prompt"]
        messages = isinstance(prompt, list) and bool(prompt)
        for message in prompt if messages else ():
            parts = message if isinstance(message, Mapping) else {}
            messages = messages and all(isinstance(parts.get(key), str) for key in ("role", "content"))
        if not messages and not (isinstance(prompt, str) and prompt):
            expected = "non-empty text, or a list of messages with a text as 'role' and as 'content'"
            raise InputError(f"{place}: 'prompt' must be {expected}, got {prompt!r:.80}")
        texts = [message["content"] for message in prompt] if messages else [prompt]
        if any(re.search("[\ud800-\udfff]", text) for text in texts):
            raise InputError(f"{place}: 'prompt' has half of a surrogate pair, which is no character")


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
    asked: Sequence[Any] = ()  # what became tokens: the rows' prompts with system prompt and template

    @cached_property
    def digest(self) -> str:
        """The number of rows and a hash of what is in them, in their order, wherever they came from."""
        found = sha256()
        for row in self.rows:
            items = sorted(row.items(), key=lambda item: item[0])
            found.update(json.dumps(items, skipkeys=True, default=_plain).encode() + b"\n")
        return f"{len(self.rows)} rows {found.hexdigest()[:12]}"


def _plain(value: Any) -> Any:
    """Return what JSON lacks as something that is equal for equal values, in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return value.tolist() if hasattr(value, "tolist") else re.sub(r" at 0x\w+", "", repr(value))


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
    """Turn prompts into tokens, as `encode_prompts` does; an `InputError` names a row that does not fit.

    Args:
        tokenizer, rows: a transformers tokenizer, and rows that `check_rows` accepts.
        name: the name of the rows in messages.
        longest, embedded: most tokens of a prompt, and number of ids that the model embeds; None: no limit.
        options: system prompt, templates, and the length beyond which prompts are left out.
        say: prints how many were left out.
    """
    if longest is not None and longest < 1:
        raise InputError(f"{name}: rollout.max_new_tokens leaves no room for a prompt in the model's context")
    options, kept = options or DataConfig(), []
    asked = [_ask(row["prompt"], tokenizer, options) for row in rows]
    tokens = encode_prompts(tokenizer, asked, name, options.template_options)
    for number, ids in enumerate(tokens, start=1):
        place = f"{name}, row {number}: the prompt has"
        if not ids:
            raise InputError(f"{name}, row {number}: the tokenizer makes no token of the prompt")
        if embedded is not None and max(ids) >= embedded:
            known = f"the model embeds only {embedded}; the tokenizer belongs to another model"
            raise InputError(f"{place} token {max(ids)}, but {known}")
        if options.max_prompt_tokens is not None and len(ids) > options.max_prompt_tokens:
            continue
        kept.append(number - 1)
        if longest is not None and len(ids) > longest:
            room = f"rollout.max_new_tokens leaves room for {longest} in the model's context"
            raise InputError(f"{place} {len(ids)} tokens, but {room}")
    if len(kept) < len(tokens):
        longer = f"prompts are longer than data.max_prompt_tokens = {options.max_prompt_tokens}"
        if not kept:
            raise InputError(f"{name}: all {len(tokens)} {longer}")
        say(f"{name}: {len(tokens) - len(kept)} of {len(tokens)} {longer} and are left out")
        rows = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept]
        asked, tokens = ([each[i] for i in kept] for each in (asked, tokens))
    texts = [(prompt, ids) for prompt, ids in zip(asked, tokens, strict=True) if isinstance(prompt, str)]
    end = tokenizer.eos_token
    if any(ids[-1] == tokenizer.eos_token_id and not text.endswith(end) for text, ids in texts):
        why = "so completions begin after the end; set add_eos_token to false in tokenizer_config.json"
        warnings.warn(f"{name}: the tokenizer appends its end token {end} to prompts, {why}", stacklevel=2)
    return Prompts(rows, tokens, column_names(rows), asked)


def _ask(prompt: Any, tokenizer: Any, options: DataConfig) -> Any:
    """Return what becomes tokens: a text becomes a conversation if the tokenizer has a chat template."""
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


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Any], name: str, template_options: Mapping[str, Any]
) -> list[list[int]]:
    """Return the token ids of prompts.

    Text gets the special tokens that the tokenizer adds by itself. A conversation goes through the chat
    template, which opens the assistant's turn, or continues the last message if that is the assistant's.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    for is_text in (True, False):  # a template writes its special tokens itself
        chosen = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == is_text]
        texts = [
            prompts[i]
            if is_text
            else _render(tokenizer, prompts[i], f"{name}, row {i + 1}", template_options)
            for i in chosen
        ]
        if chosen:
            encoded = tokenizer(texts, add_special_tokens=is_text)["input_ids"]
            for i, ids in zip(chosen, encoded, strict=True):
                tokens[i] = ids
    return tokens


def _render(tokenizer: Any, messages: list[Any], place: str, options: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        given = "the prompt is a conversation, or there is data.system_prompt"
        raise InputError(f"{place}: {given}, but the tokenizer has no chat template")
    continued = messages[-1]["role"] == "assistant"
    # Arrow fills the keys that a message lacks with None.
    messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
    turn = {"add_generation_prompt": not continued, "continue_final_message": continued}
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **turn, **options)
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError(f"{place}: the chat template does not take the conversation: {error}") from error
    return text


def prompt_order(num_rows: int, seed: int, start: int, count: int) -> list[int]:
    """Return ``count`` rows of an endless shuffled order, from position ``start`` on.

    Every epoch is another permutation, drawn from (seed, epoch), so the position is the only state.
    """
    first, last = start // num_rows, (start + count - 1) // num_rows
    epochs = [np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in range(first, last + 1)]
    offset = start - first * num_rows
    order: list[int] = np.concatenate(epochs)[offset : offset + count].tolist() if epochs else []
    return order
