"""The parts of ``make dist``: versions that agree, honest wheels, bare environments."""

import itertools
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import gspo_kernels as gk
from release import build, install, user, version
from release.__main__ import main

ROOT = Path(__file__).parent.parent
COMPILED = "gspo_kernels-1.2.3-cp310-abi3-manylinux_2_28_x86_64.whl"
PURE = "gspo_kernels-1.2.3-py3-none-any.whl"
EXTENSION = "gspo_kernels/_C.abi3.so"


def test_version_tag_and_changelog_agree_in_this_tree(capsys):
    """No second place states the version."""
    assert version.disagreements(tag=f"v{version.stated()}") == []
    assert gk.__version__ == version.stated()
    stated = re.compile(rf"""["']v?{re.escape(version.stated())}["']""")
    for path in (*(ROOT / "gspo_kernels").rglob("*.py"), ROOT / "setup.py", *(ROOT / "release").glob("*.py")):
        assert not stated.search(path.read_text()), path
    assert main(["version"]) == 0 and capsys.readouterr().out.strip() == version.stated()
    assert main(["version", "--tag", "v0.0.0"]) == 1
    assert "'v0.0.0'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "tag", "message"),
    [
        ("## 1.2.3\n\nNew.\n\n## 1.2.2\n", "v1.2.3", None),
        ("## 1.2.3\n", "1.2.3", "wants 'v1.2.3'"),
        ("## 1.2.2\n", None, "newest section is '1.2.2'"),
        ("", None, "newest section is missing"),
        ("## Unreleased\n\nNew.\n\n## 1.2.3\n", "v1.2.3", 'stand under "Unreleased"'),
        ("## Unreleased\n\n## 1.2.3\n", None, None),
    ],
)
def test_disagreements_are_named(tmp_path, sections, tag, message):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "gspo_kernels"\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{sections}")
    found = version.disagreements(tmp_path, tag)
    assert len(found) == (message is not None) and all(message in line for line in found)


@pytest.fixture
def calls(monkeypatch):
    """Record commands instead of running them."""
    found = []
    monkeypatch.setattr(build, "run", lambda *command, **_: found.append([str(part) for part in command]))
    monkeypatch.setattr(build, "stated", lambda: "1.2.3")
    return found


def wheel(folder, name, *files):
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in ("gspo_kernels/__init__.py", "gspo_kernels-1.2.3.dist-info/WHEEL", *files):
            archive.writestr(file, "")


def test_check_runs_the_checkers(tmp_path, calls):
    wheel(tmp_path, COMPILED, EXTENSION)
    wheel(tmp_path, PURE, "gspo_kernels/_C.unavailable")
    (tmp_path / "gspo_kernels-1.2.3.tar.gz").touch()
    build.check(tmp_path)
    by_tool = {call[2]: call for call in calls}
    assert set(by_tool) == {"twine", "abi3audit", "auditwheel"}
    assert [Path(name).name for name in by_tool["twine"][5:]] == [COMPILED, PURE, "gspo_kernels-1.2.3.tar.gz"]
    assert by_tool["abi3audit"][-1].endswith(COMPILED) and "--strict" in by_tool["abi3audit"]
    assert install.fits(Path(PURE)) and not install.fits(Path(COMPILED.replace("x86_64", "s390x")))


@pytest.mark.parametrize(
    ("name", "inside", "said"),
    [
        (None, (), "nothing to check"),
        ("gspo_kernels-1.2.30-py3-none-any.whl", (), "pyproject.toml says 1.2.3"),
        (PURE, ("tests/__init__.py",), "nobody asked for tests"),
        (COMPILED.replace("manylinux_2_28", "linux"), (EXTENSION,), "index refuses this tag"),
        (COMPILED, (), "says that it is compiled"),
        (PURE, (EXTENSION,), "says that it is pure"),
    ],
    ids=["empty", "version", "strangers", "platform", "no extension", "extension"],
)
def test_check_refuses(tmp_path, calls, name, inside, said):
    if name is not None:
        wheel(tmp_path, name, *inside)
    with pytest.raises(RuntimeError, match=said):
        build.check(tmp_path)


