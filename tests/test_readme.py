"""The Python of the README and of docs/ runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")))


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run(page):
    namespace = {"__name__": page}
    for block in blocks(page):
        exec(compile(block, page, "exec"), namespace)
    return namespace


def test_the_readme_does_what_it_says():
    assert len(blocks("README.md")) == 3
    namespace = run("README.md")
    assert namespace["hidden"].grad.isfinite().all()
    assert namespace["hidden"].grad.abs().sum() > 0
    assert namespace["logits"].grad.isfinite().all()
    assert float(namespace["out"].metrics["ratio/max"]) == 1.0


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_page_runs(page):
    if page == "docs/integrations/trl.md":
        pytest.importorskip("trl", reason="needs Python 3.11")
    run(page)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_the_index_names_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)", index.read_text())}
    pages = {(ROOT / page).resolve() for page in PAGES[1:]} - {index}
    assert pages <= linked, sorted(str(page.relative_to(ROOT)) for page in pages - linked)
