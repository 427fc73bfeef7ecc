"""Matmuls of a head: from hidden states to logits and their statistics, and from gradient rows to gradients.

``pytorch.HeadMatmul`` is the interface and ``select_matmul`` selects an implementation. Matmuls that fuse
statistics or gradient rows are subclasses in separate files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.backends.cpp.products import multiplies
from gspo_kernels.core.types import RowOptions
from gspo_kernels.hidden.matmul.batch_invariant import SEGMENT, BatchInvariantMatmul
from gspo_kernels.hidden.matmul.cpp_blocks import CppMatmul, StreamedMatmul
from gspo_kernels.hidden.matmul.exponentials import ExponentialMatmul, exponentials_unavailable
from gspo_kernels.hidden.matmul.lora import LoRAMatmul
from gspo_kernels.hidden.matmul.pytorch import HeadMatmul, SlabMatmul

__all__ = [
    "SEGMENT",
    "HeadMatmul",
    "select_matmul",
]

MIN_CPP_ELEMENTS = 2**20
"""Elements of an fp32 weight below which torch.mm is used."""


def select_matmul(
    weight: Tensor,
    bias: Tensor | None,
    base: Tensor | None,
    logits_dtype: str,
    invariant: bool,
    options: RowOptions,
    whole_logits: bool = False,
) -> HeadMatmul:
    """Select the matmul implementation of a call.

    | weight | implementation |
    |---|---|
    | any, in a batch-invariant call | ``BatchInvariantMatmul``: sums in a fixed order |
    | bf16 on Hopper and B200, if enabled | ``ExponentialMatmul``: no pass over logits |
    | any other on CUDA | ``HeadMatmul``: torch.mm, to fp32 from 16 bits |
    | on the CPU, bf16 with AVX-512, or large fp32 on AMD | ``CppMatmul``: the C++ backend's |
    | any other on the CPU | ``StreamedMatmul``: torch.mm in slabs of fp32 or fp64 |
    | on other devices | ``SlabMatmul``: the same, with statistics from written logits |
    | with a low-rank adapter | ``LoRAMatmul`` around one of these |

    The selection depends on the weight only, not on the number of rows, to keep log-probs of different calls
    comparable. ``ExponentialMatmul`` serves losses and log-probs, but does not support ``whole_logits``,
    ``logits_dtype="input"``, sampling masks, vocabulary shards and adapters, which need logits. Compiled for
    sm_80 its kernel spills registers and does not pipeline loads. No GPU has run it;
    ``self_test.enable_tensor_maps`` enables it.

    Args:
        weight: [V, H], or a low-rank adapter's [V, r] if ``base`` [V, H] is the frozen weight.
        bias: [V] or None.
        base: see ``LinearOperands``.
        logits_dtype: "float32" or "input".
        invariant: whether the call is batch-invariant.
        options: the options of the row operations.
        whole_logits: whether the caller reads logits, not only statistics and gradient rows.
    """
    head = weight if base is None else base
    large = head.dtype != torch.float32 or head.numel() >= MIN_CPP_ELEMENTS
    in_blocks = head.is_cpu and large and multiplies(head.dtype)
    if invariant:
        kind: type[HeadMatmul] = BatchInvariantMatmul
        converts = head.is_cpu and head.dtype == torch.float16
    elif (
        head.dtype == torch.bfloat16
        and base is None
        and not (whole_logits or exponentials_unavailable(head, logits_dtype, options))
    ):
        kind, converts = ExponentialMatmul, False
    elif head.is_cuda:
        kind, converts = HeadMatmul, False
    elif in_blocks:
        kind, converts = CppMatmul, False
    else:
        kind, converts = StreamedMatmul if head.is_cpu else SlabMatmul, True
    matmul = kind(head, bias, logits_dtype, converts, options)
    return matmul if base is None else LoRAMatmul(matmul, weight)
