"""Launching of kernels: block sizes, compile-time constants, and the launch itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels.backends.triton.columns import element
from gspo_kernels.core.types import LogitTransform, RowStats, stats_dtype

INTERPRETED = not isinstance(element, triton.runtime.JITFunction)
"""Whether the kernels were imported under TRITON_INTERPRET=1 and run on CPU tensors."""


@functools.cache
def platform() -> str:
    """Return the target of the kernels: "interpreter", "hip" or "cuda"."""
    if INTERPRETED:
        return "interpreter"
    return "cuda" if torch.version.hip is None else "hip"


def triton_version() -> tuple[int, ...]:
    """Return the major and minor number of Triton's version."""
    return tuple(int(number) for number in triton.__version__.split(".")[:2])


class Tile(NamedTuple):
    """Launch options of a kernel: ``block`` columns at a time, ``warps`` per thread block, ``stages`` of the
    pipeline of a matmul, thread ``blocks`` per program (a cluster if several), and the maximum of
    ``registers`` per thread (None for the compiler's).
    """

    block: int
    warps: int
    stages: int = 1
    blocks: int = 1
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options with which Triton compiles a kernel.

        Fused multiply-adds are off except where kernels ask for them: a helper then rounds the same in every
        kernel, and old log-probs from one kernel equal new ones from another.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages, "num_ctas": self.blocks}
        options["enable_fp_fusion"] = False
        return options | ({} if self.registers is None else {"maxnreg": self.registers})


# The forward's tiles by the bytes of one logit. It keeps two numbers per thread (three with entropy), and a
# block is two 16-byte loads per thread. It loads nothing ahead: ptxas would move such loads down to their
# use. 10 to 16 programs of four warps with 32 to 48 registers share an NVIDIA multiprocessor.
FORWARD = {2: Tile(2048, 4), 4: Tile(1024, 4), 8: Tile(512, 4)}


@functools.lru_cache(maxsize=64)
def without_spills(tile: Tile, much: bool, registers: int = 128) -> Tile:
    """Return the tile, with a limit of registers on CUDA if the kernel keeps ``much`` alive at a time, as
    under a softcap or in fp64. Without a limit ptxas spills, to fit one more program on a multiprocessor.
    """
    if much and platform() == "cuda":
        return tile._replace(registers=registers)
    return tile


_STATS = {torch.float32: tl.float32, torch.float64: tl.float64}


