"""The command line: ``gspo train``, ``gspo demo``, ``gspo ask``, ``gspo eval``, ``gspo export`` and more."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_kernels import __version__

if TYPE_CHECKING:
    from gspo_kernels.trainer.config import TrainConfig
    from gspo_kernels.trainer.data import Rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0 success, 1 error, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="gspo", description="Group Sequence Policy Optimization for language models."
    )
    parser.add_argument("--version", action="version", version=f"gspo_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known: dict[str, tuple[Callable[[list[str]], None], str]] = {
        "train": (train, "train a model; gspo train --help lists all options"),
        "demo": (_demo, "train a tiny model on this machine, and show what it learned"),
        "ask": (_ask, "print a trained model's answer to a prompt"),
        "eval": (_eval, "print mean rewards of a trained model on a dataset"),
        "export": (_export, "write the model of a checkpoint"),
        "plot": (_plot, "plot the metrics of a run, which may be in progress"),
        "mismatch": (_mismatch, "compare the log-probs of sampling and training, and find the cause"),
        "doctor": (_doctor, "print which backends work here, and why others do not"),
    }
    for name, (_, what) in known.items():
        commands.add_parser(name, help=what)
    command = parser.parse_args(arguments[:1]).command
    # --max_new_tokens and --max-new-tokens are equivalent
    words = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in arguments[1:]]
    return _exit_status(f"gspo {command}", lambda: known[command][0](words))


def _exit_status(prog: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit status; print an error of the input as one sentence."""
    try:
        command()
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted{interrupt}", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gspo_kernels"):
            raise
        print(f"{prog}: error: {error}; pip install 'gspo_kernels[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        from gspo_kernels.models import IntegrationError
        from gspo_kernels.trainer.config import InputError

        if not isinstance(error, InputError | IntegrationError | OSError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(arguments: list[str]) -> None:
    description = "Print which backends work here, and why others do not."
    argparse.ArgumentParser(prog="gspo doctor", description=description).parse_args(arguments)
    from gspo_kernels.doctor import report

    print(report())


def train(
    arguments: Sequence[str], trainer_class: Any = None, config_type: Any = None, prog: str = "gspo train"
) -> None:
    """Run ``gspo train``, or a recipe's subclasses of `GSPOTrainer` and of the configuration.

    Wrong keys and missing files are reported before torch is imported.
    """
    config, flags = parse_arguments(arguments, config_type, prog)
    _run(config, trainer_class, **flags)


def run(trainer_class: Any, config_type: Any, arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a recipe; return its exit status, as `main` does."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    module = sys.modules["__main__"].__spec__  # None without python -m
    prog = f"python {sys.argv[0]}" if module is None else f"python -m {module.name}"
    return _exit_status(prog, lambda: train(arguments, trainer_class, config_type, prog))


DESCRIPTION = """\
Train a causal language model with GSPO on prompts and reward functions.
  {prog} config.yaml --update.learning_rate 1e-6
  {prog} --model DIR --dataset prompts.jsonl --reward rewards.py:correct
  {prog} --resume --output DIR
- config.yaml comes first; it has the keys below, nested by section. Options on
  the command line replace its values; null restores a default.
- --objective.name drops the file's options of another objective.
- A reward is a function f(completions, **columns) -> list[float | None].
- Several devices: accelerate launch [...] {launched} config.yaml
"""
FLAGS = {
    "resume": "continue from the last checkpoint in --output",
    "force": "with --resume: accept changed settings, data or weights",
    "overwrite": "replace the run in --output",
    "dry_run": "check the inputs and print the first prompt, without loading weights",
}


def parse_arguments(
    arguments: Sequence[str], cls: Any = None, prog: str = "gspo train"
) -> tuple[Any, dict[str, bool]]:
    """Read ``[CONFIG] [--key value ...]``; return the configuration and the values of `FLAGS`.

    ``--resume --output DIR`` without CONFIG reads DIR/config.yaml.
    """
    from gspo_kernels.trainer.config import InputError, TrainConfig, from_mapping, load_config, near_matches

    cls = cls or TrainConfig
    options = {
        name: {"type": "boolean", "default": False, "description": what} for name, what in FLAGS.items()
    }
    options |= _options(cls)
    arguments = list(arguments)
    if {"-h", "--help"} & {*arguments}:
        _print_help(cls, options, prog)
        raise SystemExit(0)
    path = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    words: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            if name not in options and not name.startswith("objective."):
                raise InputError(f"unknown option --{name}{near_matches(name, options)}")
            words[name] = [value] if equals else []
        elif name and (not words[name] or "array" in _types(options.get(name, {}))):
            words[name].append(argument)
        else:
            raise InputError(f"unexpected argument {argument!r}; a configuration file comes first")
    given = {name: _value(name, options.get(name), each) for name, each in words.items()}
    flags = {name: bool(given.pop(name, False)) for name in FLAGS}
    if ignored := [name for name in ("force", "overwrite") if flags["dry_run"] and flags[name]]:
        raise InputError(f"--{ignored[0]} has no effect with --dry-run, which does not write to --output")
    if path is None and flags["resume"] and given.get("output"):
        path = str(Path(given["output"]) / "config.yaml")
    start = cls() if path is None else load_config(path, cls)
    values, before = start.model_dump(), start.objective
    if given.get("objective.name", before.name) != before.name:
        values["objective"] = {}
        if dropped := before.model_dump(exclude={"name"}, exclude_defaults=True):
            of = f"the options of {before.name} in {path}: {', '.join(dropped)}"
            print(f"objective.name {given['objective.name']} drops {of}", file=sys.stderr)
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = value
    return from_mapping(values, cls), flags


def _options(cls: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each option by its dotted key."""
    schema = cls.model_json_schema()
    options: dict[str, dict[str, Any]] = {}
    for name, each in schema["properties"].items():
        if "$ref" in each:
            section = schema["$defs"][each["$ref"].rpartition("/")[2]]
            options |= {f"{name}.{key}": inner for key, inner in section["properties"].items()}
        else:
            options[name] = each
    return options


def _types(schema: dict[str, Any]) -> list[str]:
    """Return the types or choices of an option, without null."""
    parts = schema.get("anyOf", [schema])
    types = [part.get("enum") or [part.get("const") or part.get("type", "any")] for part in parts]
    return [str(each) for part in types for each in part if each != "null"]


def _value(name: str, schema: dict[str, Any] | None, words: list[str]) -> Any:
    """Return an option's value; without a schema (an objective's option), parse the word as YAML."""
    import yaml

    from gspo_kernels.trainer.config import InputError

    types = ["any"] if schema is None else _types(schema)
    words = words or ["true"] * (types == ["boolean"])
    if not words:
        raise InputError(f"--{name} has no value")
    if len(words) > 1 or words[0] in ("null", "None", ""):
        return words if len(words) > 1 else None
    if types == ["boolean"] and words[0].lower() not in ("true", "false"):
        rest = "a configuration file comes first" if "." in words[0] else "alone it means true"
        raise InputError(f"--{name} must be true or false, got {words[0]!r}; {rest}")
    if types not in (["any"], ["object"], ["boolean"]):
        return words[0]
    try:
        return yaml.safe_load(words[0])
    except yaml.YAMLError as error:
        raise InputError(f"--{name}: got {words[0]!r}, which is not valid YAML") from error


def _print_help(cls: Any, options: dict[str, dict[str, Any]], prog: str) -> None:
    """Print the options in groups, a line each: name, meaning, choices, default."""
    launched = "-m gspo_kernels.cli train" if prog == "gspo train" else prog.removeprefix("python ")
    print(DESCRIPTION.format(prog=prog, launched=launched).rstrip())
    width, column, last = shutil.get_terminal_size().columns, max(map(len, options)) + 6, ""
    for name, schema in options.items():
        section = name.rpartition(".")[0]
        group = (
            f"{section}: {cls.model_fields[section].annotation.__doc__}" if section else "inputs and output:"
        )
        if last != (last := "start:" if name in FLAGS else group):
            print(f"\n{last}")
        text, default = schema["description"], schema.get("default")
        if name not in FLAGS:
            choices = [each for each in _types(schema) if each not in _TYPES]
            text += f" [{' | '.join(choices)}]" if len(choices) > 1 else ""
            default = " ".join(default) if isinstance(default, list) else default
            text += (
                "" if default in (None, "", {}) else f" (default: {str(default).replace('False', 'false')})"
            )
        head = f"  --{name} ".ljust(column)
        wrapper = textwrap.TextWrapper(max(width, 2 * column), break_on_hyphens=False)
        wrapper.initial_indent, wrapper.subsequent_indent = head, " " * column
        print(wrapper.fill(text))


_TYPES = {"any", "array", "boolean", "integer", "number", "object", "string"}


def _demo(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gspo demo",
        description="Make a tiny Qwen3 and its tokenizer, pretrain it briefly on sorting four digits, "
        "and train it with GSPO, without any download.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="directory of everything that is written"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--steps", type=int, default=300, help="rollouts")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    parser.add_argument("--force", action="store_true", help="with --resume: accept other --steps")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    chosen = parser.parse_args(arguments)
    import torch

    from gspo_kernels import demo
    from gspo_kernels.trainer.checkpoint import RunDirectory

    torch.set_num_threads(1)  # fastest for such a small model
    config = demo.make_config(chosen.output, seed=chosen.seed, steps=chosen.steps)
    if not chosen.resume:
        with RunDirectory(chosen.output) as directory:
            directory.claim(overwrite=chosen.overwrite, force=chosen.force, others=demo.FILES)
            print(f"writing a tiny model, its tokenizer and its prompts to {chosen.output}", flush=True)
            _quiet_transformers()
            demo.prepare(chosen.output, seed=chosen.seed)
    _run(config, resume=chosen.resume, overwrite=chosen.overwrite, force=chosen.force)


def _ask(arguments: list[str]) -> None:
    from gspo_kernels.trainer import evaluation

    _quiet_transformers()
    evaluation.ask(arguments)


def _eval(arguments: list[str]) -> None:
    from gspo_kernels.trainer import evaluation

    _quiet_transformers()
    evaluation.evaluate(arguments)


def _export(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gspo export", description="Write the model of a checkpoint, for from_pretrained."
    )
    parser.add_argument("run", type=Path, help="directory of the run, which may be in progress")
    parser.add_argument("--to", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="precision of the weights")
    chosen = parser.parse_args(arguments)
    from gspo_kernels.trainer.checkpoint import export_checkpoint

    _quiet_transformers()
    export_checkpoint(chosen.run, chosen.to, step=chosen.step, half=chosen.dtype == "bf16")
    print(f"exported model: {chosen.to}")


def _plot(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="gspo plot", description="Draw progress.png of a run.")
    parser.add_argument("run", type=Path, help="directory of the run, which may be in progress")
    chosen = parser.parse_args(arguments)
    from gspo_kernels.trainer.report import plot_run

    print(plot_run(chosen.run))


def _mismatch(arguments: list[str]) -> None:
    from gspo_kernels.mismatch import command_line

    _quiet_transformers()
    command_line.run(arguments)


def _run(
    config: TrainConfig,
    trainer_class: Any = None,
    *,
    resume: bool,
    overwrite: bool,
    force: bool,
    dry_run: bool = False,
) -> None:
    from gspo_kernels.trainer.config import InputError, check_model_path
    from gspo_kernels.trainer.data import load_prompts

    data = config.data
    names = [name for name in (config.dataset, config.eval_dataset) if name]
    only_files = all(Path(name).is_file() for name in names)

    def load(name: str, split: str | None) -> Rows:
        subset = data.subset if only_files or not Path(name).is_file() else None
        return load_prompts(name, split=split, subset=subset, prompt_column=data.prompt_column)

    missing = [key for key in ("model", "dataset", "reward") if not getattr(config, key)]
    faults = [f"{key} is missing: give --{key}, or the key in the configuration file" for key in missing]
    found: dict[str, Any] = {}
    reads: dict[str, Callable[[], Any]] = {
        "model": lambda: check_model_path(config.model),
        "dataset": lambda: load(config.dataset, data.split),
        "eval_dataset": lambda: load(config.eval_dataset or "", data.eval_split),
    }
    if data.eval_split and not config.eval_dataset:
        faults.append(f"data.eval_split must be null without eval_dataset, got {data.eval_split!r}")
    for key, read in reads.items():
        try:
            found[key] = read() if getattr(config, key) else None
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError(faults[0] if len(faults) == 1 else "\n- ".join(["these must change:", *faults]))
    dataset, eval_dataset = found["dataset"], found["eval_dataset"]
    from gspo_kernels.trainer.rewards import load_reward  # which imports torch

    rewards = [load_reward(spec) for spec in config.reward]
    _quiet_transformers()
    from gspo_kernels.trainer import GSPOTrainer

    trainer_class = trainer_class or GSPOTrainer
    if dry_run:
        trainer_class.dry_run(rewards, dataset, eval_dataset, config)
        return
    trainer = trainer_class(config.model, None, rewards, dataset, eval_dataset, config)
    try:
        trainer.train(resume=resume, overwrite=overwrite, force=force)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            "; --resume continues from the last checkpoint, if there is one"
        ) from interrupt


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    # peft uses deprecated names of transformers, which users cannot change
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


if __name__ == "__main__":
    raise SystemExit(main())
