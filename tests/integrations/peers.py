"""Functions of a framework's real code, run without importing the framework and all it needs.

A framework counts as there if it is installed, or if the folder in GSPO_PEER_SOURCES has its sources in a
folder of its name: a checkout, or an unpacked wheel. Nothing of them is kept here.
"""

import ast
import os
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch


def source(framework: str, path: str) -> Path:
    """A file of ``framework``, named by its import package; skips the test where there is none."""
    roots = []
    if root := os.environ.get("GSPO_PEER_SOURCES"):
        roots += [Path(root, framework), Path(root, framework, "src")]
    spec = PathFinder.find_spec(framework)  # whatever a test has put into sys.modules
    if spec is not None:
        roots += [Path(each).parent for each in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / path).is_file():
            return root / path
    pytest.skip(f"{framework} is neither installed nor in GSPO_PEER_SOURCES")


def extract(file: Path, *names: str, **namespace) -> dict:
    """Run the named top-level definitions of a file, without decorators that are calls, in ``namespace``."""
    tree = ast.parse(file.read_text())
    wanted = [each for each in tree.body if _name(each) in names]
    assert {_name(each) for each in wanted} == set(names), f"{file.name} has changed"
    for each in wanted:
        if not isinstance(each, ast.Assign):
            each.decorator_list = [one for one in each.decorator_list if isinstance(one, ast.Name)]
    annotations = dict.fromkeys(("Any", "Callable", "Iterator", "Optional", "Tuple", "Union"), Anything)
    namespace = {"torch": torch, **annotations, **namespace}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), namespace)
    return namespace


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign):
        return getattr(node.targets[0], "id", None)
    return getattr(node, "name", None)


class Anything:
    """Stands for types in annotations."""

    def __class_getitem__(cls, item):
        return cls
