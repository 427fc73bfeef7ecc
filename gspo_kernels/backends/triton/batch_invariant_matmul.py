"""Batch-invariant matmuls: an element's result depends only on its row and its column.

Libraries select tiles and split K by the shapes of a matmul. Here tiles are the same for any number of rows
and columns, and K is summed in order, one step at a time, starting from ``out`` if accumulating. Accumulated
matmuls are bitwise identical to one along the whole K if K is split at multiples of a step. Programs are
persistent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels.backends.triton.launch import launch, platform, typed_kernel, without_spills
from gspo_kernels.backends.triton.rows import narrowed
from gspo_kernels.backends.triton.tiles import ProductTile, add_product, halves, tile_at
from gspo_kernels.core.self_test import SelfTest, tensor_maps_enabled

STEP = 64
"""Matmuls may be split along K at multiples of this, the largest step of a tile."""
_VECTOR_BYTES = 16

# Registers hold the sums of a tile. Tensor maps load 16-bit operands in 16-byte pieces and take no registers.
# Otherwise each piece has an address, or each element of operands that don't come in pieces.
_BULK = ProductTile(128, 256, 64, 32, 8, 4)
_WIDE = {2: ProductTile(128, 128, 32, 32, 8, 4), 4: ProductTile(64, 64, 16, 32, 8, 3)}
_NARROW = {2: ProductTile(64, 64, 32, 32, 8, 2), 4: ProductTile(32, 32, 16, 32, 4, 2)}
_INTERPRETED = ProductTile(32, 64, 64, 32, 1, 1)


@triton.jit
def _lines(first, COUNT: tl.constexpr, size, VECTOR: tl.constexpr):
    """Return the lines of an operand from ``first`` on. Lines beyond the end become some of the first VECTOR
    lines, and what is computed from them is not stored.
    """
    lines = first + tl.arange(0, COUNT)
    return tl.where(lines < size, lines, lines % VECTOR).to(tl.int64)


@triton.jit
def _opaque(x, PLATFORM: tl.constexpr):
    """Return ``x`` in a way that NVIDIA's compiler can't see through, so that addresses derived from it don't
    stay in registers while the sums need those.
    """
    if PLATFORM == "cuda":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


class ProductConstants(NamedTuple):
    """The constants for which a product is compiled.

    Attributes:
        A_ALONG_K, B_ALONG_K: whether an operand is contiguous along K, or along its other dimension.
        A_VECTOR, B_VECTOR, OUT_VECTOR: elements of a 16-byte piece, or 1 if the matrix doesn't come in such
            pieces.
        BULK: whether ``a`` and ``b`` are tensor descriptors.
        WHOLE: whether K consists of whole steps.
        ACCUMULATE: whether the product is added to ``out``.
        TILE: rows, columns and depth of a tile, and the columns that are loaded or stored at a time.
        PLATFORM: see ``launch.platform``.
    """

    A_ALONG_K: bool
    B_ALONG_K: bool
    A_VECTOR: int
    B_VECTOR: int
    OUT_VECTOR: int
    BULK: bool
    WHOLE: bool
    ACCUMULATE: bool
    TILE: ProductTile
    PLATFORM: str


@triton.jit
def _piece_of_out(out_ptr, top, left, M, N, stride, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr):
    """Return the addresses of a piece of a tile of ``out``, and which elements exist."""
    VECTOR: tl.constexpr = PRODUCT.OUT_VECTOR
    rows = _opaque(top, PRODUCT.PLATFORM) + tl.arange(0, PRODUCT.TILE.rows)
    columns = _opaque(left, PRODUCT.PLATFORM) + tl.arange(0, COLUMNS)
    columns = tl.max_contiguous(tl.multiple_of(columns, COLUMNS), COLUMNS)
    lines = tl.multiple_of(out_ptr + rows.to(tl.int64) * stride, 16 if VECTOR > 1 else 1)
    inside = (rows < M)[:, None] & (columns < N // VECTOR * VECTOR)[None, :]
    return lines[:, None] + columns[None, :], inside


@triton.jit
def _load_sums(out_ptr, top, left, M, N, stride, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr):
    """Return what ``out`` holds of a tile, loaded PIECE columns at a time."""
    if PRODUCT.TILE.piece < COLUMNS:
        HALF: tl.constexpr = COLUMNS // 2
        x0 = _load_sums(out_ptr, top, left, M, N, stride, HALF, PRODUCT)
        x1 = _load_sums(out_ptr, top, left + HALF, M, N, stride, HALF, PRODUCT)
        x = tl.reshape(tl.permute(tl.join(x0, x1), [0, 2, 1]), [PRODUCT.TILE.rows, COLUMNS])
    else:
        pointers, inside = _piece_of_out(out_ptr, top, left, M, N, stride, COLUMNS, PRODUCT)
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store_sums(x, out_ptr, top, left, M, N, stride, PRODUCT: tl.constexpr):
    """Store a tile PIECE columns at a time, so that few addresses are in registers."""
    COLUMNS: tl.constexpr = x.shape[1]
    if PRODUCT.TILE.piece < COLUMNS:
        x0, x1 = halves(x)
        _store_sums(x0, out_ptr, top, left, M, N, stride, PRODUCT)
        _store_sums(x1, out_ptr, top, left + COLUMNS // 2, M, N, stride, PRODUCT)
    else:
        pointers, inside = _piece_of_out(out_ptr, top, left, M, N, stride, COLUMNS, PRODUCT)
        tl.store(pointers, narrowed(x, out_ptr.dtype.element_ty, PRODUCT.PLATFORM), mask=inside)


@typed_kernel
def fixed_product_kernel(
    a, b, bias_ptr, out_ptr, M: tl.int32, N: tl.int32, K: tl.int32,
    a_stride_m: tl.int64, a_stride_k: tl.int64, b_stride_k: tl.int64, b_stride_n: tl.int64,
    bias_stride: tl.int64, out_stride: tl.int64,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute a program's share of the tiles of out (+)= a @ b + bias. ``a`` and ``b`` are tensor descriptors
    or addresses, PRODUCT is a ``ProductConstants``.
    """
    ROWS: tl.constexpr = PRODUCT.TILE.rows
    COLUMNS: tl.constexpr = PRODUCT.TILE.columns
    DEPTH: tl.constexpr = PRODUCT.TILE.depth
    A_VECTOR: tl.constexpr = PRODUCT.A_VECTOR
    B_VECTOR: tl.constexpr = PRODUCT.B_VECTOR
    A_ALONG_K: tl.constexpr = PRODUCT.A_ALONG_K
    B_ALONG_K: tl.constexpr = PRODUCT.B_ALONG_K
    height = tl.cdiv(M, ROWS)
    width = tl.cdiv(N, COLUMNS)
    if A_ALONG_K:
        a_stride_k = 1
    else:
        a_stride_m = 1
        # The same number, in a form that the compiler can prove to be a multiple of A_VECTOR.
        a_stride_k = a_stride_k // A_VECTOR * A_VECTOR
    if B_ALONG_K:
        b_stride_k = 1
    else:
        b_stride_n = 1
        b_stride_k = b_stride_k // B_VECTOR * B_VECTOR
    for tile in range(tl.program_id(0), height * width, tl.num_programs(0)):
        row, column = tile_at(tile, height, width)
        top = row * ROWS
        left = column * COLUMNS
        if PRODUCT.ACCUMULATE:
            sums = _load_sums(out_ptr, top, left, M, N, out_stride, COLUMNS, PRODUCT)
        else:
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            if bias_ptr is not None:
                columns = left + tl.arange(0, COLUMNS)
                places = bias_ptr + columns.to(tl.int64) * bias_stride
                sums += tl.load(places, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if PRODUCT.BULK:
            for k in range(0, K, DEPTH):
                x = a.load([top, k]) if A_ALONG_K else a.load([k, top]).T
                y = b.load([left, k]).T if B_ALONG_K else b.load([k, left])
                sums = add_product(sums, x, y, PRODUCT.PLATFORM)
        else:
            depths = tl.arange(0, DEPTH).to(tl.int64)
            a_lines = a + _lines(top, ROWS, M, 1 if A_ALONG_K else A_VECTOR) * a_stride_m
            b_lines = b + _lines(left, COLUMNS, N, 1 if B_ALONG_K else B_VECTOR) * b_stride_n
            if A_VECTOR > 1:
                a_lines = tl.max_contiguous(tl.multiple_of(a_lines, 16), 1 if A_ALONG_K else A_VECTOR)
            if B_VECTOR > 1:
                b_lines = tl.max_contiguous(tl.multiple_of(b_lines, 16), 1 if B_ALONG_K else B_VECTOR)
            a_pointers = a_lines[:, None] + (depths * a_stride_k)[None, :]
            b_pointers = b_lines[None, :] + (depths * b_stride_k)[:, None]
            for k in range(0, K, DEPTH):
                if PRODUCT.WHOLE:
                    x = tl.load(a_pointers)
                    y = tl.load(b_pointers)
                else:
                    in_depth = k + tl.arange(0, DEPTH) < K
                    x = tl.load(a_pointers, mask=in_depth[None, :], other=0.0)
                    y = tl.load(b_pointers, mask=in_depth[:, None], other=0.0)
                sums = add_product(sums, x, y, PRODUCT.PLATFORM)
                a_pointers += DEPTH * a_stride_k
                b_pointers += DEPTH * b_stride_k
        _store_sums(sums, out_ptr, top, left, M, N, out_stride, PRODUCT)


def batch_invariant_mm(
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
        ends: None, or where K may be cut: multiples of ``STEP``, then K.

    Raises:
        ValueError: other ``ends``.
    """
    (M, K), N = a.shape, b.shape[1]
    *inner, last = [K] if ends is None else ends.tolist()
    if last != K or any(end % STEP for end in inner):
        raise ValueError(f"ends: got {[*inner, last]}, expected multiples of {STEP}, then {K}")
    vector = _VECTOR_BYTES // a.element_size()
    b_along_k = b.stride(1) != 1
    if b_along_k and b.stride(0) != 1:
        b, b_along_k = b.contiguous(), False
    b_lines = b.t() if b_along_k else b
    b_vector = vector if _comes_in_vectors(b_lines, vector) else 1
    a_along_k = a.stride(1) == 1 or a.stride(0) != 1
    lines = a if a_along_k else a.t()
    # the tile must not depend on the address of `a`, which holds other rows in each call
    a_vector = vector if lines.shape[1] % vector == 0 else 1
    if lines.stride(1) != 1 or (a_vector > 1 and not _comes_in_vectors(lines, vector)):
        lines = lines.clone(memory_format=torch.contiguous_format)
    a = lines if a_along_k else lines.t()
    whole = K % STEP == 0
    tile, bulk = _tile(a.element_size(), min(a_vector, b_vector) > 1, whole, a.device)
    operands: tuple[Any, Any] = (a, b)
    if bulk:
        operands = (
            _descriptor(lines, tile.rows, tile.depth, a_along_k),
            _descriptor(b_lines, tile.columns, tile.depth, b_along_k),
        )
    out_vector = _VECTOR_BYTES // out.element_size()
    launch(
        fixed_product_kernel, tile.programs(M, N, a.device), a.device,
        without_spills(tile.launched(), a.dtype == torch.float32),
        *operands, bias, out, M, N, K,
        *a.stride(), *b.stride(), 0 if bias is None else bias.stride(0), out.stride(0),
        PRODUCT=ProductConstants(
            A_ALONG_K=a_along_k,
            B_ALONG_K=b_along_k,
            A_VECTOR=a_vector,
            B_VECTOR=b_vector,
            OUT_VECTOR=out_vector if _comes_in_vectors(out, out_vector) else 1,
            BULK=bulk,
            WHOLE=whole or bulk,
            ACCUMULATE=accumulate,
            TILE=tile,
            PLATFORM=platform(),
        ),
    )  # fmt: skip
    return out


def _descriptor(lines: Tensor, count: int, depth: int, along_k: bool) -> TensorDescriptor:
    """Return an operand's descriptor, whose boxes are ``count`` by ``depth`` along K."""
    return TensorDescriptor.from_tensor(lines, [count, depth] if along_k else [depth, count])


def _comes_in_vectors(lines: Tensor, vector: int) -> bool:
    """Return whether lines, contiguous along their second dimension, consist of aligned 16-byte pieces."""
    starts = lines.data_ptr() % _VECTOR_BYTES == 0 and lines.stride(0) % vector == 0
    return starts and lines.shape[1] % vector == 0


def _tile(size: int, wide: bool, whole: bool, device: torch.device) -> tuple[ProductTile, bool]:
    """Return the tile for elements of ``size`` bytes, and whether tensor maps load the operands. ``wide``:
    both come in 16-byte pieces. ``whole``: K consists of whole steps.
    """
    bulk = wide and size == 2 and _has_tensor_maps(device)
    if platform() == "interpreter":
        return _INTERPRETED, bulk
    return _BULK if bulk else (_WIDE if wide and whole else _NARROW)[size], bulk


def excess(device: torch.device) -> float:
    """Compare sums of operands as for logits, dHidden and dWeight with PyTorch's; see ``SelfTest``."""
    rng, bf16 = torch.Generator("cpu").manual_seed(0), torch.bfloat16
    a, b = (
        torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu").to(device, bf16)
        for shape in ((136, 200), (200, 264))
    )
    exact = a.double() @ b.double() + 1
    operands = ((a, b.t().contiguous().t()), (a, b), (a.t().contiguous().t(), b))
    sums = [
        batch_invariant_mm(*pair, torch.ones_like(exact, dtype=torch.float32), accumulate=True)
        for pair in operands
    ]
    return float((torch.stack(sums) - exact).abs().max() / 1e-2)


TENSOR_MAPS = SelfTest(excess)
"""Where tensor maps, and 192 KiB of shared memory, bring what 16-bit products multiply."""


def _has_tensor_maps(device: torch.device) -> bool:
    """Return whether tensor maps bring the operands. The interpreter needs no device that has them."""
    return (
        tensor_maps_enabled()
        if platform() == "interpreter"
        else TENSOR_MAPS.unavailable_reason(device) is None
    )
