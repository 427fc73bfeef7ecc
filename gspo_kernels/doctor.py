"""``gspo doctor``: what this machine offers, which backend "auto" picks, and why the others can't serve."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from gspo_kernels.ops import backends

_PACKAGES = (
    "gspo_kernels",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "accelerate",
    "datasets",
    "flash-attn",
    "trl",
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def report() -> str:
    """Several lines of text for people."""
    lines = [
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
        *(f"{package:<13} {_version(package)}" for package in _PACKAGES),
        "",
    ]
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        detail = (
            f"{torch.get_num_threads()} threads"
            if device.type == "cpu"
            else torch.cuda.get_device_name(device)
        )
        lines.append(f"{device} ({detail}): backend 'auto' is {backends.resolve('auto', device)!r}")
        for name in backends.BACKENDS:
            reason = backends.why_not(name, device)
            lines.append(f"  {name:<10} {'ready' if reason is None else 'not here: ' + reason}")
    if len(devices) == 1:
        lines.append("no CUDA device: torch.cuda.is_available() is False")
    return "\n".join(lines)
