"""Checks of a framework: whether it is installed, and whether its functions have known parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch

from gspo_kernels.models import IntegrationError

__all__ = ["IntegrationError", "check_signature", "declared_range", "require_package"]


def declared_range(distribution: str) -> str:
    """Return the version range that this package's extras declare for a framework, such as ">=1.16".

    It is empty if they declare none, or if this package isn't installed.
    """
    try:
        lines = requires("gspo_kernels") or []
    except PackageNotFoundError:
        return ""
    found = (re.match(rf"{re.escape(distribution)}\s*([<>=!~][^;]*)", line) for line in lines)
    return next((match[1].strip() for match in found if match), "")


def require_package(distribution: str) -> None:
    """Raise IntegrationError unless a package is installed, by its name for pip, and new enough.

    This package's extras have no upper bound: `check_signature` finds out whether a newer version fits.
    """
    specifier = declared_range(distribution)
    needed = f"this integration needs {distribution}{specifier}"
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        raise IntegrationError(
            f'{distribution}: not installed, {needed}: pip install "{distribution}{specifier}"'
        ) from None
    # This package does not depend on packaging, but every framework that can be installed here does.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(specifier).contains(installed, prereleases=True):
        raise IntegrationError(f"{distribution}: version {installed} is installed, {needed}")


def check_signature(distribution: str, path: str, function: Any, expected: Callable[..., Any] | str) -> None:
    """Raise IntegrationError unless a framework's function has the parameters that an integration knows.

    Args:
        distribution, path: the framework as pip knows it, and the function's name, for the message.
        function: the function; None if the framework has none of this name.
        expected: the function that replaces it and must take every call of it; or the names of its first
            parameters, separated by spaces, if the integration calls it.
    """
    found = None if function is None else _parameters(function)
    if isinstance(expected, str):
        names = expected.split()
        fits = found is not None and found[: len(names)] == names
    else:
        known = inspect.signature(expected).parameters
        names = [*known]
        required = sum(each.default is each.empty for each in known.values())
        fits = found is not None and len(found) >= required and found == names[: len(found)]
    if not fits:
        installed = version(distribution)
        what = "does not exist" if found is None else f"takes ({', '.join(found)})"
        raise IntegrationError(
            f"{distribution}: {path} {what} in version {installed}, expected ({', '.join(names)}); install "
            f'an older version: pip install "{distribution}<{installed}"'
        )


def _parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters; of an autograd function's ``apply``, its forward's."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return [*inspect.signature(owner.forward).parameters][1:]  # without ctx
    return [*inspect.signature(function).parameters]
