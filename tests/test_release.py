"""The parts of ``make dist``: versions that agree, honest wheels, bare environments."""

import subprocess
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gspo_kernels as gk
from release import build, install, user, version
from release.__main__ import main

ROOT = Path(__file__).parent.parent
COMPILED = "gspo_kernels-1.2.3-cp310-abi3-manylinux_2_28_x86_64.whl"
PURE = "gspo_kernels-1.2.3-py3-none-any.whl"
EXTENSION = "gspo_kernels/_C.abi3.so"


def test_version_tag_and_changelog_agree_in_this_tree(capsys):
    assert version.disagreements(tag=f"v{version.stated()}") == []
    assert gk.__version__ == version.stated()
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


def wheel(folder, name, *files):
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in ("gspo_kernels/__init__.py", "gspo_kernels-1.2.3.dist-info/WHEEL", *files):
            archive.writestr(file, "")


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
def test_check_refuses(tmp_path, monkeypatch, name, inside, said):
    monkeypatch.setattr(build, "run", lambda *command, **_: None)
    monkeypatch.setattr(build, "stated", lambda: "1.2.3")
    if name is not None:
        wheel(tmp_path, name, *inside)
    with pytest.raises(RuntimeError, match=said):
        build.check(tmp_path)


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
