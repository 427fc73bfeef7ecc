"""Write the table and the plot of docs/objectives.md, and how many objectives there are into all pages:
``python docs/generate_objectives.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective

PAGE = Path(__file__).with_name("objectives.md")
PLOT = Path(__file__).with_name("objectives.png")
PAGES = (PAGE.parent.parent / "README.md", *sorted(PAGE.parent.rglob("*.md")))

BEGIN, END = "<!-- objectives -->\n", "<!-- end of objectives -->\n"


def classes() -> dict[str, type[Objective]]:
    """All registered objectives by name, in the order of the alphabet."""
    return {name: getattr(gk.objectives, name) for name in sorted(gk.objectives.__all__, key=str.lower)}


def own_fields(cls: type[Objective]) -> list[dataclasses.Field[Any]]:
    """Options besides those of every objective, and those of them whose default differs."""
    shared = {field.name: field.default for field in dataclasses.fields(Objective)}
    return [f for f in dataclasses.fields(cls) if shared.get(f.name, dataclasses.MISSING) != f.default]


def row(name: str, cls: type[Objective]) -> str:
    """One objective's line of the table: summary and loss, scope of a coefficient, inputs, options."""
    fields = own_fields(cls)
    positional = [f"{f.name}={f.default!r}" for f in fields if not f.kw_only]
    named = [f"{f.name}={f.default!r}" for f in fields if f.kw_only]
    options = ", ".join([*positional, *(["*"] if named else []), *named])
    source = Path(inspect.getfile(cls)).relative_to(PAGE.parent.parent)
    text = inspect.getdoc(cls).partition("\nArgs:\n")[0].replace("``", "`")  # type: ignore[union-attr]
    summary, *sentences = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()))
    found = (re.search(r"`(.*`)?loss\S* = .*?(?=; `dloss|\.?$)", each) for each in sentences)
    loss = next((match.group() for match in found if match is not None), "")
    advantages = "per token or sequence" if cls.takes_token_advantages else "per sequence"
    inputs = [f"advantages {advantages}"] if cls.needs_advantages else []
    inputs += [f"`{needed}`" for needed in cls.needs]
    what = f"{summary} {loss}".strip().rstrip(".") + f". Options: `{options}`"
    cells = (f"[{name}](../{source.as_posix()})", what, f"{cls.coefficient_scope}; {', '.join(inputs)}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def page() -> str:
    """The page with its table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    head = "| objective | loss and options | a coefficient depends on; inputs |\n|---|---|---|\n"
    table = "".join(row(name, cls) for name, cls in classes().items())
    return before + BEGIN + head + table + END + rest.partition(END)[2]


def numbered(text: str) -> str:
    """A page's text with the number of objectives as it should be."""
    return re.sub(r"\b\d+ objectives\b", f"{len(classes())} objectives", text)


def made(cls: type[Objective]) -> Objective:
    """With its defaults, and a constant where there is none."""
    try:
        return cls()
    except (TypeError, ValueError):
        return cls(aggregation_constant=1.0)


def push(objective: Objective, ratios: torch.Tensor, advantage: float) -> list[float]:
    """Minus the coefficient of the first of a pair of tokens, times how many there are, at each ratio."""
    alone = objective.coefficient_scope == "batch"
    if alone and len(ratios) > 1:
        return [push(objective, ratio, advantage)[0] for ratio in ratios.split(1)]
    pairs = len(ratios)
    # covariances of two tokens are equal; a third makes them differ
    sequences = 2 * pairs + alone
    old = torch.full((sequences, 1), -1.0, dtype=torch.float64)
    old[2 * pairs :] = -3.0
    logprobs = old.clone()
    logprobs[: 2 * pairs : 2, 0] += ratios.double().log()
    has = {
        "ref_logprobs": old,
        "token_weights": torch.ones_like(old),
        "lengths": torch.ones(sequences),
        "entropy": torch.ones_like(old),
        "group_ids": torch.arange(sequences) // 2,
        "turn_ids": torch.zeros(sequences, 1, dtype=torch.int64),
    }
    got = gk.policy_coefficients(
        logprobs,
        old,
        torch.tensor([*[advantage, -advantage] * pairs, *[0.0] * alone]),
        objective=objective,
        **{name: has[name] for name in objective.needs},  # type: ignore[arg-type]
    )
    return (-sequences * got[: 2 * pairs : 2, 0]).tolist()


def plot() -> None:
    """One panel per objective with advantages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: cls for name, cls in classes().items() if cls.needs_advantages}
    columns = 5
    figure, panels = pyplot.subplots(
        math.ceil(len(shown) / columns),
        columns,
        figsize=(12, 2 * math.ceil(len(shown) / columns)),
        sharex=True,
    )
    ratios = torch.linspace(0.5, 1.75, 251)
    for panel, (name, cls) in zip(panels.flat, shown.items(), strict=False):
        for advantage, colour in ((1.0, "tab:blue"), (-1.0, "tab:red")):
            panel.plot(
                ratios, push(made(cls), ratios, advantage), color=colour, label=f"A = {advantage:+.0f}"
            )
        panel.axhline(0.0, color="black", linewidth=0.5)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
    for panel in panels.flat[len(shown) :]:
        panel.set_axis_off()
    panels.flat[0].legend(fontsize=7)
    figure.supxlabel("ratio", fontsize=9)
    figure.supylabel("minus the gradient coefficient", fontsize=9)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    PAGE.write_text(page())
    for each in PAGES:
        each.write_text(numbered(each.read_text(encoding="utf-8")), encoding="utf-8")
    if "--no-plot" not in sys.argv:
        plot()
