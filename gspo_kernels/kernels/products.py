"""Matrix products whose sums have a fixed order: an element's bits depend on its row and its column alone.

Libraries choose tiles, and how they split K, by the shapes of a product. Here tiles are the same for every
number of rows and columns. K is cut into segments of fixed length. A tile sums up each segment from zero and
adds the segments from the first to the last; so products that are accumulated one after the other equal one
product along the longer K. A few programs walk over all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.columns import decode, decode_wide
from gspo_kernels.kernels.launch import (
    Tile,
    Wide,
    encode,
    encode_strides,
    launch,
    platform,
    row_kernel,
    without_spills,
)
from gspo_kernels.kernels.rows import narrowed

SEGMENT = 128
"""Values along K in a segment, which is summed up from zero before it is added to the total."""
_VECTOR_BYTES = 16
# Row tiles that are computed side by side: they share the columns of `b` that the L2 cache holds.
_GROUP = 8


class _ProductTile(NamedTuple):
    """The rows and columns of a tile, the depth of a step along K, warps, and stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Registers hold two sums of a tile: that of the segment, and that of all segments before it. Operands that
# come in 16-byte pieces are loaded a segment or two ahead. Other operands also pass through registers and
# have a pointer for each element; masks at the end of K take registers as well.
_LARGE = _ProductTile(128, 128, 64, 8, 3)
_WIDE = {2: _ProductTile(128, 64, 32, 8, 2), 4: _ProductTile(32, 32, 16, 4, 3)}
_MASKED = {2: _ProductTile(64, 64, 32, 8, 2), 4: _ProductTile(32, 32, 16, 4, 3)}
_NARROW = {2: _ProductTile(32, 64, 32, 8, 2), 4: _ProductTile(32, 32, 16, 4, 2)}
_INTERPRETED = _ProductTile(32, 64, 64, 1, 1)


@triton.jit
def _lines(first, COUNT: tl.constexpr, size, VECTOR: tl.constexpr):
    """Return the lines of an operand from ``first`` on. Lines beyond the end become some of the first VECTOR
    lines, and what is computed from them is not stored.
    """
    lines = first + tl.arange(0, COUNT)
    return tl.where(lines < size, lines, lines % VECTOR).to(tl.int64)


@triton.jit
def _anew(x, PLATFORM: tl.constexpr):
    """Return ``x`` in a way that NVIDIA's compiler can't see through, so that addresses derived from it don't
    stay in registers while the sums need those.
    """
    if PLATFORM == "cuda":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


class ProductNumbers(NamedTuple):
    """Sizes and strides of out = a @ b + bias, all of them encoded.

    Attributes:
        M, N, K: rows and columns of ``out``, and the length of its sums.
        programs: the number of programs.
        a, b, bias, out: strides of these tensors.
    """

    M: int
    N: int
    K: int
    programs: int
    a: tuple[Wide, ...] | None
    b: tuple[Wide, ...] | None
    bias: tuple[Wide, ...] | None
    out: tuple[Wide, ...] | None


class ProductConstants(NamedTuple):
    """The constants for which a product is compiled.

    Attributes:
        A_ALONG_K, B_ALONG_K: whether an operand is contiguous along K, or along its other dimension.
        A_VECTOR, B_VECTOR: elements of a 16-byte piece, or 1 if the operand doesn't come in such pieces.
        WHOLE: whether K is a multiple of LENGTH.
        ACCUMULATE: whether the product is added to ``out``.
        ROWS, COLUMNS, DEPTH: rows and columns of a tile, and the depth of a step along K.
        LENGTH: values along K in a segment.
        GROUP: tiles of rows that are computed side by side.
        PLATFORM: see ``launch.platform``.
    """

    A_ALONG_K: bool
    B_ALONG_K: bool
    A_VECTOR: int
    B_VECTOR: int
    WHOLE: bool
    ACCUMULATE: bool
    ROWS: int
    COLUMNS: int
    DEPTH: int
    LENGTH: int
    GROUP: int
    PLATFORM: str


