"""The losses as a kernel of the Hugging Face hub, which ``kernels.get_kernel`` loads without an install.

Such a kernel is imported from any folder under a name of its own, several versions side by side. So imports
become relative here, and the operators' namespace follows the name of the module (``operators``). There is
no C++ in it: Triton serves GPUs, plain PyTorch the CPU.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path

from release.version import ROOT, stated, tomllib

PACKAGE = "gspo_kernels"
LEFT_OUT = ("cli.py", "doctor.py", "integrations", "mismatch", "models", "rewards.py", "trainer")
"""What stands above the losses: it needs frameworks, or an install."""

HERE = Path(__file__).parent


def relative(source: str, depth: int) -> str:
    """A module's text with relative imports of its own package.

    Args:
        source: the text.
        depth: 1 for modules in the package's folder, 2 for those one below, and so on.

    Raises:
        ValueError: an import that has no relative form, such as ``import gspo_kernels``.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    raise ValueError(f"line {node.lineno}: `import {alias.name}` has no relative form")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            top, _, inner = node.module.partition(".")
            if top == PACKAGE:
                at = node.lineno - 1
                absolute, dotted = f"from {node.module} import", f"from {'.' * depth}{inner} import"
                if absolute not in lines[at]:
                    raise ValueError(f"line {node.lineno}: expected `{absolute}` in one line")
                lines[at] = lines[at].replace(absolute, dotted, 1)
    return "".join(lines)


def modules() -> dict[Path, str]:
    """Text by path of every module of the kernel, and its license."""
    found = {}
    package = ROOT / PACKAGE
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0] not in LEFT_OUT:
            found[inside] = relative(path.read_text(encoding="utf-8"), len(inside.parts))
    found[Path("__init__.py")] += (
        f'\nfrom . import layers  # noqa: E402, F401\n\n__version__ = "{stated()}"\n'
    )
    found[Path("layers.py")] = relative((HERE / "layers.py").read_text(encoding="utf-8"), 1)
    found[Path("LICENSE")] = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return found


def build(out: Path) -> None:
    """Write the repository of the kernel: its sources, and what ``kernels`` loads for each backend.

    Args:
        out: a folder that doesn't exist yet, or one that this has written.

    Raises:
        FileExistsError: the folder holds something else.
    """
    if out.exists():
        if not (out / "build.toml").is_file():
            raise FileExistsError(f"{out}: exists and is no kernel, name another folder with --out")
        shutil.rmtree(out)
    texts = modules()
    settings = (HERE / "build.toml").read_text(encoding="utf-8")
    general = tomllib.loads(settings)["general"]
    digest = hashlib.sha256(json.dumps([[str(path), text] for path, text in texts.items()]).encode())
    _write(out / "torch-ext" / PACKAGE, texts)
    for backend in general["backends"]:
        folder = out / "build" / f"torch-{backend}"
        _write(folder, texts)
        # the name under which the module is imported, and so the namespace of its operators
        identity = f"{PACKAGE}_{backend}_{digest.hexdigest()[:12]}"
        about = {"id": identity, **{key: general[key] for key in ("name", "version", "license")}}
        about |= {"python-depends": [], "backend": {"type": backend}}
        (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (out / "build.toml").write_text(settings, encoding="utf-8")
    shutil.copy(HERE / "README.md", out)
    size = sum(len(text.encode()) for text in texts.values())
    print(f"{out}: {len(texts)} files, {size / 1024:.0f} KiB for each of {', '.join(general['backends'])}")


def _write(folder: Path, texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
