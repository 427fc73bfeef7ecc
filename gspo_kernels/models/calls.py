"""Replace the calls of a module in one thread, without attributes or hooks that other threads would see.

The first replacement gives the module a subclass of its class, with the same name. The module keeps it, and
behaves as before outside `replaced_calls` and in other threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_FUNCTIONS: ContextVar[Mapping[Any, Callable[..., Any]] | None] = ContextVar("replaced calls", default=None)
_OPEN: list[None] = []
"""One entry for each open context of any thread. torch.compile can read this, and no ContextVar."""


class Replaceable:
    """A mixin of modules whose calls `replaced_calls` replaces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the context has in the place of this module, or the module itself."""
        functions = _FUNCTIONS.get() if _OPEN else None
        if functions is None or (function := functions.get(self)) is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module with its own class."""
        return reduced(super().__reduce_ex__(max(protocol, 2)), Replaceable, object.__new__)


def reduced(state: Any, mixin: type, rebuild: Callable[..., Any]) -> Any:
    """Return the reduced state of an instance of `subclass(mixin, cls)`, as ``rebuild(cls)``."""
    _, (cls, *_), *rest = state
    if cls.__mro__[1] is not mixin:  # a library has made a subclass of it, and pickling is up to that
        return state
    return rebuild, (cls.__mro__[2],), *rest


def subclass(mixin: Any, cls: type, **attributes: Any) -> Any:
    """Return a subclass of ``cls`` with the methods of ``mixin``, with the name and module of ``cls``."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass = type(mixin)
    if metaclass is not type:
        metaclass = type(metaclass.__name__, (metaclass, type(cls)), {})
    return metaclass(cls.__name__, (mixin, cls), names | attributes)


@functools.cache
def _replaceable(cls: Any) -> Any:
    return subclass(Replaceable, cls)


@contextmanager
def replaced_calls(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Call ``functions[module](*args, **kwargs)`` where code in this context calls ``module``."""
    for module in functions:
        if not isinstance(module, Replaceable):
            module.__class__ = _replaceable(type(module))  # type: ignore[arg-type]
    token = _FUNCTIONS.set({**(_FUNCTIONS.get() or {}), **functions})
    _OPEN.append(None)
    try:
        yield
    finally:
        _OPEN.pop()
        _FUNCTIONS.reset(token)


def own_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `Replaceable` module itself, with its hooks, where its calls are replaced."""
    return super(Replaceable, module).__call__(*args, **kwargs)


def restore_class(module: Any) -> None:
    """Give a module back the class that it had before its calls were replaced."""
    if type(module).__mro__[1] is Replaceable:
        module.__class__ = type(module).__mro__[2]


def view_of(module: Any, **attributes: Any) -> Any:
    """Return a module with the parameters, submodules and hooks of ``module``, but other ``attributes``."""
    view = object.__new__(type(module))
    vars(view).update(vars(module), **attributes)
    return view
