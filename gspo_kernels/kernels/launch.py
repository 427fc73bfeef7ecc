"""What the launchers share: block sizes, the flags a kernel is compiled for, and the launch itself."""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from gspo_kernels.kernels.columns import decode
from gspo_kernels.types import LogitTransform, stats_dtype

try:
    from triton._C.libtriton import native_specialize_impl as _specialise
except ImportError:  # another version of Triton
    _specialise = None

INTERPRETED = not isinstance(decode, triton.runtime.JITFunction)
"""Whether the kernels were imported under TRITON_INTERPRET=1 and so run on CPU tensors."""


@functools.cache
def platform() -> str:
    """Return what the kernels are compiled for: "interpreter", "hip" or "cuda"."""
    if INTERPRETED:
        return "interpreter"
    return "cuda" if torch.version.hip is None else "hip"


def triton_version() -> tuple[int, ...]:
    """Return the major and minor number of Triton's version."""
    return tuple(int(number) for number in triton.__version__.split(".")[:2])


class Tile(NamedTuple):
    """How a kernel is launched: ``block`` columns at a time, ``warps`` per block of threads, ``stages`` of
    the pipeline that feeds a product, ``blocks`` of threads per program (more than one make a cluster), and
    at most ``registers`` per thread (None: the compiler chooses).
    """

    block: int
    warps: int
    stages: int = 1
    blocks: int = 1
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options with which Triton compiles a kernel.

        Fusing of multiplications and additions is off, so that the same helper rounds the same in every
        kernel: old log-probs from one kernel and new ones from another then don't differ at all. Kernels ask
        for fma where it pays.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages, "num_ctas": self.blocks}
        options["enable_fp_fusion"] = False
        return options | ({} if self.registers is None else {"maxnreg": self.registers})


# Tiles by the bytes of one logit, the same on all devices. The forward keeps two numbers per thread (three
# with entropy), and a block is two 16-byte loads per thread. It loads nothing ahead, because ptxas would move
# such loads down to where their values are used; many programs at once hide the latency of memory. With 32 to
# 48 registers, 10 to 16 programs of four warps share an NVIDIA multiprocessor, with 40 to 64 KiB of loads
# under way. The backward keeps no such numbers and takes 64 bytes per thread.
FORWARD = {2: Tile(2048, 4), 4: Tile(1024, 4), 8: Tile(512, 4)}
BACKWARD = {2: Tile(8192, 8), 4: Tile(4096, 8), 8: Tile(2048, 8)}

# The on-policy kernel reads its row twice, the second time from the L2 cache, so only few rows may be in
# flight at a time. A program takes 16 warps, and so many loads per thread that it needs more than 64
# registers: only one fits on an NVIDIA multiprocessor. More warps would exceed the 1,024 threads of an AMD
# workgroup.
FORWARD_BACKWARD = {2: Tile(16384, 16), 4: Tile(8192, 16), 8: Tile(2048, 16)}

# A divergence reads two rows and keeps four numbers per lane. With eight lanes a thread takes 62 to 72
# registers, and seven programs share an NVIDIA multiprocessor.
DIVERGENCE = {2: Tile(1024, 4), 4: Tile(1024, 4), 8: Tile(512, 4)}


@functools.lru_cache(maxsize=64)
def without_spills(tile: Tile, much: bool, registers: int = 128) -> Tile:
    """Return the tile, with a limit of registers on CUDA if the kernel keeps ``much`` alive at a time.

    That is so under a softcap or in fp64. Without a limit ptxas gives some of these kernels a few registers
    less than they need, to fit one more program, and spills a number to the stack. With a limit it gives them
    what they need.
    """
    if much and platform() == "cuda":
        return tile._replace(registers=registers)
    return tile


_STATS = {torch.float32: tl.float32, torch.float64: tl.float64}