@row_kernel
def fixed_product_kernel(a_ptr, b_ptr, bias_ptr, out_ptr, product, PRODUCT: tl.constexpr):
    """Compute every ``programs``-th tile of out (+)= a @ b + bias. ``product`` is a ``ProductNumbers``,
    PRODUCT a ``ProductConstants``.
    """
    PLATFORM: tl.constexpr = PRODUCT.PLATFORM
    ROWS: tl.constexpr = PRODUCT.ROWS
    COLUMNS: tl.constexpr = PRODUCT.COLUMNS
    DEPTH: tl.constexpr = PRODUCT.DEPTH
    GROUP: tl.constexpr = PRODUCT.GROUP
    A_VECTOR: tl.constexpr = PRODUCT.A_VECTOR
    B_VECTOR: tl.constexpr = PRODUCT.B_VECTOR
    A_ALONG_K: tl.constexpr = PRODUCT.A_ALONG_K
    B_ALONG_K: tl.constexpr = PRODUCT.B_ALONG_K
    M = decode(product.M)
    N = decode(product.N)
    K = decode(product.K)
    programs = decode(product.programs)
    out_stride_m = decode_wide(product.out[0])
    height = tl.cdiv(M, ROWS)
    width = tl.cdiv(N, COLUMNS)
    a_stride_m = decode_wide(product.a[0])
    a_stride_k = decode_wide(product.a[1])
    b_stride_k = decode_wide(product.b[0])
    b_stride_n = decode_wide(product.b[1])
    if A_ALONG_K:
        a_stride_k = 1
    else:
        a_stride_m = 1
        # The same number, but now the compiler knows that A_VECTOR divides it.
        a_stride_k = a_stride_k // A_VECTOR * A_VECTOR
    if B_ALONG_K:
        b_stride_k = 1
    else:
        b_stride_n = 1
        b_stride_k = b_stride_k // B_VECTOR * B_VECTOR
    depths = tl.arange(0, DEPTH).to(tl.int64)
    for tile in range(tl.program_id(0), height * width, programs):
        group = tile // (GROUP * width) * GROUP
        members = tl.minimum(height - group, GROUP)
        within = tile % (GROUP * width)
        top = (group + within % members) * ROWS
        left = within // members * COLUMNS
        a_lines = a_ptr + _lines(top, ROWS, M, 1 if A_ALONG_K else A_VECTOR) * a_stride_m
        b_lines = b_ptr + _lines(left, COLUMNS, N, 1 if B_ALONG_K else B_VECTOR) * b_stride_n
        if A_VECTOR > 1:
            a_lines = tl.max_contiguous(tl.multiple_of(a_lines, 16), 1 if A_ALONG_K else A_VECTOR)
        if B_VECTOR > 1:
            b_lines = tl.max_contiguous(tl.multiple_of(b_lines, 16), 1 if B_ALONG_K else B_VECTOR)
        a_pointers = a_lines[:, None] + (depths * a_stride_k)[None, :]
        b_pointers = b_lines[None, :] + (depths * b_stride_k)[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        if PRODUCT.ACCUMULATE:
            rows = top + tl.arange(0, ROWS)
            columns = left + tl.arange(0, COLUMNS)
            out_pointers = out_ptr + rows.to(tl.int64)[:, None] * out_stride_m + columns[None, :]
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            total += tl.load(out_pointers, mask=inside, other=0.0).to(tl.float32)
        for start in range(0, K, PRODUCT.LENGTH):
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            # unrolled, so that the next segment's operands are loaded while this one's are multiplied
            for step in tl.static_range(PRODUCT.LENGTH // DEPTH):
                if PRODUCT.WHOLE:
                    a = tl.load(a_pointers)
                    b = tl.load(b_pointers)
                else:
                    in_depth = start + step * DEPTH + tl.arange(0, DEPTH) < K
                    a = tl.load(a_pointers, mask=in_depth[None, :], other=0.0)
                    b = tl.load(b_pointers, mask=in_depth[:, None], other=0.0)
                if PLATFORM == "interpreter":
                    # There tl.dot is NumPy's product: it takes bf16 bits for integers, and on some
                    # processors rounds an element by its place in the tile.
                    sums += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
                else:
                    sums = tl.dot(a, b, sums, input_precision="ieee")
                a_pointers += DEPTH * a_stride_k
                b_pointers += DEPTH * b_stride_k
            total += sums
        rows = _anew(top, PLATFORM) + tl.arange(0, ROWS)
        columns = _anew(left, PLATFORM) + tl.arange(0, COLUMNS)
        out_pointers = out_ptr + rows.to(tl.int64)[:, None] * out_stride_m + columns[None, :]
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        if bias_ptr is not None:
            bias = tl.load(
                bias_ptr + columns.to(tl.int64) * decode_wide(product.bias[0]), mask=columns < N, other=0.0
            )
            total += bias.to(tl.float32)[None, :]
        tl.store(out_pointers, narrowed(total, out_ptr.dtype.element_ty, PLATFORM), mask=inside)


def fixed_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """Compute ``out = a @ b + bias``, or ``out += a @ b`` with ``accumulate``, summed in fp32.

    Args:
        a, b: [M, K] and [K, N], both fp16, bf16 or fp32; copied unless one of the strides is 1. ``a`` is also
            copied where only its address or its other stride keeps it from coming in 16-byte pieces.
        out: [M, N], any float dtype, stride 1 along N.
        bias: [N], any float dtype and stride, or None.
        accumulate: whether to add to what ``out`` holds.
        ends: None, or the ends of the segments: all multiples of ``SEGMENT`` below K, then K.

    Raises:
        ValueError: ``ends`` are those of segments of another length.
    """
    (M, K), N = a.shape, b.shape[1]
    if ends is not None and ends.tolist() != [*range(SEGMENT, K, SEGMENT), K]:
        raise ValueError(f"ends: got segments that end at {ends.tolist()}, expected them {SEGMENT} apart")
    vector = _VECTOR_BYTES // a.element_size()
    b_along_k = b.stride(1) != 1
    if b_along_k and b.stride(0) != 1:
        b, b_along_k = b.contiguous(), False
    b_vector = vector if _comes_in_vectors(b.t() if b_along_k else b, vector) else 1
    a_along_k = a.stride(1) == 1 or a.stride(0) != 1
    lines = a if a_along_k else a.t()
    # the tile must not depend on the address of `a`, which holds other rows in each call
    a_vector = vector if lines.shape[1] % vector == 0 else 1
    if lines.stride(1) != 1 or (a_vector > 1 and not _comes_in_vectors(lines, vector)):
        lines = lines.clone(memory_format=torch.contiguous_format)
    a = lines if a_along_k else lines.t()
    whole_segments = K % SEGMENT == 0
    tile = _tile(a.element_size(), min(a_vector, b_vector) > 1, whole_segments, a.device)
    tiles = triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns)
    programs = min(tiles, _multiprocessors(a.device))
    launch(
        fixed_product_kernel, programs, a.device,
        without_spills(Tile(tile.columns, tile.warps, tile.stages), a.dtype == torch.float32),
        a, b, bias, out,
        ProductNumbers(
            M=encode(M), N=encode(N), K=encode(K), programs=encode(programs),
            a=encode_strides(a), b=encode_strides(b), bias=encode_strides(bias), out=encode_strides(out),
        ),
        PRODUCT=ProductConstants(
            A_ALONG_K=a_along_k,
            B_ALONG_K=b_along_k,
            A_VECTOR=a_vector,
            B_VECTOR=b_vector,
            WHOLE=whole_segments,
            ACCUMULATE=accumulate,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            LENGTH=SEGMENT,
            GROUP=_GROUP,
            PLATFORM=platform(),
        ),
    )  # fmt: skip
    return out


def _comes_in_vectors(lines: Tensor, vector: int) -> bool:
    """Return whether lines, contiguous along their second dimension, consist of aligned 16-byte pieces."""
    starts = lines.data_ptr() % _VECTOR_BYTES == 0 and lines.stride(0) % vector == 0
    return starts and lines.shape[1] % vector == 0


def _tile(size: int, wide: bool, whole_segments: bool, device: torch.device) -> _ProductTile:
    """Return the tile for elements of ``size`` bytes. ``wide``: both operands come in 16-byte pieces.
    ``whole_segments``: K consists of them.
    """
    if platform() == "interpreter":
        return _INTERPRETED
    if not wide:
        return _NARROW[size]
    if not whole_segments:
        return _MASKED[size]
    return _LARGE if size == 2 and _holds_large_tiles(device) else _WIDE[size]


def _holds_large_tiles(device: torch.device) -> bool:
    """Return whether a block of threads may have the 192 KiB of shared memory that the operands of the large
    tile take: on Hopper and on Blackwell's server GPUs.
    """
    return platform() == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once: one per multiprocessor of a GPU."""
    if platform() == "interpreter":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
