"""One version: ``pyproject.toml`` states it, the changelog's newest section and the tag have to agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def stated(root: Path = ROOT) -> str:
    """The version in ``pyproject.toml``."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def disagreements(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """What says another version than ``pyproject.toml``, a line each.

    Args:
        root: folder of ``pyproject.toml`` and ``CHANGELOG.md``.
        tag: name of the tag that is to be released, ``v`` and the version; None: there is none yet.
    """
    version, found = stated(root), []
    sections = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [section.strip() for section in sections if section.strip() != "Unreleased"]
    if not released or released[0] != version:
        newest = repr(released[0]) if released else "missing"
        found.append(f"CHANGELOG.md: the newest section is {newest}, pyproject.toml says {version!r}")
    if tag is not None:
        if tag != f"v{version}":
            found.append(f"the tag is {tag!r}, pyproject.toml wants {f'v{version}'!r}")
        if "Unreleased" in (section.strip() for section in sections):
            found.append('CHANGELOG.md: changes stand under "Unreleased", they belong to the tagged version')
    return found
