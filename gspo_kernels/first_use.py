"""Products that no GPU had run when they were written: a device's first use compares them with PyTorch's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

_LOGGER = logging.getLogger("gspo_kernels")


class FirstUse:
    """Which devices a product by tensor maps serves.

    Args:
        excess: runs the product on a device and returns its largest error there, as a multiple of what
            roundings allow.
    """

    def __init__(self, excess: Callable[[torch.device], float]):
        self._excess = excess
        self._found: dict[torch.device, str | None] = {}
        self._lock = threading.RLock()  # other threads wait for the comparison

    def why_not(self, device: torch.device) -> str | None:
        """Return None if the product serves a device, otherwise why not.

        Only a wrong result and a refusal of Triton's compiler are kept, and logged. All other errors, such as
        running out of memory, are raised, and the next call tries again.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            return "it is for NVIDIA GPUs"
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
