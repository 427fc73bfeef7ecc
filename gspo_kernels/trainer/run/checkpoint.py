"""What a checkpoint holds: the state of a run, with checksums, every random generator's, and tensors.

Each process writes and reads its own shards of weights and optimizer (`torch.distributed.checkpoint`), which
another number of processes can read as well; the rest is one file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import random
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gspo_kernels.trainer.data import Prompts
from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.processes import ALONE, in_shares, on_all

WEIGHTS = "weights/"
"""What the names of weights begin with, among a checkpoint's tensors; then come those in the policy."""

_STATE, _TENSORS = "state.pt", "tensors"
_FORMAT = 4
"""Goes up when a run's state gains or loses something that going on needs."""


def save_state(
    state: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, accelerator: Any = ALONE
) -> None:
    """Write the state of a run into a checkpoint's directory; all processes must call it.

    Of the tensors, by name, each process writes the shards that it holds, or its share of what all hold.
    """
    _together(lambda: save(dict(tensors), checkpoint_id=path / _TENSORS))
    sums = _checksums(path / _TENSORS, accelerator)
    if accelerator.is_main_process:
        torch.save({"format": _FORMAT, "checksums": sums, **state}, path / _STATE)


def load_state(path: Path, accelerator: Any = ALONE) -> dict[str, Any]:
    """Read the state that `save_state` wrote, after comparing every byte with its checksum.

    The tensors are left to `read_tensors`, their files are compared here as well. All processes must call.
    A `RunDirectoryError` says that a file is missing or was damaged, or that another version wrote it.
    """
    state: dict[str, Any] = {}

    def read() -> None:
        with zipfile.ZipFile(path / _STATE) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state.update(torch.load(path / _STATE, map_location="cpu", weights_only=True))

    try:
        on_all(accelerator, read)
        if state.pop("format", 1) != _FORMAT:
            raise RunDirectoryError(
                f"the checkpoint {path} was written by another version of gspo_kernels, whose state differs; "
                "go on with that version, or begin anew in another --output"
            )
        sums = _checksums(path / _TENSORS, accelerator)
        for name, expected in state.pop("checksums").items():
            if sums.get(name) != expected:
                raise OSError(f"{name} is {'changed' if name in sums else 'missing'}")
    except (OSError, zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError) as error:
        raise RunDirectoryError(
            f"the checkpoint {path} is damaged ({error}); remove it to go on from the one before"
        ) from error
    return state | {"checkpoint": path}


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Return the shape and dtype of a checkpoint's tensors by name, as tensors without content."""
    found = FileSystemReader(path / _TENSORS).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def check_weights(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise a `RunDirectoryError` if a checkpoint's weights have other names or shapes than a policy's."""
    shapes = {WEIGHTS + name: tensor.shape for name, tensor in own.items()}
    found = {name: tensor.shape for name, tensor in saved.items() if name.startswith(WEIGHTS)}
    for name in sorted(shapes | found):
        if shapes.get(name) != found.get(name):
            raise RunDirectoryError(
                f"the checkpoint is of another model: it holds {name.removeprefix(WEIGHTS)} as "
                f"{found.get(name, 'nothing')}, the model as {shapes.get(name, 'nothing')}"
            )


def read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or shards, with what a checkpoint holds under their names; all processes call."""
    _together(lambda: load(dict(tensors), checkpoint_id=path / _TENSORS))


def _together(work: Callable[[], object]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as meant
            work()
    except CheckpointException as error:  # no Exception of Python's
        causes = [cause for cause, _ in error.failures.values()]
        raise OSError(f"{type(causes[0]).__name__}: {causes[0]}") from error


def _checksums(path: Path, accelerator: Any) -> dict[str, int]:
    """Return the CRC-32 of every file; each process reads its share of them."""
    here = on_all(accelerator, lambda: sorted(path.iterdir()))[0]

    def checksum(file: Path) -> int:
        value = 0
        with file.open("rb") as opened:
            while block := opened.read(2**20):
                value = zlib.crc32(block, value)
        return value

    parts = in_shares(accelerator, len(here), lambda own: [checksum(here[index]) for index in own])
    return dict(zip((file.name for file in here), itertools.chain(*parts), strict=True))


def fingerprints(config: Any, tokenizer: Any, prompts: Prompts) -> dict[str, str]:
    """Return a hash of what must be the same when a run goes on, wherever it lies by then."""
    drop = ("_name_or_path", "transformers_version", "dtype")
    found = {
        "the model's configuration": {k: v for k, v in config.to_diff_dict().items() if k not in drop},
        "the tokenizer": (tokenizer.get_vocab(), getattr(tokenizer, "chat_template", None)),
        "the training dataset": (list(prompts.rows), prompts.tokens),
    }
    texts = {
        what: json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
        for what, value in found.items()
    }
    return {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}


def random_state() -> dict[str, Any]:
    """Return the state of every global random generator, as plain containers and tensors."""
    name, keys, *others = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *others),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
