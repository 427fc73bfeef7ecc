"""What every adapter says when a setup can't work: one clear sentence, before any work is done."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


class IntegrationError(ValueError):
    """A framework, model or option that an adapter can't serve exactly; the message says which, and why."""


def require_package(distribution: str, specifier: str, *, optional: bool = False) -> None:
    """Refuse to go on unless the installed version of ``distribution`` lies in ``specifier``.

    Args:
        distribution: its name as pip knows it, for example "transformers".
        specifier: a version range as pip writes it, for example ">=5.0,<6".
        optional: nothing of it is imported, so that it need not be installed.

    Raises:
        IntegrationError: it is not installed, or at another version.
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
    # Not a dependency of this package, but one of every framework that can be installed here.
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(specifier).contains(installed, prereleases=True):
        raise IntegrationError(
            f"{distribution}: version {installed} is installed, this adapter needs {distribution}{specifier}"
        )
