"""``gspo doctor``: packages, backends and their defaults on each device, and supported frameworks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from gspo_kernels.backends import dispatch as backends
from gspo_kernels.backends.cpp.products import best_instructions, multiplies
from gspo_kernels.core.batch_invariance import is_batch_invariant
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.hidden.matmul.exponentials import unavailable_on
from gspo_kernels.integrations.errors import IntegrationError, declared_range, require_package

_PACKAGES = ("gspo_kernels", "torch", "triton", "numpy", "accelerate", "datasets", "flash-attn")

_FRAMEWORKS = {
    "transformers": "pip install 'gspo_kernels[train]'",
    "trl": "pip install 'gspo_kernels[trl]'",
    "verl": "pip install 'gspo_kernels[verl]', in a separate environment",
    "skyrl": "pip install 'gspo_kernels[skyrl]', in a separate environment",
    "torchtitan": "pip install 'gspo_kernels[torchtitan]', in a separate environment",
}
"""How to install the frameworks that have an integration; this package's extras have their versions."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _frameworks() -> list[str]:
    """Return a line per framework: its version, and whether the integration supports it."""
    lines = []
    for framework, advice in _FRAMEWORKS.items():
        installed, supported = _version(framework), declared_range(framework)
        if installed == "not installed":
            verdict = f"integration for {supported or 'any version'}: {advice}"
        else:
            try:
                require_package(framework)
                verdict = f"supported ({supported or 'any version'})"
            except IntegrationError:
                verdict = f"not supported: got {installed}, expected {supported}; {advice}"
        lines.append(f"  {framework:<13} {installed:<14} {verdict}")
    return lines


def _cpu_matmuls() -> list[str]:
    """Return lines that name the matmul of the lm_head on the CPU, for each dtype and mode."""
    fp32 = "cpp" if multiplies(torch.float32) else "torch"
    bf16 = "fp32, by the library above: no AVX-512, or PyTorch may not use it"
    if multiplies(torch.bfloat16):
        without_amx = torch.ops.gspo_kernels_cpp.amx_unavailable()
        bf16 = f"cpp with {best_instructions(torch.bfloat16)}"
        bf16 += f"; no AMX: {without_amx}" if without_amx else ""
    missing = backends.unavailable_reason("cpp", torch.device("cpu"))
    fixed = "cpp" if missing is None else f"not available: {missing}"
    return [
        f"  fp32 matmul: {fp32}",
        f"  bf16 matmul: {bf16}",
        f"  batch-invariant matmul: {fixed}",
    ]


def gpu_matmuls(device: torch.device) -> list[str]:
    """Return lines that name the matmul of the lm_head on a GPU, and the results of self-tests."""
    if (missing := backends.unavailable_reason("triton", device)) is not None:
        return [f"  matmul: torch.mm ({missing})"]
    from gspo_kernels.backends.triton.batch_invariant_matmul import TENSOR_MAPS

    def line(what: str, ours: str, other: str, self_test: Callable[[torch.device], str | None]) -> str:
        try:
            missing = self_test(device)
        except RuntimeError as error:  # such as a GPU without free memory
            missing = f"the self-test failed: {error}"
        if missing is None:
            return f"  {what}: {ours}; self-test passed (PyTorch's results, up to rounding)"
        return f"  {what}: {other}, not {ours}: {missing}"

    exponentials, tensor_maps = "Triton with exponentials in the epilogue", "Triton with tensor maps"
    return [
        line("bf16 matmul", exponentials, "torch.mm and a pass over the logits", unavailable_on),
        line("batch-invariant matmul", tensor_maps, "Triton", TENSOR_MAPS.unavailable_reason),
    ]


def report() -> str:
    """Return the text that ``gspo doctor`` prints."""
    lines = [
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
        *(f"{package:<13} {_version(package)}" for package in _PACKAGES),
        "",
        f"batch-invariant mode is {'on' if is_batch_invariant() else 'off'}",
        "",
        "frameworks with an integration (docs/integrations):",
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
            lines.append(f"  {name:<10} {'ready' if reason is None else 'not available: ' + reason}")
        if device.type == "cpu":
            lines += _cpu_matmuls()
        elif device.type == "cuda":
            lines += gpu_matmuls(device)
        if exact_dtype(device) == torch.float32:
            lines.append("  matmul: PyTorch")
            lines.append("  no fp64 on this device: statistics and losses in fp32, with compensated sums")
    if not torch.cuda.device_count():
        lines.append("no CUDA device: torch.cuda.is_available() is False")
    return "\n".join(lines)
