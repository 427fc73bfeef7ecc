"""Which backend serves a call: a table with a row for each backend, which is imported on first use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from gspo_kernels.backends.protocol import HiddenKernels, RatioBackend, RowBackend
from gspo_kernels.core.batch_invariance import in_force
from gspo_kernels.core.torch_internals import constant_when_traced


class _Row(NamedTuple):
    """A backend, its modules relative to this package, which may be imported under another name.

    Attributes:
        rows: the module of row operations, see ``protocol.RowBackend``.
        hidden: the module of steps around the products, see ``protocol.HiddenKernels``.
        auto_on: the type of devices on which "auto" takes the backend; "": on those that no other serves.
        batch_invariant: whether a row's bits depend on that row alone.
    """

    rows: str
    hidden: str
    auto_on: str
    batch_invariant: bool


_PYTORCH = ".reference.row_scaling"
_TABLE = {
    "triton": _Row(".triton", ".triton", "cuda", True),
    "cpp": _Row(".cpp", _PYTORCH, "cpu", True),
    "reference": _Row(".reference.rows", _PYTORCH, "", False),
}

BACKENDS = tuple(_TABLE)


@functools.cache
def load(name: str) -> RowBackend:
    """Return the backend module called ``name``, imported on first use."""
    return cast(RowBackend, importlib.import_module(_TABLE[name].rows, __package__))


ratio_backend = cast(Callable[[str], RatioBackend], load)
"""``load`` for a backend that evaluates clipped ratios."""


@functools.cache
def hidden_kernels(name: str) -> HiddenKernels:
    """Return the steps around products for the backend called ``name``: its own kernels, or PyTorch's."""
    return cast(HiddenKernels, importlib.import_module(_TABLE[name].hidden, __package__))


def unavailable_reason(name: str, device: torch.device) -> str | None:
    """Return None if ``name`` can serve tensors on ``device``, otherwise the reason why it can't."""
    try:
        return load(name).unavailable(device)
    except ImportError as error:
        return f"it can't be imported: {error}"


@functools.lru_cache(maxsize=64)
def automatic(device: torch.device) -> str:
    """Return the first backend that can serve ``device``."""
    candidates = (name for name, row in _TABLE.items() if row.auto_on in (device.type, ""))
    return next(name for name in candidates if unavailable_reason(name, device) is None)


@constant_when_traced
def resolve(name: str, device: torch.device) -> str:
    """Turn "auto" into the first backend that can serve ``device``; check that a named one can.

    Raises:
        ValueError: ``name`` is no backend.
        RuntimeError: the named backend can't serve ``device``; the message says why.
    """
    if name == "auto":
        return automatic(device)
    if name not in _TABLE:
        raise ValueError(f"backend: got {name!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = unavailable_reason(name, device)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} can't serve tensors on {device}: {reason}")
    return name


def refuse_backend(backend: str, requested: bool | None = None) -> None:
    """Refuse a backend in a batch-invariant call that it can't serve; see ``batch_invariance.in_force``.

    Raises:
        ValueError: with the reason.
    """
    if not _TABLE[backend].batch_invariant and in_force(requested):
        served = " or ".join(repr(name) for name, row in _TABLE.items() if row.batch_invariant)
        raise ValueError(
            f"backend: {backend!r} can't serve a batch-invariant call, expected {served}: PyTorch may split "
            "the sum over a row among threads"
        )
