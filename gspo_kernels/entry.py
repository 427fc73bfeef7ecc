"""How public functions hand their arguments on: declared with signature and docstring, done elsewhere."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _refuse_options(
    function: str, unknown: set[str], given: Mapping[Any, Any], kinds: Mapping[str, Any]
) -> None:
    """Refuse arguments that are none of the function's, but options of one, as an objective's clip range."""
    for name in sorted(unknown):
        for argument, kind in kinds.items():
            if not isinstance(kind, type) or name not in _fields_below(kind):
                continue
            value, example = given.get(argument), "..."
            if isinstance(value, kind) and hasattr(value, name):
                example = f"{type(value).__name__}({name}={given[name]!r})"
            raise TypeError(
                f"{name}: {function} has no such argument, it is an option of the {argument}; pass it as "
                f"{argument}={example}"
            )


def _fields_below(kind: Any) -> Iterator[str]:
    """The names of the fields of a dataclass, and of all that derive from it."""
    if hasattr(kind, "__dataclass_fields__"):
        yield from kind.__dataclass_fields__
        for derived in kind.__subclasses__():
            yield from _fields_below(derived)


def implemented_by(implementation: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have ``implementation`` do what the decorated function declares by its signature and docstring.

    The implementation names the arguments that it looks at itself; those that belong together reach it as
    one named tuple, whose fields say which they are. So an argument that only passes through is written once
    in the signature and once in the table that it belongs to.

    Raises:
        TypeError: at import, for a declared argument that nothing takes.
    """
    from gspo_kernels.logits import spread

    wanted = typing.get_type_hints(implementation)
    del wanted["return"]

    def declare(declared: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declared).parameters
        names = tuple(parameters)
        ordered = tuple(n for n in names if parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        defaults: dict[Any, Any] = {
            n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty
        }
        alone = tuple(name for name in wanted if name in parameters)
        tables = []
        taken = {*alone, "parallel"}
        for name, table in wanted.items():
            if name in parameters:
                continue
            places = [field if field in parameters else (name, field) for field in table._fields]
            taken.update(set(table._fields) & set(names))
            # what the function doesn't declare stays as the table has it
            defaults |= {place: table._field_defaults[place[1]] for place in places if place not in names}
            tables.append((name, table._make, places))
        if {*names} - taken:
            raise TypeError(f"{declared.__name__}: nothing takes {', '.join(sorted({*names} - taken))}")
        complete = {*names, *defaults}

        @functools.wraps(declared)
        def call(*args: P.args, **named: P.kwargs) -> R:
            said = {**dict(zip(ordered, args, strict=False)), **named}
            given = {**defaults, **said}
            # less was said than was given: something twice, or more than there are places for
            if len(said) != len(args) + len(named) or given.keys() != complete:
                _refuse_options(declared.__name__, named.keys() - complete, given, wanted)
                declared(*args, **named)  # says what is wrong as Python does
            passed = {name: given[name] for name in alone}
            for name, make, places in tables:
                passed[name] = make([given[place] for place in places])
            if "parallel" in names:
                passed = spread(declared.__name__, given["parallel"], passed)
            return implementation(**passed)

        return call

    return declare
