"""One option of a configuration: its documentation, range and type, and what may have been meant instead."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from gspo_kernels.trainer.input_errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Several = Annotated[int, Field(ge=2)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_EXPECTED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
}
"""What a range or a choice asks for, by pydantic's name of the error."""


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and a line of documentation."""
    return dataclasses.field(default=default, metadata={"help": help})


class Section:
    """A frozen dataclass of options: values become what their annotations say, or are refused by name."""

    key: ClassVar[str] = ""

    def __init_subclass__(cls, key: str = "") -> None:
        """Take the section's name, which precedes its options' in messages."""
        cls.key = f"{key}." if key else ""

    def __post_init__(self) -> None:
        for name, expected in _leaves(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, name, coerce(getattr(self, name), expected, f"{self.key}{name}"))

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise a `ConfigError` that names an option and its value unless the condition holds."""
        if not condition:
            raise ConfigError(f"{self.key}{name} must be {expected}, got {getattr(self, name)!r}")

    def require_address(self, name: str, *others: str) -> None:
        """Raise a `ConfigError` unless an option is where a server listens, or None and others untouched."""
        if getattr(self, name) is None:
            for other in others:
                untouched = getattr(self, other) == getattr(type(self), other)
                self.require(untouched, other, f"left alone where there is no {self.key}{name}")
            return
        parts = urlsplit(getattr(self, name))
        whole = parts.scheme in ("http", "https") and bool(parts.netloc) and parts.path in ("", "/")
        self.require(whole, name, "an address as http://localhost:8000, without /v1 or another path")


@functools.cache
def _leaves(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [leaf.name for leaf in dataclasses.fields(cls)]
    return {name: hints[name] for name in names if not dataclasses.is_dataclass(hints[name])}


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
    plain = typing.get_args(expected)[0] if hasattr(expected, "__metadata__") else expected
    kinds = {typing.get_origin(kind) or kind for kind in (plain, *typing.get_args(plain))}
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
        first = error.errors()[0]
        if first["type"] in _EXPECTED:
            expected = _EXPECTED[first["type"]].format(**first.get("ctx", {}))
            raise ConfigError(f"{key} must be {expected}, got {value!r}") from error
        raise ConfigError(f"{key}: {first['msg']}, got {value!r}") from error
