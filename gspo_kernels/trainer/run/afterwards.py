"""What can be made of a run's directory later, while it goes on as well: its plot, and a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.checkpoint import (
    WEIGHTS,
    check_weights,
    load_state,
    read_tensors,
    saved_tensors,
)
from gspo_kernels.trainer.run.config_file import load_config
from gspo_kernels.trainer.run.export import export_adapters, export_model
from gspo_kernels.trainer.run.files import RunDirectory, write_directory
from gspo_kernels.trainer.run.models import add_adapters, load_model, load_skeleton, load_tokenizer
from gspo_kernels.trainer.run.run import draw


def plot_run(path: str | Path) -> Path:
    """Draw ``progress.png`` of the metrics that a run has written so far; return where it lies."""
    directory = _run_in(path)
    draw(directory)
    return directory.plot


def export_checkpoint(
    path: str | Path, to: Path, *, step: int | None = None, half: bool = False, adapters: bool = False
) -> None:
    """Write the model of a checkpoint, by default the newest, into a new directory for ``from_pretrained``.

    With ``half`` in bfloat16; with ``adapters`` nothing but these, for peft. A `RunDirectoryError` says that
    there is no such checkpoint, that it has no adapters, or that something lies at ``to`` already.
    """
    directory = _run_in(path)
    if to.exists():
        raise RunDirectoryError(f"{to} exists already; nothing is written over")
    chosen = directory.latest_checkpoint() if step is None else directory.checkpoints / f"step_{step:06d}"
    if chosen is None or not chosen.is_dir():
        raise RunDirectoryError(
            f"there is no checkpoint {'yet' if chosen is None else chosen.name} in {path}"
        )
    config = load_config(directory.config)
    if adapters and config.lora.rank == 0:
        raise RunDirectoryError(f"the run in {path} trains all weights: there are no adapters alone")
    load_state(chosen)
    tokenizer = load_tokenizer(config.model)
    model = load_skeleton(config.model) if adapters else load_model(config.model)
    adapted = add_adapters(model, config.lora) if config.lora.rank > 0 else None
    for module in model.modules():
        if any(p.requires_grad and p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)  # adapters, which the checkpoint fills
    trained = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    check_weights(saved_tensors(chosen), trained)
    read_tensors(chosen, {WEIGHTS + name: weight for name, weight in trained.items()})
    dtype = torch.bfloat16 if half else torch.float32
    write = partial(export_adapters, adapted) if adapters else partial(export_model, model)
    write_directory(to, lambda path: write(tokenizer, path, dtype=dtype))


def _run_in(path: str | Path) -> RunDirectory:
    directory = RunDirectory(path)
    if not directory.holds_a_run():
        raise RunDirectoryError(f"there is no run in {path}")
    return directory
