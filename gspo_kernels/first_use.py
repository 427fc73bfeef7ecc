"""Products that no GPU had run when they were written: a device's first use compares them with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import torch


class FirstUse:
    """Which devices a product by tensor maps serves.

    Args:
        excess: runs the product on a device and returns its largest error there, as a multiple of what
            roundings allow.
    """

    def __init__(self, excess: Callable[[torch.device], float]):
        self._excess = excess
        self._found: dict[torch.device, str | None] = {}

    def why_not(self, device: torch.device) -> str | None:
        """Return None if the product serves a device, otherwise why not. What was found once is kept."""
        if device in self._found:
            return self._found[device]
        if device.type != "cuda" or torch.version.hip is not None:
            return "it is for NVIDIA GPUs"
        try:
            if torch.cuda.get_device_capability(device)[0] not in (9, 10):
                return "it needs the tensor maps and the shared memory of Hopper or B200"
            if torch.cuda.is_current_stream_capturing():
                return "its first use compares results, which a graph can't capture"
            self._found[device] = None  # it serves its own comparison
            if not (excess := self._excess(device)) <= 1:
                self._found[device] = f"it is off by {excess:.2g} times what roundings allow"
        except Exception as error:  # of a driver, Triton or its compiler: another product serves
            self._found[device] = f"it fails here: {type(error).__name__}: {error}"
        return self._found[device]
