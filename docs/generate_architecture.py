"""Write docs/architecture.svg, the package's layers: ``python docs/generate_architecture.py``.

Layers are those of the import contract in pyproject.toml, which lint-imports enforces; each module says what
it is with the first sentence of its docstring. So the sketch can't show what isn't so.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from html import escape
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SKETCH = Path(__file__).with_name("architecture.svg")
WIDTH, GAP, MARGIN, ROW, LINE = 1040, 8, 16, 4, 13
SHADES = ("#2166ac", "#30343b")  # of what users import, and of what is below


def layers() -> list[list[str]]:
    """Modules from the top down, those of one layer side by side."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    first = project["tool"]["importlinter"]["contracts"][0]
    return [re.split(" [|:] ", layer) for layer in first["layers"]]


def says(module: str) -> str:
    """The first sentence of a module's docstring."""
    path = ROOT / "gspo_kernels" / f"{module}.py"
    if not path.exists():
        path = ROOT / "gspo_kernels" / module / "__init__.py"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)}: has no docstring to put into the sketch")
    sentence = docstring.split("\n\n")[0].replace("\n", " ").replace("`", "")
    return sentence.split(". ")[0].rstrip(".") + "."


def sketch() -> str:
    """The SVG."""
    shapes, top, shade = [], MARGIN, SHADES[0]
    for layer in layers():
        if layer == ["hidden"]:  # the first that only other layers import
            shade = SHADES[1]
        for start in range(0, len(layer), ROW):
            modules = layer[start : start + ROW]
            width = (WIDTH - 2 * MARGIN - GAP * (len(modules) - 1)) / len(modules)
            texts = [textwrap.wrap(says(module), int((width - 20) / 5.7)) for module in modules]
            height = 30 + LINE * max(map(len, texts))
            for place, (module, lines) in enumerate(zip(modules, texts, strict=True)):
                shapes += box(MARGIN + place * (width + GAP), top, width, height, shade, module, lines)
            top += height + (2 if start + ROW < len(layer) else GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - GAP + MARGIN}" '
        'font-family="system-ui, sans-serif">'
    )
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, ground, *shapes, "</svg>", ""])


def box(
    left: float, top: float, width: float, height: float, shade: str, module: str, lines: list[str]
) -> list[str]:
    """One module."""
    shapes = [
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="4" fill="#f4f5f7"/>',
        f'<rect x="{left:.1f}" y="{top}" width="3" height="{height}" rx="1" fill="{shade}"/>',
        f'<text x="{left + 12:.1f}" y="{top + 18}" font-size="13" font-weight="600" fill="{shade}">'
        f"{module}</text>",
    ]
    for place, line in enumerate(lines):
        shapes.append(
            f'<text x="{left + 12:.1f}" y="{top + 34 + LINE * place}" font-size="11" fill="#30343b">'
            f"{escape(line)}</text>"
        )
    return shapes


if __name__ == "__main__":
    SKETCH.write_text(sketch())
