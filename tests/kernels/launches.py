"""Launch kernels on a fake GPU without the interpreter, and print as JSON what was launched. A script.

Triton launches each call, then ``launch`` launches it twice.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels import kernels
from gspo_kernels.kernels import clipped_ratios, exponentials, logprobs, masks, scale, sequence_ratio, tiles
from gspo_kernels.kernels import launch as launching
from gspo_kernels.types import LogitRows, LogitTransform, RatioClip, RatioOperands

DEVICE = torch.device("cuda", 0)
TILE = launching.Tile(64, 4)


class Driver:
    """A GPU on which nothing runs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


launched: list[Any] = []
by_triton = [0]


def prepare(kernel: Any) -> None:
    """Take the place of loading a kernel."""
    kernel.module, kernel.function = 0, id(kernel)
    kernel._run = lambda *arguments: launched.append((kernel.hash, arguments))


@launching.typed_kernel
def numbers_kernel(
    values_ptr, missing_ptr, count: tl.int32, stride: tl.int64, factor: tl.float64, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    tl.store(values_ptr + lanes * stride, factor.to(values_ptr.dtype.element_ty), mask=lanes < count)


def described(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return [described(value.base), value.shape, value.strides, value.block_shape]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.data_ptr()]
    return value if isinstance(value, int | float | None) else str(value)


def shown(kernel: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Return what a launch shows, without what only hooks get, as JSON takes it."""
    return [kernel, *map(described, arguments[:6]), *map(described, arguments[9:])]


def of_numbers() -> list[Any]:
    """Return calls that differ by numbers, addresses, dtypes and a missing tensor."""
    memory = torch.zeros(80)
    return [
        (numbers_kernel, 3, TILE, (memory.to(dtype)[start:], missing, count, stride, factor), {"BLOCK": 64})
        for dtype in (torch.float32, torch.bfloat16)
        for missing in (None, memory)
        for start in (0, 1)
        for count, stride, factor in ((1, 1, 1.0), (16, 2**40, 0.1), (17, -16, 1e300), (2**31 - 1, 0, 2.0))
    ]


def of_launchers() -> list[Any]:
    """Return calls of the package's launchers."""
    found: list[Any] = []

    def record(kernel: Any, programs: int, _: Any, tile: Any, *arguments: Any, **constants: Any) -> None:
        found.append((kernel, programs, tile, arguments, constants))

    for module in (exponentials, logprobs, masks, scale, sequence_ratio, clipped_ratios):
        module.launch = record  # type: ignore[assignment]
    form = RatioClip(-1.0, 1.0, 2.0, False, "sequences", 1.0)
    for B, T, V in ((1, 1, 1), (2, 16, 16), (3, 17, 17)):
        for start in (0, 1):
            for dtype in (torch.float32, torch.bfloat16):
                logits = torch.zeros(B * T * V + start, dtype=dtype)[start:].view(B, T, V)
                labels, old = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T)
                rows = LogitRows(logits, labels, LogitTransform(), -1 if start else -100)
                operands = RatioOperands(old, torch.zeros(B), None if start else torch.ones(B))
                kernels.logprobs_forward(rows, entropy=bool(start))
                kernels.merge_mask(old if start else labels != 0, labels, -100)
                kernels.lengths(labels, -100, None, old if start else torch.zeros(B))
                kernels.scale_(logits, torch.ones(()))
                kernels.sequence_ratio_forward(rows, labels != 0 if start else None, operands, form)
                kernels.ratio_step(old, labels != 0, operands, form)
    exponentials.capability, tiles.multiprocessors = lambda device: 9, lambda device: 132
    for n in (3, 16):
        shapes = (n, 8), (40, 8), (n, 40)
        hidden, weight, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        labels = torch.zeros(1, n, dtype=torch.int64)
        given = (hidden, weight, None, labels, LogitTransform(), -100)
        head = exponentials.exponentials(*given, out)
        known = exponentials.KnownRows(*given, head.stats, head.factors, labels[0] == 0)
        known.exponentials(out[:, :16], n)
    return found


def reported(calls: list[Any]) -> list[Any]:
    """Return for each call the three launches, and how many of the last two Triton served."""
    report = []
    for kernel, programs, tile, arguments, constants in calls:
        launched.clear()
        kernel[(programs,)](*arguments, **constants, **tile.options())
        by_triton[0] = 0
        for _ in range(2):
            launching.launch(kernel, programs, DEVICE, tile, *arguments, **constants)
        report.append(([shown(*each) for each in launched], by_triton[0]))
    return report


def main() -> None:
    """Print ``reported`` calls of both kinds, and what hooks of a launch have seen."""
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    CompiledKernel._init_handles = prepare
    run = JITFunction.run

    def counted(*arguments: Any, **keywords: Any) -> Any:
        by_triton[0] += 1
        return run(*arguments, **keywords)

    JITFunction.run = counted
    numbers, launchers = of_numbers(), of_launchers()
    report = [reported(numbers), reported(launchers)]
    seen: list[str] = []
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    kernel, programs, tile, arguments, constants = numbers[0]
    launching.launch(kernel, programs, DEVICE, tile, *arguments, **constants)
    metadata, hook = launched[-1][1][6:8]
    hook(metadata)
    print(json.dumps((*report, seen)))


if __name__ == "__main__":
    main()
