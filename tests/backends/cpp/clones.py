"""Build the extension with one clone of its loops, so that the loader has no choice.

``python -m tests.backends.cpp.clones x86-64-v3 folder`` prints the FILE for ``pytest --extension FILE``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def tree(destination: Path) -> Path:
    """Copy what the build and the backend need, without an extension from an earlier build."""
    shutil.copytree(ROOT / "csrc", destination / "csrc")
    shutil.copy(ROOT / "setup.py", destination)
    for source in ("backends/__init__.py", "backends/cpp/__init__.py", "core/__init__.py", "core/types.py"):
        (destination / "gspo_kernels" / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "gspo_kernels" / source, destination / "gspo_kernels" / source)
    (destination / "gspo_kernels" / "__init__.py").touch()
    return destination


def build(clone: str, folder: Path) -> Path:
    """Build an extension with this clone alone and return its file; a second build there compiles little."""
    root = folder if (folder / "csrc").exists() else tree(folder)
    target = "" if clone == "x86-64" else f'__attribute__((target("arch={clone}")))'
    (root / "csrc" / "clones.h").write_text(f"#pragma once\n#define GSPO_CLONES {target}\n")
    # with ninja, which compiles in parallel and only what has changed; without the loops of avx512.cpp
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    flags = f"{os.environ.get('CFLAGS', '')} -DGSPO_ONE_CLONE"
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=root,
        env={**os.environ, "PATH": path, "CFLAGS": flags, "CXXFLAGS": flags},
        check=True,
        capture_output=True,
        timeout=600,
    )
    (built,) = (root / "gspo_kernels").glob("_C*.so")
    return built


if __name__ == "__main__":
    print(build(sys.argv[1], Path(sys.argv[2])))
