"""The parts of ``make dist``: versions that agree, tagged wheels, bare environments."""

import zipfile
from pathlib import Path

import pytest

import gspo_kernels as gk
from release import build, install, version
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
    ids=["empty", "version", "unexpected", "platform", "no extension", "extension"],
)
def test_check_refuses(tmp_path, monkeypatch, name, inside, said):
    monkeypatch.setattr(build, "run", lambda *command, **_: None)
    monkeypatch.setattr(build, "stated", lambda: "1.2.3")
    if name is not None:
        wheel(tmp_path, name, *inside)
    with pytest.raises(RuntimeError, match=said):
        build.check(tmp_path)


def test_a_bare_environment_has_no_compiler(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "CXX", "LD_LIBRARY_PATH", "GSPO_KERNELS_NO_EXT", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(ROOT))
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    bare = install.bare_environment(tmp_path, tmp_path / "home")
    assert bare["PATH"] == str(tmp_path) and bare["HOME"] == str(tmp_path / "home")
    assert bare["PIP_INDEX_URL"] == "kept" and str(ROOT) not in bare.values()
    (tmp_path / "g++").touch(mode=0o755)
    with pytest.raises(RuntimeError, match=r"g\+\+"):
        install.bare_environment(tmp_path, tmp_path)
