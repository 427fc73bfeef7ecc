"""Which backend serves a call: a table of the backends, imported on first use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import cast

import torch

from gspo_kernels.backends.protocol import HiddenKernels, RatioBackend, RowBackend
from gspo_kernels.core.torch_internals import constant_when_traced

# relative, as the package may be imported under another name
_MODULES = {"triton": ".triton", "cpp": ".cpp", "reference": ".reference.rows"}
_AUTO = {"cuda": ("triton", "reference"), "cpu": ("cpp", "reference")}

BACKENDS = tuple(_MODULES)


@functools.cache
def load(name: str) -> RowBackend:
    """Return the backend module called ``name``, imported on first use."""
    return cast(RowBackend, importlib.import_module(_MODULES[name], __package__))


ratio_backend = cast(Callable[[str], RatioBackend], load)
"""``load`` for a backend that evaluates clipped ratios."""


@functools.cache
def hidden_kernels(name: str) -> HiddenKernels:
    """Return the steps around products for the backend called ``name``: its own kernels, or PyTorch's."""
    module = _MODULES["triton"] if name == "triton" else ".reference.row_scaling"
    return cast(HiddenKernels, importlib.import_module(module, __package__))


def unavailable_reason(name: str, device: torch.device) -> str | None:
    """Return None if ``name`` can serve tensors on ``device``, otherwise the reason why it can't."""
    try:
        return load(name).unavailable(device)
    except ImportError as error:
        return f"it can't be imported: {error}"


@functools.lru_cache(maxsize=64)
def automatic(device: torch.device) -> str:
    """Return the first backend that can serve ``device``."""
    candidates = _AUTO.get(device.type, ("reference",))
    return next(candidate for candidate in candidates if unavailable_reason(candidate, device) is None)


@constant_when_traced
def resolve(name: str, device: torch.device) -> str:
    """Turn "auto" into the first backend that can serve ``device``; check that a named one can.

    Raises:
        ValueError: ``name`` is no backend.
        RuntimeError: the named backend can't serve ``device``; the message says why.
    """
    if name == "auto":
        return automatic(device)
    if name not in _MODULES:
        raise ValueError(f"backend: got {name!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = unavailable_reason(name, device)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} can't serve tensors on {device}: {reason}")
    return name