def stats_type(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's dtype for the statistics of logits of ``dtype``."""
    return _STATS[stats_dtype(dtype)]


ALIGNED_COLUMNS = 16
"""Contiguous rows whose length is a multiple of this consist of 16-byte pieces, whatever their dtype."""


def is_aligned(tensor_BTV: Tensor) -> bool:
    """Return whether each row starts at a multiple of 16 bytes and no 16-byte access crosses its end."""
    vocabulary = tensor_BTV.shape[-1]
    size = tensor_BTV.element_size()
    return (
        vocabulary % ALIGNED_COLUMNS == 0
        and tensor_BTV.stride(2) == 1
        and tensor_BTV.data_ptr() % 16 == 0
        and tensor_BTV.stride(0) * size % 16 == 0
        and tensor_BTV.stride(1) * size % 16 == 0
    )


def access(logits_BTV: Tensor, *out_BTV: Tensor) -> str:
    """Return how kernels access rows: in the same way in the logits and in the outputs.

    Returns:
        "aligned" if all rows consist of 16-byte pieces; "shifted" if they do except for their ends, and a row
        begins equally far from a multiple of 16 bytes, in elements, in all tensors; "single" otherwise.
    """
    tensors = (logits_BTV, *out_BTV)
    if all(map(is_aligned, tensors)):
        return "aligned"
    vector = 16 // min(each.element_size() for each in tensors)
    starts = {
        tuple(number % vector for number in (each.data_ptr() // each.element_size(), *each.stride()[:2]))
        for each in tensors
    }
    return "shifted" if len(starts) == 1 and all(each.stride(2) == 1 for each in tensors) else "single"


def _extent(tensor: Tensor) -> range:
    """Return the range of addresses from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def narrows_in_place(logits_BTV: Tensor, out_BTV: Tensor) -> bool:
    """Return whether ``out`` has a narrower dtype than the logits and lies in the memory of their rows.

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
        f"{logits_BTV.stride()}; expected memory of its own, logits itself, or a narrower dtype whose rows "
        "begin where those of the logits do"
    )


# --- numbers that kernels take


Wide = tuple[int, int]
"""A 64-bit number as two encoded halves: see ``encode_wide`` and ``encode_float``."""


def encode(number: int) -> int:
    """Encode a 32-bit number for a tuple of kernel arguments; ``columns.decode`` decodes it.

    Triton compiles anew if an integer in a tuple is 1, is divisible by 16 or needs more than 32 bits, has no
    annotation to forbid that, and rounds floats in tuples to fp32. In the upper half of an odd 64-bit number
    all integers look alike to Triton, and reading them takes no instruction. The lower half is such that none
    fits 32 bits.
    """
    return (number << 32) + (0x80000001 if number >= 0 else 1)


@functools.lru_cache(maxsize=4096)
def encode_wide(number: int) -> Wide:
    """Encode a 64-bit integer as two halves, the lower half first."""
    low = number & 0xFFFFFFFF
    return encode(low - (1 << 32) if low >> 31 else low), encode(number >> 32)


@functools.lru_cache(maxsize=1024)
def encode_float(number: float) -> Wide:
    """Encode an fp64 number by its bits."""
    return encode_wide(struct.unpack("<q", struct.pack("<d", number))[0])


def encode_strides(tensor: Tensor | None) -> tuple[Wide, ...] | None:
    """Encode a tensor's strides."""
    return None if tensor is None else _encode_all(tensor.stride())


@functools.lru_cache(maxsize=1024)
def _encode_all(numbers: tuple[int, ...]) -> tuple[Wide, ...]:
    return tuple(map(encode_wide, numbers))


@functools.lru_cache(maxsize=64)
def _slopes(scale: float, softcap: float, temperature: float) -> tuple[Wide, ...]:
    """Encode (slope, inner, outer) of ``RowNumbers``."""
    inner, outer = (scale / softcap, softcap / temperature) if softcap else (1.0, 1.0)
    return tuple(map(encode_float, (scale / temperature, inner, outer)))


class RowNumbers(NamedTuple):
    """Sizes, strides and factors of logit rows, all of them encoded.

    Attributes:
        T, V: rows of a sequence and columns of a row.
        ignore_index: the label of rows that don't count.
        slopes: (slope, inner, outer) of the ``LogitTransform``: z = slope * x, or with a softcap
            z = outer * tanh(inner * x).
        logits, labels, row_temperature, kept, out, grad, grad_entropy: strides of these tensors.
    """

    T: int
    V: int
    ignore_index: Wide
    slopes: tuple[Wide, ...]
    logits: tuple[Wide, ...] | None
    labels: tuple[Wide, ...] | None
    row_temperature: tuple[Wide, ...] | None
    kept: tuple[Wide, ...] | None
    out: tuple[Wide, ...] | None
    grad: tuple[Wide, ...] | None
    grad_entropy: tuple[Wide, ...] | None

    @staticmethod
    def of(
        logits: Tensor,
        labels: Tensor | None,
        transform: LogitTransform,
        ignore_index: int,
        *,
        out: Tensor | None = None,
        grad: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> RowNumbers:
        """Encode the numbers of logits [B, T, V]."""
        return RowNumbers(
            encode(logits.shape[1]),
            encode(logits.shape[2]),
            encode_wide(ignore_index),
            _slopes(*transform[:3]),
            encode_strides(logits),
            encode_strides(labels),
            encode_strides(transform.row_temperature),
            encode_strides(transform.kept),
            encode_strides(out),
            encode_strides(grad),
            encode_strides(grad_entropy),
        )


class RowConstants(NamedTuple):
    """The constants for which a kernel over logit rows is compiled.

    Attributes:
        STATS: the dtype of statistics.
        SCALED: 0 if logits are not multiplied, otherwise the sign of their factor.
        SOFTCAP: whether the logits have a softcap.
        ACCESS: see ``access``.
        NARROWS_IN_PLACE: see ``narrows_in_place``.
        BLOCK, WARPS: the tile.
        PLATFORM: see ``platform``.
    """

    STATS: tl.dtype
    SCALED: int
    SOFTCAP: bool
    ACCESS: str
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
            ACCESS=access(logits) if out is None else access(logits, out),
            NARROWS_IN_PLACE=out is not None and narrows_in_place(logits, out),
            BLOCK=tile.block,
            WARPS=tile.warps,
            PLATFORM=platform(),
        )


def row_kernel(function: Callable[..., None]) -> Any:
    """Apply ``triton.jit`` so that changes of shapes, strides or addresses don't compile the kernel anew.

    Only dtypes, the presence of optional tensors and the constants enter the specialisation, and whether
    tensors in tuples begin at a multiple of 16 bytes. The constant ACCESS says what vectorised accesses need
    to know of strides and addresses. Tuples have as many fields in every launch, and all numbers are encoded.
    """
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(function, do_not_specialize=runtime)


_COMPILED: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
"""Compiled kernels by kernel, device, options, constants, and what Triton looks at in each argument."""


def launch(
    kernel: Any, programs: int, device: torch.device, tile: Tile, *args: Any, **constants: Any
) -> None:
    """Run ``programs`` programs of ``kernel`` on ``device``, which needn't be the current one.

    Triton's own launch compares all globals of a kernel and takes longer than all else here, so it serves the
    first of equal launches, and those that somebody watches. Later ones go to the compiled kernel directly.

    Args:
        kernel: a function of ``triton.jit``.
        programs: how many; 0: do nothing.
        device: the device of all tensors.
        tile: the options of the launch.
        args: the kernel's parameters in order, up to its first constant.
        constants: its constants, in order.
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
    if _specialise is None or _watched(kernel):
        kernel[(programs,)](*args, **constants, **tile.options())
        return
    # to Triton the numbers of a ``row_kernel`` look alike; it would take as long to say so as all else here
    alike = len(kernel.do_not_specialize) == len(args)
    look = [kernel.fn, index, tile, *constants.values()]
    for arg in args:
        if alike and isinstance(arg, Tensor):
            look.append(arg.dtype)
        elif alike and isinstance(arg, tuple):
            look += [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x) for x in arg]
        elif arg is None:
            look.append(None)
        else:
            # of a named tuple Triton would build another one, of types
            values = tuple(arg) if isinstance(arg, tuple) else arg
            look.append(_specialise(_backend(index), values, False, True, True))
    key = tuple(look)
    known = _COMPILED.get(key)
    if known is None:
        compiled = kernel[(programs,)](*args, **constants, **tile.options())
        if compiled is not None:
            _COMPILED[key] = compiled.run, compiled.function, compiled.packed_metadata
        return
    run, function, metadata = known
    stream = driver.active.get_current_stream(index)
    # without hooks, and without the metadata that they would get
    run(programs, 1, 1, stream, function, metadata, None, None, None, *args, *constants.values())


@functools.cache
def _backend(index: int) -> Any:
    """Return Triton's compiler for the current device, whose number is ``index``."""
    return make_backend(driver.active.get_current_target())


def _watched(kernel: Any) -> bool:
    """Return whether Triton's own launch would call somebody, or compile in another way than usually."""
    runtime = triton.knobs.runtime
    return bool(
        runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or kernel.pre_run_hooks
        or triton.knobs.compilation.instrumentation_mode
        or runtime.debug
        or runtime.add_stages_inspection_hook
    )
