"""``gspo doctor``: what this machine offers, which backend "auto" picks, which frameworks adapters serve."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from gspo_kernels.backends import dispatch as backends
from gspo_kernels.backends.cpp.products import best_instructions, multiplies
from gspo_kernels.core.batch_invariance import is_batch_invariant
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.hidden.matmul import fp32_library
from gspo_kernels.hidden.matmul.exponentials import unavailable_on
from gspo_kernels.integrations.errors import IntegrationError, declared_range, require_package

_PACKAGES = ("gspo_kernels", "torch", "triton", "numpy", "accelerate", "datasets", "flash-attn")

_FRAMEWORKS = {
    "transformers": "pip install 'gspo_kernels[train]'",
    "trl": "pip install 'gspo_kernels[trl]'",
    "verl": "pip install 'gspo_kernels[verl]', in an environment of its own",
    "skyrl": "pip install 'gspo_kernels[skyrl]', in an environment of its own",
    "torchtitan": "pip install 'gspo_kernels[torchtitan]', in an environment of its own",
}
"""Frameworks with an adapter, and how to install them. Their versions are those of this package's extras."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _frameworks() -> list[str]:
    """Return a line per framework: its version, and whether the adapter serves it."""
    lines = []
    for framework, advice in _FRAMEWORKS.items():
        installed, supported = _version(framework), declared_range(framework)
        if installed == "not installed":
            verdict = f"adapter for {supported or 'any version'}: {advice}"
        else:
            try:
                require_package(framework)
                verdict = f"supported ({supported or 'any version'})"
            except IntegrationError:
                verdict = f"not supported, the adapter needs {supported}: {advice}"
        lines.append(f"  {framework:<13} {installed:<14} {verdict}")
    return lines


def _products() -> list[str]:
    """Return lines that say which code multiplies hidden states and weights on the CPU."""
    fp32 = fp32_library()
    bf16 = "in fp32 by the library above: this processor has no AVX-512, or PyTorch may not use it"
    if multiplies(torch.bfloat16):
        without_amx = torch.ops.gspo_kernels_cpp.amx_unavailable()
        bf16 = f"by cpp with {best_instructions(torch.bfloat16)}"
        bf16 += f"; no AMX: {without_amx}" if without_amx else ""
    missing = backends.unavailable_reason("cpp", torch.device("cpu"))
    fixed = "by cpp" if missing is None else f"not here: {missing}"
    return [
        f"  products of fp32 by {fp32}",
        f"  products of bf16 {bf16}",
        f"  products in batch-invariant mode {fixed}",
    ]


def own_products(device: torch.device) -> list[str]:
    """Return lines that say which of Triton's products serve a GPU, and what their first use there showed."""
    if (missing := backends.unavailable_reason("triton", device)) is not None:
        return [f"  products by torch.mm: {missing}"]
    from gspo_kernels.backends.triton.batch_invariant_matmul import TENSOR_MAPS

    def line(what: str, product: str, other: str, first_use: Callable[[torch.device], str | None]) -> str:
        try:
            missing = first_use(device)
        except RuntimeError as error:  # such as a GPU whose memory is full
            missing = f"its comparison failed: {error}"
        if missing is None:
            return f"  {what} by {product}: compared here with PyTorch's, it differs by roundings alone"
        return f"  {what} by {other}, not by {product}: {missing}"

    exponentials, bulk = "Triton's product with exponentials", "Triton's product by tensor maps"
    return [
        line("logits of bf16", exponentials, "torch.mm and a pass over logits", unavailable_on),
        line(
            "batch-invariant products", bulk, "Triton's product by addresses", TENSOR_MAPS.unavailable_reason
        ),
    ]


def report() -> str:
    """Return the text that ``gspo doctor`` prints."""
    lines = [
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
        *(f"{package:<13} {_version(package)}" for package in _PACKAGES),
        "",
        f"batch-invariant mode is {'on' if is_batch_invariant() else 'off'}",
        "",
        "frameworks that an adapter serves (docs/integrations):",
        *_frameworks(),
        "",
    ]
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    for device in devices:
        if device.type == "cuda":
            detail = torch.cuda.get_device_name(device)
        else:
            detail = f"{torch.get_num_threads()} threads" if device.type == "cpu" else platform.machine()
        lines.append(f"{device} ({detail}): backend 'auto' is {backends.resolve('auto', device)!r}")
        for name in backends.BACKENDS:
            reason = backends.unavailable_reason(name, device)
            lines.append(f"  {name:<10} {'ready' if reason is None else 'not here: ' + reason}")
        if device.type == "cpu":
            lines += _products()
        elif device.type == "cuda":
            lines += own_products(device)
        if exact_dtype(device) == torch.float32:
            lines.append("  products by PyTorch")
            lines.append("  no fp64 on this device: statistics and losses in fp32, with compensated sums")
    if not torch.cuda.device_count():
        lines.append("no CUDA device: torch.cuda.is_available() is False")
    return "\n".join(lines)
