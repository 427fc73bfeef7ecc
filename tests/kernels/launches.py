"""Launch kernels on a pretended GPU without the interpreter, and print as JSON what was launched. A script.

Each call is launched by Triton, then twice by ``launch``, which launches the second time by itself. At
the end 64 steps of as many sizes are launched.
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
from gspo_kernels.kernels.columns import decode
from gspo_kernels.types import LogitRows, LogitTransform, RatioClip, RatioOperands

DEVICE = torch.device("cuda", 0)


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


@triton.jit
def plain_kernel(values_ptr, count, factor, pair, missing_ptr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    """Triton looks at alignment and size of every argument of this kernel."""
    lanes = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + lanes, mask=lanes < count) * factor + pair[1]
    tl.store(pair[0] + lanes, values, mask=lanes < count)


@launching.row_kernel
def encoded_kernel(values_ptr, triple, BLOCK: tl.constexpr):
    """Triton looks at addresses of tensors in tuples of this kernel, and at no number."""
    lanes = tl.arange(0, BLOCK)
    tl.store(triple[0] + lanes, tl.load(values_ptr + lanes) + decode(triple[1]))


def shown(kernel: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Return what a launch shows, without what only hooks get, as JSON takes it."""
    *grid, stream, function, metadata = arguments[:6]
    return [kernel, grid, stream, function, str(metadata), *map(described, arguments[9:])]


def described(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return [described(value.base), value.shape, value.strides, value.block_shape]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.data_ptr()]
    if isinstance(value, tuple):
        return [type(value).__name__, *map(described, value)]
    return value if isinstance(value, int | float | None) else str(value)


def calls() -> list[Any]:
    """Return the calls of ``launch`` as (kernel, programs, tile, arguments, constants)."""
    found: list[Any] = []

    def record(kernel: Any, programs: int, _: Any, tile: Any, *arguments: Any, **constants: Any) -> None:
        found.append((kernel, programs, tile, arguments, constants))

    numbers = torch.zeros(80)
    assert numbers.data_ptr() % 16 == 0
    for dtype in (torch.float32, torch.bfloat16):
        for start in (0, 1):
            for count in (1, 16, 17, 2**31):
                for missing in (None, numbers):
                    values = numbers.to(dtype)[start:]
                    rest = count, 0.5, (values[1:], 1 if missing is None else 17), missing
                    record(
                        plain_kernel, 3, DEVICE, launching.Tile(64, 4), values, *rest, BLOCK=64, TWICE=start
                    )
            for number in (-1, 0, 1, 16, 2**31 - 1):
                for third in (None, launching.encode_wide(number)):
                    triple = numbers.to(dtype)[start:], launching.encode(number), third
                    record(encoded_kernel, 3, DEVICE, launching.Tile(64, 4), numbers, triple, BLOCK=64)
    for module in (exponentials, logprobs, masks, scale, sequence_ratio, clipped_ratios):
        module.launch = record  # type: ignore[assignment]
    for B, T, V in ((1, 1, 1), (2, 16, 16), (3, 17, 17)):
        for start in (0, 1):
            for dtype in (torch.float32, torch.bfloat16):
                logits = torch.zeros(B * T * V + start, dtype=dtype)[start:].view(B, T, V)
                labels, old = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T)
                rows = LogitRows(logits, labels, LogitTransform(), -1 if start else -100)
                form = RatioClip(-1.0, 1.0, 2.0, False, "sequences", 1.0)
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


def steps_of_64_sizes() -> None:
    """Launch what a step in packed training launches around its products, with other tokens each time."""
    form = RatioClip(-1.0, 1.0, 2.0, False, "sequences", 1.0)
    for N in range(1, 65):
        labels, numbers = torch.zeros(1, N, dtype=torch.int64), torch.zeros(1, N)
        offsets = torch.tensor([0, N // 2, N], dtype=torch.int32)
        operands = RatioOperands(numbers, torch.zeros(2), None, None, torch.ones(()), offsets)
        rows = LogitRows(torch.zeros(1, N, 64), labels, LogitTransform(), -100)
        kernels.merge_mask(numbers, labels, -100)
        kernels.lengths(labels, -100, offsets, operands.advantages)
        kernels.logprobs_forward(rows, entropy=False)
        kernels.ratio_step(numbers, labels != 0, operands, form)


def on_host(make: Any) -> Any:
    """Return a function that makes tensors without a device."""
    return lambda *sizes, device=None, **options: make(*sizes, **options)


def main() -> None:
    """Print (by Triton, at first, later, later by Triton) of every call, and how many of the launches of
    ``steps_of_64_sizes`` Triton served; check what a hook has seen.
    """
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    CompiledKernel._init_handles = prepare
    run = JITFunction.run

    def counted(*arguments: Any, **keywords: Any) -> Any:
        by_triton[0] += 1
        return run(*arguments, **keywords)

    JITFunction.run = counted
    report = []
    for kernel, programs, tile, arguments, constants in calls():
        launched.clear()
        kernel[(programs,)](*arguments, **constants, **tile.options())
        launching.launch(kernel, programs, DEVICE, tile, *arguments, **constants)
        by_triton[0] = 0
        launching.launch(kernel, programs, DEVICE, tile, *arguments, **constants)
        report.append(([shown(*each) for each in launched], by_triton[0]))
    seen: list[Any] = []
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    for hook in hooks:
        hook.add(seen.append)
        by_triton[0] = 0
        launching.launch(kernel, programs, DEVICE, tile, *arguments, **constants)
        assert by_triton[0] == 1 and launched[-1][1][7:9] == hooks
        hook.remove(seen.append)
    launched.clear()
    by_triton[0] = 0
    for module in (logprobs, masks, clipped_ratios):
        module.launch = launching.launch
    launching.torch.Tensor.device = property(lambda _: DEVICE)  # type: ignore[assignment]
    launching.torch.empty, launching.torch.zeros = on_host(torch.empty), on_host(torch.zeros)
    steps_of_64_sizes()
    print(json.dumps((report, len(launched), by_triton[0])))


if __name__ == "__main__":
    main()
