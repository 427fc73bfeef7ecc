"""Replace the calls of a module in one thread, without attributes or hooks that other threads would see.

Within `replaced_calls` the module has a subclass of its class, with the same name. In other threads it
behaves as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch

_FUNCTIONS: ContextVar[Mapping[Any, Callable[..., Any]] | None] = ContextVar("replaced calls", default=None)
_OPEN: dict[Any, tuple[Any, int]] = {}
"""For each module whose calls are replaced: its own class, and the number of contexts in all threads."""
_LOCK = Lock()


@contextmanager
def replaced_calls(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Call ``functions[module](*args, **kwargs)`` where code in this context calls ``module``."""
    with _LOCK:
        for module in functions:
            own, contexts = _OPEN.get(module, (type(module), 0))
            module.__class__ = _replaceable(own)
            _OPEN[module] = own, contexts + 1
    token = _FUNCTIONS.set({**(_FUNCTIONS.get() or {}), **functions})
    try:
        yield
    finally:
        _FUNCTIONS.reset(token)
        with _LOCK:
            for module in functions:
                own, contexts = _OPEN.pop(module)
                if contexts == 1:
                    module.__class__ = own
                else:
                    _OPEN[module] = own, contexts - 1


@functools.cache
def _replaceable(own: Any) -> Any:
    """Return a subclass of a module's own class whose calls `replaced_calls` replaces."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        functions = _FUNCTIONS.get()
        if functions is None or (function := functions.get(self)) is None:
            return own.__call__(self, *args, **kwargs)  # another thread may restore the class: not super()
        return function(*args, **kwargs)

    # torch.compile would trace the function of one call, and run it in others
    disabled = torch.compiler.disable(__call__)  # type: ignore[no-untyped-call]
    return subclass(type(own), (own,), object.__new__, __call__=disabled)


def subclass(metaclass: Any, bases: tuple[Any, ...], rebuild: Callable[..., Any], **attributes: Any) -> Any:
    """Return a class named like the last of its ``bases``; copies of instances are ``rebuild(last base)``."""
    own = bases[-1]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        function, arguments, *state = own.__reduce_ex__(self, max(protocol, 2))
        if arguments[:1] != (cls,):  # a library has made a subclass of ours, and pickling is up to it
            return function, arguments, *state
        return rebuild, (own,), *state

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    cls = metaclass(own.__name__, bases, {**names, "__reduce_ex__": __reduce_ex__, **attributes})
    return cls


def view_of(module: Any, **attributes: Any) -> Any:
    """Return a module with the parameters, submodules and hooks of ``module``, but other ``attributes``."""
    view = object.__new__(type(module))
    vars(view).update(vars(module), **attributes)
    return view
