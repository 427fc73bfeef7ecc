"""The Triton backend: ``protocol.RatioBackend`` as a module, for NVIDIA and AMD GPUs.

Kernels operate on rows and sequences of rows; the only losses are the clip of ``RatioClip`` and its KL
penalty.
"""

from __future__ import annotations

import torch

from gspo_kernels.backends.triton.batch_invariant_matmul import batch_invariant_mm
from gspo_kernels.backends.triton.divergences import divergence
from gspo_kernels.backends.triton.launch import INTERPRETED, platform, triton_version
from gspo_kernels.backends.triton.logprobs import (
    logprobs_and_grad,
    logprobs_and_rows,
    logprobs_backward,
    logprobs_forward,
    one_pass_pays,
)
from gspo_kernels.backends.triton.masks import lengths, merge_mask
from gspo_kernels.backends.triton.ratios import ratio_step, sequence_ratio_forward
from gspo_kernels.backends.triton.row_scaling import (
    product_operand,
    scale_,
    scale_rows_,
    store_hidden,
    sum_unit,
)

__all__ = [
    "batch_invariant_mm",
    "divergence",
    "lengths",
    "logprobs_and_grad",
    "logprobs_and_rows",
    "logprobs_backward",
    "logprobs_forward",
    "merge_mask",
    "one_pass_pays",
    "product_operand",
    "ratio_step",
    "scale_",
    "scale_rows_",
    "sequence_ratio_forward",
    "store_hidden",
    "sum_unit",
    "unavailable",
]


_ORDERED_ON_AMD_FROM = (3, 9)
"""The oldest Triton for AMD GPUs: 3.6 and 3.7 omit a wait in code for gfx942; 3.8 was not tested."""


def unavailable(device: torch.device) -> str | None:
    """Return the reason why the kernels can't run on ``device``, or None; the CPU needs the interpreter."""
    if device.type == "cuda":
        if platform() == "hip" and triton_version() < _ORDERED_ON_AMD_FROM:
            return "Triton before 3.9 may omit a wait between writes and reads on AMD GPUs"
        return None
    if device.type == "cpu":
        return None if INTERPRETED else "Triton kernels run on the CPU only under TRITON_INTERPRET=1"
    return f"Triton kernels support CUDA and ROCm devices, not {device.type}"
