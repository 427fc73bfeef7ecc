"""The package without its extension: it builds, imports, and reports the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from gspo_kernels.backends import cpp
from tests.backends.cpp.clones import ROOT, tree

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def reported(cwd: Path) -> str:
    # An editable install of the real tree would lend the copy its extension.
    code = (
        "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder)]; "
        "import torch; from gspo_kernels.backends import cpp; print(cpp.unavailable(torch.device('cpu')))"
    )
    return run(cwd, "-c", code, PYTHONPATH=str(cwd)).stdout


def test_missing_extension_has_a_reason(tmp_path):
    root = tree(tmp_path)
    (root / "no_torch" / "torch").mkdir(parents=True)
    (root / "no_torch" / "torch" / "__init__.py").write_text("raise ImportError('not here')\n")
    built = run(root, "setup.py", "build_ext", "--inplace", PYTHONPATH="no_torch")
    assert "WARNING: gspo_kernels is built without its C++ CPU backend" in built.stderr
    assert not list(root.rglob("_C*.so"))
    message = reported(root)
    assert "gspo_kernels._C is missing" in message and "PyTorch can't be imported by the build" in message
    (root / "gspo_kernels" / "_C.abi3.so").write_bytes(b"not a library")
    assert "gspo_kernels._C does not load" in reported(root)


FAKE_COMPILER = """#!/bin/sh
# answers as a compiler would, and writes an empty file wherever one is asked for
for argument in "$@"; do
    [ "$before" = "-o" ] && : > "$argument"
    before=$argument
done
echo 13.0.0
"""


def test_a_wheels_tag_depends_on_the_extension(tmp_path):
    """Files that an earlier build left don't get into a wheel."""
    root = tree(tmp_path)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "compiler").write_text(FAKE_COMPILER)
    (root / "compiler").chmod(0o755)
    works, missing = (dict.fromkeys(("CXX", "CC"), path) for path in (f"{root}/compiler", "/nonexistent/cc"))
    for name, environment, tag, reason in (
        ("compiled", works, "cp310-abi3-", None),
        ("broken", missing, "py3-none-any", "compiling it failed"),
    ):
        run(root, "setup.py", "bdist_wheel", "--dist-dir", name, **environment)
        (wheel,) = (root / name).iterdir()
        assert tag in wheel.name and (reason or list((root / "build").rglob("_C.abi3.so")))
        with zipfile.ZipFile(wheel) as files:
            built = {Path(path).name: path for path in files.namelist() if "/_C" in path}
            assert list(built) == ["_C.unavailable" if reason else "_C.abi3.so"]
            assert reason is None or reason in files.read(built["_C.unavailable"]).decode()
            about = next(path for path in files.namelist() if path.endswith("/WHEEL"))
            assert f"Root-Is-Purelib: {str(bool(reason)).lower()}" in files.read(about).decode()
    assert not (root / "gspo_kernels" / "_C.unavailable").exists()


def test_the_source_distribution_tests_itself(tmp_path):
    """The archive has all that the Makefile's commands read, and nothing that was built."""
    folders = ("gspo_kernels", "csrc", "tests", "benchmarks", "docs", "examples", "release")
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = [*("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "constraints.txt"), ".clang-format"]
    files += [".pre-commit-config.yaml", "mkdocs.yml", "README.md", "LICENSE", "CHANGELOG.md"]
    files += ["CONTRIBUTING.md", *(f".github/workflows/{path.name}" for path in WORKFLOWS)]
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    for name in files:
        shutil.copy(ROOT / name, tmp_path / name)
    run(tmp_path, "setup.py", "sdist", "--dist-dir", "dist", GSPO_KERNELS_NO_EXT="1")  # without torch
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as source:
        found = {str(Path(*Path(name).parts[1:])) for name in source.getnames()}
    wanted = {str(path.relative_to(tmp_path)) for f in folders for path in (tmp_path / f).rglob("*.*")}
    built = {name for name in wanted if name.endswith((".so", "_C.unavailable"))}
    assert not built & found
    assert (wanted | set(files)) - built - found == set()


def test_other_devices_are_refused():
    for device in ("cuda", "meta", "mps"):
        assert "CPU tensors only" in str(cpp.unavailable(torch.device(device)))


def test_calls_without_the_extension_raise_its_reason(monkeypatch):
    monkeypatch.setattr(cpp, "_load_error", lambda: "the reason")
    monkeypatch.setattr(cpp, "operators", cpp.operators.__wrapped__)
    assert cpp.unavailable(CPU) == "the reason"
    logits, labels = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="the reason"):
        cpp.logprobs_forward(cpp.LogitRows(logits, labels, cpp.LogitTransform(), -100), False)


def test_extension_is_stable_abi_without_openmp():
    if cpp.unavailable(CPU) is not None:
        pytest.skip(str(cpp.unavailable(CPU)))
    import gspo_kernels._C as extension

    assert extension.__file__.endswith(".abi3.so")
    needed = Path(extension.__file__).read_bytes()
    assert b"libgomp" not in needed and b"libtorch_python" not in needed
