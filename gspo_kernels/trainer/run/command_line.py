"""The command line of ``gspo train``: tyro's, made from the configuration's own documentation."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.run.config_file import flat, load_config, options

# tyro keeps the line breaks before what is indented or a point of a list, and does not wrap
DESCRIPTION = """\
Train a causal language model with GSPO on prompts and reward functions.
  gspo train config.yaml --update.learning_rate 1e-6
  gspo train --model DIR --dataset prompts.jsonl --reward rewards.py:correct
- CONFIG is a YAML or TOML file with the keys below, nested by section;
  options on the command line come on top of it.
- A reward is a function
  f(prompts, completions, completion_ids, **columns) -> list[float | None].
- Several devices:
  accelerate launch [...] -m gspo_kernels.cli train CONFIG [...]
"""

NOT_GIVEN = "\0"
"""Default of the options of the command line; no argument of a process can hold this character."""


@dataclass(frozen=True)
class TrainArguments:
    """What one ``gspo train`` command asks for."""

    config: TrainConfig
    resume: bool
    overwrite: bool


def parse_train_arguments(arguments: Sequence[str]) -> TrainArguments:
    """Read a command line; ``--resume --output DIR`` without CONFIG takes the one that DIR holds."""
    chosen: Any = tyro.cli(
        command_line(),
        prog="gspo train",
        description=DESCRIPTION,
        args=arguments,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    given = flat(dataclasses.asdict(chosen))
    values = {key: value for key, value in given.items() if value not in (NOT_GIVEN, ())}
    for key, value in values.items():
        if isinstance(value, tuple) and len(value) == 1:
            values[key] = value[0]  # a list of one, or none
    resume, overwrite, path = values.pop("resume"), values.pop("overwrite"), values.pop("CONFIG", None)
    if path is None and resume and "output" in values:
        path = Path(values["output"]) / "config.yaml"
    return TrainArguments(load_config(path, values), resume, overwrite)


def command_line() -> Any:
    """Return the dataclass that tyro fills: every option as text, as `load_config` takes it."""
    start = tyro.conf.create_mutex_group(required=False, title="start")
    config = tyro.conf.arg(help="YAML or TOML file", help_behavior_hint="", metavar="[CONFIG]")
    resume = tyro.conf.arg(help="go on from the last checkpoint in --output", help_behavior_hint="")
    overwrite = tyro.conf.arg(help="replace the run in --output", help_behavior_hint="")
    sections: dict[str, list[tuple[str, Any, Any]]] = {
        "": [
            ("CONFIG", tyro.conf.Positional[Annotated[str, config]], NOT_GIVEN),
            ("resume", Annotated[bool, resume, start], False),
            ("overwrite", Annotated[bool, overwrite, start], False),
        ]
    }
    for key, text, default, kind in options():
        section, _, name = key.rpartition(".")
        shown = "" if default in (None, "", ()) else f"(default: {default})"
        about = tyro.conf.arg(help=text, help_behavior_hint=shown, metavar=_metavar(kind))
        leaf: tuple[str, Any, Any] = (name, Annotated[str, about], NOT_GIVEN)
        if "tuple" in str(kind):
            leaf = (name, tyro.conf.UseAppendAction[Annotated[tuple[str, ...], about]], ())
        sections.setdefault(section, []).append(leaf)
    top = sections.pop("")
    hints = typing.get_type_hints(TrainConfig)
    for name, leaves in sections.items():
        section_type = dataclasses.make_dataclass(name, leaves, namespace={"__doc__": hints[name].__doc__})
        top.append((name, section_type, field(default_factory=section_type)))
    return dataclasses.make_dataclass("train", top)


def _metavar(kind: Any) -> str:
    """Return what an option takes, from its type: of ``float | None`` and ``tuple[float, ...]`` FLOAT."""
    inner = typing.get_args(kind)
    if inner and isinstance(inner[0], str):
        return "|".join(inner)
    return _metavar(inner[0]) if inner else str(kind.__name__).upper()
