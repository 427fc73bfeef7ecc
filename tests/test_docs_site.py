"""The site: every page is in its navigation, links hold there, and the reference has every public name."""

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

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


def test_every_page_is_in_the_navigation_once():
    """What lies outside of docs/ is there and takes no page's place."""
    inside = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    outside = {place for place in SITE.OUTSIDE if place.endswith(".md")}
    pages = inside | outside | {f"reference/{name}.md" for name in SITE.REFERENCE}
    assert sorted(leaves(CONFIG["nav"])) == sorted(pages), "mkdocs.yml and docs/ have different pages"
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
        ("stability.md", "![a](stability_cost.png)", "[![a](stability_cost.png)](stability_cost.png)"),
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
    def page(place):
        return SimpleNamespace(file=SimpleNamespace(src_uri=place), meta={})

    config, start = SimpleNamespace(repo_url=None), page("index.md")
    assert SITE.on_page_markdown("[a](docs/losses.md)", start, config, None) == "[a](losses.md)"
    assert start.meta["hide"] == ["navigation"]
    text = SITE.reference_page("losses")
    assert SITE.on_page_markdown(text, page("reference/losses.md"), config, None) == text


def test_the_reference_has_every_public_name_with_a_docstring():
    shown = [name for _, names in SITE.REFERENCE.values() for name in names.split()]
    assert all(pkgutil.resolve_name(name).__doc__ for name in shown)
    assert set(gk.__all__) - {"objectives"} <= {name.removeprefix("gspo_kernels.") for name in shown}


def test_nothing_is_loaded_from_elsewhere():
    assert CONFIG["theme"]["font"] is False and CONFIG["strict"] is True
    assert "http" not in (DOCS / "site.css").read_text()
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())
