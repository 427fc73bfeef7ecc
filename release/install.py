"""Installs wheels into a bare environment, as a stranger would, and has ``user.py`` use them there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from release.build import wheel_kind

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ninja")


def bare_environment(binaries: Path, home: Path) -> dict[str, str]:
    """Environment variables with neither a compiler nor a checkout in reach.

    Raises:
        RuntimeError: there is a compiler in ``binaries``.
    """
    if found := [name for name in COMPILERS if shutil.which(name, path=str(binaries))]:
        raise RuntimeError(f"{binaries} has {', '.join(found)}: nothing would be shown there")
    dropped = ("PYTHON", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "LD_", "GSPO_KERNELS_")
    dropped += ("VIRTUAL_ENV", "PWD", "OLDPWD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PATH": str(binaries), "HOME": str(home)}


def fits(wheel: Path) -> bool:
    """Whether pip would take a wheel for this machine and this interpreter."""
    return not parse_wheel_filename(wheel.name)[3].isdisjoint(sys_tags())


def install(wheels: list[Path], python: str, torch: str | None) -> None:
    """Install wheels, one after the other, into one new environment, and use each.

    Args:
        wheels: the compiled one, the pure one or both.
        python: an interpreter's name or path.
        torch: version of torch to install; None: the one that pip takes for the wheel.

    Raises:
        subprocess.CalledProcessError: pip or the use of a wheel failed.
    """
    user = Path(__file__).with_name("user.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        binaries = folder / "env" / "bin"
        environment = bare_environment(binaries, folder)

        def call(*command: str | Path) -> None:
            print("+", *command, flush=True)
            subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)

        for index, wheel in enumerate(wheels):
            start = time.perf_counter()
            pip = (binaries / "python", "-m", "pip", "install", "--quiet")
            if index == 0:
                pinned = [] if torch is None else [f"torch=={torch}"]
                call(*pip, *pinned, f"gspo_kernels[train] @ {wheel.resolve().as_uri()}")
            else:
                call(*pip, "--force-reinstall", "--no-deps", wheel.resolve())
            took = time.perf_counter() - start
            size = sum(path.lstat().st_size for path in (folder / "env").rglob("*") if path.is_file())
            print(f"installed {wheel.name} in {took:.0f} s; the environment has {size / 2**20:.0f} MiB")
            # fed by standard input: a script's own folder would be searched for modules
            print("+ user.py", wheel_kind(wheel), flush=True)
            subprocess.run(
                [binaries / "python", "-u", "-", wheel_kind(wheel)],
                input=user, text=True, cwd=folder, env=environment, check=True,
            )  # fmt: skip
