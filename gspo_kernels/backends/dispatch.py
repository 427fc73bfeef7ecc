"""Selection of the backend of a call, from a table of lazily imported backends."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from gspo_kernels.backends.protocol import Backend, HiddenKernels, RatioBackend
from gspo_kernels.core.batch_invariance import checked_mode
from gspo_kernels.core.torch_internals import constant_when_traced


class _Row(NamedTuple):
    """A backend, with modules relative to this package.

    Attributes:
        rows: the module of row operations, see ``protocol.Backend``.
        hidden: the module of operations on hidden states, see ``protocol.HiddenKernels``.
        auto_on: the device type for which "auto" selects the backend, or "" for all that no other supports.
        batch_invariant: whether results of a row depend only on that row.
    """

    rows: str
    hidden: str
    auto_on: str
    batch_invariant: bool


_PYTORCH = ".reference.hidden"
_TABLE = {
    "triton": _Row(".triton", ".triton", "cuda", True),
    "cpp": _Row(".cpp", _PYTORCH, "cpu", True),
    "reference": _Row(".reference.rows", _PYTORCH, "", False),
}

BACKENDS = tuple(_TABLE)


@functools.cache
def load(name: str) -> Backend:
    """Import and return the backend module called ``name``."""
    return cast(Backend, importlib.import_module(_TABLE[name].rows, __package__))


ratio_backend = cast(Callable[[str], RatioBackend], load)
"""``load`` for a backend that evaluates clipped ratios."""


@functools.cache
def hidden_kernels(name: str) -> HiddenKernels:
    """Return the operations on hidden states of the backend called ``name``, or PyTorch's."""
    return cast(HiddenKernels, importlib.import_module(_TABLE[name].hidden, __package__))


def unavailable_reason(name: str, device: torch.device) -> str | None:
    """Return None if ``name`` supports tensors on ``device``, otherwise the reason."""
    try:
        return load(name).unavailable(device)
    except ImportError as error:
        return f"it can't be imported: {error}"


@functools.lru_cache(maxsize=64)
def automatic(device: torch.device) -> str:
    """Return the first backend that supports ``device``."""
    candidates = (name for name, row in _TABLE.items() if row.auto_on in (device.type, ""))
    return next(name for name in candidates if unavailable_reason(name, device) is None)


@constant_when_traced
def resolve(name: str, device: torch.device) -> str:
    """Resolve "auto" to the first backend that supports ``device``; check that a named one does.

    Raises:
        ValueError: ``name`` is not a backend.
        RuntimeError: the named backend does not support ``device``, with the reason.
    """
    if name == "auto":
        return automatic(device)
    if name not in _TABLE:
        raise ValueError(f"backend: got {name!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = unavailable_reason(name, device)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} does not support tensors on {device}: {reason}")
    return name


def refuse_backend(backend: str, requested: bool | None = None) -> None:
    """Raise a ValueError if a backend does not support a batch-invariant call; see
    ``batch_invariance.checked_mode``.
    """
    if not _TABLE[backend].batch_invariant and checked_mode(requested):
        served = " or ".join(repr(name) for name, row in _TABLE.items() if row.batch_invariant)
        raise ValueError(
            f"backend: {backend!r} does not support batch-invariant calls, expected {served}: PyTorch may "
            "split the sum over a row among threads"
        )
