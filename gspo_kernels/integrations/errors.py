"""The error that adapters raise for a setup that can't work, before any work, and the check of versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


class IntegrationError(ValueError):
    """A framework, model or option that an adapter can't serve exactly; the message says which, and why."""


def require_package(distribution: str, specifier: str, *, optional: bool = False) -> None:
    """Raise an error unless the installed version of ``distribution`` lies in ``specifier``.

    Args:
        distribution: its name as pip knows it, for example "transformers".
        specifier: a version range as pip writes it, for example ">=5.0,<6".
        optional: whether the package may be missing.

    Raises:
        IntegrationError: the package is not installed, or its version is another.
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        if optional:
            return
        raise IntegrationError(
            f"{distribution}: not installed, this adapter needs {distribution}{specifier}: "
            f'pip install "{distribution}{specifier}"'
        ) from None
    # This package does not depend on packaging, but every framework that can be installed here does.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(specifier).contains(installed, prereleases=True):
        raise IntegrationError(
            f"{distribution}: version {installed} is installed, this adapter needs {distribution}{specifier}"
        )
