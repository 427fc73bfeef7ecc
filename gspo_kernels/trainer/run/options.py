"""One option of a configuration: its documentation, range and type, and what may have been meant instead."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from gspo_kernels.trainer.run.input_errors import ConfigError


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

    The conversions are pydantic's, which takes numbers written as text: YAML reads ``3e-4`` as text, and a
    command line has nothing else. For the same reason ``none`` is None where None is allowed, a single value
    is a list of one, and a mapping may be JSON.
    """
    kinds = {typing.get_origin(kind) or kind for kind in (expected, *typing.get_args(expected))}
    if isinstance(value, str) and value.lower() in ("none", "null") and type(None) in kinds:
        return None
    given, schema = value, expected
    if isinstance(value, bool):
        given = str(value) if kinds & {int, float} else value  # pydantic would take True for 1
    elif tuple in kinds and isinstance(value, str | int | float):
        given = [value]
    if kinds & {typing.Union, types.UnionType} and type(None) not in kinds:
        schema = Annotated[expected, Field(union_mode="left_to_right")]  # "0.5" is a number before it is text
    try:
        if isinstance(value, str) and Mapping in kinds:
            return TypeAdapter(schema).validate_json(value)
        return TypeAdapter(schema).validate_python(given)
    except ValidationError as error:
        raise ConfigError(f"{key}: {error.errors()[0]['msg']}, got {value!r}") from error
