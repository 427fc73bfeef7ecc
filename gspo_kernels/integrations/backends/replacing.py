"""Replace functions of a framework in all modules that have imported them, and restore them."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from gspo_kernels.integrations.errors import check_signature, require_package

_LOGGER = logging.getLogger("gspo_kernels")
_INHERITED = object()


class NotServedError(Exception):
    """A call that the framework's own code must take; the message says why."""


class Replacements:
    """Functions of a framework, by "module:name" or "module:class.name", and our functions that replace them.

    Args:
        framework: its distribution, as pip knows it; the import package has the same name.
        functions: our function for each of the framework's. It takes the same arguments, or raises
            NotServedError.
    """

    def __init__(self, framework: str, functions: dict[str, Callable[..., Any]]):
        self.framework, self.functions = framework, functions
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the framework's functions, also in modules that have imported them already.

        Raises:
            IntegrationError: the framework isn't installed or too old, or one of its functions takes other
                arguments; then nothing is replaced.
        """
        if self._undo:
            return
        require_package(self.framework)
        found = []
        for path, ours in self.functions.items():
            module, _, qualified = path.partition(":")
            *classes, name = qualified.split(".")
            owner = self._module(module)
            for each in classes:
                owner = getattr(owner, each, None)
            theirs: Any = getattr(owner, name, None)
            path = path.replace(":", ".")
            check_signature(self.framework, path, theirs, ours)
            found.append((owner, name, theirs, _either(path, ours, theirs), bool(classes)))
        for owner, name, theirs, stand_in, in_class in found:
            self._set(owner, name, stand_in)
            if in_class:
                continue
            for importer, loaded in list(sys.modules.items()):
                if importer.startswith(f"{self.framework}.") and loaded is not None:
                    for attribute in [key for key, value in vars(loaded).items() if value is theirs]:
                        self._set(loaded, attribute, stand_in)

    def remove(self) -> None:
        """Restore the framework's functions."""
        while self._undo:
            owner, name, theirs = self._undo.pop()
            if theirs is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, theirs)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def _module(self, name: str) -> Any:
        """Return a framework's module; None if the framework has none of this name."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{error.name}.".startswith(f"{self.framework}."):
                raise  # a dependency of the framework
            return None


def _either(path: str, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def stand_in(*arguments: Any, **named: Any) -> Any:
        try:
            result = ours(*arguments, **named)
        except NotServedError as reason:
            _log_once(f"{path} stays as it is where {reason}")
            return theirs(*arguments, **named)
        _log_once(f"{path} runs in gspo_kernels")
        return result

    return stand_in


def _log_once(message: str) -> None:
    if not torch.compiler.is_compiling():  # torch.compile would try to compile the log call
        _log(message)


@functools.cache
def _log(message: str) -> None:
    _LOGGER.warning(message)
