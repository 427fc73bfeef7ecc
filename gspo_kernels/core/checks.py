"""Argument checks of the public functions: shapes, dtypes and devices.

Values are checked inside the operators (``terms.check_values``).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.core.exact import exact_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
_NUMBERS = (int, float)  # int | float builds a type at each evaluation


def tensor(
    name: str,
    value: object,
    shape: tuple[int, ...] | None,
    meaning: str,
    device: torch.device | None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    host: bool = False,
) -> Tensor:
    """Check that a value is a dense tensor of a shape, device and dtype, where None allows any; return it.

    Complex and quantized dtypes are always rejected. With ``host`` the value may also be on the CPU.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor {meaning}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").replace("_", " ")
        raise TypeError(f"{name}: got a {kind} tensor, expected a dense one {meaning}")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {meaning} = {shape}")
    if device is not None and value.device != device and not (host and value.is_cpu):
        raise ValueError(f"{name}: is on {value.device}, expected {device} like the other tensors")
    if dtypes is not None and value.dtype not in dtypes:
        names = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise TypeError(f"{name}: got {value.dtype}, expected one of {names}")
    if dtypes is None and (value.is_complex() or value.is_quantized):
        raise TypeError(f"{name}: got {value.dtype}, expected bool, int or float")
    return value


def floats(
    name: str, value: object, shape: tuple[int, ...] | None, meaning: str, device: torch.device | None
) -> Tensor:
    """Check a floating-point tensor, as ``tensor`` does."""
    return tensor(name, value, shape, meaning, device, FLOATS)


def number(name: str, value: object, *, positive: bool = False, minimum: float | None = None) -> float:
    """Check a finite Python number; return it as a float."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name}: got {value}, expected a finite number")
    if positive and not value > 0:
        raise ValueError(f"{name}: got {value}, expected a positive number")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: got {value}, expected at least {minimum}")
    return float(value)


def integer(name: str, value: object, dtype: torch.dtype = torch.int64) -> int:
    """Check a Python integer that ``dtype`` holds, int64 or int32; return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    limit = 2**31 if dtype == torch.int32 else 2**63
    if not -limit <= value < limit:
        raise ValueError(f"{name}: got {value}, expected a number that {dtype} holds")
    return value


def flag(name: str, value: object) -> bool:
    """Check a Python bool; return it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a bool")
    return value


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Check that a value is one of some strings; return it."""
    if not isinstance(value, str):
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected one of {', '.join(map(repr, allowed))}"
        )
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, allowed))}")
    return value


def layout(name: str, tokens: Tensor, cu_seqlens: object) -> None:
    """Check that tokens are padded [B, T] without ``cu_seqlens``, packed [N] with it.

    Offsets may be on the CPU. If offsets are passed as ``tokens``, only they are checked.
    """
    if cu_seqlens is None:
        if tokens.ndim != 2:
            raise ValueError(
                f"{name}: got shape {tuple(tokens.shape)}, expected [B, T] or, with cu_seqlens, packed [N]"
            )
        return
    offsets = tensor("cu_seqlens", cu_seqlens, None, "[B + 1]", tokens.device, INTEGERS, host=True)
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {tuple(offsets.shape)}, expected [B + 1]")
    if tokens.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(tokens.shape)}, expected packed [N] with cu_seqlens")
    if offsets.shape[0] == 1 and tokens.numel() and tokens is not offsets:
        raise ValueError(
            f"cu_seqlens: got shape (1,), expected [B + 1] with B > 0 for {tokens.numel()} tokens"
        )


def broadcastable(name: str, value: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a number, or a tensor that broadcasts to ``shape``."""
    if not isinstance(value, Tensor):
        number(name, value)
        return
    floats(name, value, None, "", None)
    if value.ndim and value.device != device:
        raise ValueError(f"{name}: is on {value.device}, expected {device} like the other tensors")
    try:
        fits = torch.broadcast_shapes(tuple(value.shape), shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected one that broadcasts to {shape}")


def filled(value: float, device: torch.device) -> Tensor:
    """Return a 0-d tensor in ``exact_dtype``, filled on the device, because a copy would sync with it."""
    return torch.full((), float(value), dtype=exact_dtype(device), device=device)


def scalar(name: str, value: object) -> None:
    """Check a positive number or a 0-d tensor."""
    if not isinstance(value, Tensor):
        number(name, value, positive=True)
        return
    tensor(name, value, None, "of no dimensions, or a number", None)
    if value.ndim != 0:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected a number or a 0-d tensor")


def objective(value: Any, base: type) -> Any:
    """Check that a value is an instance of an objective; return it."""
    if base in type(value).__mro__:
        return value
    if isinstance(value, type) and issubclass(value, base):
        raise TypeError(
            f"objective: got the class {value.__name__}, expected an instance such as {value.__name__}()"
        )
    shown = "a tensor" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"objective: got {shown}, expected an instance such as GSPO()")


_VALIDATE = os.environ.encodekey("GSPO_KERNELS_VALIDATE")
_ENVIRONMENT: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
"""The dictionary behind ``os.environ``, whose ``get`` is slow for unset variables."""


def validates() -> bool:
    """Return whether GSPO_KERNELS_VALIDATE is 1; False while code is compiled."""
    return not is_compiling() and _VALIDATE in _ENVIRONMENT and os.environ["GSPO_KERNELS_VALIDATE"] == "1"
