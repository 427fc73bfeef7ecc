"""The options of ``gspo train``, made from the configuration's own documentation."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.config_file import load_config, objective_options, options
from gspo_kernels.trainer.options import near_matches

DESCRIPTION = """\
Train a causal language model with GSPO on prompts and reward functions.

  gspo train config.yaml --update.learning_rate 1e-6
  gspo train --model DIR --dataset prompts.jsonl --reward rewards.py:correct

CONFIG is a YAML or TOML file with the keys below, nested by section; options on the command line come on top
of it. A reward is a function f(prompts, completions, completion_ids, **columns) -> list[float | None].
Several devices: accelerate launch [...] -m gspo_kernels.cli train CONFIG [...].
"""


@dataclass(frozen=True)
class TrainArguments:
    """What one ``gspo train`` command asks for."""

    config: TrainConfig
    resume: bool
    overwrite: bool


def parse_train_arguments(arguments: Sequence[str]) -> TrainArguments:
    """Read a command line; ``--resume --output DIR`` without CONFIG takes the one that DIR holds."""
    parser, keys = train_parser()
    arguments = [_with_underscores(argument) for argument in arguments]
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and name and name not in {*keys, "resume", "overwrite", "help"}:
            parser.error(f"unknown option --{name}{near_matches(name, keys)}")
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    path, resume, overwrite = (values.pop(name) for name in ("CONFIG", "resume", "overwrite"))
    if path is None and resume and "output" in values:
        path = Path(values["output"]) / "config.yaml"
    return TrainArguments(load_config(path, values), resume, overwrite)


def train_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser and its dotted keys."""
    parser = argparse.ArgumentParser(
        prog="gspo train",
        usage="gspo train [CONFIG] [--key VALUE ...] [--section.key VALUE ...] [--resume | --overwrite]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("CONFIG", nargs="?", default=None, help="YAML or TOML file")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", default=False, help="go on from the last checkpoint in --output"
    )
    start.add_argument("--overwrite", action="store_true", default=False, help="replace the run in --output")
    groups = {"": parser.add_argument_group("run", "What is trained, on what, and where it goes.")}
    for leaf in dataclasses.fields(TrainConfig):
        if isinstance(leaf.default_factory, type):
            groups[leaf.name] = parser.add_argument_group(leaf.name, leaf.default_factory.__doc__)
    keys = []
    for key, leaf, kind in options():
        section, _, name = key.rpartition(".")
        default = "" if leaf.default in (None, "", ()) else f" (default: {leaf.default})"
        groups[section].add_argument(
            f"--{key}",
            dest=key,
            metavar=name.upper(),
            help=(leaf.metadata["help"] + default).replace("%", "%%"),
            action="append" if "tuple" in str(kind) else "store",
        )
        keys.append(key)
    for name, owners in objective_options().items():
        key = f"objective.{name}"
        text = f"field of {', '.join(owners)}"
        groups["objective"].add_argument(f"--{key}", dest=key, metavar=name.upper(), help=text)
        keys.append(key)
    return parser, keys


def _with_underscores(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + separator + value
