"""How public functions hand their arguments on: declared with signature and docstring, done elsewhere."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def implemented_by(implementation: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have ``implementation`` do what the decorated function declares by its signature and docstring.

    The implementation names the arguments that it looks at itself; those that belong together reach it as
    one named tuple, whose fields say which they are. So an argument that only passes through is written once
    in the signature and once in the table that it belongs to.

    Raises:
        TypeError: at import, for a declared argument that nothing takes.
    """
    wanted = typing.get_type_hints(implementation)
    del wanted["return"]

    def declare(declared: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declared).parameters
        names = tuple(parameters)
        ordered = tuple(n for n in names if parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        alone = tuple(name for name in wanted if name in parameters)
        tables = tuple(
            (name, table, tuple(field for field in table._fields if field in parameters))
            for name, table in wanted.items()
            if name not in parameters
        )
        taken = {*alone, *(field for _, _, fields in tables for field in fields)}
        if taken != set(names):
            raise TypeError(f"{declared.__name__}: nothing takes {', '.join(sorted({*names} - taken))}")

        @functools.wraps(declared)
        def call(*args: P.args, **named: P.kwargs) -> R:
            given = {**defaults, **dict(zip(ordered, args, strict=False)), **named}
            twice = [name for name in ordered[: len(args)] if name in named]
            missing = [name for name in names if name not in given]
            if twice or missing or len(given) != len(names) or len(args) > len(ordered):
                declared(*args, **named)  # says what is wrong as Python does
            passed: dict[str, Any] = {name: given[name] for name in alone}
            for name, table, fields in tables:
                passed[name] = table(**{field: given[field] for field in fields})
            return implementation(**passed)

        return call

    return declare