def stats_type(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's dtype for the statistics of logits of ``dtype``."""
    return _STATS[stats_dtype(dtype)]


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether all rows of 2-D or 3-D tensors, whose last stride is 1, consist of 16-byte pieces."""
    for each in tensors:
        vector = 16 // each.element_size()
        if each.shape[-1] % 16 or each.data_ptr() % 16:
            return False
        if each.stride(0) % vector or each.stride(-2) % vector:
            return False
    return True


def with_contiguous_rows(logits_BTV: Tensor) -> Tensor:
    """Return logits with a vocabulary stride of 1, copied if necessary."""
    return logits_BTV if logits_BTV.stride(2) == 1 else logits_BTV.contiguous()


def _extent(tensor: Tensor) -> range:
    """Return the range of addresses from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def narrows_in_place(logits_BTV: Tensor, out_BTV: Tensor) -> bool:
    """Return whether ``out`` has a narrower dtype than the logits and is in the memory of their rows.

    Raises:
        ValueError: ``out`` shares memory with the logits in another way and isn't the same tensor.
    """
    logits, out = _extent(logits_BTV), _extent(out_BTV)
    if not range(max(logits.start, out.start), min(logits.stop, out.stop)):
        return False
    wide, narrow = logits_BTV.element_size(), out_BTV.element_size()
    dims = [dim for dim in range(2) if out_BTV.shape[dim] > 1]
    same_rows = logits_BTV.data_ptr() == out_BTV.data_ptr() and all(
        logits_BTV.stride(dim) * wide == out_BTV.stride(dim) * narrow for dim in dims
    )
    # Rows must not overlap. From the innermost dimension outwards, a stride is at least the extent so far.
    reach = logits_BTV.shape[2]
    for dim in sorted(dims, key=logits_BTV.stride):
        same_rows = same_rows and logits_BTV.stride(dim) >= reach
        reach += (logits_BTV.shape[dim] - 1) * logits_BTV.stride(dim)
    if same_rows and logits_BTV.dtype == out_BTV.dtype and logits_BTV.stride(2) == out_BTV.stride(2):
        return False
    if same_rows and narrow < wide and logits_BTV.stride(2) == out_BTV.stride(2) == 1:
        return True
    raise ValueError(
        f"out: shares memory with logits; got {out_BTV.dtype} with strides {out_BTV.stride()}, "
        f"{out.start - logits.start} bytes after logits of {logits_BTV.dtype} with strides "
        f"{logits_BTV.stride()}; expected separate memory, the logits, or a narrower dtype whose rows start "
        "at those of the logits"
    )


def empty_stats(labels: Tensor, dtype: torch.dtype, entropy: bool) -> RowStats:
    """Return memory for statistics in ``dtype`` of the rows of labels [B, T]."""
    new = functools.partial(torch.empty, *labels.shape, device=labels.device)
    return RowStats(new(dtype=dtype), new(dtype=torch.float64), new(dtype=dtype) if entropy else None)


def strides(*tensors: Tensor | None) -> list[int]:
    """Return the strides of each tensor along its first two dimensions; 0 for None."""
    return [stride for each in tensors for stride in ((0, 0) if each is None else each.stride()[:2])]


def strides_of(values: Tensor | None, packed: bool) -> tuple[int, int]:
    """Return the strides along sequences and tokens of values [sequences] or like the tokens, 0 for
    broadcasting.
    """
    if values is None:
        return 0, 0
    if values.ndim == 1:
        return values.stride(0), 0
    return 0 if packed else values.stride(0), values.stride(1)


def slopes_of(transform: LogitTransform) -> tuple[float, float, float]:
    """Return (slope, inner, outer): z = slope * x, or with a softcap z = outer * tanh(inner * x)."""
    scale, softcap, temperature = transform[:3]
    inner, outer = (scale / softcap, softcap / temperature) if softcap else (1.0, 1.0)
    return scale / temperature, inner, outer


def row_numbers(logits: Tensor, labels: Tensor, transform: LogitTransform, ignore_index: int) -> list[Any]:
    """Return the numeric arguments of kernels over logit rows: T, V, ignore_index, slopes, and the strides of
    logits, labels, temperatures and sampling masks.
    """
    strided = strides(logits, labels, transform.row_temperature, transform.kept)
    return [*logits.shape[1:], ignore_index, *slopes_of(transform), *strided]


class RowConstants(NamedTuple):
    """The constants for which a kernel over logit rows is compiled.

    Attributes:
        STATS: the dtype of statistics.
        SCALED: 0 if logits are not multiplied, otherwise the sign of their factor.
        SOFTCAP: whether the logits have a softcap.
        ALIGNED: see ``is_aligned``.
        NARROWS_IN_PLACE: see ``narrows_in_place``.
        BLOCK, WARPS: the tile.
        PLATFORM: see ``platform``.
    """

    STATS: tl.dtype
    SCALED: int
    SOFTCAP: bool
    ALIGNED: bool
    NARROWS_IN_PLACE: bool
    BLOCK: int
    WARPS: int
    PLATFORM: str

    @staticmethod
    def of(logits: Tensor, transform: LogitTransform, tile: Tile, out: Tensor | None = None) -> RowConstants:
        """Return the constants for logits [B, T, V] and their gradient; raises as ``narrows_in_place``."""
        slope = transform.logit_scale / transform.temperature
        plain = slope == 1.0 and transform.row_temperature is None
        return RowConstants(
            STATS=stats_type(logits.dtype),
            SCALED=0 if plain else 1 if slope > 0 else -1,
            SOFTCAP=bool(transform.softcap),
            ALIGNED=is_aligned(logits) if out is None else is_aligned(logits, out),
            NARROWS_IN_PLACE=out is not None and narrows_in_place(logits, out),
            BLOCK=tile.block,
            WARPS=tile.warps,
            PLATFORM=platform(),
        )


def typed_kernel(function: Callable[..., None]) -> Any:
    """Apply ``triton.jit`` with specialization on dtypes, the presence of optional tensors, and constants
    only, not on shapes, strides or addresses. Tensors are the first arguments; numbers have type annotations.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    kernel: Any = triton.jit(function, do_not_specialize=runtime)
    kernel.pointers = sum(parameter.annotation is inspect.Parameter.empty for parameter in parameters)
    return kernel


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by kernel, device, tile, constants, and the dtypes of tensors."""


def launch(
    kernel: Any, programs: int, device: torch.device, tile: Tile, *args: Any, **constants: Any
) -> None:
    """Launch ``programs`` programs of a ``typed_kernel`` on the tensors' ``device``, which may not be the
    current one. ``args`` and ``constants`` are the kernel's parameters, in order.

    Only the first launch of each specialization uses Triton's launcher, which is slow; later ones call the
    compiled kernel.
    """
    if programs == 0:
        return
    if INTERPRETED:
        import numpy as np

        with np.errstate(all="ignore"):
            kernel[(programs,)](*args, **constants, **tile.options())
        return
    index = torch.cuda.current_device()
    if device.index != index:
        with torch.cuda.device(device):
            launch(kernel, programs, device, tile, *args, **constants)
        return
    key = (kernel.fn, index, tile, *constants.values(), *map(_dtype, args[: kernel.pointers]))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(programs,)](*args, **constants, **tile.options())
    else:
        compiled[(programs, 1, 1)](*args, *constants.values())


def _dtype(arg: Tensor | TensorDescriptor | None) -> Any:
    """Return the dtype of a tensor, or of a descriptor's tensor; the constants have its blocks."""
    return None if arg is None else arg.dtype if isinstance(arg, Tensor) else arg.base.dtype
