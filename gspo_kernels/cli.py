"""The command line: ``gspo train``, ``gspo demo``, ``gspo export``, ``gspo plot``, ``gspo mismatch``,
``gspo doctor``.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_kernels import __version__

if TYPE_CHECKING:
    from gspo_kernels.trainer.config import TrainConfig
    from gspo_kernels.trainer.data import Rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 cannot be done, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="gspo", description="Group Sequence Policy Optimization for language models."
    )
    parser.add_argument("--version", action="version", version=f"gspo_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known: dict[str, tuple[Callable[[list[str]], None], str]] = {
        "train": (train, "train a model; gspo train --help lists all options"),
        "demo": (_demo, "make a tiny model, train it and show what it learned"),
        "export": (_export, "write the model of a run's checkpoint"),
        "plot": (_plot, "draw the metrics that a run has written so far"),
        "mismatch": (_mismatch, "compare the log-probs of sampling and training, and find the cause"),
        "doctor": (_doctor, "say what works here, and why the rest does not"),
    }
    for name, (_, what) in known.items():
        commands.add_parser(name, help=what)
    command = parser.parse_args(arguments[:1]).command
    return _exit_status(f"gspo {command}", lambda: known[command][0](arguments[1:]))


def _exit_status(prog: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit status; print an error that a person can mend as one sentence."""
    try:
        command()
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted{interrupt}", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gspo_kernels"):
            raise
        print(f"{prog}: error: {error}; pip install 'gspo-kernels[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        from gspo_kernels.integrations.errors import IntegrationError
        from gspo_kernels.trainer.config import InputError

        if not isinstance(error, InputError | IntegrationError | OSError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(arguments: list[str]) -> None:
    argparse.ArgumentParser(prog="gspo doctor", description="Say which backends work here.").parse_args(
        arguments
    )
    from gspo_kernels.doctor import report

    print(report())


def train(
    arguments: Sequence[str], trainer: Any = None, config_type: Any = None, prog: str = "gspo train"
) -> None:
    """Train as a command line says, with `GSPOTrainer` or a recipe's subclasses of it and its configuration.

    Wrong keys and missing files are reported before torch is imported.
    """
    words = [word for word in arguments if word != "--dry-run"]
    config, flags = parse_arguments(words, config_type, prog)
    _run(config, trainer, dry_run=len(words) < len(arguments), **flags)


def run(trainer: Any, config_type: Any, arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a recipe, as `main` runs that of the package; return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    module = sys.modules["__main__"].__spec__  # None without python -m
    prog = f"python {sys.argv[0]}" if module is None else f"python -m {module.name}"
    return _exit_status(prog, lambda: train(arguments, trainer, config_type, prog))


DESCRIPTION = """\
Train a causal language model with GSPO on prompts and reward functions.
  {prog} config.yaml --update.learning_rate 1e-6
  {prog} --model DIR --dataset prompts.jsonl --reward rewards.py:correct
  {prog} --resume --output DIR
- config.yaml comes first. It has the keys below, nested by section; options come
  on top of it.
- --resume goes on from the last checkpoint in --output, with --force although
  settings or data were changed; --overwrite replaces the run in --output.
- --dry-run prints what the run needs of memory, and reads no weights.
- A reward is a function f(completions, **columns) -> list[float | None].
- Several devices: accelerate launch [...] {launched} config.yaml
"""


def parse_arguments(
    arguments: Sequence[str], cls: Any = None, prog: str = "gspo train"
) -> tuple[Any, dict[str, bool]]:
    """Read ``[CONFIG] [--key value ...]``; return the configuration and the flags resume, overwrite, force.

    ``--resume --output DIR`` without CONFIG reads DIR/config.yaml.
    """
    import tyro
    import yaml

    from gspo_kernels.trainer.config import (
        InputError,
        TrainConfig,
        flat,
        from_mapping,
        load_config,
        near_matches,
    )

    cls = cls or TrainConfig
    arguments = list(arguments)
    path = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    names = ("resume", "overwrite", "force")
    defaults = flat(cls().model_dump())
    booleans = [*names, *(key for key, value in defaults.items() if isinstance(value, bool))]
    # --name, --name true and --name=true mean the same, as in the file; tyro takes --name=True
    pattern = rf"(?<![^\0])(--(?:{'|'.join(booleans).replace('_', '[-_]')}))(?:[=\0](?!-)([^\0]*))?(?![^\0])"

    def with_value(match: re.Match[str]) -> str:
        value = (match[2] or "true").title()
        if value not in ("True", "False"):
            rest = "a configuration file comes first" if "." in value else "alone it means true"
            raise InputError(f"{match[1]} must be true or false, got {match[2]!r}; {rest}")
        return f"{match[1]}={value}"

    line = re.sub(pattern, with_value, "\0".join(arguments))
    arguments = line.split("\0") if line else []
    flags = {name: f"--{name}=True" in arguments for name in names}
    flag_words = [f"--{name}={value}" for name in names for value in (True, False)]
    arguments = [word for word in arguments if word not in flag_words]
    output = re.findall(r"(?<![^\0])--output[=\0]([^\0]+)", line)
    if path is None and flags["resume"] and output:
        path = str(Path(output[-1]) / "config.yaml")
    start = cls() if path is None else load_config(path, cls)
    launched = "-m gspo_kernels.cli train" if prog == "gspo train" else prog.removeprefix("python ")
    chosen, unknown = tyro.cli(
        cls,
        default=start,
        prog=prog,
        description=DESCRIPTION.format(prog=prog, launched=launched),
        args=arguments,
        use_underscores=True,
        return_unknown_args=True,
        config=(tyro.conf.FlagConversionOff,),
    )
    # Options of an objective are unknown here: its class has the fields, and importing the class needs torch.
    objective = {**start.objective.model_dump(), "name": chosen.objective.name}
    words = iter(unknown)
    for word in words:
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word!r}; a configuration file comes first")
        name, equals, value = word[2:].partition("=")
        if not name.startswith("objective."):
            raise InputError(f"unknown option --{name}{near_matches(name, defaults)}")
        objective[name.removeprefix("objective.")] = yaml.safe_load(value if equals else next(words, ""))
    return from_mapping({**chosen.model_dump(), "objective": objective}, cls), flags


def _demo(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gspo demo",
        description="Make a tiny Qwen3 and its tokenizer, warm the model up on sorting four digits, and "
        "train it with GSPO, on this machine and without any download.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="directory for everything that is made"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice")
    parser.add_argument("--steps", type=int, default=300, help="rollouts")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--force", action="store_true", help="go on with other --steps, too")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --output")
    chosen = parser.parse_args(arguments)
    import torch

    from gspo_kernels import demo
    from gspo_kernels.trainer.checkpoint import RunDirectory

    torch.set_num_threads(1)  # quickest for a model this small
    config = demo.make_config(chosen.output, seed=chosen.seed, steps=chosen.steps)
    if not chosen.resume:
        with RunDirectory(chosen.output) as directory:
            directory.claim(overwrite=chosen.overwrite, others=demo.FILES)
            print(f"making a tiny model, its tokenizer and its tasks in {chosen.output}", flush=True)
            _quiet_transformers()
            demo.prepare(chosen.output, seed=chosen.seed)
    _run(config, resume=chosen.resume, overwrite=chosen.overwrite, force=chosen.force)


def _export(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gspo export", description="Write the model of a checkpoint, for from_pretrained."
    )
    parser.add_argument("run", type=Path, help="directory of the run, which may still go on")
    parser.add_argument("--to", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest one if not given")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="precision of the weights")
    chosen = parser.parse_args(arguments)
    from gspo_kernels.trainer.checkpoint import export_checkpoint

    _quiet_transformers()
    export_checkpoint(chosen.run, chosen.to, step=chosen.step, half=chosen.dtype == "bf16")


def _plot(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="gspo plot", description="Draw progress.png of a run.")
    parser.add_argument("run", type=Path, help="directory of the run, which may still go on")
    chosen = parser.parse_args(arguments)
    from gspo_kernels.trainer.report import plot_run

    print(plot_run(chosen.run))


def _mismatch(arguments: list[str]) -> None:
    from gspo_kernels.mismatch import command_line

    _quiet_transformers()
    command_line.run(arguments)


def _run(
    config: TrainConfig,
    trainer: Any = None,
    *,
    resume: bool,
    overwrite: bool,
    force: bool,
    dry_run: bool = False,
) -> None:
    from gspo_kernels.trainer.config import InputError, check_model_path
    from gspo_kernels.trainer.data import load_prompts

    for key in ("model", "dataset", "reward"):
        if not getattr(config, key):
            raise InputError(f"{key} is missing: give --{key}, or the key in the configuration file")
    check_model_path(config.model)
    data = config.data

    def load(source: str, split: str | None) -> Rows:
        return load_prompts(source, split=split, subset=data.subset, prompt_column=data.prompt_column)

    dataset = load(config.dataset, data.split)
    eval_dataset = None if config.eval_dataset is None else load(config.eval_dataset, data.eval_split)
    from gspo_kernels.trainer.rewards import load_reward  # which imports torch

    rewards = [load_reward(spec) for spec in config.reward]
    _quiet_transformers()
    if dry_run:
        from gspo_kernels.trainer.memory import dry_run as table_of

        return print(table_of(config, dataset, eval_dataset))
    if trainer is None:
        from gspo_kernels.trainer.loop import GSPOTrainer as trainer
    made = trainer(config.model, None, rewards, dataset, eval_dataset, config)
    try:
        made.train(resume=resume, overwrite=overwrite, force=force)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            "; --resume continues from the last checkpoint, if there is one"
        ) from interrupt


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    # peft calls what transformers has renamed: nothing that a user could change
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


if __name__ == "__main__":
    raise SystemExit(main())
