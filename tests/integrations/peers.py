"""Functions of a framework's real code, run without importing the framework and its dependencies.

A framework is used if it is installed, or if the folder in GSPO_PEER_SOURCES has its sources in a folder of
its name: a checkout or an unpacked wheel. This repository has no copy of them.
"""

import __future__

import ast
import os
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch


def source(framework: str, path: str) -> Path:
    """Return a file of ``framework``, an import package; skip the test if the file does not exist."""
    roots = []
    if root := os.environ.get("GSPO_PEER_SOURCES"):
        roots += [Path(root, framework), Path(root, framework, "src")]
    spec = PathFinder.find_spec(framework)  # ignores what a test has put into sys.modules
    if spec is not None:
        roots += [Path(each).parent for each in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / path).is_file():
            return root / path
    pytest.skip(f"{framework} is neither installed nor in GSPO_PEER_SOURCES")


def extract(file: Path, *names: str, **namespace) -> dict:
    """Run the named top-level definitions of a file, and those that they use, in a copy of ``namespace``.

    Annotations are not evaluated, and decorators that are calls are left out.
    """
    definitions = {name: each for each in ast.parse(file.read_text()).body if (name := _name(each))}
    assert set(names) <= definitions.keys(), f"{file.name} has changed"
    wanted, left = set(), [*names]
    while left:
        name = left.pop()
        wanted.add(name)
        for node in ast.walk(definitions[name]):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                node.decorator_list = [each for each in node.decorator_list if isinstance(each, ast.Name)]
            if isinstance(node, ast.FunctionDef):
                node.returns = None
            if isinstance(node, ast.arg):
                node.annotation = None
        used = {each.id for each in ast.walk(definitions[name]) if isinstance(each, ast.Name)}
        left += (used & definitions.keys()) - wanted - namespace.keys()
    namespace = {"torch": torch, **namespace}
    module = ast.Module([each for name, each in definitions.items() if name in wanted], [])
    exec(compile(module, str(file), "exec", __future__.annotations.compiler_flag), namespace)
    return namespace


def _name(node: ast.stmt) -> str | None:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return getattr(node, "name", None) or getattr(targets[0], "id", None)
