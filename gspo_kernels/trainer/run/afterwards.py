"""What can be made of a run's directory later, while it goes on as well: its plot, and a model."""

from __future__ import annotations

from pathlib import Path

import torch

from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.checkpoint import load_state
from gspo_kernels.trainer.run.config_file import load_config
from gspo_kernels.trainer.run.files import RunDirectory, write_directory, write_file
from gspo_kernels.trainer.run.metrics import read_metrics
from gspo_kernels.trainer.run.models import add_adapters, export_model, load_model, load_tokenizer
from gspo_kernels.trainer.run.plot import plot_progress
from gspo_kernels.trainer.run.processes import whole_state


def plot_run(path: str | Path) -> Path:
    """Draw ``progress.png`` of the metrics that a run has written so far; return where it lies."""
    directory = _run_in(path)
    records = read_metrics(directory.metrics)
    write_file(directory.plot, lambda file: plot_progress(records, file))
    return directory.plot


def export_checkpoint(path: str | Path, to: Path, *, step: int | None = None, half: bool = False) -> None:
    """Write the model of a checkpoint, by default the newest, into a new directory for ``from_pretrained``.

    With ``half`` in bfloat16. A `RunDirectoryError` says that there is no such checkpoint, or that something
    lies at ``to`` already.
    """
    directory = _run_in(path)
    if to.exists():
        raise RunDirectoryError(f"{to} exists already; nothing is written over")
    latest = directory.latest_checkpoint()
    chosen = latest if step is None else directory.checkpoints / f"step_{step:06d}"
    if chosen is None or not chosen.is_dir():
        raise RunDirectoryError(
            f"there is no checkpoint {'yet' if chosen is None else chosen.name} in {path}"
        )
    config = load_config(directory.config)
    model = load_model(config.model)
    if config.lora.rank > 0:
        add_adapters(model, config.lora)
    trained = load_state(chosen)["updater"]["weights"]
    weights = whole_state(model, keep=True)
    weights |= {name.removeprefix("model."): weight for name, weight in trained.items()}
    dtype = torch.bfloat16 if half else torch.float32
    tokenizer = load_tokenizer(config.model)
    write_directory(to, lambda unfinished: export_model(model, weights, tokenizer, unfinished, dtype))


def _run_in(path: str | Path) -> RunDirectory:
    directory = RunDirectory(path)
    if not directory.holds_a_run():
        raise RunDirectoryError(f"there is no run in {path}")
    return directory
