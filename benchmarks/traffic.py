"""Reads and writes of logits by Triton kernels, counted under the interpreter.

Every load and store of a watched tensor counts if its mask lets it through: this is what a kernel asks for.
Whether a cache serves a second walk over a row is for a device to measure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Traffic:
    """Reads and writes per element of the tensors that it watches."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors
        self.reads = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
        self.writes = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]

    def record(self, counts: list[Tensor], pointers: Any, mask: Any) -> None:
        """Count accesses of a block of pointers."""
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)].astype(np.int64)
        width = pointers.get_element_ty().primitive_bitwidth // 8
        for tensor, count in zip(self.tensors, counts, strict=True):
            start, size = tensor.data_ptr(), tensor.element_size()
            # A load may hold several elements.
            each = (addresses[:, None] + np.arange(0, width, size)).ravel()
            inside = each[(each >= start) & (each < start + tensor.numel() * size)]
            count += torch.from_numpy(np.bincount((inside - start) // size, minlength=tensor.numel()))

    def per_row(self, counts: list[Tensor], index: int) -> list[int]:
        """One number per row where all its elements have the same count, otherwise an error."""
        rows = counts[index].view(-1, self.tensors[index].shape[-1])
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].tolist()  # type: ignore[no-any-return]


@contextlib.contextmanager
def counted(*tensors: Tensor) -> Iterator[Traffic]:
    """Count accesses of tensors by Triton's interpreter, within the block."""
    from triton.runtime import interpreter

    traffic = Traffic(*tensors)

    class Counting(type(interpreter.interpreter_builder)):  # type: ignore[misc]
        def create_masked_load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
            traffic.record(traffic.reads, pointers, mask)
            return super().create_masked_load(pointers, mask, *rest)

        def create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            traffic.record(traffic.writes, pointers, mask)
            return super().create_masked_store(pointers, value, mask, *rest)

    builder = interpreter.interpreter_builder
    plain, builder.__class__ = builder.__class__, Counting
    try:
        yield traffic
    finally:
        builder.__class__ = plain
