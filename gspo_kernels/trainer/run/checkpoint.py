"""What a checkpoint holds: the state of a run in one file, with checksums, and every random generator's."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_kernels.trainer.data import Prompts
from gspo_kernels.trainer.input_errors import RunDirectoryError

_STATE = "state.pt"
_FORMAT = 3
"""Goes up when a run's state gains or loses something that going on needs."""


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write the state of a run into a checkpoint's directory."""
    torch.save({"format": _FORMAT, **state}, path / _STATE)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, after comparing every byte with its checksum.

    Raises:
        RunDirectoryError: a file is missing or was damaged, or another version wrote it.
    """
    try:
        with zipfile.ZipFile(path / _STATE) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state: dict[str, Any] = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError) as error:
        raise RunDirectoryError(
            f"the checkpoint {path} is damaged ({error}); remove it to go on from the one before"
        ) from error
    if state.pop("format", 1) != _FORMAT:
        raise RunDirectoryError(
            f"the checkpoint {path} was written by another version of gspo_kernels, whose state differs; go "
            "on with that version, or begin anew in another --output"
        )
    return state


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
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
