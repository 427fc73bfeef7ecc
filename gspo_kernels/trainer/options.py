"""One option of a configuration: its documentation, range and type, and what may have been meant instead."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from gspo_kernels.trainer.errors import ConfigError


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and a line of documentation."""
    return field(default=default, metadata={"help": help})


def require(condition: bool, key: str, expected: str, got: object) -> None:
    """Raise a `ConfigError` that names the key unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


def near_matches(key: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` with the known keys close to ``key``, or an empty string."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close += [name for name in known if name.rsplit(".", 1)[-1] == last and name not in close]
    return f" (did you mean {' or '.join(close[:3])}?)" if close else ""


def coerce(value: Any, expected: Any, key: str) -> Any:
    """Return ``value`` as the annotated type, or raise a `ConfigError` that names the key.

    Numbers may be written as strings, because YAML reads ``3e-4`` as one and the command line has nothing
    else.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if type(None) in arguments:
                return None
            raise ConfigError(f"{key} must not be empty")
        inner = [argument for argument in arguments if argument is not type(None)]
        return coerce(value, inner[0], key) if len(inner) == 1 else value
    if origin is Mapping:
        return _mapping(value, key)
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(coerce(item, arguments[0], key) for item in values)
    if expected is bool:
        text = str(value).lower()
        if text in ("true", "false"):
            return text == "true"
    elif expected is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                pass
    elif expected is float:
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                return float(value)
            except ValueError:
                pass
    elif expected is str:
        if isinstance(value, str):
            return value
    else:
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise ConfigError(f"{key} must be {names[expected]}, got {value!r}")


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{key} is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of names to values, got {value!r}")
    return value
