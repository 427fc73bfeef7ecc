"""The Python of the README and of docs/ runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest
import torch

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
    """One line does what the naive code does: the same loss and the same gradients."""
    namespace = run("README.md")
    hidden, weight = namespace["hidden"], namespace["lm_head"].weight
    torch.testing.assert_close(namespace["out"].loss, namespace["naive"])
    expected = torch.autograd.grad(namespace["naive"], (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), expected)
    assert hidden.grad.abs().sum() > 0
    assert float(namespace["out"].metrics["ratio/max"]) == 1.0


def test_the_readme_comes_to_the_point():
    text = (ROOT / "README.md").read_text()
    lines, first = text.partition("## How it is built")[0].splitlines(), blocks("README.md")[0]
    assert len(lines) < 120
    # what is replaced comes first, then what replaces it, then how to get it
    assert text.index(first) < text.index("gk.fused_linear_policy_loss(") < text.index("pip install")


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_page_runs(page):
    if page == "docs/integrations/trl.md":
        pytest.importorskip("trl", reason="needs Python 3.11")
    if page == "docs/integrations/hub.md":
        pytest.importorskip("kernels")
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
