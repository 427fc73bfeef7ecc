"""Products by tensor maps: off by default, as no GPU has run them; first uses are compared."""

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
"""The value of the variable if it is not set. It becomes "1" once a committed run of the campaign
(``python -m benchmarks campaign``) shows these products right and faster."""

_enabled: bool | None = None


def enable_tensor_maps(enabled: bool) -> None:
    """Enable or disable products by tensor maps on Hopper and B200, in all threads of the process.

    These are the product of a bf16 head that writes exponentials in place of logits, and the batch-invariant
    product of 16-bit operands. They are disabled by default, because no GPU has run them and an illegal
    access would end the process. Without them ``torch.mm`` and passes over the logits serve a bf16 head, and
    batch-invariant products load by pointers. If enabled, the first use of each product on a device compares
    it with PyTorch's.

    The environment variable ``GSPO_KERNELS_TENSOR_MAPS``, "0" or "1", does the same; this function overrides
    it. The two ways differ in the last bits of their results, also in batch-invariant mode, so choose one
    before the first call.

    Args:
        enabled: whether these products are enabled.

    Returns:
        None.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    global _enabled
    _enabled = checks.flag("enabled", enabled)


def tensor_maps_enabled() -> bool:
    """Return whether products by tensor maps are enabled.

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
    """Which devices a product by tensor maps serves.

    Args:
        excess: runs the product on a device and returns its largest error there, as a multiple of what
            roundings allow.
    """

    def __init__(self, excess: Callable[[torch.device], float]):
        self._excess = excess
        self._found: dict[torch.device, str | None] = {}
        self._lock = threading.RLock()  # other threads wait for the comparison

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return None if the product serves a device, otherwise why not.

        Only a wrong result and a refusal of Triton's compiler are kept, and logged. All other errors, such as
        running out of memory, are raised, and the next call tries again.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            return "it is for NVIDIA GPUs"
        if not tensor_maps_enabled():
            return f"it is for Hopper and B200, and off because no GPU has run it; {VARIABLE}=1 enables it"
        with self._lock:
            if device in self._found:
                return self._found[device]
            if torch.cuda.get_device_capability(device)[0] not in (9, 10):
                return "it needs the tensor maps and the shared memory of Hopper or B200"
            if torch.cuda.is_current_stream_capturing():
                return "its first use compares results, which a graph can't capture"
            self._found[device] = None  # it serves its own comparison
            try:
                excess = self._excess(device)
                reason = None if excess <= 1 else f"it is off by {excess:.2g} times what roundings allow"
            except BaseException as error:
                del self._found[device]
                if not _is_refusal(error):
                    raise
                reason = f"Triton can't compile it here: {type(error).__name__}: {error}"
            self._found[device] = reason
            if reason is not None:
                _LOGGER.warning("a Triton matmul is off on %s in this process: %s", device, reason)
            return reason


def _is_refusal(error: BaseException) -> bool:
    """Return whether Triton's compiler raised an error: MLIR's passes raise one without a class."""
    from triton.errors import TritonError

    return isinstance(error, TritonError) or "PassManager" in str(error)
