"""Writing what was trained: a directory that ``from_pretrained`` loads, or adapters alone for peft."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGEST_FILE = 5 * 10**9
"""Bytes of weights in one file of a model, unless a single layer has more."""


@torch.no_grad()
def export_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    main: bool = True,
    dtype: torch.dtype | None = None,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write a directory that ``from_pretrained`` loads; adapters are added to the weights they adapt.

    All processes call, as shards are gathered, one weight at a time. The main one writes, and holds the
    weights of one file. They are as trained, or rounded to ``dtype``. An `OSError` of the main process comes
    once the others need it no more.
    """
    state = _saved_weights(model)
    files = _split(state, largest_file)
    gathered = ({name: _whole(state[name], keep=main) for name in names} for names in files)
    try:
        if main:
            _write(model, tokenizer, path, gathered, len(files), dtype)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        for _ in gathered:
            pass


def export_adapters(adapted: Any, tokenizer: Any, path: Path, dtype: torch.dtype) -> None:
    """Write the directory that ``PeftModel.from_pretrained`` adds to the model that was adapted."""
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)
    adapted.save_pretrained(path, save_embedding_layers=False)
    tokenizer.save_pretrained(path)


def _saved_weights(model: Any) -> dict[str, Tensor]:
    """Return what a model's files hold, as this process has it; of weights that are tied, the first."""
    ignored = set(model._keys_to_ignore_on_save or ())
    found: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        before = first.setdefault(id(tensor), name)
        # What an adapter is added to will no longer equal what it was tied to.
        if name not in ignored and (before == name or ".base_layer." in before):
            found[name] = tensor
    return found


def _split(state: dict[str, Tensor], largest: int) -> list[list[str]]:
    """Return the names for each file. Weights of one layer stay together, as conversions may join them."""
    files: list[list[str]] = [[]]
    room = largest
    for _, names in groupby(state, lambda name: re.sub(r"(\.\d+\.).*", r"\1", name)):
        layer = list(names)
        size = sum(state[name].numel() * state[name].element_size() for name in layer)
        if size > room and files[-1]:
            files.append([])
            room = largest
        files[-1] += layer
        room -= size
    return files


def _whole(tensor: Tensor, *, keep: bool) -> Tensor | None:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if keep else None


def _write(
    model: Any, tokenizer: Any, path: Path, gathered: Iterator[Any], count: int, dtype: torch.dtype | None
) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    # Everything but weights: the configurations, and the model's own code where it has any.
    model.save_pretrained(path, state_dict={})
    (path / "model.safetensors").unlink(missing_ok=True)
    if dtype is not None:
        model.config.dtype = dtype
        model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    places: dict[str, str] = {}
    total = 0
    for number, weights in enumerate(gathered, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        tensors = revert_weight_conversion(model, _merged(weights, adapted, dtype))
        weights.clear()
        save_file({key: w.contiguous() for key, w in tensors.items()}, path / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(w.numel() * w.element_size() for w in tensors.values())
        del tensors  # before the next file's are gathered
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (path / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _merged(
    weights: dict[str, Tensor], adapted: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return weights under the names that they have without adapters, with these added."""
    found = {}
    for name in [name for name in weights if ".lora_" not in name]:
        weight, prefix = weights[name], name.removesuffix(".base_layer.weight")
        if prefix in adapted and prefix != name:
            # From the gathered weights: what the module holds may be shards, or rounded by mixed precision.
            module, embedding = adapted[prefix], f"{prefix}.lora_embedding_A.default" in weights
            kind, end = ("embedding_", "") if embedding else ("", ".weight")
            a, b = (weights[f"{prefix}.lora_{kind}{x}.default{end}"] for x in "AB")
            delta = module.scaling["default"] * (b @ a)
            weight = weight + (delta.T if embedding or module.fan_in_fan_out else delta)
        if dtype is not None and weight.is_floating_point():
            weight = weight.to(dtype)
        found[name.replace(".base_layer.", ".")] = weight
    return found