def test_the_repair_is_that_of_the_containers(tmp_path, calls):
    """Each library that ``--exclude`` names lies in torch's folder, where importing torch finds it."""
    build.repair(tmp_path / "some.whl", tmp_path / "out")
    (call,) = calls
    assert call[:4] == [sys.executable, "-m", "auditwheel", "repair"]
    assert call[-3:] == ["--wheel-dir", str(tmp_path / "out"), str(tmp_path / "some.whl")]
    left_out = {option for before, option in itertools.pairwise(call) if before == "--exclude"}
    assert left_out and left_out <= {path.name for path in (Path(torch.__file__).parent / "lib").iterdir()}


def test_tools_run_with_their_neighbours_on_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "")
    program = "import os, sys; sys.exit(os.environ['PATH'].split(os.pathsep)[0] != sys.argv[1])"
    build.run(sys.executable, "-c", program, Path(sys.executable).parent)
    with pytest.raises(subprocess.CalledProcessError):
        build.run(sys.executable, "-c", program, "elsewhere")


def test_a_bare_environment_has_no_compiler_and_no_checkout(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "CXX", "LD_LIBRARY_PATH", "GSPO_KERNELS_NO_EXT", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(ROOT))
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    bare = install.bare_environment(tmp_path, tmp_path / "home")
    assert bare["PATH"] == str(tmp_path) and bare["HOME"] == str(tmp_path / "home")
    assert bare["PIP_INDEX_URL"] == "kept" and str(ROOT) not in bare.values()
    (tmp_path / "g++").touch(mode=0o755)
    with pytest.raises(RuntimeError, match=r"g\+\+"):
        install.bare_environment(tmp_path, tmp_path)


@pytest.mark.parametrize("said", ["ready", f"not here: gspo_kernels._C is missing: {user.PURE}"])
@pytest.mark.parametrize("kind", ["compiled", "pure"])
def test_the_user_believes_the_doctor_only_if_it_fits_the_wheel(monkeypatch, kind, said):
    report = f"cpu (2 threads): backend 'auto' is 'x'\n  reference  ready\n  cpp        {said}\n"
    answer = subprocess.CompletedProcess([], 0, stdout=report)
    monkeypatch.setattr(user.subprocess, "run", lambda *_, **__: answer)
    if (kind == "compiled") == (said == "ready"):
        user.use_doctor(kind)
    else:
        with pytest.raises(SystemExit, match="gspo doctor"):
            user.use_doctor(kind)


def test_the_user_refuses_a_checkout_and_runs_the_page_of_the_package(monkeypatch, tmp_path):
    assert user.PURE in (ROOT / "setup.py").read_text()  # the reason that the user expects is the build's
    monkeypatch.setattr(user.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SystemExit, match="imported from"):
        user.use_import()
    for page, error in (("no code", SystemExit), ("```python\nraise KeyError\n```\n", KeyError)):
        monkeypatch.setattr(user, "metadata", lambda _, page=page: SimpleNamespace(get_payload=lambda: page))
        with pytest.raises(error):
            user.use_readme()
    about = distribution("gspo_kernels").metadata
    assert "```python" in str(about.get_payload() or about["Description"])


def test_the_groups_are_pinned():
    """Every tool of a group has a version in constraints.txt, and the range in pyproject.toml allows it."""

    def read(lines):
        found = [Requirement(line) for line in lines if line and not line.startswith("#")]
        here = {"python_version": "3.11", "platform_system": "Linux"}
        return {one.name: one.specifier for one in found if one.marker is None or one.marker.evaluate(here)}

    pins = read((ROOT / "constraints.txt").read_text().splitlines())
    groups = version.tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name, wanted in read(tool for group in groups.values() for tool in group).items():
        (pin,) = pins[name]
        assert pin.operator == "==" and wanted.contains(pin.version), name
