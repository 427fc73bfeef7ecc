"""Self-test and switch of matmuls by tensor maps, which no GPU has run and which are disabled by default."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch

from gspo_kernels.core import checks

_LOGGER = logging.getLogger("gspo_kernels")

VARIABLE = "GSPO_KERNELS_TENSOR_MAPS"
DEFAULT = "0"
"""The variable's default, until ``python -m benchmarks campaign`` shows these matmuls correct and faster."""

_enabled: bool | None = None


def enable_tensor_maps(enabled: bool) -> None:
    """Enable or disable matmul kernels that load by tensor maps, on Hopper and B200, in all threads.

    These are the matmul of a bf16 head that writes exponentials instead of logits, and the batch-invariant
    matmul of 16-bit operands. They are disabled by default, because no GPU has run them and an illegal
    access would end the process. The alternatives are ``torch.mm`` with separate kernels over the logits, and
    batch-invariant matmuls that load by pointers. If enabled, the first use of each matmul on a device
    compares it with PyTorch's.

    The environment variable ``GSPO_KERNELS_TENSOR_MAPS``, "0" or "1", does the same; this function overrides
    it. Results differ in their last bits between the two, also in batch-invariant mode; choose one before
    the first call.

    Args:
        enabled: whether these matmuls are enabled.

    Returns:
        None.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    global _enabled
    _enabled = checks.flag("enabled", enabled)


def tensor_maps_enabled() -> bool:
    """Return whether matmuls by tensor maps are enabled.

    Raises:
        ValueError: the environment variable is neither "0" nor "1".
    """
    if _enabled is not None:
        return _enabled
    value = os.environ.get(VARIABLE, DEFAULT)
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: got {value!r}, expected '0' or '1'")
    return value == "1"


class SelfTest:
    """Self-test of a matmul by tensor maps on each device.

    Args:
        excess: runs the matmul on a device and returns its largest error as a multiple of the error bound.
    """

    def __init__(self, excess: Callable[[torch.device], float]):
        self._excess = excess
        self._found: dict[torch.device, str | None] = {}
        self._lock = threading.RLock()  # other threads wait for the self-test

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return None if the matmul supports a device, otherwise the reason.

        Wrong results and compilation errors are cached and logged. Other errors, such as out of memory, are
        raised, and the next call tries again.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            return "it needs an NVIDIA GPU"
        if not tensor_maps_enabled():
            return f"it needs Hopper or B200, and is disabled as no GPU has run it; {VARIABLE}=1 enables it"
        with self._lock:
            if device in self._found:
                return self._found[device]
            if torch.cuda.get_device_capability(device)[0] not in (9, 10):
                return "it needs the tensor maps and the shared memory of Hopper or B200"
            if torch.cuda.is_current_stream_capturing():
                return "its self-test can't run while a CUDA graph is captured"
            self._found[device] = None  # available to its own self-test
            try:
                excess = self._excess(device)
                reason = None if excess <= 1 else f"its error is {excess:.2g} times the bound"
            except BaseException as error:
                from triton.errors import TritonError

                del self._found[device]
                # passes of Triton's compiler raise a plain RuntimeError
                if not isinstance(error, TritonError) and "PassManager" not in str(error):
                    raise
                reason = f"Triton can't compile it here: {type(error).__name__}: {error}"
            self._found[device] = reason
            if reason is not None:
                _LOGGER.warning("a Triton matmul is disabled on %s in this process: %s", device, reason)
            return reason
