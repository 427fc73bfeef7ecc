"""The site: every page is in its navigation, links hold there, and the reference has every public name."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import gspo_kernels as gk

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def script(path):
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


(HOOK,) = CONFIG["hooks"]
SITE = script(HOOK)


def leaves(entry):
    """Pages of a navigation, which nests lists and single entries."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry if isinstance(entry, list) else entry.values()) for page in leaves(part)]


def pages(docs):
    """What the site has pages of, given the folder of docs/."""
    inside = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"README.md"}
    outside = {place for place in SITE.OUTSIDE if place.endswith(".md")}
    return inside | outside | {f"reference/{name}.md" for name in SITE.REFERENCE}


def test_every_page_is_in_the_navigation_once():
    shown = leaves(CONFIG["nav"])
    assert sorted(shown) == sorted(pages(DOCS)), "a page is in mkdocs.yml and not under docs/, or the reverse"


def test_a_page_in_no_navigation_is_seen(tmp_path):
    (tmp_path / "integrations").mkdir()
    (tmp_path / "integrations" / "new.md").touch()
    (tmp_path / "README.md").touch()
    assert pages(tmp_path) - set(leaves(CONFIG["nav"])) == {"integrations/new.md"}


def test_what_lies_outside_is_there_and_takes_no_pages_place():
    for place, source in SITE.OUTSIDE.items():
        assert (ROOT / source).is_file() and not (DOCS / place).exists(), place
    assert set(SITE.SAME.values()) <= set(SITE.OUTSIDE.values())


@pytest.mark.parametrize(
    ("place", "written", "shown"),
    [
        ("index.md", "[a](docs/losses.md#terms)", "[a](losses.md#terms)"),
        ("index.md", "[all pages](docs/README.md)", "[all pages](index.md)"),
        ("index.md", "![a](docs/objectives.png)", "[![a](objectives.png)](objectives.png)"),
        ("contributing.md", "![a](docs/architecture.svg)", "[![a](architecture.svg)](architecture.svg)"),
        ("losses.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("precision.md", "[a](../examples/paper/README.md)", "[a](examples/paper.md)"),
        ("examples/paper.md", "![a](training.png)", "[![a](training.png)](training.png)"),
        ("integrations/trl.md", "[a](../objectives.md)", "[a](../objectives.md)"),
        ("integrations/trl.md", "[a](README.md)", "[a](README.md)"),
        (
            "objectives.md",
            "[GSPO](../gspo_kernels/objectives/gspo.py)",
            "[GSPO](reference/objectives.md#gspo_kernels.GSPO)",
        ),
        ("benchmarks.md", "in [`results`](../benchmarks/results).", "in `results`."),
        ("index.md", "[a](https://arxiv.org) [b](#here)", "[a](https://arxiv.org) [b](#here)"),
        ("index.md", "```python\nx[a](docs/losses.md)\n```\n", "```python\nx[a](docs/losses.md)\n```\n"),
        ("index.md", "`y[a](docs/losses.md)`", "`y[a](docs/losses.md)`"),
    ],
)
def test_links_are_turned_to_the_site(place, written, shown):
    assert SITE.turned(written, place) == shown


def test_files_that_are_no_pages_lead_into_the_repository_once_there_is_one():
    written = "[results](../benchmarks/results)"
    assert "repo_url" not in CONFIG and SITE.turned(written, "benchmarks.md") == "results"
    shown = SITE.turned(written, "benchmarks.md", "https://host/repository/")
    assert shown == "[results](https://host/repository/blob/HEAD/benchmarks/results)"


def test_the_hooks_turn_pages_and_leave_the_reference():
    class Page:
        def __init__(self, place):
            self.file, self.meta = type("File", (), {"src_uri": place}), {}

    config = type("Config", (), {"repo_url": None})
    start = Page("index.md")
    assert SITE.on_page_markdown("[a](docs/losses.md)", start, config, None) == "[a](losses.md)"
    assert start.meta["hide"] == ["navigation"]
    text = SITE.reference_page("losses")
    assert SITE.on_page_markdown(text, Page("reference/losses.md"), config, None) == text


def named(path):
    """The module of a dotted name, or what a module has by it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


REFERENCE = [name for _, names in SITE.REFERENCE.values() for name in names.split()]


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_shows_what_there_is(name):
    assert named(name).__doc__


def test_the_reference_has_every_public_name():
    shown = {name.removeprefix("gspo_kernels.") for name in REFERENCE}
    assert set(gk.__all__) - {"objectives"} <= shown


def test_nothing_is_loaded_from_elsewhere():
    assert CONFIG["theme"]["font"] is False and CONFIG["strict"] is True
    assert "http" not in (DOCS / "site.css").read_text()
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())
