"""Write docs/objectives.md and .png from the classes: ``python docs/generate_objectives.py``."""

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

HEAD = """# Objectives

Generated from the classes by `python docs/generate_objectives.py`; every entry is the class's own docstring.

Notation, for a sequence of |y| counted tokens: `logp`, `old` and `ref` are log-probs under the current, the
sampling and the reference policy; `l_t = logp_t - old_t`; `r_t = exp(l_t)`; `s = exp(mean_t l_t)`; `A` is the
advantage; `sg` stops the gradient.

Only clip bounds may be given by position, in the order of `clip(r, 1 - low, 1 + high)`: `gk.DAPO(0.2, 0.28)`.
The options behind the `*` go by name. Every objective has `aggregation` and `aggregation_constant` besides.

What a coefficient depends on decides how micro-batches work. Up to the sequence they add up. Over a group
they must hold whole groups. Over the batch `policy_coefficients` comes first, on the whole batch, and
`Linear` carries the coefficients through any split; that way is open to objectives over groups too.

![Gradient coefficient against the ratio](objectives.png)

Two sequences of one token in one group, with advantages of opposite sign (1 and -1; as a level -1 is the
better), the reference where the ratio is 1, equal entropies and the objective's defaults. The first one's
ratio moves; shown is minus its gradient coefficient, what pushes its log-prob up, times the number of
sequences. Objectives over the batch see a third token, less likely and with advantage 0.
"""


def classes() -> dict[str, type[Objective]]:
    """All registered objectives by name, in the order of the alphabet."""
    return {name: getattr(gk.objectives, name) for name in sorted(gk.objectives.__all__, key=str.lower)}


def own_fields(cls: type[Objective]) -> list[dataclasses.Field[Any]]:
    """Options beside those of every objective, and those of them whose default differs."""
    shared = {field.name: field.default for field in dataclasses.fields(Objective)}
    return [f for f in dataclasses.fields(cls) if shared.get(f.name, dataclasses.MISSING) != f.default]


def entry(name: str, cls: type[Objective]) -> str:
    """One objective's section."""
    text, _, options = inspect.getdoc(cls).partition("\nArgs:\n")  # type: ignore[union-attr]
    fields = own_fields(cls)
    positional = [f"{f.name}={f.default!r}" for f in fields if not f.kw_only]
    named = [f"{f.name}={f.default!r}" for f in fields if f.kw_only]
    arguments = ", ".join([*positional, *(["*"] if named else []), *named])
    inputs = [] if not cls.needs_advantages else ["advantages, one per sequence"]
    if cls.takes_token_advantages and inputs:
        inputs = ["advantages, per sequence or per token"]
    inputs += [f"`{needed}`" for needed in cls.needs]
    facts = {
        "Options": f"`{name}({arguments})`",
        "A coefficient depends on": f"the {cls.coefficient_scope}"
        if cls.coefficient_scope != "nothing"
        else "nothing but weights",
        "Inputs": ", ".join(inputs),
    }
    lines = [f"- {fact}: {value}" for fact, value in facts.items()]
    for line in options.split("\n\n")[0].split("\n"):
        if re.match(r"    \S", line):
            names, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{names}`: {meaning}")
        elif line.strip():
            lines[-1] += f" {line.strip()}"
    return f"## {name}\n\n{text.strip()}\n\n{chr(10).join(lines)}\n".replace("``", "`")


def page() -> str:
    """The whole page."""
    return HEAD + "\n" + "\n".join(entry(name, cls) for name, cls in classes().items())


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
    if "--no-plot" not in sys.argv:
        plot()
